"""`make gpu-check`: tries on a machine with GPUs what the test suite cannot try without one, and writes one report."""

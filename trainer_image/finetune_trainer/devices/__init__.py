"""GPUs, CPUs and their networks: formats, measurements, memory. Knows no model."""

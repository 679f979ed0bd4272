"""Launcher `mpijob`: an MPIJob of the MPI Operator."""

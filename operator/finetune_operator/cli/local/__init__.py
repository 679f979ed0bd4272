"""Runs on this machine. Knows no cluster."""

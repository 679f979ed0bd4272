"""Checkpoints on disk: sealed, verified, signed. Knows no strategy."""

"""Bytes of one process, term by term. Chooses nothing."""

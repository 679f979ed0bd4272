"""Seconds of a step, of pauses and of a run. Chooses nothing."""

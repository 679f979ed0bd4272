"""Faster ways to run a model over rows: the rungs that there are, and the choice among them by measuring."""

"""Faster ways to run a model over rows: the available rungs, and the choice among them by measuring."""

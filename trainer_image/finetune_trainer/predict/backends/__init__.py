"""Backends of inference: ways to compute the same answers, measured, and the choice among them."""

"""Shapes of models by their configs. Reads no checkpoint."""

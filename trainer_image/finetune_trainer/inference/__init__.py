"""Inference: logits, the `evaluate` stage, the `predict` stage."""

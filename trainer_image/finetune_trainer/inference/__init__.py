"""Running a model without training it: logits, the `evaluate` stage, the `predict` stage."""

"""The operator: kopf handlers, and what they start and stop."""

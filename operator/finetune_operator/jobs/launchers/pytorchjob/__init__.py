"""Launcher `pytorchjob`: a PyTorchJob of the Training Operator."""

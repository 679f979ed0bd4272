"""Devices, batches and memory of evaluation, prediction and serving. Renders nothing."""

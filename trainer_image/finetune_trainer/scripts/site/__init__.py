"""This folder is the last of a user's program's PYTHONPATH; Python imports `sitecustomize` from there by itself."""

"""Protocols of a server: requests to rows, predictions to answers. Knows no model."""

"""Revisions, readiness and troubles of an endpoint. Calls nothing."""

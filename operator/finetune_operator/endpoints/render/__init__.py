"""Objects of an endpoint. Decides nothing."""

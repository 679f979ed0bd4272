"""The API server as the operator uses it. Knows no plan."""

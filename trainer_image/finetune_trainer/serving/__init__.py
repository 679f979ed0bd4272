"""Server that answers requests with a job's model."""

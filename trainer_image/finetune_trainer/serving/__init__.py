"""Server that answers requests with a job's model. Trains nothing."""

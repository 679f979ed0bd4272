"""The operator's process: kopf's handlers, and what they start and stop. Decides nothing about a job."""

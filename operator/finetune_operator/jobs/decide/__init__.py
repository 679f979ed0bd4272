"""The next actions of a job. Calls nothing and writes nothing."""

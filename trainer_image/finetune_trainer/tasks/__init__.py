"""What differs from task to task, and nothing about how a model is spread over processes."""

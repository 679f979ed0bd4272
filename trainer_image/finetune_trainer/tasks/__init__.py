"""Code that differs from task to task, independent of how a model is spread over processes. Knows no strategy."""

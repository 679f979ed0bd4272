"""How a stage's processes are started in a pod, and what their ends add up to."""

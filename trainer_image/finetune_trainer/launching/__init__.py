"""How a stage's processes are started, in a pod and on a laptop, and what their ends add up to."""

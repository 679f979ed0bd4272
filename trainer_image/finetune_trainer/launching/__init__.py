"""Start of a stage's processes, in a pod and on a laptop, and one report of their ends. Computes nothing."""

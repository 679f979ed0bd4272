"""Known state of the cluster, and the queue of jobs to look at. Reads nothing itself."""

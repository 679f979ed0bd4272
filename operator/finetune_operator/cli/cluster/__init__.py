"""Jobs of a cluster, seen and steered with the caller's own rights. Decides nothing about a job."""

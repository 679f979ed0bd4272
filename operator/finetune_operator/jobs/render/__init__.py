"""A plan as job.json, deepspeed.json and manifests. Decides nothing."""

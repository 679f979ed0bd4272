"""From a plan to what others read: job.json, deepspeed.json, manifests. Pure."""

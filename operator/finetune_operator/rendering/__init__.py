"""Render a plan as job.json, deepspeed.json and manifests. Pure."""

"""Stages of a fine-tuning job: prepare, train, evaluate, predict. Each reads `job.json` and ends with a report."""

"""One rank of one stage, from job.json to its report. The top of the trainer."""

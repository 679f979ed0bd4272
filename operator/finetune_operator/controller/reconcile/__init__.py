"""One reconcile of one job: known state, `jobs.decide`, writes. Decides nothing about a job."""

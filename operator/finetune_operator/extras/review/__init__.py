"""`finetune review`: a change of job files before it is merged. Runs no job."""

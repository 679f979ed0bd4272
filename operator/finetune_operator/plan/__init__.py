"""From a job and facts to a `JobPlan` with reasons; `plan.py` is the entrance. Pure: no clock, no file, no network."""

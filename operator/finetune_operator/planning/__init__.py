"""From a job and facts to a plan. Pure."""

"""Plans, renders and runs FineTuneJobs. CONTRIBUTING.md lists the rooms, and what each must not do."""

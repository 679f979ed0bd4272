"""Plans, renders and runs FineTuneJobs. Layers: cli and shell, reconcile, rendering, planning, api (see
CONTRIBUTING.md).
"""

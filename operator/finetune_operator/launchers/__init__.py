"""Launchers, which run the pods of a stage: `launcher_rows.py` holds the facts of each, `kinds` has a module for each.

CONTRIBUTING.md, "Add a launcher", lists the steps.
"""

"""Kinds that run the pods of a stage: a folder each, by the facts in `spec/launcher_rows.py`. Nobody else names a kind.

CONTRIBUTING.md, "Add a launcher", lists the steps."""

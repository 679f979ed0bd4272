"""Rows from files, and prepared data. Knows no task."""

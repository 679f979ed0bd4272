"""A user's own training program in place of the built-in loop: fetched once, run by all ranks, judged by its output.
Knows no task.
"""

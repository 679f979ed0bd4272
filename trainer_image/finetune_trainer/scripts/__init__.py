"""A user's own training program in place of the built-in loop: fetched once, run by every rank, judged by what it
leaves.
"""

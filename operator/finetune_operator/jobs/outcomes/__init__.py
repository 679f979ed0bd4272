"""Outcomes of attempts, and their consequences. Takes no action."""

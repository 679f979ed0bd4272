"""Modules of the launchers: each renders its object and reads its status."""

"""Launcher `job`: an Indexed Job."""

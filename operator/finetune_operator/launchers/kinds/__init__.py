"""A module for each launcher: how its object is made, and how its status is read."""

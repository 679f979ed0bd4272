"""Decisions on jobs from the observed state of the cluster. Pure: no clock, no network."""

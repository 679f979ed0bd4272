"""Servers of the operator: webhook, progress, probes, metrics. Changes no job."""

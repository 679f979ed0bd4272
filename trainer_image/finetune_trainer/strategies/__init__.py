"""Strategies that spread a model over processes: a module for each, all behind one protocol. None knows a task."""

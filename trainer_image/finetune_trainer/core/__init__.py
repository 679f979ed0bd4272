"""Ground of every program of the trainer: failures, files, ranks, progress. Imports no other room."""

"""Job files of the command line. Runs nothing."""

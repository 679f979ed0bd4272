"""GPUs, nodes and networks: tables, labels, capacities. Knows no strategy."""

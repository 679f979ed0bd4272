"""The operator around the pure layers: its reads from the API server, its writes, and its own servers."""

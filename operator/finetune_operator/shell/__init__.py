"""The operator around the pure layers: what it hears from the API server, and what it does there."""

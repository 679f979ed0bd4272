"""From raw files to token rows: sources, the `prepare` stage, and the order of batches."""

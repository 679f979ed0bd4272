"""The stage prepare: rows become features. Trains nothing."""

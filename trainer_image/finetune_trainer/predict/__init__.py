"""The stages evaluate and predict. Trains nothing."""

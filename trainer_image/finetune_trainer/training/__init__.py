"""The train stage: a subclass of `transformers.Trainer` and the small objects around it."""

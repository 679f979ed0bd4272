"""Models from their URIs: config, tokenizer, weights, adapters, number formats. Knows no task."""

"""Conveniences beside the product: pages, comparisons, reviews. Nobody imports them; `cli.main` loads them by name."""

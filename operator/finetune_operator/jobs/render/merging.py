"""Merge a user's values into ours; neither argument is changed."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue


def merge(base: dict[str, JsonValue], added: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return `base` overridden by `added`, objects merged key by key."""
    merged = dict(base)
    for key, value in added.items():
        existing = merged.get(key)
        merged[key] = merge(existing, value) if isinstance(existing, dict) and isinstance(value, dict) else value
    return merged


def join(base: Mapping[str, JsonValue], added: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Merge like `merge`, but append lists instead of replacing them: an affinity keeps our terms beside the user's."""
    joined = dict(base)
    for key, value in added.items():
        existing = joined.get(key)
        if isinstance(existing, dict) and isinstance(value, dict):
            joined[key] = join(existing, value)
        elif isinstance(existing, list) and isinstance(value, list):
            joined[key] = [*existing, *value]
        else:
            joined[key] = value
    return joined

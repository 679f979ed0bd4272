"""Keys known to DeepSpeed: `spec/tables/deepspeed_keys.yaml`, which is read for a job with keys of its own only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from finetune_operator.spec import tables


@cache
def known_keys() -> Mapping[tuple[str, ...], frozenset[str]]:
    """Return the keys by the path of their section; the empty path is the top level."""
    sections = tables.document("deepspeed_keys.yaml")["known"]
    return {tuple(filter(None, section.split("."))): frozenset(keys) for section, keys in sections.items()}


@cache
def open_sections() -> frozenset[str]:
    """Return the sections whose keys are not checked."""
    return frozenset(tables.document("deepspeed_keys.yaml")["open"])

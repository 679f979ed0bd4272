"""The page at `/`, to try the model in a browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADERS: Mapping[str, str] = {"Content-Security-Policy": "default-src 'none'", "X-Content-Type-Options": "nosniff"}
"""Headers that the page is sent with."""


def page(metadata: Mapping[str, Any]) -> bytes:
    """Return the HTML of the page. `metadata`: the answer of `/v2/models/NAME`."""
    return b"<!doctype html><html lang=en><title>Model server</title><p>The model server answers. See /openapi.json.\n"

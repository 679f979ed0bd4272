"""Pages of lists, events of watches, lines of logs, and the delay before the next try, all without I/O.

Anybody who may create objects decides their content. `json_text.loads` bounds the depth of every answer; an item that
is no object is skipped here, and only that item.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import JsonValue

from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.kubernetes_api.errors import UnavailableError, error_of
from finetune_operator.kubernetes_api.resources import Resource

FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 5.0
LONGEST_RETRY_AFTER_SECONDS = 30.0
"""Longest wait within one request; the caller tries again later instead."""


@dataclass(frozen=True)
class WatchEvent:
    """One event of a watch."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Manifest
    """Its current state, or its last; in a bookmark only the resource version."""
    version: int
    """Resource version from which a later watch can start."""


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    items: list[Manifest]
    version: int
    """Resource version of the whole list."""
    first: bool
    """True: pages before it no longer count."""
    next_page: str
    """Token of the next page; empty after the last one."""


def page_of(request: str, resource: Resource, answer: Manifest, *, first: bool) -> Page:
    """Return the page, each item with its kind, which built-in lists leave out. UnavailableError for no list."""
    metadata, raw_items = answer.get("metadata"), answer.get("items") or []
    try:
        assert isinstance(metadata, dict)
        assert isinstance(raw_items, list)
        version = int(str(metadata["resourceVersion"]))
    except (AssertionError, KeyError, ValueError) as error:
        raise UnavailableError(request, 0, "", "the answer is not a list") from error
    named = {"apiVersion": resource.api_version, "kind": resource.kind}
    items = [{**named, **item} for item in raw_items if isinstance(item, dict)]
    return Page(items, version, first, str(metadata.get("continue") or ""))


def event_of(request: str, resource: Resource, value: JsonValue) -> WatchEvent:
    """Return the event. Raise the error that it holds; UnavailableError if it is no event."""
    read: Any = value
    try:
        kind, manifest = read["type"], read["object"]
        if kind == "ERROR":
            raise error_of(request, int(manifest.get("code", 500)), json.dumps(manifest).encode())
        version = int(manifest["metadata"]["resourceVersion"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnavailableError(request, 0, "", "a line of the watch cannot be read") from error
    return WatchEvent(kind, {"apiVersion": resource.api_version, "kind": resource.kind, **manifest}, version)


class Lines:
    """Splits an answer into lines as it arrives."""

    def __init__(self, longest: int | None = None) -> None:
        """`longest`: bytes after which a line is passed on in parts; None: never."""
        self._longest = longest
        self.rest = b""
        """Line that has not ended yet."""

    def take(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end in this chunk."""
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        if self._longest is not None and len(self.rest) > self._longest:
            lines.append(self.rest)
            self.rest = b""
        return lines


def delay(attempt: int, retry_after: float | None, jitter: float) -> float:
    """Return the seconds before the next try: doubled each time, and half of it random, so that clients spread out.

    `jitter` is a random number in [0, 1).
    """
    doubled: float = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** (attempt - 1))
    return max(doubled * (0.5 + jitter / 2), min(retry_after or 0.0, LONGEST_RETRY_AFTER_SECONDS))

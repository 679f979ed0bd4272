"""Table of the measured backends."""

from __future__ import annotations

from pydantic import AliasChoices, Field

from finetune_contract.contract_models import Message


class BackendRow(Message):
    """Figures of one backend."""

    name: str
    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    """Generated tokens, without special ones; None if the answers are no texts."""
    agreement: float | None = None
    largest_difference: float | None = None
    metric: str | None = None
    """Metric that is worst compared with the plain model."""
    metric_worse_by: float | None = None
    memory_bytes: int | None = None
    setup_seconds: float | None = None
    worker_setup_seconds: float | None = None
    """Set-up of each further worker; None if there are no others."""
    chosen: bool = False
    why: str


class BackendTable(Message):
    """Figures of all backends."""

    chosen: str
    rows: int
    reason: str
    backends: tuple[BackendRow, ...] = Field(default=(), validation_alias=AliasChoices("backends", "rungs"))
    """Also under the name of a choice that an earlier version has stored."""

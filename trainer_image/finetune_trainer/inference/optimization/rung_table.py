"""The table of rungs."""

from __future__ import annotations

from finetune_contract.contract_models import Message


class RungRow(Message):
    """One rung."""

    name: str
    rows_per_second: float | None = None
    agreement: float | None = None
    largest_difference: float | None = None
    metric: str | None = None
    """Metric that is worst against the plain model's."""
    metric_worse_by: float | None = None
    memory_bytes: int | None = None
    setup_seconds: float | None = None
    chosen: bool = False
    why: str


class RungTable(Message):
    """All rungs."""

    chosen: str
    rows: int
    reason: str
    rungs: tuple[RungRow, ...] = ()

"""Table of the measured rungs."""

from __future__ import annotations

from finetune_contract.contract_models import Message


class RungRow(Message):
    """Figures of one rung."""

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


class RungTable(Message):
    """Figures of all rungs."""

    chosen: str
    rows: int
    reason: str
    rungs: tuple[RungRow, ...] = ()

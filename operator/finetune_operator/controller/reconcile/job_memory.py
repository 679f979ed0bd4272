"""State of a job that the operator keeps between reconciles."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

from finetune_operator.jobs.state.decision_types import AutoscalerView, IdleScalingView, Refusal, RouteView, StartEvent
from finetune_operator.jobs.state.plan_table import PlanTable

View = TypeVar("View")


@dataclass
class Reading(Generic[View]):
    """Last reading of an object that is read at intervals."""

    view: View | None = None
    """State of the object; None if it is not known."""
    time: float = float("-inf")
    """Time of the reading on the monotonic clock."""


@dataclass
class JobMemory:
    """State of one job that is remembered between reconciles, and may be lost."""

    uid: str
    refusals: tuple[Refusal, ...] = ()
    """Refusals of the last reconcile, until one that knew of them has been carried out."""
    logs: dict[str, str] = field(default_factory=dict)
    """Log tails by pod; read once."""
    last_logs: dict[str, str] = field(default_factory=dict)
    """Log tails by pod, read when its deletion began."""
    autoscaler: Reading[AutoscalerView] = field(default_factory=Reading)
    """The endpoint's autoscaler."""
    route: Reading[RouteView] = field(default_factory=Reading)
    """The endpoint's HTTPRoute."""
    idle_scaling: Reading[IdleScalingView] = field(default_factory=Reading)
    """The endpoint's HTTPScaledObject."""
    start_events: Reading[tuple[StartEvent, ...]] = field(default_factory=Reading)
    """Newest events of the objects that keep its attempt from starting."""
    queued: set[tuple[str, str, str]] = field(default_factory=set)
    """Events that were queued: version of the job that they were decided at, reason, message."""
    progress_due: float = float("-inf")
    """Time from which the status may be written for progress alone, on the monotonic clock."""
    checked_update: float = float("-inf")
    """Time of the last update after which the attempt was read again already."""
    plans: PlanTable = field(default_factory=PlanTable)
    plan_wanted_since: datetime | None = None
    """Time since when the job has been waiting for its plan; None: it is not."""
    failures: int = 0
    """Reconciles in a row that ended in an error."""
    internal_errors: int = 0
    """Reconciles in a row that ended in an error of the operator, without those that the API server answered."""

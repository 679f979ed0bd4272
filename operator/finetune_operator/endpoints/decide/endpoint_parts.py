"""Objects beside an endpoint's servers whose controllers report troubles in their status alone: they are read at
intervals, as a watch on all objects of such a kind would need more rights.
"""

from __future__ import annotations

from datetime import timedelta

from finetune_contract.choices import Stage
from finetune_operator.jobs.outcomes.status import condition
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import JobView

READ_SECONDS = 60
"""Interval of reading an object whose state is unknown or bad."""
READ_AGAIN_SECONDS = 600
"""Interval of reading one whose state is good."""


def is_due(age_seconds: float, works: bool) -> bool:
    """Return whether an object that was read `age_seconds` ago is read again. `works`: its state was good then."""
    return age_seconds >= _interval(works) - 1


def are_serving(job: JobView) -> bool:
    """Return whether the endpoint has servers."""
    return any((one.name, one.state) == (Stage.SERVE, "Running") for one in job.status.stages)


def with_reading(state: ReconcileState, works: bool, trouble: str, start: str, reason: str) -> ReconcileState:
    """Return the state with the next reading, and with a warning of that `reason` for a new trouble. `trouble`: a
    sentence for the message of condition Ready that begins with `start`; empty if there is none.
    """
    state = state.requeue(state.now + timedelta(seconds=_interval(works)))
    before = condition(state.job.status, "Ready")
    if not trouble or (before is not None and start in before.message):
        return state
    return state.with_event(reason, trouble.strip(), warning=True)


def _interval(works: bool) -> int:
    return READ_AGAIN_SECONDS if works else READ_SECONDS

"""Consequences for a job of an error in the operator that the job triggers, by its spec or by reports of its pods.

Without them it would be reconciled for ever, and its status would not say why nothing happens. This module must not
plan or render: the error may be there.
"""

from __future__ import annotations

from datetime import datetime

from finetune_operator.jobs.decide.decide import MANAGER
from finetune_operator.jobs.outcomes.attempt_outcomes import give_up
from finetune_operator.jobs.outcomes.remedies import Cause, OperatorCause
from finetune_operator.jobs.outcomes.status import complete, condition, ended
from finetune_operator.jobs.state.decision_state import Inputs, ReconcileState, Stalled
from finetune_operator.jobs.state.decision_types import Decision, JobView, Observed
from finetune_operator.jobs.state.plan_table import PlanTable
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import Condition, ConditionType

MOST_IN_A_ROW = 5
"""Errors in a row after which a job that runs nothing has failed."""
REASON = "InternalError"
_HINT = "Report this as a bug of the operator, with the job's file and the operator's log."


def after_internal_error(
    job: JobView, observed: Observed, now: datetime, settings: Settings, error: str, in_row: int
) -> Decision:
    """Decide about `job` after `in_row` errors in a row, the last of type `error`: it stalls, and in the end it fails,
    unless anything of it runs.
    """
    inputs = Inputs(job, observed, now, settings, None, PlanTable().find)
    suspended = job.status.phase == "Suspended"
    state = ReconcileState(inputs, Decision(job.status), end=ended(job.status), suspended=suspended)
    if state.end is not None or job.deleting or job.managed_by not in (None, "", MANAGER):
        return state.decision
    problem = f"The operator cannot process this job because of an error of its own ({error})."
    if in_row >= MOST_IN_A_ROW and not _runs(observed):
        cause = Cause(OperatorCause.INTERNAL_ERROR, REASON, problem, _HINT)
        stage = state.current
        name, attempt = (None, None) if stage is None or not stage.attempt else (stage.name, stage.attempt)
        state = give_up(state, stage, cause.to_failure_status(name, attempt))
        return state.with_actions(status=complete(state)).decision
    stalled = Stalled(REASON, f"{problem} It tries again. {_HINT}")
    before = condition(job.status, "Stalled")
    if before is None or before.reason != REASON:
        state = state.with_event(REASON, stalled.message, warning=True)
    after = complete(state.with_findings(stalled=stalled))
    # Nothing else was found out about the job: its other conditions stay.
    stored: dict[ConditionType, Condition] = {one.type: one for one in job.status.conditions if one.type != "Stalled"}
    conditions = tuple(stored.get(one.type, one) for one in after.conditions)
    phase = job.status.phase or after.phase
    return state.with_actions(status=after.model_copy(update={"conditions": conditions, "phase": phase})).decision


def _runs(observed: Observed) -> bool:
    children = any(child.state not in ("Succeeded", "Failed") for child in observed.children)
    return children or any(not pod.over for pod in observed.pods) or bool(observed.endpoints)

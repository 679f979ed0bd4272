"""Pods that a child's own controller replaces: they are reported as events, and are no failure of their attempt.

A Job with `backoffLimitPerIndex` creates another pod for an index whose pod was lost, a bounded number of times. The
newest pod of each index counts; an attempt fails when the Job does, and then the newest pods have the cause. Spark
replaces its executors itself, which are no pods of the attempt: its driver counts the lost ones in its progress.
"""

from __future__ import annotations

from collections.abc import Sequence

from finetune_contract.causes import ECHOES
from finetune_operator.jobs.outcomes.failure_diagnosis import first_cause
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import ChildView, PodView
from finetune_operator.spec.launcher_rows import SUPPORTED
from finetune_operator.spec.types import StageStatus

_DRIVER_KINDS = tuple(launcher.kind for launcher in SUPPORTED if launcher.driver is not None)


def current_pods(child: ChildView, pods: Sequence[PodView]) -> tuple[PodView, ...]:
    """Return the pods of `child` without those that its controller has replaced."""
    if not child.replaces_pods:
        return tuple(pods)
    newest = _newest(pods)
    return tuple(pod for pod in pods if pod.index is None or newest[pod.index] is pod)


def pods_with_cause(child: ChildView, pods: Sequence[PodView]) -> tuple[PodView, ...]:
    """Return the pods of a failed `child` that show the cause: the current ones, or all if these only show echoes.

    A pod may have been replaced, after it had reported a failure, before the others noticed it and ended.
    """
    current = current_pods(child, pods)
    return tuple(pods) if first_cause(child.stage, child, current).cause in ECHOES else current


def report_replaced_pods(
    state: ReconcileState, stage: StageStatus, child: ChildView, pods: Sequence[PodView]
) -> tuple[ReconcileState, StageStatus]:
    """Add an event for each of the attempt's `pods` that was replaced since the status was written."""
    if child.ref.kind in _DRIVER_KINDS:
        return _report_replaced_executors(state, stage, child)
    newest = _newest(pods)
    count = sum(pod.lost_before for pod in newest.values())
    if not child.replaces_pods or count <= stage.replaced_pods:
        return state, stage
    later = sorted((pod for pod in pods if pod.index is not None and pod.lost_before), key=lambda pod: pod.created)
    for pod in later[stage.replaced_pods - count :]:
        lost = _replaced_pod(pod, pods)
        cause = (
            first_cause(child.stage, child, [lost]).message if lost else f"The pod of index {pod.index} was deleted."
        )
        message = (
            f"Stage {stage.name}, attempt {stage.attempt}: {cause} {child.ref.kind} {child.ref.name} has "
            f"created pod {pod.name} in its place; finished work is kept."
        )
        state = state.with_event("PodReplaced", message, warning=True)
    stage = stage.model_copy(update={"replaced_pods": count})
    return state.with_stage(stage), stage


def _replaced_pod(pod: PodView, pods: Sequence[PodView]) -> PodView | None:
    """Return the pod that `pod` replaced; None if it was deleted before anybody looked."""
    same = (other for other in pods if other.index == pod.index and other.lost_before < pod.lost_before)
    return max(same, key=lambda other: other.created, default=None)


def _report_replaced_executors(
    state: ReconcileState, stage: StageStatus, child: ChildView
) -> tuple[ReconcileState, StageStatus]:
    """Add an event for the executors that a driver has replaced since the status was written."""
    progress = state.observed.progress
    count = 0 if progress is None or progress.replaced_pods is None else progress.replaced_pods
    more = count - stage.replaced_pods
    if more <= 0:
        return state, stage
    message = (
        f"Stage {stage.name}, attempt {stage.attempt}: the driver of {child.ref.kind} {child.ref.name} has replaced "
        f"{more} lost executor{'s' if more > 1 else ''}; finished work is kept."
    )
    stage = stage.model_copy(update={"replaced_pods": count})
    return state.with_event("PodReplaced", message, warning=True).with_stage(stage), stage


def _newest(pods: Sequence[PodView]) -> dict[int, PodView]:
    """Return the newest pod of each index."""
    ordered = sorted(pods, key=lambda pod: (pod.created, pod.lost_before, pod.name))
    return {pod.index: pod for pod in ordered if pod.index is not None}

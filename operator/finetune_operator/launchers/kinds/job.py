"""batch/v1 Job: an Indexed Job, with a headless Service where several pods train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_CODES, EXIT_OK, FailureClass
from finetune_operator.api.objects import Raw
from finetune_operator.launchers.kinds.launcher_status import ConditionedStatus, PodTemplate, Verdict
from finetune_operator.rendering.manifests import metadata, service
from finetune_operator.rendering.pod_parts import CONTAINER_NAME
from finetune_operator.rendering.render_types import Manifest
from finetune_operator.rendering.templates import document
from finetune_operator.rendering.trainer_pod import StagePods, stage_pod

REPLACEMENTS = 3
"""Pods of one index that the Job replaces in an attempt. One lost more often is a failure of the attempt, with its
cause, and the next attempt begins with new pods. The Job waits 10, 20 and 40 s before the three.
"""
REPLACED_CODES = tuple(
    EXIT_CODES[failure]
    for failure in (
        FailureClass.OUT_OF_MEMORY,
        FailureClass.PREEMPTED,
        FailureClass.STORAGE_LOST,
        FailureClass.HUB_UNAVAILABLE,
    )
)
"""Exit codes of processes that were killed, for lack of memory among other reasons, were told to stop, or lost what
another node may still reach. With any other one the trainer reports a failure that ends the attempt.
"""


def render(pods: StagePods) -> tuple[Manifest, ...]:
    replaces = pods.stage is Stage.PREDICT and pods.shares_rows
    made = document(
        "job",
        metadata=metadata(pods),
        nodes=pods.nodes,
        container=CONTAINER_NAME,
        # Of a gang each one's end counts.
        first_pod_decides=pods.shares_rows,
        replacements=REPLACEMENTS if replaces else None,
        on_disruption="Count" if replaces else "FailJob",
        other_codes=[EXIT_OK, *REPLACED_CODES] if replaces else [EXIT_OK],
        pod=replace(stage_pod(pods), subdomain=pods.service).manifest(),
    )
    return (made,) if pods.service is None else (service(pods, pods.service), made)


class _Spec(Raw):
    suspend: bool | None = None
    backoff_limit_per_index: int | None = None
    template: PodTemplate = PodTemplate()


class _Status(ConditionedStatus):
    ready: int | None = None


class _Job(Raw):
    spec: _Spec = _Spec()
    status: _Status = _Status()


def read(value: Mapping[str, JsonValue]) -> Verdict:
    """`FailureTarget` comes before `Failed`, and `SuccessCriteriaMet` before `Complete`: pods still end then.

    Of a failure they may tell the cause, and it is waited for. A success stays one, however the pods end that are not
    needed any more (KEP-3998 of kubernetes/enhancements), and one on a node that is gone may never end.

    A Job counts pods that only wait as active, so it is running when one of them is ready.
    """
    raw = _Job.model_validate(value)
    return replace(
        _judged(raw),
        started=raw.status.start_time,
        configuration=raw.spec.template.configuration,
        replaces_pods=bool(raw.spec.backoff_limit_per_index),
    )


def _judged(raw: _Job) -> Verdict:
    status = raw.status
    if done := status.condition("Complete") or status.condition("SuccessCriteriaMet"):
        return Verdict("Succeeded", done, status.completion_time or done.last_transition_time)
    if failed := status.condition("Failed"):
        return Verdict("Failed", failed, failed.last_transition_time)
    if raw.spec.suspend:
        return Verdict("Suspended", status.condition("Suspended"))
    return Verdict("Running" if status.ready else "Pending", status.condition("FailureTarget"))

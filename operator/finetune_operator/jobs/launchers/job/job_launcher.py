"""batch/v1 Job: an Indexed Job, with a headless Service where several pods train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_CODES, EXIT_OK, FailureClass
from finetune_operator.jobs.launchers.launcher_status import ConditionedStatus, PodTemplate, Verdict
from finetune_operator.jobs.render.manifests import metadata, service
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.jobs.render.templates import document
from finetune_operator.jobs.render.trainer_pod import StagePods, stage_pod
from finetune_operator.spec.kubernetes_objects import Raw

REPLACEMENTS = 3
"""Pods of one index that the Job replaces in an attempt. One more loss fails the attempt, with its cause, and the next
attempt starts new pods. The Job's back-off is 10, 20 and 40 s.
"""
REPLACED_CODES = tuple(
    EXIT_CODES[failure]
    for failure in (
        FailureClass.KILLED,
        FailureClass.PREEMPTED,
        FailureClass.STORAGE_LOST,
        FailureClass.HUB_UNAVAILABLE,
        FailureClass.OUT_OF_MEMORY,
    )
)
"""Exit codes of processes that were killed, ran out of memory, were preempted, or lost storage or a Hub that another
node may still reach. Any other code is a failure that ends the attempt.
"""


def render(pods: StagePods) -> tuple[Manifest, ...]:
    replaces = pods.stage is Stage.PREDICT and pods.shares_rows
    made = document(
        "job",
        metadata=metadata(pods),
        nodes=pods.nodes,
        container=CONTAINER_NAME,
        # Any failed pod of a gang fails the attempt.
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
    """Read a Job's status: while pods end, `FailureTarget` precedes `Failed` and `SuccessCriteriaMet` `Complete`.

    A failure is final only at `Failed`, since its pods may still report the cause. `SuccessCriteriaMet` is final: the
    remaining pods do not matter (KEP-3998 of kubernetes/enhancements), and one on a lost node may never end.

    A Job counts pending pods as active, so it is running once one of them is ready.
    """
    raw = _Job.model_validate(value)
    return replace(
        _verdict(raw),
        started=raw.status.start_time,
        configuration=raw.spec.template.configuration,
        replaces_pods=bool(raw.spec.backoff_limit_per_index),
    )


def _verdict(raw: _Job) -> Verdict:
    status = raw.status
    if done := status.condition("Complete") or status.condition("SuccessCriteriaMet"):
        return Verdict("Succeeded", done, status.completion_time or done.last_transition_time)
    if failed := status.condition("Failed"):
        return Verdict("Failed", failed, failed.last_transition_time)
    if raw.spec.suspend:
        return Verdict("Suspended", status.condition("Suspended"))
    return Verdict("Running" if status.ready else "Pending", status.condition("FailureTarget"))

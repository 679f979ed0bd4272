"""kubeflow.org/v1 PyTorchJob of the Training Operator, which gives each replica a Service of its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue

from finetune_operator.jobs.launchers.launcher_status import KubeflowJob, Verdict
from finetune_operator.jobs.render.manifests import metadata
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.jobs.render.templates import document
from finetune_operator.jobs.render.trainer_pod import StagePods, stage_pod

PORT = {"pytorchjob-port": 23456}
"""Port name and default that the Training Operator looks for; the rendezvous listens there."""


def render(pods: StagePods) -> tuple[Manifest, ...]:
    pod = stage_pod(pods)
    made = document(
        "pytorchjob",
        metadata=metadata(pods),
        nodes=pods.nodes,
        processes_per_node=str(pods.processes_per_node),
        pod=replace(pod, container=replace(pod.container, ports=PORT)).manifest(),
    )
    return (made,)


def read(value: Mapping[str, JsonValue]) -> Verdict:
    """Read a PyTorchJob's status. `Failed` is never removed and may lack a completion time, so it takes precedence."""
    raw = KubeflowJob.model_validate(value)
    status = raw.status
    if failed := status.condition("Failed"):
        over = status.completion_time or failed.last_transition_time
        return Verdict("Failed", failed, over, started=status.start_time)
    if done := status.condition("Succeeded"):
        over = status.completion_time or done.last_transition_time
        return Verdict("Succeeded", done, over, started=status.start_time)
    return raw.underway()

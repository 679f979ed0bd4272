"""sparkoperator.k8s.io/v1beta2 SparkApplication: Spark's driver runs the stage, its executors tokenise or predict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue

from finetune_contract.byte_text import MIB
from finetune_contract.choices import Stage
from finetune_operator.jobs.launchers.launcher_status import PodTemplate, Verdict
from finetune_operator.jobs.render.manifests import metadata
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME, Pod, Resources
from finetune_operator.jobs.render.render_types import ATTEMPT_LABEL, MANAGED_BY, STAGE_LABEL, Manifest
from finetune_operator.jobs.render.templates import document
from finetune_operator.jobs.render.trainer_pod import StagePods, program_arguments, stage_pod
from finetune_operator.spec.kubernetes_objects import Raw, RawCondition, Time
from finetune_operator.spec.quantities import parse_quantity


def render(pods: StagePods) -> tuple[Manifest, ...]:
    settings = pods.context.settings.spark
    assert settings.image is not None, "a plan with Spark has an image"
    pod = _pod(pods, settings.image)
    # Only the driver has the attempt's labels: its end is the attempt's.
    labels = {**MANAGED_BY, **pods.context.job_labels(pods.plan.name)}
    made = document(
        "sparkapplication",
        metadata=metadata(pods),
        image=settings.image,
        arguments=list(program_arguments(pods)),
        container=CONTAINER_NAME,
        executors=pods.nodes - 1,
        **_size(pods),
        executor_labels=dict.fromkeys((STAGE_LABEL, ATTEMPT_LABEL), ""),
        # The driver requests executors from the API server.
        driver=replace(pod, service_account=settings.service_account_name, api_token=True).manifest(),
        executor=replace(pod, labels=labels).manifest(),
    )
    return (made,)


def _pod(pods: StagePods, image: str) -> Pod:
    """Return the pod without command and sizes, which Spark adds; its devices (names with a domain) are kept."""
    pod = stage_pod(pods)
    limits = {name: count for name, count in pod.container.resources.limits.items() if "/" in name}
    # Spark's image has a working directory of its own, into which executors copy files.
    resources = Resources({}, limits)
    container = replace(pod.container, image=image, command=(), resources=resources, working_folder=None)
    return replace(pod, container=container)


def _size(pods: StagePods) -> dict[str, JsonValue]:
    """Return CPU and Python memory of the driver and of an executor.

    Spark also uses the memory request as the limit. So without one from the job, prediction gets twice the expected
    memory: measuring ways to compute holds a converted model beside the first.
    """
    if pods.stage is Stage.PREPARE:
        return {"cpu": None, "python_memory": "2g"}
    requested = stage_pod(pods).container.resources
    limit = requested.limits.get("memory")
    count = 2 * parse_quantity(requested.requests["memory"]) if limit is None else parse_quantity(limit)
    return {"cpu": requested.limits.get("cpu"), "python_memory": f"{math.ceil(count / MIB)}m"}


class _Driver(Raw):
    template: PodTemplate = PodTemplate()


class _Spec(Raw):
    driver: _Driver = _Driver()


class _State(Raw):
    state: str = ""
    error_message: str = ""


class _Status(Raw):
    application_state: _State = _State()
    last_submission_attempt_time: Time | None = None
    termination_time: Time | None = None


class _Application(Raw):
    spec: _Spec = _Spec()
    status: _Status = _Status()


def read(value: Mapping[str, JsonValue]) -> Verdict:
    """Read a status with the states of the Spark Operator's `api/v1beta2/sparkapplication_types.go`.

    COMPLETED and FAILED are final. Others lead to them: SUBMISSION_FAILED becomes FAILED unless it is retried, and
    SUCCEEDING and FAILING precede the last check of the driver.
    """
    raw = _Application.model_validate(value)
    verdict = _verdict(raw.status)
    started, configuration = raw.status.last_submission_attempt_time, raw.spec.driver.template.configuration
    return replace(verdict, started=started, configuration=configuration)


def _verdict(status: _Status) -> Verdict:
    state = status.application_state
    condition = RawCondition(type=state.state, status="True", reason=state.state, message=state.error_message)
    match state.state:
        case "COMPLETED":
            return Verdict("Succeeded", condition, status.termination_time)
        case "FAILED":
            return Verdict("Failed", condition, status.termination_time)
        case "RUNNING" | "SUCCEEDING" | "FAILING":
            return Verdict("Running", condition)
        case "SUSPENDING" | "SUSPENDED":
            return Verdict("Suspended", condition)
        case _:
            return Verdict("Pending", condition if state.state else None)

"""Parse raw JSON of the API server into the values that decisions use.

Unreadable values are never guessed: a field of our status that cannot be read counts as left out, and its content is
found again from the children; an object without our labels is not ours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field, JsonValue, ValidationError

from finetune_contract.choices import Stage
from finetune_contract.report import TrainerReport, shortened
from finetune_operator.endpoints.kinds import KSERVE_LABEL
from finetune_operator.jobs.outcomes.failure_diagnosis import first_cause, reported_success, without_report
from finetune_operator.jobs.outcomes.hang_detection import pods_to_read_logs_from, progress_gap
from finetune_operator.jobs.outcomes.pod_replacement import current_pods, pods_with_cause
from finetune_operator.jobs.outcomes.remedies import LOG_LIMIT, MOST_LOGS
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME, SERVED_CONTAINER_NAME
from finetune_operator.jobs.render.render_types import ROLLBACK_ANNOTATION
from finetune_operator.jobs.state.children import attempt_of
from finetune_operator.jobs.state.decision_state import job_redactor, with_own_report
from finetune_operator.jobs.state.decision_types import ChildView, Ended, JobView, Observed, PodView, Waiting
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.kubernetes_objects import Conditions, Meta, Raw, RawCondition, Time, empty
from finetune_operator.spec.launcher_rows import SUPPORTED
from finetune_operator.spec.problems import MOST_PROBLEMS, Problem
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJob, FineTuneJobStatus

# ------------------------------------------------------------------------------------------------ pods as they are read


class Terminated(Raw):
    """`state.terminated` of a container."""

    exit_code: int = 0
    reason: str = ""
    message: str = ""
    started_at: Time | None = None
    finished_at: Time | None = None


class RunningState(Raw):
    """`state.running` of a container."""

    started_at: Time | None = None


class WaitingState(Raw):
    """`state.waiting` of a container."""

    reason: str = ""
    message: str = ""


class ContainerState(Raw):
    """State of a container; exactly one of the three is set."""

    waiting: WaitingState | None = None
    running: RunningState | None = None
    terminated: Terminated | None = None


class ContainerStatus(Raw):
    """Status of one container."""

    name: str
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()
    """State before its last restart."""


Statuses = Annotated[tuple[ContainerStatus, ...], BeforeValidator(empty)]


class ClaimSource(Raw):
    """`persistentVolumeClaim` of a volume."""

    claim_name: str = ""


class Volume(Raw):
    """Volume of a pod."""

    persistent_volume_claim: ClaimSource | None = None


class PodSpec(Raw):
    """Fields that are read from a pod's spec."""

    node_name: str | None = None
    volumes: Annotated[tuple[Volume, ...], BeforeValidator(empty)] = ()


class PodStatus(Raw):
    """Fields that are read from a pod's status."""

    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"] = "Pending"
    reason: str | None = None
    message: str | None = None
    conditions: Conditions = ()
    pod_ip: str = Field(default="", alias="podIP")
    container_statuses: Statuses = ()
    init_container_statuses: Statuses = ()


class RawPod(Raw):
    """A pod."""

    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def condition(self, type_: str) -> RawCondition | None:
        """Return the condition of that type, whether it holds or not."""
        return next((one for one in self.status.conditions if one.type == type_), None)


# --------------------------------------------------------------------------------------------------- what decisions use

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""kubectl's copy of the whole object: its problems are reported once, for the object itself."""
MAX_PROBLEMS = 20
LONGEST_PATH = 300
LONGEST_ROLLBACK = 64
_INDEX_LABELS = tuple(dict.fromkeys(launcher.index_label for launcher in SUPPORTED if launcher.index_label is not None))
_STARTERS = tuple(launcher.starter_pod for launcher in SUPPORTED if launcher.starter_pod is not None)
FAILURES_ANNOTATION = "batch.kubernetes.io/job-index-failure-count"
"""Annotation of pods of a Job with backoffLimitPerIndex (kubernetes `staging/src/k8s.io/api/batch/v1/types.go`)."""
MOST_DIGITS = 10
"""Maximum number of digits of a count that a person can set."""
_NOT_WAITING = frozenset({"", "ContainerCreating", "PodInitializing"})
"""Waiting reasons of the kubelet for a start that goes on."""


Validate: TypeAlias = Callable[[JsonValue, Settings], tuple[FineTuneJob | None, list[Problem]]]
"""Function in the place of `validate_job`."""


def job_view(
    value: Mapping[str, JsonValue],
    settings: Settings,
    before: JobView | None = None,
    validate: Validate | None = None,
) -> JobView:
    """Return the FineTuneJob as read. ValidationError if it has no metadata, which no API server sends.

    `before` is an earlier view under the same settings: while the same job asks for the same, it is not checked again.
    """
    meta = Meta.model_validate(value["metadata"])
    labels, annotations = _marked(meta)
    marks = _marks(meta)
    metadata: dict[str, JsonValue] = {
        "name": meta.name,
        "namespace": meta.namespace,
        "uid": meta.uid,
        "generation": meta.generation,
        "labels": labels,
        "annotations": annotations,
    }
    document: dict[str, JsonValue] = {
        "apiVersion": value.get("apiVersion"),
        "kind": value.get("kind"),
        "metadata": metadata,
        "spec": value.get("spec"),
    }
    if before is not None and _is_unchanged(meta, marks, before):
        job, problems = before.job, before.problems
    else:
        try:
            job, all_problems = (validate or validate_job)(document, settings)
        except Exception as error:
            # A bug that one object triggers must not keep the operator from all others.
            job, all_problems = None, [_validation_failure(error)]
        problems = _kept(all_problems)
        if job is not None:
            job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"annotations": {}})})
    return JobView(
        name=meta.name,
        namespace=meta.namespace,
        uid=meta.uid,
        generation=meta.generation,
        created=meta.creation_timestamp,
        deleting=meta.deletion_timestamp is not None,
        managed_by=_managed_by(value.get("spec")),
        job=job,
        problems=problems,
        status=_status(value.get("status")),
        marks=marks,
        rollback=_rollback(meta),
    )


def _rollback(meta: Meta) -> str | None:
    text = meta.annotations.get(ROLLBACK_ANNOTATION)
    return None if text is None else shortened(text, LONGEST_ROLLBACK)


def is_unchanged(value: Mapping[str, JsonValue], before: JobView) -> bool:
    """Return whether `job_view` reuses the verdict of `before`. ValidationError as there."""
    meta = Meta.model_validate(value["metadata"])
    return _is_unchanged(meta, _marks(meta), before)


def _is_unchanged(meta: Meta, marks: str, before: JobView) -> bool:
    # Kubernetes counts the generation up with each change of a spec, but not with one of labels and annotations.
    return (before.uid, before.generation, before.marks) == (meta.uid, meta.generation, marks)


def _marked(meta: Meta) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """Return the labels and annotations that validation reads."""
    return {**meta.labels}, {key: text for key, text in meta.annotations.items() if key != LAST_APPLIED}


def _marks(meta: Meta) -> str:
    # Views of all jobs stay in memory, so no text that users can make large does.
    return hashlib.sha256(json.dumps(_marked(meta), sort_keys=True).encode()).hexdigest()


def _kept(problems: Sequence[Problem]) -> tuple[Problem, ...]:
    """Return the first problems and the number of the others: as much as a condition shows."""
    kept = [replace(problem, path=shortened(problem.path, LONGEST_PATH)) for problem in problems[:MAX_PROBLEMS]]
    if more := len(problems) - len(kept):
        rule = f"has {more} more problem{'s' * (more > 1)}{' or more' * (len(problems) >= MOST_PROBLEMS)}"
        kept.append(Problem("", None, rule, "run finetune validate to list them"))
    return tuple(kept)


def _validation_failure(error: Exception) -> Problem:
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Problem(
        "spec",
        None,
        f"cannot be validated because of an error in the operator ({shortened(why, 200)})",
        "run finetune validate on the job's file, and report its output as a bug of the operator",
    )


def _managed_by(spec: JsonValue) -> str | None:
    policy = spec.get("runPolicy") if isinstance(spec, dict) else None
    manager = policy.get("managedBy") if isinstance(policy, dict) else None
    return manager if isinstance(manager, str) else None


def _status(value: JsonValue) -> FineTuneJobStatus:
    try:
        return FineTuneJobStatus.model_validate(value or {})
    except ValidationError as error:
        if not isinstance(value, dict):
            return FineTuneJobStatus()
        # The job's end and its usage must not be lost with a condition of a newer operator.
        unread = {str(one["loc"][0]) for one in error.errors(include_input=False, include_url=False)}
        return FineTuneJobStatus.model_validate({name: field for name, field in value.items() if name not in unread})


def pod_view(value: Mapping[str, JsonValue]) -> PodView | None:
    """Return the pod; None if it belongs to no attempt of ours."""
    try:
        raw = RawPod.model_validate(value)
    except ValidationError:
        return None
    attempt = attempt_of(raw.metadata)
    if attempt is None:
        return None
    scheduled = raw.condition("PodScheduled")
    unschedulable = scheduled is not None and scheduled.status == "False" and scheduled.reason == "Unschedulable"
    disrupted = raw.condition("DisruptionTarget")
    status = raw.status
    return PodView(
        name=raw.metadata.name,
        uid=raw.metadata.uid,
        stage=attempt[0],
        attempt=attempt[1],
        created=raw.metadata.creation_timestamp,
        phase=status.phase,
        index=_index(raw.metadata.labels),
        lost_before=_lost_before(raw.metadata.annotations),
        node=raw.spec.node_name,
        address=raw.status.pod_ip or None,
        scheduled=scheduled.last_transition_time if scheduled is not None and scheduled.holds else None,
        started_at=_started_at(raw),
        unschedulable=scheduled.message if scheduled is not None and unschedulable else None,
        waiting=_waiting(raw),
        node_silent_since=_node_silent_since(raw),
        ended=_ended(raw, attempt[0]),
        disruption=disrupted.reason if disrupted is not None and disrupted.holds else None,
        status_reason=status.reason or None,
        status_message=status.message or None,
        changed=max((one.last_transition_time for one in status.conditions if one.last_transition_time), default=None),
        deleting_until=raw.metadata.deletion_timestamp,
        deleting_since=_deleting_since(raw.metadata),
        container=_container(raw.metadata),
        claims=tuple(one.persistent_volume_claim.claim_name for one in raw.spec.volumes if one.persistent_volume_claim),
    )


def _container(metadata: Meta) -> str:
    """Return the name of the trainer's container."""
    return SERVED_CONTAINER_NAME if KSERVE_LABEL in metadata.labels else CONTAINER_NAME


def _deleting_since(metadata: Meta) -> datetime | None:
    until = metadata.deletion_timestamp
    try:
        return None if until is None else until - timedelta(seconds=metadata.deletion_grace_period_seconds)
    except OverflowError:
        # Whoever deletes a pod may write any grace period.
        return until


def _index(labels: Mapping[str, str]) -> int | None:
    """Return the node rank. A pod that starts the ranks may have an index too, and is no node."""
    if any(labels.get(label) == value for label, value in _STARTERS):
        return None
    text = next((labels[label] for label in _INDEX_LABELS if label in labels), "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _lost_before(annotations: Mapping[str, str]) -> int:
    """Return the failures of the pod's index as the Job counts them, without those that its policy ignores."""
    text = annotations.get(FAILURES_ANNOTATION, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < MOST_DIGITS else 0


def _waiting(raw: RawPod) -> Waiting | None:
    """Return why a container does not start; init containers start first, so they are checked first."""
    for container in (*raw.status.init_container_statuses, *raw.status.container_statuses):
        state = container.state.waiting
        if state is not None and state.reason not in _NOT_WAITING:
            return Waiting(state.reason, state.message)
    return None


def _node_silent_since(raw: RawPod) -> datetime | None:
    """Return since when the node of a running pod does not respond.

    The node lifecycle controller then sets Ready to False and nothing else (kubernetes `MarkPodsNotReady` in
    `pkg/controller/util/node/controller_utils.go`). A kubelet sets ContainersReady to False as well, or names a gate.
    """
    ready, containers_ready = raw.condition("Ready"), raw.condition("ContainersReady")
    if raw.status.phase != "Running" or ready is None or containers_ready is None:
        return None
    marked = ready.status == "False" and containers_ready.holds and ready.reason != "ReadinessGatesNotReady"
    return ready.last_transition_time if marked else None


def _ended(raw: RawPod, stage: Stage) -> Ended | None:
    """Return the end of the trainer's container. Except for a server's it never restarts in its pod, so there is no
    earlier end to look for.
    """
    for container in raw.status.container_statuses:
        ended = container.state.terminated
        if ended is None and stage is Stage.SERVE:
            ended = container.last_state.terminated
        if container.name == _container(raw.metadata) and ended is not None:
            report = _report(ended.message)
            return Ended(ended.exit_code, ended.reason, ended.finished_at, report, "" if report else ended.message)
    return None


def _started_at(raw: RawPod) -> datetime | None:
    """Return when the trainer's container started."""
    for container in raw.status.container_statuses:
        state = container.state
        if container.name == _container(raw.metadata):
            return next((one.started_at for one in (state.running, state.terminated) if one is not None), None)
    return None


def _report(message: str) -> TrainerReport | None:
    try:
        return TrainerReport.model_validate_json(message)
    except ValidationError:
        return None


def wanted_logs(job: JobView, observed: Observed, now: datetime, settings: Settings) -> tuple[str, ...]:
    """Return the pods of the current attempt that failed and whose log tail is not known yet, at most 3: the one with
    the cause, then the first to fail; of an attempt to be stopped for its silence, those that may show where it hangs.

    The shell reads the logs before it decides, and passes an empty text if there is none. An attempt whose failure the
    status records already needs no log any more.
    """
    newest = _newest(job, observed)
    if newest is None:
        return ()
    every = _pods_of(newest, job, observed)
    pods = pods_with_cause(newest, every) if newest.state == "Failed" else current_pods(newest, every)
    # A deleted pod has no log to read.
    failed = sorted(
        (pod for pod in pods if pod.phase == "Failed" and not pod.deleted), key=lambda pod: (_ended_at(pod), pod.name)
    )
    cause = _pod_with_cause(newest, pods)
    first = [cause] if cause is not None and cause.over and not cause.deleted else []
    gap = progress_gap(job, observed, settings, newest.stage, newest.attempt)
    hung = pods_to_read_logs_from(pods) if gap is not None and gap.until <= now else ()
    wanted = dict.fromkeys(pod.name for pod in (*first, *failed, *hung))
    known = {name for name, _ in observed.logs}
    return tuple(name for name in list(wanted)[:MOST_LOGS] if name not in known)


def pods_being_deleted(job: JobView, observed: Observed) -> tuple[str, ...]:
    """Return the pods of the current attempt that are being deleted while they run, at most 3: their logs have to be
    read now. The operator did not delete them: it does so only after the status records an end.
    """
    newest = _newest(job, observed)
    if newest is None:
        return ()
    deleting = [
        pod for pod in _pods_of(newest, job, observed) if pod.deleting_since is not None and pod.started_at is not None
    ]
    first = sorted(
        (pod for pod in deleting if not pod.over), key=lambda pod: (pod.deleting_since, pod.index or 0, pod.name)
    )
    known = {name for name, _ in observed.last_logs}
    return tuple(pod.name for pod in first[:MOST_LOGS] if pod.name not in known)[: MOST_LOGS - len(known)]


def _newest(job: JobView, observed: Observed) -> ChildView | None:
    """Return the child of the current attempt; None if there is none, or the status records its end already."""
    if not observed.children:
        return None
    newest = max(observed.children, key=lambda child: (list(Stage).index(child.stage), child.attempt))
    for stage in job.status.stages:
        recorded = stage.attempt >= newest.attempt and stage.state not in ("Pending", "Running")
        if stage.name is newest.stage and recorded:
            return None
    return newest


def _pods_of(child: ChildView, job: JobView, observed: Observed) -> list[PodView]:
    same = (pod for pod in observed.pods if (pod.stage, pod.attempt) == (child.stage, child.attempt))
    return [with_own_report(pod, job.name) for pod in same]


def redacted_log(job: JobView, log: str) -> str:
    """Return a pod's log tail as the status may hold it: without secrets, including those that the job names in plain.
    Not everybody who may read the job may read its Secrets.
    """
    # Redacted before it is cut: half a secret cannot be recognised.
    return job_redactor(job).text(log)[-LOG_LIMIT:]


def _pod_with_cause(child: ChildView, pods: Sequence[PodView]) -> PodView | None:
    """Return the pod whose end will be reported as the cause; None if nothing has failed, or no pod shows why."""
    if child.state == "Succeeded":
        return None if reported_success(pods) is not None else without_report(pods).pod
    return first_cause(child.stage, child, pods).pod if any(pod.phase == "Failed" for pod in pods) else None


def _ended_at(pod: PodView) -> float:
    """Return the sort key; a pod whose end the kubelet does not report comes last."""
    return pod.ended.finished.timestamp() if pod.ended and pod.ended.finished else float("inf")

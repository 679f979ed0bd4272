"""Invariants after a storm. Each function yields a sentence for every violation."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator

from box_support.box import OPERATOR
from box_support.chaos import STEPS, JobState, Storm, living
from box_support.chaos_schedule import TRAIN, End, Kind, possible_ends
from box_support.faults import ready
from cluster_support.api_access import Object, path_of
from cluster_support.operator_process import NAMESPACE, USER
from cluster_support.world import CHILD_KINDS
from finetune_contract.layout import COMPLETION_MARKER, JobPaths
from finetune_operator.jobs.render.render_types import JOB_LABEL
from finetune_operator.spec.types import API_VERSION, PLURAL

_BESIDE = (("v1", "configmaps"), ("v1", "services"))
_AGAIN = re.compile(r"Stage (\w+) restarts as attempt (\d+) ")
_STOPPED = re.compile(r"Stage (\w+), attempt (\d+), is stopped")


def attempts_of(status: Object) -> dict[str, int]:
    """Return stage -> number of its last attempt."""
    return {stage["name"]: int(stage["attempt"]) for stage in status.get("stages", [])}


def wrong_ends(storm: Storm) -> Iterator[str]:
    """Yield jobs that are lost, or whose end their faults do not explain."""
    for job_state in storm.states.values():
        status = job_state.status
        if not status:
            yield f"{job_state.name} has not ended"
            continue
        failure = (status.get("failure") or {}).get("class") if status["phase"] == "Failed" else None
        end = End(status["phase"], failure, status.get("restarts", 0), status.get("countedRestarts", 0))
        verdict = possible_ends(job_state.case, attempts_of(status), job_state.strikes)
        if end not in verdict.ends:
            right = "; ".join(verdict.wrong) or f"right are {sorted(map(str, verdict.ends))}"
            yield f"{job_state.name} is {end}; {right}"


def changed_after_the_end(storm: Storm) -> Iterator[str]:
    """Yield jobs that were deleted, or changed after their end."""
    for job_state in _ended(storm):
        now = storm.team.box.api.get(path_of(API_VERSION, PLURAL, storm.team.namespace, job_state.name))
        if now is None:
            yield f"{job_state.name} is gone"
        elif _essence(now.get("status", {})) != _essence(job_state.status):
            yield f"{job_state.name} was {_essence(job_state.status)} and is {_essence(now['status'])}"


def _essence(status: Object) -> Object:
    return {"phase": status.get("phase"), "restarts": status.get("restarts"), "attempts": attempts_of(status)}


def _ended(storm: Storm) -> list[JobState]:
    return [job_state for job_state in storm.states.values() if job_state.status]


def _creations(storm: Storm, mark: int) -> Iterator[tuple[str, str]]:
    """Yield resource and name of everything that the operator created in the team's namespace since `mark`."""
    for entry in storm.team.box.cluster.audit(mark, USER):
        if entry["verb"] != "create" or entry["responseStatus"].get("code") != 201:
            continue
        reference = entry.get("objectRef", {})
        if reference.get("namespace") == storm.team.namespace and "name" in reference:
            yield reference["resource"], reference["name"]


def attempts_not_made_once(storm: Storm) -> Iterator[str]:
    """Yield attempts that were created more than once, or that the status has and that were never created."""
    kinds = {plural for _, plural in CHILD_KINDS}
    made = Counter(name for resource, name in _creations(storm, storm.mark) if resource in kinds)
    expected = {
        f"{job_state.name}-{stage}-{number}"
        for job_state in _ended(storm)
        for stage, last in attempts_of(job_state.status).items()
        for number in range(1, last + 1)
    }
    ours = tuple(f"{job_state.name}-" for job_state in storm.states.values())
    for name, times in made.items():
        if times > 1:
            yield f"{name} was created {times} times"
        if (
            name.startswith(ours)
            and name not in expected
            and all(job_state.status for job_state in storm.states.values())
        ):
            yield f"{name} was created but is in no status"
    # A killed API server can have stored an object without an entry in the audit log.
    ran = {f"{job}-{stage}-{attempt}" for job, stage, attempt in storm.seen}
    unlogged = sorted(expected - set(made))
    if len(unlogged) > sum(fault.kind is Kind.API for fault in storm.done) or set(unlogged) - ran:
        yield f"never created: {', '.join(unlogged)}"


def made_after_the_end(storm: Storm) -> Iterator[str]:
    """Yield objects that were created for jobs after their end."""
    for job_state in _ended(storm):
        for resource, name in _creations(storm, job_state.mark):
            if name.startswith(f"{job_state.name}-"):
                yield f"{resource} {name} was created after the end of {job_state.name}"


def unreported_restarts(storm: Storm) -> Iterator[str]:
    """Yield attempts without an event for their start, and events of attempts that did not exist.

    Events come last in each reconcile: an operator that is killed, or has no API server, at that moment omits one.
    """
    missing = []
    for job_state in _ended(storm):
        events = storm.team.events(job_state.name)
        again = [_pair(found) for event in events if (found := _AGAIN.search(event["message"]))]
        stopped = [_pair(found) for event in events if (found := _STOPPED.search(event["message"]))]
        reported = Counter(again + [(stage, number + 1) for stage, number in stopped])
        wanted = {
            (stage, number)
            for stage, last in attempts_of(job_state.status).items()
            for number in range(2, last + 1)
        }  # fmt: skip
        missing += [f"{job_state.name} {stage} {number}" for stage, number in sorted(wanted - set(reported))]
        for (stage, number), times in reported.items():
            if (stage, number) not in wanted and (stage, number - 1) not in stopped:
                yield f"{job_state.name}: attempt {number} at {stage} is in an event but was never started"
            if times > 1:
                yield f"{job_state.name}: attempt {number} at {stage} is in {times} events"
    excused = sum(fault.kind in (Kind.API, Kind.OPERATOR, Kind.OPERATORS, Kind.NODE_OFF) for fault in storm.done)
    if len(missing) > excused:
        yield f"no event gives the reason of: {', '.join(missing)}"


def _pair(found: re.Match[str]) -> tuple[str, int]:
    return found[1], int(found[2])


def broken_results(storm: Storm) -> Iterator[str]:
    """Yield succeeded jobs with incomplete results."""
    for job_state in _ended(storm):
        if job_state.status["phase"] == "Succeeded":
            yield from (f"{job_state.name}: {defect}" for defect in _broken(job_state))


def _broken(job_state: JobState) -> Iterator[str]:
    assert job_state.folder is not None
    paths, case = JobPaths(job_state.folder), job_state.case
    for stage in case.stages:
        if not (paths.state / f"{stage}.json").is_file():
            yield f"state/{stage}.json is missing"
    if not (paths.prepared / COMPLETION_MARKER).is_file():
        yield "prepared data are not marked as whole"
    if TRAIN in case.stages:
        yield from _broken_training(paths)
    if "evaluate" in case.stages and "accuracy" not in json.loads(paths.metrics.read_text()).get("evaluate", {}):
        yield f"no accuracy in metrics.json: {paths.metrics.read_text()[:300]}"
    if "predict" in case.stages and (rows := len(paths.predictions_jsonl.read_text().splitlines())) != 32:
        yield f"{rows} predictions for 32 rows"


def _broken_training(paths: JobPaths) -> Iterator[str]:
    from transformers import AutoModel, AutoModelForSequenceClassification

    lines = [json.loads(line) for line in paths.history.read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    if steps != list(range(1, STEPS + 1)):
        yield f"history.jsonl has steps {steps}"
    if not all(math.isfinite(line["loss"]) for line in lines if "loss" in line):
        yield "a loss is not finite"
    if "train" not in json.loads(paths.metrics.read_text()):
        yield f"nothing about train in metrics.json: {paths.metrics.read_text()[:300]}"
    model = AutoModelForSequenceClassification.from_pretrained(paths.model)
    if not all(bool(tensor.isfinite().all()) for tensor in model.parameters()):
        yield "the model has parameters that are not finite"
    AutoModel.from_pretrained(paths.model)


def left_behind(storm: Storm) -> Iterator[str]:
    """Yield pods that still run, objects without garbage collection, nodes and operators that are not back."""
    box, namespace = storm.team.box, storm.team.namespace
    names = {job_state.name: job_state for job_state in storm.states.values()}
    yield from (f"{one.pod} still runs" for one in living(box, namespace) if one.job in names)
    for pod in box.api.items(path_of("v1", "pods", namespace)):
        job, phase = pod["metadata"].get("labels", {}).get(JOB_LABEL), pod["status"].get("phase")
        if job in names and phase not in ("Succeeded", "Failed"):
            yield f"pod {pod['metadata']['name']} is {phase}"
    for api_version, plural in (*CHILD_KINDS, *_BESIDE):
        # A kind that this cluster does not serve leaves nothing.
        listed = box.api.get(path_of(api_version, plural, namespace)) or {"items": []}
        for child in listed["items"]:
            yield from _orphaned(storm, names, plural, child)
    yield from (f"{node} is not ready" for node in box.nodes if not ready(box, node))
    deployment = box.api.get(path_of("apps/v1", "deployments", NAMESPACE, OPERATOR)) or {}
    available, wanted = (deployment.get(key, {}).get(name) for key, name in _REPLICAS)
    if available != wanted:
        yield f"{available} of {wanted} operators are available"


_REPLICAS = (("status", "availableReplicas"), ("spec", "replicas"))


def _orphaned(storm: Storm, names: dict[str, JobState], plural: str, child: Object) -> Iterator[str]:
    meta = child["metadata"]
    job = meta.get("labels", {}).get(JOB_LABEL)
    if job not in names:
        return
    owner = storm.team.get(job)["metadata"]["uid"]
    if [one["uid"] for one in meta.get("ownerReferences", [])] != [owner]:
        yield f"{plural} {meta['name']} does not belong to {job}"
    conditions = {one["type"] for one in child.get("status", {}).get("conditions", []) if one["status"] == "True"}
    if plural in {kind for _, kind in CHILD_KINDS} and not conditions & {"Complete", "Succeeded", "Failed"}:
        yield f"{plural} {meta['name']} is not over: {sorted(conditions)}"


def tracebacks(storm: Storm) -> Iterator[str]:
    """Yield errors that the operator did not expect."""
    logs = storm.operator_logs()
    for place in [found.start() for found in re.finditer("Traceback", logs)][:3]:
        yield logs[max(0, place - 600) : place + 2500]

"""A data scientist's namespace: jobs are applied, watched and judged by their state in the API server."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from box_support.box import Box
from cluster_support.api_access import ApiError, Object, path_of, wait_until
from finetune_contract.layout import JobPaths
from finetune_operator.jobs.render.render_types import ATTEMPT_LABEL, JOB_LABEL, STAGE_LABEL
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

T = TypeVar("T")

INPUTS = "inputs"
"""Claim with the folders tiny/{model,data}, minilm/, rotten_tomatoes/ and reviews/."""
TERMINAL = ("Succeeded", "Failed")
JOB_SECONDS = 600
"""Longest time of a job of some stages; most take a minute on two idle cores."""
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}


def tiny_spec(**spec: Any) -> Object:
    """Return a job over the tiny model and data that ends within a minute; blocks of `spec` replace the defaults."""
    base: Object = {
        "task": "text-classification",
        "model": {"uri": f"pvc://{INPUTS}/tiny/model"},
        "dataset": {"uri": f"pvc://{INPUTS}/tiny/data"},
        "training": {"epochs": 1, "globalBatchSize": 16, "learningRate": 0.002, "precision": "fp32"},
        "parallelism": {"strategy": "ddp"},
        "resources": {"nodes": 2, "processesPerNode": 1, "cpu": "1", "memory": "2Gi"},
        "launcher": "job",
        "storage": {"size": "1Gi"},
    }
    return {**base, **spec}


@dataclass(frozen=True)
class Team:
    """One namespace of a cluster with the PodSecurity level restricted."""

    box: Box
    namespace: str

    # ----------------------------------------------------------------------------------------------------------- jobs

    def new_name(self, stem: str) -> str:
        """Return a name that no other job has, not even one of an earlier run of the suite."""
        return f"{stem}-{secrets.token_hex(2)}"

    def apply(self, name: str, spec: Object) -> None:
        """Apply a job by `kubectl apply`."""
        self.apply_manifest({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec})

    def apply_manifest(self, *documents: Object) -> None:
        """Apply whole documents into this namespace."""
        self.box.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=yaml.safe_dump_all(documents))

    def patch(self, name: str, spec: Object) -> None:
        """Merge into the job's spec."""
        self.box.api.patch(self._path(name), {"spec": spec})

    def delete(self, name: str) -> None:
        """Delete the job; its objects are deleted in the background, its claim stays."""
        self.box.api.delete(self._path(name))

    def get(self, name: str) -> Object:
        found = self.box.api.get(self._path(name))
        assert found is not None, f"there is no job {name}"
        return found

    def status(self, name: str) -> Object:
        found: Object = self.get(name).get("status", {})
        return found

    def _path(self, name: str) -> str:
        return path_of(API_VERSION, PLURAL, self.namespace, name)

    # -------------------------------------------------------------------------------------------------------- waiting

    def wait(self, name: str, look: Callable[[Object], T | None], goal: str, seconds: float = JOB_SECONDS) -> T:
        """Return the first true value of `look` at the job's status; a job that ends before fails the test."""

        def see() -> T | None:
            status = self.status(name)
            found = look(status)
            if not found and status.get("phase") in TERMINAL:
                raise AssertionError(f"{name} ended before: {goal}\n{self.describe(name)}")
            return found

        return wait_until(see, f"{name}: {goal}", seconds, lambda: self.describe(name))

    def wait_phase(self, name: str, phase: str, seconds: float = JOB_SECONDS) -> Object:
        return self.wait(name, lambda status: status if status.get("phase") == phase else None, phase, seconds)

    def wait_step(self, name: str, step: int, attempt: int = 1, seconds: float = JOB_SECONDS) -> Object:
        """Wait until attempt `attempt` (or a later one) of the training has reported `step`; return the status."""

        def reached(status: Object) -> Object | None:
            train = stage_of(status, "train")
            there = train.get("attempt", 0) >= attempt and train.get("state") == "Running"
            return status if there and status.get("progress", {}).get("step", 0) >= step else None

        return self.wait(name, reached, f"step {step} of attempt {attempt}", seconds)

    def wait_end(self, name: str, seconds: float = JOB_SECONDS) -> Object:
        """Wait for the end of a job, in success or failure; return its status."""

        def ended() -> Object | None:
            status = self.status(name)
            return status if status.get("phase") in TERMINAL else None

        return wait_until(ended, f"the end of {name}", seconds, lambda: self.describe(name), poll_seconds=0.5)

    def succeeds(self, name: str, seconds: float = JOB_SECONDS) -> Object:
        """Return the status of a job that must succeed."""
        status = self.wait_end(name, seconds)
        assert status["phase"] == "Succeeded", self.describe(name)
        return status

    def fails(self, name: str, seconds: float = JOB_SECONDS) -> Object:
        """Return `status.failure` of a job that must fail."""
        status = self.wait_end(name, seconds)
        assert status["phase"] == "Failed", self.describe(name)
        failure: Object = status["failure"]
        return failure

    # ------------------------------------------------------------------------------------------------------- objects

    def pods(self, name: str, stage: str | None = None, attempt: int | None = None) -> list[Object]:
        """Return the pods of the job, of a stage, or of one attempt at it; by name."""
        chosen = [f"{JOB_LABEL}={name}"]
        chosen += [f"{STAGE_LABEL}={stage}"] if stage else []
        chosen += [f"{ATTEMPT_LABEL}={attempt}"] if attempt else []
        found = self.box.api.items(path_of("v1", "pods", self.namespace), labelSelector=",".join(chosen))
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, name: str) -> Object:
        """Return one pod, by its own name."""
        found = self.box.api.get(path_of("v1", "pods", self.namespace, name))
        assert found is not None, f"there is no pod {name}"
        return found

    def of_job(self, name: str, api_version: str, plural: str) -> list[Object]:
        """Return objects of another kind with the job's label."""
        return self.box.api.items(path_of(api_version, plural, self.namespace), labelSelector=f"{JOB_LABEL}={name}")

    def events(self, name: str) -> list[Object]:
        """Return the events of the job itself, oldest first."""
        found = self.box.api.items(
            path_of("v1", "events", self.namespace),
            fieldSelector=f"involvedObject.name={name},involvedObject.kind={KIND}",
        )
        return sorted(found, key=lambda event: str(event.get("eventTime") or event.get("firstTimestamp")))

    def results(self, name: str) -> Path:
        """Return the job's folder on its own claim, on this machine."""
        return self.box.claim_folder(self.namespace, f"{name}-workspace") / name

    def step(self, name: str) -> int:
        """Return the last step in the training's history, without the delay of its reports; 0 before the first, also
        while the job has no claim yet.
        """
        folder = self.box.bound_folder(self.namespace, f"{name}-workspace")
        return 0 if folder is None else last_step(JobPaths(folder / name).history)

    def describe(self, name: str) -> str:
        """Return everything that explains a failed test."""
        try:
            status = yaml.safe_dump(self.status(name), sort_keys=False)
        except (ApiError, AssertionError) as error:
            status = str(error)
        events = "\n".join(f"  {event['reason']}: {event['message']}" for event in self.events(name))
        pods = [
            f"  {pod['metadata']['name']} {pod['status'].get('phase')} "
            f"{json.dumps(pod['status'].get('containerStatuses', [{}])[0].get('state', {}))[:600]}"
            for pod in self.pods(name)
        ]
        logs = [
            f"--- {pod['metadata']['name']}\n"
            + self.box.cluster.kubectl("logs", "-n", self.namespace, pod["metadata"]["name"], "--tail=25").stdout
            for pod in self.pods(name)[-3:]
        ]
        jobs = {job["metadata"]["name"]: job.get("status") for job in self.of_job(name, "batch/v1", "jobs")}
        writes = [f"  {each}" for each in self.box.cluster.writes(name)[-60:]]
        controllers = [f"  {line[:400]}" for line in self.box.cluster.controller_lines(name)[-40:]]
        parts = [status, "events:", events, "pods:", *pods, *logs, "Jobs:", yaml.safe_dump(jobs), "writes:", *writes]
        return "\n".join([*parts, "controllers:", *controllers, "operator:", self.box.operator_log(30)])


def last_step(history: Path) -> int:
    """Return the last step in a training's `history.jsonl`; 0 before there is one."""
    try:
        lines = history.read_text().splitlines()
    except FileNotFoundError:
        return 0
    # The last line may be incomplete.
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def stage_of(status: Object, name: str) -> Object:
    """Return the stage's entry in a status; empty before there is one."""
    return next((one for one in status.get("stages", []) if one["name"] == name), {})

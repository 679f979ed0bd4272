"""Stand-ins for the training operators: PyTorchJobs and MPIJobs get pods, and conditions as from the real ones.

Names, labels, conditions and reasons are those of Training Operator 1.9.4 (`pkg/core/job.go`,
`pkg/controller.v1/pytorch`) and MPI Operator 0.8.2 (`pkg/controller/mpi_job_controller.go`). Services, hostfile, keys
and restarts in place, which the operator never sees, are left out. The real ones run in the end-to-end tests.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from cluster_support.api_access import MERGE, AsyncApi, Object, path_of
from cluster_support.background import Background
from cluster_support.kubelet import now

PYTORCH = ("kubeflow.org/v1", "pytorchjobs", "PyTorchJob")
MPI = ("kubeflow.org/v2beta1", "mpijobs", "MPIJob")
_LABELS = "training.kubeflow.org"


class Gangs:
    """Both training operators; level-triggered: any change of a job or its pods reconciles the whole job.

    A job may be deleted during any request for it.
    """

    def __init__(self, api: AsyncApi, background: Background) -> None:
        self._api = api
        self._background = background
        self._jobs: dict[str, Object] = {}
        self._kinds: dict[str, tuple[str, str, str]] = {}
        self._pods: dict[str, dict[str, Object]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def up(self) -> None:
        """Start; the CRDs must be installed."""
        for kind in (PYTORCH, MPI):
            self._background.start(self._watch_jobs(kind))
        self._background.start(self._watch_pods())

    async def _watch_jobs(self, kind: tuple[str, str, str]) -> None:
        async for there, job in self._api.follow(path_of(kind[0], kind[1])):
            uid = job["metadata"]["uid"]
            if there and not job["metadata"].get("deletionTimestamp"):
                self._jobs[uid], self._kinds[uid] = job, kind
                self._background.spawn(self._look(uid))
            else:
                self._jobs.pop(uid, None)

    async def _watch_pods(self) -> None:
        async for there, pod in self._api.follow(path_of("v1", "pods"), {"labelSelector": f"{_LABELS}/job-name"}):
            owners = [ref["uid"] for ref in pod["metadata"].get("ownerReferences", []) if ref.get("controller")]
            for uid in owners:
                pods = self._pods.setdefault(uid, {})
                if there:
                    pods[pod["metadata"]["name"]] = pod
                else:
                    pods.pop(pod["metadata"]["name"], None)
                self._background.spawn(self._look(uid))

    async def _look(self, uid: str) -> None:
        async with self._locks.setdefault(uid, asyncio.Lock()):
            job = self._jobs.get(uid)
            if job is None or _has(job, "Succeeded") or _has(job, "Failed"):
                return
            if not _has(job, "Created"):
                await self._set_condition(uid, "Created", "Created")
            for name, template, role, index in _wanted(self._kinds[uid], job):
                if name not in self._pods.get(uid, {}):
                    await self._make(uid, name, template, role, index)
            await self._judge(uid)

    async def _judge(self, uid: str) -> None:
        """Set the condition that follows from the pods."""
        pods = self._pods.get(uid, {})
        phases = {name: pod.get("status", {}).get("phase") for name, pod in pods.items()}
        deciding = {name: phase for name, phase in phases.items() if self._kinds[uid] is PYTORCH or "-launcher" in name}
        if any(phase == "Failed" for phase in deciding.values()):
            await self._set_condition(uid, "Failed", "Failed", over=True)
        # With an elastic policy one successful worker would be enough.
        elif deciding and all(phase == "Succeeded" for phase in deciding.values()):
            await self._set_condition(uid, "Succeeded", "Succeeded", over=True)
        elif phases and all(phase == "Running" for phase in phases.values()):
            await self._set_condition(uid, "Running", "Running")
        job = self._jobs.get(uid)
        if job is not None and (_has(job, "Succeeded") or _has(job, "Failed")):
            await self._clean(uid, job)

    async def _set_condition(self, uid: str, condition: str, reason: str, over: bool = False) -> None:
        job, (version, plural, kind) = self._jobs.get(uid), self._kinds[uid]
        if job is None or _has(job, condition):
            return
        status = copy.deepcopy(job.get("status", {}))
        # Conditions are in the order of their last change; Running ends with the job.
        kept = [
            {**old, "status": "False"} if old["type"] == "Running" and over else old
            for old in status.get("conditions", [])
            if old["type"] != condition
        ]
        name = job["metadata"]["name"]
        prefix = "MPIJob" if kind == "MPIJob" else "PyTorchJob"
        entry = {
            "type": condition,
            "status": "True",
            "reason": f"{prefix}{reason}",
            "message": f"{kind} {name} is {condition.lower()}.",
            "lastUpdateTime": now(),
            "lastTransitionTime": now(),
        }
        status["conditions"] = [*kept, entry]
        status.setdefault("startTime", now())
        if over:
            status["completionTime"] = now()
        path = path_of(version, plural, job["metadata"]["namespace"], name, "status")
        changed = await self._api.quietly("PATCH", path, {"metadata": {"uid": uid}, "status": status}, MERGE)
        if changed is not None and uid in self._jobs:
            self._jobs[uid] = changed

    async def _make(self, uid: str, name: str, template: Object, role: str, index: int) -> None:
        job, (version, _, kind) = self._jobs.get(uid), self._kinds[uid]
        if job is None:
            return
        meta = job["metadata"]
        pod: Object = copy.deepcopy(template)
        labels = {
            f"{_LABELS}/job-name": meta["name"],
            f"{_LABELS}/replica-type": role,
            f"{_LABELS}/replica-index": str(index),
            f"{_LABELS}/operator-name": "mpi-operator" if kind == "MPIJob" else "pytorchjob-controller",
            f"{_LABELS}/job-role": role,
        }
        owner = {
            "apiVersion": version,
            "kind": kind,
            "name": meta["name"],
            "uid": uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        given = pod.get("metadata", {})
        pod["metadata"] = {
            "name": name,
            "annotations": given.get("annotations", {}),
            "labels": {**given.get("labels", {}), **labels},
            "ownerReferences": [owner],
        }
        made = await self._api.quietly(
            "POST",
            path_of("v1", "pods", meta["namespace"]),
            {"apiVersion": "v1", "kind": "Pod", **pod},
        )
        if made is not None:
            self._pods.setdefault(uid, {})[name] = made

    async def _clean(self, uid: str, job: Object) -> None:
        """Delete pods by cleanPodPolicy."""
        policy = job["spec"].get("runPolicy", {}).get("cleanPodPolicy", "None")
        for name, pod in list(self._pods.get(uid, {}).items()):
            if policy == "All" or (
                policy == "Running" and pod.get("status", {}).get("phase") in ("Pending", "Running")
            ):
                await self._api.quietly("DELETE", path_of("v1", "pods", pod["metadata"]["namespace"], name))


def _wanted(kind: tuple[str, str, str], job: Object) -> list[tuple[str, Object, str, int]]:
    """Return name, template, role and index of each wanted pod."""
    name, spec = job["metadata"]["name"], job["spec"]
    if spec.get("runPolicy", {}).get("suspend"):
        return []
    replicas: dict[str, Any] = spec["pytorchReplicaSpecs" if kind is PYTORCH else "mpiReplicaSpecs"]
    found = []
    for role, group in replicas.items():
        for index in range(group.get("replicas", 1)):
            template = copy.deepcopy(group["template"])
            template["spec"]["restartPolicy"] = group.get("restartPolicy", "OnFailure")
            pod = f"{name}-launcher" if role == "Launcher" else f"{name}-{role.lower()}-{index}"
            found.append((pod, template, role.lower(), index))
    return found


def _has(job: Object, condition: str) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any(found["type"] == condition and found["status"] == "True" for found in conditions)

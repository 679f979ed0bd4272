"""Nodes without machines: their pods follow a playbook, and the cluster sees a kubelet.

A node is Ready, renews its lease, and answers `kubectl logs`. Its pods wait for their ConfigMaps, claims and Secrets,
also those of variables, as real ones do, run, end with an exit code and a termination message, and obey deletion. A
restart in place, which no pod of ours may need, is not imitated but recorded as a complaint.
"""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from cluster_support.api_access import MERGE, STRATEGIC, AsyncApi, Object, path_of
from cluster_support.background import Background
from cluster_support.control_plane import free_port
from cluster_support.plays import Play, Playbook, trainer_job
from cluster_support.self_signed import for_loopback
from finetune_contract.choices import Stage
from finetune_operator.jobs.render.render_types import ATTEMPT_LABEL, JOB_LABEL, STAGE_LABEL

NODE_MARK = "finetune.dev/stand-in"
"""Label and taint of the nodes: they get our pods only, even in a shared cluster, and ours go nowhere else."""
STORAGE_CLASS = "finetune-stand-in"
ON_STAND_IN: Object = {
    "nodeSelector": {NODE_MARK: "true"},
    "tolerations": [{"key": NODE_MARK, "operator": "Exists", "effect": "NoSchedule"}],
}
"""`spec.template` of jobs that run here."""
CAPACITY = {"cpu": "256", "memory": "2Ti", "pods": "250", "ephemeral-storage": "10Ti", "nvidia.com/gpu": "8"}


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class _Running:
    """A pod of this kubelet."""

    play: Play
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the pod is being deleted."""
    switched: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `play` was replaced by one to follow at once."""

    async def ended(self, seconds: float | None) -> None:
        """Wait until the pod is being deleted or follows another play, at most `seconds`."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self.stop, self.switched)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where the stand-in itself is cancelled
            for wait in waits:
                wait.cancel()


class Kubelet:
    """All stand-in nodes of a cluster, and the volumes for claims of the class `finetune-stand-in`."""

    def __init__(self, api: AsyncApi, background: Background, folder: Path, nodes: int = 4) -> None:
        self.playbook = Playbook()
        self.complaints: list[str] = []
        self._api = api
        self._background = background
        self.nodes = [f"stand-in-{index}" for index in range(nodes)]
        self._pods: dict[str, _Running] = {}
        self._labels: dict[str, dict[str, str]] = {}
        self._logs: dict[tuple[str, str], str] = {}
        self._certificate = for_loopback(folder, "kubelet")
        self._port = free_port()
        self._runner: web.AppRunner | None = None

    # ---- for tests

    def up(self) -> None:
        """Create the nodes and start."""
        self._background.run(self._up())
        for work in (self._watch_pods(), self._watch_claims(), self._beat()):
            self._background.start(work)

    def down(self) -> None:
        """Delete the nodes and their remaining pods."""
        self._background.run(self._down())

    def switch_play(self, job: str, stage: str, play: Play, attempt: int | None = None) -> int:
        """Let the running pods of a stage end now by `play`; return the number of pods."""
        wanted = {JOB_LABEL: job, STAGE_LABEL: stage} | ({ATTEMPT_LABEL: str(attempt)} if attempt else {})

        async def act() -> int:
            found = [uid for uid in self._pods if wanted.items() <= self._labels[uid].items()]
            for uid in found:
                self._pods[uid].play = play
                self._pods[uid].switched.set()
            return len(found)

        return self._background.run(act())

    # ---- nodes

    async def _up(self) -> None:
        application = web.Application()
        application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._log)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._certificate.server_context()).start()
        storage = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": STORAGE_CLASS},
            "provisioner": "kubernetes.io/no-provisioner",
        }
        await self._api.quietly("POST", path_of("storage.k8s.io/v1", "storageclasses"), storage)
        for name in self.nodes:
            await self._join(name)

    async def _join(self, name: str) -> None:
        taint = {"key": NODE_MARK, "value": "true", "effect": "NoSchedule"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {NODE_MARK: "true", "kubernetes.io/hostname": name}},
            "spec": {"taints": [taint]},
        }
        await self._api.quietly("POST", path_of("v1", "nodes"), node)
        status = {
            "capacity": CAPACITY,
            "allocatable": CAPACITY,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "conditions": [_ready_node()],
        }
        await self._api.call("PATCH", path_of("v1", "nodes", None, name, "status"), {"status": status}, STRATEGIC)

    async def _beat(self) -> None:
        """Renew the leases, well within the 40 s after which a node counts as lost."""
        namespace = "kube-node-lease"
        while True:
            for name in self.nodes:
                stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
                spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": stamp}
                path = path_of("coordination.k8s.io/v1", "leases", namespace, name)
                if await self._api.quietly("PATCH", path, {"spec": spec}, MERGE) is None:
                    lease = {
                        "apiVersion": "coordination.k8s.io/v1",
                        "kind": "Lease",
                        "metadata": {"name": name, "namespace": namespace},
                        "spec": spec,
                    }
                    await self._api.quietly("POST", path_of("coordination.k8s.io/v1", "leases", namespace), lease)
                status = {"conditions": [_ready_node()]}
                await self._api.quietly(
                    "PATCH", path_of("v1", "nodes", None, name, "status"), {"status": status}, STRATEGIC
                )
            await asyncio.sleep(10)

    async def _down(self) -> None:
        for name in self.nodes:
            await self._api.quietly("DELETE", path_of("v1", "nodes", None, name))
        await self._api.quietly("DELETE", path_of("storage.k8s.io/v1", "storageclasses", None, STORAGE_CLASS))
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- claims

    async def _watch_claims(self) -> None:
        """Create a volume for each claim of our class, like a provisioner."""
        async for there, claim in self._api.follow(path_of("v1", "persistentvolumeclaims")):
            if claim["spec"].get("storageClassName") != STORAGE_CLASS:
                continue
            meta = claim["metadata"]
            name = f"stand-in-{meta['uid']}"
            if not there:
                await self._api.quietly("DELETE", path_of("v1", "persistentvolumes", None, name))
            elif not claim["spec"].get("volumeName"):
                reference = {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    **{key: meta[key] for key in ("namespace", "name", "uid")},
                }
                spec = {
                    "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
                    "accessModes": claim["spec"]["accessModes"],
                    "storageClassName": STORAGE_CLASS,
                    "persistentVolumeReclaimPolicy": "Retain",
                    "claimRef": reference,
                    "hostPath": {"path": f"/nowhere/{name}"},
                }
                volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec}
                await self._api.quietly("POST", path_of("v1", "persistentvolumes"), volume)

    # ---- pods

    async def _watch_pods(self) -> None:
        async for there, pod in self._api.follow(path_of("v1", "pods")):
            meta = pod["metadata"]
            uid = meta["uid"]
            if pod["spec"].get("nodeName") not in self.nodes:
                continue
            if uid not in self._pods and there:
                self._pods[uid] = _Running(self._play(pod))
                self._labels[uid] = meta.get("labels", {})
                self._background.spawn(self._live(pod, self._pods[uid]))
            if uid in self._pods and (not there or meta.get("deletionTimestamp")):
                self._pods[uid].stop.set()

    def _play(self, pod: Object) -> Play:
        labels = pod["metadata"].get("labels", {})
        if _is_mpi_worker(pod):
            return Play(lasts=None, message="")
        if JOB_LABEL not in labels:
            return self.playbook.other
        return self.playbook.of(
            labels[JOB_LABEL], labels[STAGE_LABEL], int(labels[ATTEMPT_LABEL]), _index(pod["metadata"])
        )

    async def _live(self, pod: Object, running: _Running) -> None:
        meta = pod["metadata"]
        try:
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                await running.stop.wait()
            else:
                await self._run(pod, running)
            await running.stop.wait()
            await self._api.quietly(
                "DELETE",
                path_of("v1", "pods", meta["namespace"], meta["name"]),
                {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}},
            )
        finally:
            self._pods.pop(meta["uid"], None)

    async def _run(self, pod: Object, running: _Running) -> None:
        if pod["spec"].get("restartPolicy") != "Never" and running.play.exit_code:
            self.complaints.append(f"{pod['metadata']['name']}: would be restarted in place")
        if not (await self._volumes_there(pod, running.stop) and await self._variables_there(pod, running.stop)):
            return
        if running.play.waiting is not None:
            await self._show_waiting(pod, *running.play.waiting)
            await running.ended(None)
        if running.stop.is_set():
            return
        started = now()
        log_key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        self._logs[log_key] = running.play.log
        await self._status(pod, _running_status(pod, started, running.play.address))
        await running.ended(running.play.lasts)
        stopped = running.stop.is_set()
        if stopped:
            await asyncio.sleep(running.play.stops_after)
        play = running.play
        self._logs[log_key] = play.log
        if play.disruption:
            await self._status(pod, {"conditions": [_condition("DisruptionTarget", "True", play.disruption)]})
        if stopped and not play.exit_code:
            # Stopped in the middle of its work: the end of a trainer after SIGTERM.
            play = Play(exit_code=143, reason="Error", message="", log=play.log)
        await self._status(pod, await self._ended_status(pod, play, started))

    async def _volumes_there(self, pod: Object, stop: asyncio.Event) -> bool:
        """Wait for the pod's mounted objects; return False if the pod is deleted before."""
        for volume in pod["spec"].get("volumes", []):
            for source, plural, key in (
                ("configMap", "configmaps", "name"),
                ("secret", "secrets", "secretName"),
                ("persistentVolumeClaim", "persistentvolumeclaims", "claimName"),
            ):
                if source not in volume or volume[source].get("optional"):
                    continue
                path = path_of("v1", plural, pod["metadata"]["namespace"], volume[source][key])
                while await self._api.quietly("GET", path) is None:
                    if stop.is_set():
                        return False
                    await asyncio.sleep(0.2)
        return True

    async def _variables_there(self, pod: Object, stop: asyncio.Event) -> bool:
        """Wait for the Secrets that variables refer to; return False if the pod is deleted before."""
        shown = ""
        while (message := await self._missing_secret(pod)) is not None:
            if stop.is_set():
                return False
            if message != shown:
                await self._show_waiting(pod, "CreateContainerConfigError", message)
                shown = message
            await asyncio.sleep(0.2)
        return True

    async def _missing_secret(self, pod: Object) -> str | None:
        """Return the message about a missing Secret or key (kubernetes `pkg/kubelet/kubelet_pods.go`); None without."""
        namespace, containers = pod["metadata"]["namespace"], pod["spec"]["containers"]
        references = [
            each.get("valueFrom", {}).get("secretKeyRef") for one in containers for each in one.get("env", [])
        ]
        references += [each.get("secretRef") for one in containers for each in one.get("envFrom", [])]
        for reference in references:
            if reference is None or reference.get("optional"):
                continue
            name, key = reference["name"], reference.get("key")
            secret = await self._api.quietly("GET", path_of("v1", "secrets", namespace, name))
            if secret is None:
                return f'secret "{name}" not found'
            if key is not None and key not in secret.get("data", {}):
                return f"couldn't find key {key} in Secret {namespace}/{name}"
        return None

    async def _show_waiting(self, pod: Object, reason: str, message: str) -> None:
        """Report containers that do not start."""
        state = {"waiting": {"reason": reason, "message": message}}
        await self._status(pod, {"phase": "Pending", "startTime": now(), **_containers(pod, state, ready=False)})

    async def _ended_status(self, pod: Object, play: Play, started: str) -> Object:
        terminated = {
            "exitCode": play.exit_code,
            "reason": play.reason,
            "message": await self._termination_message(pod, play),
            "startedAt": started,
            "finishedAt": now(),
        }
        status: Object = {
            "phase": "Failed" if play.exit_code else "Succeeded",
            "conditions": [_condition("Ready", "False"), _condition("ContainersReady", "False")],
            **_containers(pod, {"terminated": terminated}, ready=False),
        }
        return status | ({"reason": play.pod_reason} if play.pod_reason else {})

    async def _termination_message(self, pod: Object, play: Play) -> str:
        labels = pod["metadata"].get("labels", {})
        if play.message is not None or STAGE_LABEL not in labels:
            return play.message or ""
        names = [v["configMap"]["name"] for v in pod["spec"]["volumes"] if v.get("configMap")]
        for name in names:
            found = await self._api.quietly("GET", path_of("v1", "configmaps", pod["metadata"]["namespace"], name))
            if found is None or "job.json" not in found.get("data", {}):
                continue
            job, stage = trainer_job(found), Stage(labels[STAGE_LABEL])
            world = job.training.world if job.training is not None and stage is Stage.TRAIN else None
            rank = _index(pod["metadata"]) * (world.processes_per_node if world else 1)
            pods = job.preparation.pods if stage is Stage.PREPARE and job.preparation.engine == "job" else 1
            return play.termination_message(job, stage, rank, world.size if world else pods)
        return ""

    async def _status(self, pod: Object, status: Object) -> None:
        meta = pod["metadata"]
        path = path_of("v1", "pods", meta["namespace"], meta["name"], "status")
        # The uid keeps a late status of this pod from a later pod of the same name.
        await self._api.quietly("PATCH", path, {"metadata": {"uid": meta["uid"]}, "status": status}, STRATEGIC)

    async def _log(self, request: web.Request) -> web.Response:
        key = (request.match_info["namespace"], request.match_info["pod"])
        text = self._logs.get(key)
        if text is None:
            return web.Response(status=404, text="no such container")
        if request.query.get("timestamps") == "true":
            lines_of_it = text.splitlines(keepends=True)
            text = "".join(f"2026-01-01T00:00:00.{number:09}Z {line}" for number, line in enumerate(lines_of_it, 1))
        if (lines := request.query.get("tailLines")) is not None:
            text = "".join(text.splitlines(keepends=True)[-int(lines) :])
        if (limit := request.query.get("limitBytes")) is not None:
            text = text.encode()[: int(limit)].decode(errors="ignore")
        return web.Response(text=text)


def _ready_node() -> Object:
    stamp = now()
    return {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "stand-in",
        "lastHeartbeatTime": stamp,
        "lastTransitionTime": stamp,
    }


def _index(meta: Object) -> int:
    marks = {**meta.get("annotations", {}), **meta.get("labels", {})}
    names = ("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")
    return next((int(marks[name]) for name in names if name in marks), 0)


def _is_mpi_worker(pod: Object) -> bool:
    labels = pod["metadata"].get("labels", {})
    return labels.get("training.kubeflow.org/operator-name") == "mpi-operator" and (
        labels.get("training.kubeflow.org/job-role") == "worker"
    )


def _condition(name: str, status: str, reason: str = "") -> Object:
    value = {"type": name, "status": status, "lastTransitionTime": now()}
    return value | ({"reason": reason} if reason else {})


def _containers(pod: Object, state: Object, ready: bool) -> Object:
    return {
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": ready,
                "started": ready,
                "restartCount": 0,
                "state": state,
            }
            for container in pod["spec"]["containers"]
        ]
    }


def _running_status(pod: Object, started: str, address: str) -> Object:
    return {
        "phase": "Running",
        "startTime": started,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "hostIP": "127.0.0.1",
        "conditions": [_condition(name, "True") for name in ("Initialized", "Ready", "ContainersReady")],
        **_containers(pod, {"running": {"startedAt": started}}, ready=True),
    }

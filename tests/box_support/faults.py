"""Faults of a cluster, on purpose: one function for each fault, a context manager if it has to be undone.

Faults below the API are real: processes get signals, a memory cgroup gets one process too many, a claim is on a file
system that is too small, a node's pods lose their power, the API server's process is killed. All of it needs a box of
our own; on an external cluster the test is skipped.
"""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from box_support.box import FRAGILE, Box, claim_of, pod_with_claim
from box_support.team import Team
from cluster_support.api_access import Object, path_of, wait_until
from cluster_support.operator_process import NAMESPACE
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME
from finetune_operator.kubernetes_api.resources import resource_of
from finetune_trainer.core.distributed import discover
from process_support.command_lines import trainer_arguments
from suite_plugins.patience import patient

RAISE_SIGNAL = signal.SIGUSR2
"""Signal on which a rank of a job with `puppet` raises; neither the trainer nor its launchers use it."""
GO_SIGNAL = signal.SIGRTMIN
"""Signal that releases a held rank of a job with `puppet`."""
RAISED = "this row has no label"
_PUPPET = "puppet"
_CLAIMS = ("v1", "persistentvolumeclaims")
_SITE = """
# Imported by every interpreter of the pod before its program.
import importlib.machinery, importlib.util, os, signal, sys, time


broken = free = False
done = 0


def break_next_step(number, frame):
    # Raised at the next step: inside of a `try` of the program it might be no error at all.
    global broken
    broken = True


def let_go(number, frame):
    global free
    free = True


def after_step(*_):
    global done
    done += 1
    time.sleep(float(os.environ["PUPPET_STEP_SECONDS"]))
    while done == int(os.environ["PUPPET_HOLDS_AT"]) and not free:
        time.sleep(0.05)
    if broken:
        raise ValueError({raised!r})


class AfterImport:
    # Lets torch itself be imported when the program wants it, which sets up the environment before.
    def find_spec(self, name, path=None, target=None):
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            module.register_optimizer_step_post_hook(after_step)

        spec.loader.exec_module = loaded
        return spec


def import_the_next():
    # The trainer gives programs one of its own, which this one hides.
    elsewhere = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


signal.signal({number}, break_next_step)
signal.signal({going}, let_go)
sys.meta_path.insert(0, AfterImport())
import_the_next()
"""
_EATER = """
import sys
with open(sys.argv[1], "w") as group:
    group.write("0")
kept = []
while True:
    kept.append(bytearray(b"x") * (16 << 20))
"""


# ------------------------------------------------------------------------------------------------------------ processes


@dataclass(frozen=True)
class Rank:
    """One process of a training on this machine."""

    rank: int
    process: psutil.Process


def ranks(team: Team, pod: str) -> list[Rank]:
    """Return the training's processes that run in a pod now; with an MPIJob they are in its workers."""
    found = []
    for process in _processes(team.box, team.namespace, pod):
        try:
            command_line, environment = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        own = bool(trainer_arguments(command_line)) or command_line[:1] == ["finetune-trainer"]
        if own and "train" in command_line and not {"launch", "sshd"} & set(command_line):
            found.append(Rank(discover(environment).rank, process))
    return sorted(found, key=lambda one: one.rank)


def _processes(box: Box, namespace: str, pod: str) -> list[psutil.Process]:
    """Return all processes in the trainer's container of a pod."""
    state = box.own("looking into a pod") / "kubelet" / "pods"
    for file in state.glob(f"*/containers/{CONTAINER_NAME}/exec.json"):
        try:
            entry = json.loads(file.read_text())
            if entry["pod"] == [namespace, pod]:
                return psutil.Process(entry["pid"]).children(recursive=True)
        except (OSError, ValueError, psutil.Error):
            continue
    return []


def kill_pod(team: Team, pod: str, by: str = "KILL") -> None:
    """Kill all processes of a pod's trainer container, or send its first one another signal."""
    output = team.box.fault("kill", pod, "-n", team.namespace, "-c", CONTAINER_NAME, "--signal", by)
    assert _hit(output), f"the container of pod {pod} had ended before"


def _hit(output: str) -> bool:
    """Return whether process-kubelet found a container to kill; it prints them."""
    return "[]" not in output


def signal_rank(team: Team, pod: str, number: signal.Signals, rank: int | None = None) -> int:
    """Signal only one process of the training in a pod: the given rank, or the first; return its rank."""

    def found() -> Rank | None:
        return next((one for one in ranks(team, pod) if rank in (None, one.rank)), None)

    hit = wait_until(found, f"rank {'of any number' if rank is None else rank} runs in pod {pod}")
    hit.process.send_signal(number)
    return hit.rank


def kill_rank(team: Team, pod: str, rank: int | None = None) -> int:
    """Send SIGKILL, like a crash in a native library; the pod's launcher survives and reports it."""
    return signal_rank(team, pod, signal.SIGKILL, rank)


def hang_rank(team: Team, pod: str, rank: int | None = None) -> int:
    """Send SIGSTOP: the process exists and does nothing, as if waiting for a broken device. It ends with its pod."""
    return signal_rank(team, pod, signal.SIGSTOP, rank)


def raise_in_rank(team: Team, pod: str, rank: int | None = None) -> int:
    """Raise ValueError(RAISED) after the rank's next step, in a job with `puppet`."""
    return signal_rank(team, pod, RAISE_SIGNAL, rank)


def let_go(team: Team, pod: str) -> None:
    """Release a training that `puppet` holds."""
    signal_rank(team, pod, GO_SIGNAL)


def puppet(team: Team, step_seconds: float = 0.0, holds_at: int = 0) -> Object:
    """Return a `spec.template` with which a process of the job raises on request, and each optimizer step lasts at
    least `step_seconds`, so that a fault hits a running training on any machine. A process waits at its step
    `holds_at`, counted from 1, until `let_go`.
    """
    site = _SITE.format(raised=RAISED, number=int(RAISE_SIGNAL), going=int(GO_SIGNAL))
    metadata = {"name": _PUPPET}
    team.apply_manifest(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"sitecustomize.py": site}}
    )
    return {
        "env": [
            {"name": "PYTHONPATH", "value": f"/mnt/{_PUPPET}"},
            {"name": "PUPPET_STEP_SECONDS", "value": str(step_seconds)},
            {"name": "PUPPET_HOLDS_AT", "value": str(holds_at)},
        ],
        "volumes": [{"name": _PUPPET, "configMap": {"name": _PUPPET}}],
        "volumeMounts": [{"name": _PUPPET, "mountPath": f"/mnt/{_PUPPET}", "readOnly": True}],
    }


# --------------------------------------------------------------------------------------------------------------- memory


def exhaust_memory(team: Team, pod: str) -> None:
    """Add a process to the memory cgroup of a pod's container that takes all memory up to its limit: the kernel's OOM
    killer acts, and the container ends as OOMKilled.
    """
    uid = team.pod(pod)["metadata"]["uid"]
    group = next(iter(sorted(Path("/sys/fs/cgroup").glob(f"**/process-kubelet-*/{uid}_{CONTAINER_NAME}"))), None)
    assert group is not None, (
        f"container {CONTAINER_NAME} of pod {pod} has no memory cgroup: no limit, or none can be made"
    )
    eater = subprocess.Popen(
        [sys.executable, "-c", _EATER, str(group / "cgroup.procs")], stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        # Either it is killed itself or the training is; then the kubelet ends the container.
        wait_until(
            lambda: eater.poll() is not None or not _processes(team.box, team.namespace, pod),
            f"memory has run out in pod {pod}",
        )
    finally:
        eater.kill()
        eater.wait(patient(10))


# --------------------------------------------------------------------------------------------------- by way of the API


def delete_pod(team: Team, pod: str) -> None:
    """Delete the pod like `kubectl delete pod`, with its grace period."""
    team.box.api.delete(path_of("v1", "pods", team.namespace, pod))


def delete_child(team: Team, name: str, stage: str) -> str:
    """Delete the object of a stage's current attempt without the operator; return its name."""
    child = next(one["child"] for one in team.status(name)["stages"] if one["name"] == stage)
    team.box.api.delete(
        path_of(
            child["apiVersion"], resource_of(child["apiVersion"], child["kind"]).plural, team.namespace, child["name"]
        )
    )
    return str(child["name"])


def preempt(team: Team, pod: str, by: Literal["taint", "shutdown"]) -> None:
    """Evict the pod: the taint manager deletes it, or its node shuts down and ends it."""
    team.box.fault("preempt", pod, "-n", team.namespace, "--by", by)


# ---------------------------------------------------------------------------------------------------------------- nodes


@contextmanager
def node_off(box: Box, node: str) -> Iterator[None]:
    """Power a node off: its pods' processes die without a report. Afterwards it is up and ready again."""
    box.fault("node-down", node, "--power-off")
    try:
        yield
    finally:
        box.fault("node-up", node)
        wait_until(lambda: ready(box, node), f"node {node} is ready and takes pods again")


def ready(box: Box, node: str) -> bool:
    """Return whether the scheduler may place pods on a node."""
    found = box.api.get(path_of("v1", "nodes", name=node)) or {}
    conditions = {one["type"]: one["status"] for one in found.get("status", {}).get("conditions", [])}
    spec = found.get("spec", {})
    taints = {taint["key"] for taint in spec.get("taints", [])} - {FRAGILE}
    return conditions.get("Ready") == "True" and not spec.get("unschedulable") and not taints


# -------------------------------------------------------------------------------------------------------------- storage


@dataclass(frozen=True)
class SmallClaim:
    """A claim on a small file system of its own."""

    name: str
    folder: Path
    """Folder of its files for this process."""

    def free(self) -> int:
        """Return the number of free bytes."""
        return psutil.disk_usage(str(self.folder)).free

    def fill(self, leave: int = 0) -> None:
        """Fill the file system with ballast, all but `leave` bytes."""
        with (self.folder / "ballast").open("ab", buffering=0) as file:
            while (left := self.free() - leave) > 0:
                try:
                    file.write(b"\0" * min(left, 1 << 20))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return  # the job has taken the rest

    def clear(self) -> None:
        """Remove the ballast."""
        (self.folder / "ballast").unlink(missing_ok=True)


@contextmanager
def small_claim(team: Team, name: str, megabytes: int) -> Iterator[SmallClaim]:
    """Yield a bound claim, for `storage.workspace: pvc://NAME`, that really holds no more than `megabytes`.

    Jobs that use it must be deleted before the end.
    """
    team.apply_manifest(claim_of(name, f"{megabytes}Mi"))
    path = path_of(*_CLAIMS, team.namespace, name)
    wait_until(lambda: _bound(team, path), f"{name} is bound")
    folder = team.box.claim_folder(team.namespace, name)
    kubelet = int((team.box.own("a small claim") / "kubelet.pid").read_text())
    # The kubelet has its own mounts, the source of those of pods; this process sees them below the kubelet's root.
    among: Sequence[str] = ("nsenter", "--mount", "--target", str(kubelet))
    folder.mkdir(parents=True, exist_ok=True)
    size = ("-o", f"size={megabytes}m,mode=0777")
    subprocess.run([*among, "mount", "-t", "tmpfs", *size, "tmpfs", str(folder)], check=True, timeout=patient(30))
    try:
        yield SmallClaim(name, Path(f"/proc/{kubelet}/root") / folder.relative_to("/"))
    finally:
        subprocess.run([*among, "umount", "--lazy", str(folder)], check=True, timeout=patient(30))


# --------------------------------------------------------------------------------------------------------- our operator


def operator_pods(box: Box) -> list[Object]:
    """Return the operator's pods; the active one holds the Lease."""
    chosen = "app.kubernetes.io/component=operator"
    return box.api.items(path_of("v1", "pods", NAMESPACE), labelSelector=chosen)


def acting_operator(box: Box) -> str | None:
    """Return the name of the pod that holds the Lease."""
    lease = box.api.get(path_of("coordination.k8s.io/v1", "leases", NAMESPACE, "finetune-operator")) or {}
    holder = str(lease.get("spec", {}).get("holderIdentity") or "").partition("_")[0]
    return next((name for pod in operator_pods(box) if (name := pod["metadata"]["name"]) == holder), None)


def kill_operator(box: Box, which: Literal["acting", "all"] = "all") -> list[str]:
    """Send SIGKILL to the operator's processes, which their kubelet restarts. Return the names of the pods that were
    hit: none while they are starting.
    """
    running = [
        pod["metadata"]["name"]
        for pod in operator_pods(box)
        if "deletionTimestamp" not in pod["metadata"]
        and all("running" in one["state"] for one in pod["status"].get("containerStatuses", [{"state": {}}]))
    ]
    chosen = [name for name in running if which == "all" or name == acting_operator(box)]
    return [name for name in chosen if _hit(box.fault("kill", name, "-n", NAMESPACE))]


@contextmanager
def api_server_away(box: Box) -> Iterator[None]:
    """Stop the API server; afterwards it is ready again. Its clients may need another minute: see `caught_up`."""
    with box.cluster.api_server_away():
        yield


def caught_up(team: Team) -> None:
    """Wait until the cluster's own controllers have found the API server again: a Job with a claim runs to its end.

    They retry with growing back-off, each for every kind by itself; the last ones are back a minute after the server,
    even after a shorter outage.
    """
    name = team.new_name("probe")
    job, claim = (path_of(*kind, team.namespace, name) for kind in (("batch/v1", "jobs"), _CLAIMS))
    template = {"spec": pod_with_claim("probe", name, "true")}
    team.apply_manifest(
        claim_of(name, "1Mi"),
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": template}},
    )

    def done() -> bool:
        found = team.box.api.get(job) or {}
        return any(one["type"] == "Complete" for one in found.get("status", {}).get("conditions", []))

    wait_until(done, "a new Job with a claim has run", 240)
    for path in (job, claim):
        team.box.api.delete(path)
    _ready_again(team.box)


def _ready_again(box: Box) -> None:
    """Mark pods ready that the node controller marked unready, as after an outage of the API server. A kubelet reverts
    that; the box's reports only its own changes, so Services would lose the pods for ever.
    """
    if box.folder is None:
        return
    for pod in box.api.items("/api/v1/pods"):
        conditions = {one["type"]: one["status"] for one in pod["status"].get("conditions", [])}
        if conditions.get("ContainersReady") == "True" and conditions.get("Ready") == "False":
            name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
            ready = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
            box.kubectl("patch", "pod", name, "-n", namespace, "--subresource=status", "-p", ready)


def _bound(team: Team, claim: str) -> bool:
    found = team.box.api.get(claim) or {}
    return bool(found.get("status", {}).get("phase") == "Bound")

"""A cluster with nodes for whole jobs: the one that a kubeconfig names, or a cluster in a box on this machine.

The box is a real control plane with simulated nodes: pods run as local processes from images that are really built from
the Dockerfiles. Only there can a test take a node away; `Box.own` skips a test that needs it.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import pytest
import yaml

from box_support import sleeping_kubelet
from cluster_support.api_access import Api, Object
from cluster_support.control_plane import ROOT, Cluster, assets_folder, audited, free_port
from cluster_support.operator_process import NAMESPACE
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME
from suite_plugins.patience import patient
from suite_plugins.shared_folder import TOOLS
from suite_plugins.shared_folder import missing as without

PROCESS_KUBELET = TOOLS / "process-kubelet"
OPERATOR, TRAINER = "finetune-operator", "finetune-trainer"
IMAGES = (OPERATOR, TRAINER)
CONTROLLERS = ("training-operator", "mpi-operator")
EXAMPLES_GIT_HOST, SCRIPTS_GIT_HOST = GIT_HOSTS = ("git.examples.svc", "git.scripts.svc")
"""Hosts of users' own programs, each a Service of `git_pod`; one per test file, as files run in parallel."""
FRAGILE = "finetune.dev/fragile"
FRAGILE_PAIRS = ("training", "inference")
"""Pairs of fragile nodes: tests that take nodes away at the same time have a pair each."""
"""Label and taint of nodes that tests take away, so that other tests may run meanwhile."""

SETTINGS: Object = {
    # Short enough for a test to see the end of a delay, long enough for a pod to be reported before its replacement.
    "limits": {
        "restartDelaySeconds": 1,
        "imagePullSeconds": math.ceil(patient(10)),
        "containerConfigSeconds": math.ceil(patient(7)),
        # After an outage of the API server, the scheduler finds claims and nodes again up to a minute later.
        "unschedulableSeconds": 60 + math.ceil(patient(20)),
    },
    "progress": {"statusSeconds": 1},
    # The launchers reserve 10 s of it.
    "defaults": {"terminationGraceSeconds": 10 + math.ceil(patient(15))},
    "gitHosts": list(GIT_HOSTS),
}
"""Settings of the operator under test; the rest are an administrator's defaults."""


@dataclass(frozen=True)
class Box:
    """A cluster with nodes, and the folder of its state if it is ours."""

    cluster: Cluster
    api: Api
    folder: Path | None = None
    """State of the box; None: an external cluster, whose nodes no test takes away."""
    nodes: tuple[str, ...] = ()
    """Nodes for all tests."""
    fragile: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Two more of each of FRAGILE_PAIRS, for pods with `on_fragile_nodes`; none in an external cluster."""
    controllers: set[str] = field(default_factory=set)
    """Controllers installed by `install_controller`."""

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 120) -> str:
        """Run kubectl, which must succeed, and return its output."""
        ran = self.cluster.kubectl(*arguments, stdin=stdin, seconds=seconds)
        assert ran.returncode == 0, f"kubectl {' '.join(arguments)}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    def own(self, need: str) -> Path:
        """Return the box's folder; skip a test that needs it on another cluster."""
        if self.folder is None:
            pytest.skip(f"{need} needs a cluster in a box; FINETUNE_TEST_KUBECONFIG names another cluster")
        return self.folder

    # -------------------------------------------------------------------------------------------------------- faults

    def fault(self, verb: str, target: str, *options: str) -> str:
        """Run `kill`, `preempt`, `node-down` or `node-up` of process-kubelet (see its --help); return its output."""
        state = self.own(f"`{verb}`") / "kubelet"
        command = [sys.executable, str(PROCESS_KUBELET), verb, target, "--state", str(state), *options]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
        assert ran.returncode == 0, f"{verb} {target}: {ran.stdout}{ran.stderr}"
        return ran.stdout

    def inside(self, namespace: str, pod: str, *command: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command in the trainer's container of a pod."""
        if self.folder is None:
            return self.cluster.kubectl(
                "exec", "-n", namespace, pod, "-c", CONTAINER_NAME, "--", *command, seconds=seconds
            )
        call = [sys.executable, str(PROCESS_KUBELET), "exec", pod, "-n", namespace, "-c", CONTAINER_NAME]
        state = ["--state", str(self.folder / "kubelet")]
        return subprocess.run([*call, *state, "--", *command], capture_output=True, text=True, timeout=patient(seconds))

    # --------------------------------------------------------------------------------------------- training operators

    def install_controller(self, name: str) -> None:
        """Install Training Operator, MPI Operator or KServe by their own manifests, and wait until it is ready."""
        if name in self.controllers:
            return
        file = assets_folder() / "manifests" / f"{name}.yaml"
        self.own(f"installing the {name}")
        apply = ("apply", "--server-side", "--force-conflicts", "-f", str(file))
        # CRDs first: the same file has resources of these kinds.
        if self.cluster.kubectl(*apply).returncode != 0:
            self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
            self.kubectl(*apply)
        for document in yaml.safe_load_all(file.read_text()):
            if document and document["kind"] == "Deployment":
                meta = document["metadata"]
                where = ("-n", meta["namespace"], f"deployment/{meta['name']}")
                self.kubectl("rollout", "status", *where, "--timeout=120s", seconds=150)
        self.controllers.add(name)

    # -------------------------------------------------------------------------------------------------- our operator

    def install_operator(self, work: Path, settings: Object = SETTINGS) -> None:
        """Apply an overlay of `manifests/operator` with its own settings, as an administrator does."""
        overlay = work / "overlay"
        overlay.mkdir(parents=True, exist_ok=True)
        base = yaml.safe_load((ROOT / "manifests" / "operator" / "settings.yaml").read_text())
        whole = {**base, **settings, "defaults": {**base.get("defaults", {}), **settings.get("defaults", {})}}
        (overlay / "settings.yaml").write_text(yaml.safe_dump(whole))
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": NAMESPACE,
            "resources": [os.path.relpath(ROOT / "manifests" / "operator", overlay)],
            "configMapGenerator": [
                {"name": "finetune-operator-settings", "behavior": "merge", "files": ["settings.yaml"]}
            ],
        }
        if self.folder is None:
            kustomization["images"] = [{"name": OPERATOR, **_named_image(OPERATOR)}]
        (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        self.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(overlay))
        self.kubectl("rollout", "status", "-n", NAMESPACE, f"deployment/{OPERATOR}", "--timeout=120s", seconds=150)

    def uninstall_operator(self) -> None:
        """Delete everything of ours, including jobs and the CRD."""
        self.kubectl("delete", "-k", str(ROOT / "manifests" / "operator"), "--ignore-not-found", seconds=400)

    def operator_log(self, lines: int = 60) -> str:
        """Return the end of the operator pods' logs, for a failed test."""
        chosen = ("-l", "app.kubernetes.io/component=operator", f"--tail={lines}", "--prefix")
        return self.cluster.kubectl("logs", "-n", NAMESPACE, *chosen).stdout

    # -------------------------------------------------------------------------------------------------------- claims

    def claim_folder(self, namespace: str, claim: str) -> Path:
        """Return the folder of a bound claim's files on this machine."""
        folder = self.bound_folder(namespace, claim)
        assert folder is not None, f"there is no bound claim {namespace}/{claim}"
        return folder

    def bound_folder(self, namespace: str, claim: str) -> Path | None:
        """Return the folder of a claim's files; None before the claim is bound."""
        volumes = self.own("looking into a claim") / "kubelet" / "volumes"
        found = self.api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}") or {}
        volume = found.get("spec", {}).get("volumeName")
        return volumes / volume if volume else None

    def fill_claim(self, namespace: str, claim: str, files: Path, size: str = "2Gi") -> None:
        """Create a claim with a copy of the folder `files`, readable by anyone."""
        filler = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"filler-{claim}"}}
        documents = [claim_of(claim, size), {**filler, "spec": pod_with_claim("filler", claim, "sleep", "3600")}]
        self.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump_all(documents))
        where = ("-n", namespace, "pod/filler-" + claim)
        self.kubectl("wait", "--for=condition=Ready", *where, "--timeout=120s", seconds=150)
        if self.folder is not None:
            shutil.copytree(files, self.claim_folder(namespace, claim), dirs_exist_ok=True)
        else:
            with subprocess.Popen(["tar", "-C", str(files), "-c", "."], stdout=subprocess.PIPE) as packed:
                unpack = [self.cluster.kubectl_program, "--kubeconfig", str(self.cluster.kubeconfig), "exec", "-i"]
                subprocess.run(
                    [*unpack, "-n", namespace, "filler-" + claim, "--", "tar", "-C", "/in", "-x"],
                    stdin=packed.stdout, check=True, timeout=patient(300),
                )  # fmt: skip
        self.kubectl("delete", *where, "--grace-period=1")


def claim_of(name: str, size: str) -> Object:
    """Return a claim that many pods may use at a time."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}},
    }


def pod_with_claim(container: str, claim: str, *command: str) -> Object:
    """Return the spec of a pod that runs a command once, with the claim at /in."""
    return {
        "restartPolicy": "Never",
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": container,
                "image": trainer_image(),
                "command": list(command),
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "volumeMounts": [{"name": "in", "mountPath": "/in"}],
            }
        ],
        "volumes": [{"name": "in", "persistentVolumeClaim": {"claimName": claim}}],
    }  # fmt: skip


def trainer_image() -> str:
    """Return the trainer's default image."""
    settings = yaml.safe_load((ROOT / "manifests" / "operator" / "settings.yaml").read_text())
    named = os.environ.get("FINETUNE_TEST_TRAINER_IMAGE")
    return named or str(settings["defaults"]["image"])


def _named_image(name: str) -> Object:
    """Return an image that an external cluster can pull, for kustomize."""
    variable = "FINETUNE_TEST_OPERATOR_IMAGE"
    named = os.environ.get(variable)
    if named is None:
        pytest.skip(f"FINETUNE_TEST_KUBECONFIG names a cluster; {variable} has to name the image of {name} for it")
    repository, _, tag = named.rpartition(":")
    return {"newName": repository, "newTag": tag}


def built_images() -> None:
    """Build the images ahead of the suite if a box is possible once its programs are built; print the reason if not."""
    print(_why_no_nodes() or image_folders())


def image_folders() -> dict[str, str]:
    """Return our images by name: folders named in FINETUNE_TEST_IMAGES (`NAME=FOLDER,...`, as for process-kubelet);
    build the others.
    """
    given = dict(entry.split("=", 1) for entry in os.environ.get("FINETUNE_TEST_IMAGES", "").split(",") if entry)
    return {name: given.get(name) or build_image(name) for name in IMAGES}


def build_image(name: str) -> str:
    """Build one of our Dockerfiles for real; unchanged layers are not built again."""
    file = f"images/{name.removeprefix('finetune-')}/Dockerfile"
    # The nodes of a box have no GPUs; only the trainer's image differs for them.
    variant = ["--", "--build-arg", "ACCELERATOR=cpu"] if name == TRAINER else []
    command = [str(TOOLS / "image-build"), "-f", file, "-t", f"{name}:test", ".", *variant]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(2700))
    assert ran.returncode == 0, f"{' '.join(command)}\n{ran.stdout[-2000:]}{ran.stderr[-6000:]}"
    return ran.stdout.strip().splitlines()[-1]


def why_no_box() -> str | None:
    """Return the missing requirements for a cluster in a box; None if there are none."""
    if why := _why_no_nodes():
        return why
    assets = assets_folder()
    lacking = [name for name in ("kube-apiserver", "kubectl", "kube-scheduler") if not (assets / name).is_file()]
    return f"KUBEBUILDER_ASSETS ({assets}) has no {', '.join(lacking)}" if lacking else None


def _why_no_nodes() -> str | None:
    """Name missing requirements except the programs of the control plane."""
    if not (TOOLS / "cluster").is_file():
        return f"FINETUNE_TEST_KUBECONFIG is not set and {without(TOOLS / 'cluster')}"
    if os.geteuid() != 0:
        return "FINETUNE_TEST_KUBECONFIG is not set and a cluster in a box needs root"
    missing = [
        name for name in ("ip", "iptables", "openssl", "curl", "buildah", "debootstrap") if not shutil.which(name)
    ]
    if missing:
        return f"FINETUNE_TEST_KUBECONFIG is not set and a cluster in a box needs {', '.join(missing)}"
    return None


HELD = "FINETUNE_TEST_BOX"
"""Environment variable with the folder of a box that another process holds, with our operator installed."""


def held_box() -> Box | None:
    """Return the box that HELD names, for one of several processes that use it."""
    if (folder := os.environ.get(HELD)) is None:
        return None
    return _box_in(Path(folder))


def _box_in(folder: Path) -> Box:
    place = folder / "control-plane"
    cluster = Cluster(str(assets_folder() / "kubectl"), place / "admin.kubeconfig", place)

    def chosen(by: str) -> tuple[str, ...]:
        names = cluster.must("get", "nodes", "-l", by, "-o", "jsonpath={.items[*].metadata.name}")
        return tuple(sorted(names.split()))

    fragile = {pair: chosen(f"{FRAGILE}={pair}") for pair in FRAGILE_PAIRS}
    return Box(cluster, Api(cluster.access), folder, chosen(f"!{FRAGILE}"), fragile)


def on_fragile_nodes(box: Box, pair: str) -> Object:
    """Return a `spec.template` for a pair of nodes that may be taken away; for any nodes if there are none."""
    if not box.fragile:
        return {}
    tolerated = {"key": FRAGILE, "operator": "Equal", "value": pair, "effect": "NoSchedule"}
    return {"nodeSelector": {FRAGILE: pair}, "tolerations": [tolerated]}


@contextmanager
def running_box(folder: Path, nodes: int = 2, gpus: int = 0, options: Sequence[str] = ()) -> Iterator[Box]:
    """Yield the cluster of FINETUNE_TEST_KUBECONFIG, or a box without training operators; skip if there is neither.

    A box has `nodes` for all tests, and pairs of fragile ones. `options` go to process-kubelet.
    """
    if given := os.environ.get("FINETUNE_TEST_KUBECONFIG"):
        kubectl = shutil.which("kubectl") or str(assets_folder() / "kubectl")
        cluster = Cluster(kubectl, Path(given))
        names = cluster.must("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()
        yield Box(cluster, Api(cluster.access), nodes=tuple(names))
        return
    if why := why_no_box():
        pytest.skip(why)
    assets = assets_folder()
    images = [f"{name}:*={place}" for name, place in image_folders().items()]
    for name in (*CONTROLLERS, "kserve"):
        place = assets / "images" / name
        if place.is_dir():
            program = next(one.name for one in (place / "bin").iterdir())
            images.append(f"*/{program.removesuffix('.v1')}:*={place}")
    environment = {
        **os.environ,
        "KUBE_ASSETS": str(assets),
        "PYTHON": str(_python_with_our_kubelet(folder)),
        sleeping_kubelet.PROGRAM: str(PROCESS_KUBELET),
        "PATH": f"{assets}:{os.environ['PATH']}",
        "APISERVER_FLAGS": audited(folder, folder / "control-plane" / "audit.log"),
    }
    mapped = [part for image in images for part in ("--image", image)]
    up = [
        "up",
        str(folder),
        "--nodes",
        str(nodes + 2 * len(FRAGILE_PAIRS)),
        "--gpus",
        str(gpus),
        "--with",
        "none",
        "--port",
        str(free_port()),
    ]
    with _ending_orphans(folder), _down_after(folder, environment):
        # The servers outlive the call and would hold a pipe open: output goes to a file.
        with (folder / "up.log").open("w") as log:
            command = [str(TOOLS / "cluster"), *up, *mapped, *(["--", *options] if options else [])]
            started = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=patient(300))
        assert started.returncode == 0, (folder / "up.log").read_text()
        _check_servers(folder / "control-plane")
        box = _box_in(folder)
        for place, node in enumerate(box.nodes[nodes:]):
            pair = FRAGILE_PAIRS[place // 2]
            box.kubectl("label", "node", node, f"{FRAGILE}={pair}")
            box.kubectl("taint", "node", node, f"{FRAGILE}={pair}:NoSchedule")
        yield _box_in(folder)


def _python_with_our_kubelet(folder: Path) -> Path:
    """Write a Python interpreter that runs our kubelet in place of process-kubelet; return its path."""
    file = folder / "python"
    python, program = shlex.quote(sys.executable), shlex.quote(str(Path(sleeping_kubelet.__file__).resolve()))
    ours = f'case $1 in */{PROCESS_KUBELET.name}) shift; set -- {program} "$@";; esac'
    file.write_text(f'#!/bin/sh\n{ours}\nexec {python} "$@"\n', encoding="utf-8")
    file.chmod(0o755)
    return file


def _check_servers(folder: Path) -> None:
    """Fail if a server of the control plane has ended, e.g. as another run left one behind that has its port."""
    for file in folder.glob("*.pid"):
        if not Path(f"/proc/{int(file.read_text())}").exists():
            [*_, last] = file.with_suffix(".log").read_text().splitlines() or [""]
            raise AssertionError(f"{file.stem} of the box has ended: {last}")


@contextmanager
def _down_after(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    finally:
        down = [str(TOOLS / "cluster"), "down", str(folder)]
        subprocess.run(down, env=environment, capture_output=True, timeout=patient(120))


@contextmanager
def _ending_orphans(folder: Path) -> Iterator[None]:
    """Kill processes that survive process-kubelet's SIGKILL: in a container whose user is not root only the outermost
    process dies, as a change of user clears the parent-death signal of the others. They would keep training.
    """
    over = Event()

    def sweep() -> None:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if _is_orphan(process, folder):
                    os.kill(int(process.name), signal.SIGKILL)

    def look() -> None:
        while not over.wait(0.2):
            sweep()

    thread = Thread(target=look, name="orphans", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        sweep()


def _is_orphan(process: Path, folder: Path) -> bool:
    """Return whether it is the orphaned first process of a container of ours; all others end with it."""
    parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
    if parent != "1" or (process / "ns" / "pid").readlink() == Path("/proc/self/ns/pid").readlink():
        return False
    return f"{folder}/kubelet/pods/".encode() in (process / "mountinfo").read_bytes()

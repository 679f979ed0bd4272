"""World of a behaviour test: one namespace, its jobs and their objects."""

from __future__ import annotations

import copy
import json
import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
import yaml

from cluster_support.api_access import PATIENCE_SECONDS, Api, AsyncApi, Object, new_session, path_of, wait_until
from cluster_support.background import Background
from cluster_support.control_plane import Cluster
from cluster_support.gangs import Gangs
from cluster_support.kubelet import ON_STAND_IN, STORAGE_CLASS, Kubelet
from cluster_support.operator_process import OperatorProcess
from finetune_contract.report import KubeflowMetric, KubeflowStatus, KubeflowUpdate
from finetune_operator.jobs.render.render_types import JOB_LABEL, PROGRESS_AUDIENCE, STAGE_LABEL
from finetune_operator.spec.launcher_rows import SUPPORTED
from finetune_operator.spec.schema.crd import crd, crd_yaml
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL
from suite_plugins.patience import patient
from suite_plugins.shared_folder import CRDS, missing

FOREIGN_CRDS = tuple(f"{each.group}_{each.plural}.yaml" for each in SUPPORTED if not each.built_in)
CHILD_KINDS = tuple((each.api_version, each.plural) for each in SUPPORTED)
OTHER_KINDS: tuple[tuple[str, str], ...] = (
    ("v1", "configmaps"),
    ("v1", "services"),
    ("v1", "pods"),
    ("v1", "persistentvolumeclaims"),
    ("networking.k8s.io/v1", "networkpolicies"),
)

SETTINGS: Object = {
    # Short enough for a test to see the end of a delay, long enough to see the delay.
    "limits": {
        "restartDelaySeconds": 1,
        "imagePullSeconds": math.ceil(patient(2)),
        "containerConfigSeconds": math.ceil(patient(2)),
    },
    "progress": {"statusSeconds": 0.5},
    "spark": {"image": "registry.example.com/trainer-spark:1", "serviceAccountName": "default"},
}

BASE: Object = {
    "task": "text-classification",
    "model": {"uri": "hf://a/b"},
    "dataset": {"uri": "hf://c/d"},
    "training": {"epochs": 1, "globalBatchSize": 32},
    "evaluation": {},
    "predict": {},
    "launcher": "job",
    "storage": {"storageClassName": STORAGE_CLASS, "size": "1Gi"},
    "template": ON_STAND_IN,
}


def install_kinds(cluster: Cluster) -> None:
    """Install the CRD of FineTuneJob, and those of the training operators if available. The latter never change: those
    already served are skipped, as an API server takes seconds to read them.
    """
    definitions = {f"{PLURAL}.finetune.dev": crd_yaml()}
    for path in [CRDS / name for name in FOREIGN_CRDS if (CRDS / name).is_file()]:
        text = path.read_text()
        definitions[yaml.safe_load(text)["metadata"]["name"]] = text
    api = Api(cluster.access)
    served = {name for name in definitions if not name.startswith(PLURAL) and _established(api, name)}
    wanted = [text for name, text in definitions.items() if name not in served]
    cluster.must("apply", "--server-side", "--force-conflicts", "-f", "-", stdin="\n---\n".join(wanted))
    cluster.wait_served(*definitions)


def install_kserve(cluster: Cluster) -> None:
    """Install the CRD of KServe, only for its own tests, as the API server reads two megabytes. Skip without it."""
    file = CRDS / "serving.kserve.io_inferenceservices.yaml"
    if not file.is_file():
        pytest.skip(missing(file))
    name = "inferenceservices.serving.kserve.io"
    if not _established(Api(cluster.access), name):
        cluster.must("apply", "--server-side", "--force-conflicts", "-f", str(file))
        cluster.wait_served(name)


def loose_crd() -> str:
    """Return the CRD from before free objects had bounds: objects stored then still exist."""
    loose = crd()
    spec = loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    arguments = spec["properties"]["training"]["properties"]["arguments"]
    del arguments["additionalProperties"]
    arguments["x-kubernetes-preserve-unknown-fields"] = True
    return json.dumps(loose)


def _established(api: Api, name: str) -> bool:
    found = api.get(path_of("apiextensions.k8s.io/v1", "customresourcedefinitions", name=name)) or {}
    deleted = "deletionTimestamp" in found.get("metadata", {})
    conditions = {one["type"]: one["status"] for one in found.get("status", {}).get("conditions", [])}
    return conditions.get("Established") == "True" and not deleted


@contextmanager
def fresh_namespace(cluster: Cluster) -> Iterator[str]:
    """Yield a new namespace with the PodSecurity level restricted; delete it with its objects afterwards."""
    name = f"finetune-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    cluster.must("create", "-f", "-", stdin=json.dumps(document))
    try:
        yield name
    finally:
        cluster.must("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@contextmanager
def namespace_for_pods(cluster: Cluster) -> Iterator[str]:
    """Yield a new namespace once a controller has created the service account that pods run under."""
    with fresh_namespace(cluster) as name:
        api, account = Api(cluster.access), path_of("v1", "serviceaccounts", name, "default")
        wait_until(lambda: api.get(account), "the namespace has the service account that pods run under")
        yield name


def record_uids(background: Background, watching: AsyncApi, path: str) -> dict[str, set[str]]:
    """Return name -> UIDs of all objects of a collection with it, existing or created from now on. A watch fills it,
    which may lag, and misses objects that come and go while it is broken.
    """
    uids: dict[str, set[str]] = {}

    async def follow() -> None:
        async for _, item in watching.follow(path):
            uids.setdefault(item["metadata"]["name"], set()).add(item["metadata"]["uid"])

    background.start(follow())
    return uids


def merged(base: Object, patch: Object) -> Object:
    """Return `base` merged with `patch`; None removes a field."""
    result = copy.deepcopy(base)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result


@dataclass
class History:
    """All states of one job from a moment on, oldest first."""

    now: Callable[[], Object]
    """Function that reads the job."""
    shown: list[Object] = field(default_factory=list)
    """States from a watch so far; it may lag."""

    def jobs(self) -> list[Object]:
        """Return all states up to the current one of the API server."""
        version = int(self.now()["metadata"]["resourceVersion"])
        wait_until(
            lambda: self.shown and int(self.shown[-1]["metadata"]["resourceVersion"]) >= version,
            f"the watch has shown version {version}",
        )
        return self.shown

    def statuses(self) -> list[Object]:
        return [job["status"] for job in self.jobs() if "status" in job]

    def phases(self) -> list[str]:
        """Return the phases in the order in which they were entered."""
        found = [status["phase"] for status in self.statuses() if "phase" in status]
        return [phase for index, phase in enumerate(found) if index == 0 or found[index - 1] != phase]


@dataclass(frozen=True)
class World:
    """A test's namespace in a cluster with an operator, a kubelet and training operators."""

    namespace: str
    cluster: Cluster
    api: Api
    kubelet: Kubelet
    gangs: Gangs
    operator: OperatorProcess
    background: Background
    watching: AsyncApi

    # ---- jobs

    def record(self, name: str) -> History:
        """Record the states of the job from now on."""
        history = History(lambda: self.job(name))
        path = self.path(API_VERSION, PLURAL)
        first = self.api.get(path)
        assert first is not None, "FineTuneJob is not installed"
        first["items"] = [job for job in first["items"] if job["metadata"]["name"] == name]

        async def follow() -> None:
            async for there, job in self.watching.follow(path, {"fieldSelector": f"metadata.name={name}"}, first):
                if there:
                    history.shown.append(job)

        self.background.start(follow())
        return history

    def apply(self, name: str, spec: Object | None = None) -> Object:
        """Create the job `name`: `BASE` merged with `spec`."""
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}}
        return self.api.create(self.path(API_VERSION, PLURAL), {**body, "spec": merged(BASE, spec or {})})

    def path(self, api_version: str, plural: str, name: str = "", sub: str = "") -> str:
        return path_of(api_version, plural, self.namespace, name, sub)

    def job(self, name: str) -> Object:
        found = self.api.get(self.path(API_VERSION, PLURAL, name))
        assert found is not None, f"job {name} is gone"
        return found

    def status(self, name: str) -> Object:
        status: Object = self.job(name).get("status", {})
        return status

    def change(self, name: str, spec: Object) -> Object:
        return self.api.patch(self.path(API_VERSION, PLURAL, name), {"spec": spec})

    def delete(self, name: str) -> None:
        self.api.delete(self.path(API_VERSION, PLURAL, name))

    def wait(
        self, name: str, goal: str, holds: Callable[[Object], object], seconds: float = PATIENCE_SECONDS
    ) -> Object:
        """Wait until `holds` is true of the status, and return it."""

        def look() -> Object | None:
            status = self.status(name)
            return status if status and holds(status) else None

        return wait_until(look, f"job {name}: {goal}", seconds, lambda: self.describe(name))

    def wait_phase(self, name: str, phase: str, seconds: float = PATIENCE_SECONDS) -> Object:
        return self.wait(name, f"phase {phase}", lambda status: status.get("phase") == phase, seconds)

    def wait_running(self, name: str, stage: str, attempt: int = 1, seconds: float = PATIENCE_SECONDS) -> Object:
        """Wait until a pod of this attempt runs and the status has it; return the status."""

        def runs() -> Object | None:
            status = self.status(name)
            found = stage_of(status, stage)
            there = found is not None and (found["state"], found["attempt"]) == ("Running", attempt)
            pods = [pod for pod in self.pods(name, stage, attempt) if pod.get("status", {}).get("phase") == "Running"]
            return status if there and pods else None

        return wait_until(runs, f"job {name}: {stage} {attempt} runs", seconds, lambda: self.describe(name))

    def wait_gone(self, name: str, seconds: float = PATIENCE_SECONDS) -> None:
        path = self.path(API_VERSION, PLURAL, name)
        wait_until(lambda: self.api.get(path) is None, f"job {name} is gone", seconds)

    def catch_up(self) -> str:
        """Wait until the operator has processed all events so far, shown by its refusal of a newer, invalid job; return
        that job's name.
        """
        name = f"barrier-{secrets.token_hex(4)}"
        self.apply(name, {"model": {"trustRemoteCode": True}})
        self.wait(name, "refused", lambda status: condition(status, "Accepted").get("status") == "False")
        return name

    def describe(self, name: str) -> str:
        """Return everything that helps to explain a failed test."""
        found = self.api.get(self.path(API_VERSION, PLURAL, name)) or {}
        status = {key: value for key, value in found.get("status", {}).items() if key not in ("plan", "measured")}
        pods = [
            (pod["metadata"]["name"], pod["spec"].get("nodeName"), pod.get("status", {}).get("phase"))
            for pod in self.pods(name)
        ]
        there = self.children(name)
        log = self.operator.logs()[-6000:]
        return f"status: {json.dumps(status, indent=1)}\nchildren: {there}\npods: {pods}\noperator:\n{log}"

    # ---- their objects

    def of_job(self, name: str, api_version: str, plural: str) -> list[Object]:
        found = self.api.get(self.path(api_version, plural) + f"?labelSelector={JOB_LABEL}%3D{name}")
        return [] if found is None else list(found["items"])

    def children(self, name: str) -> list[str]:
        """Return the names of the objects of attempts, oldest first."""
        found = [item for kind in CHILD_KINDS for item in self.of_job(name, *kind)]
        return [item["metadata"]["name"] for item in sorted(found, key=lambda item: _age(item))]

    def everything(self, name: str) -> list[str]:
        """Return all existing objects of a job, as kind/name."""
        return sorted(
            f"{plural}/{item['metadata']['name']}"
            for version, plural in (*CHILD_KINDS, *OTHER_KINDS)
            for item in self.of_job(name, version, plural)
        )

    def pods(self, name: str, stage: str | None = None, attempt: int | None = None) -> list[Object]:
        wanted = {STAGE_LABEL: stage, "finetune.dev/attempt": None if attempt is None else str(attempt)}
        chosen = {label: value for label, value in wanted.items() if value is not None}
        pods = self.of_job(name, "v1", "pods")
        return [pod for pod in pods if chosen.items() <= pod["metadata"]["labels"].items()]

    def phases(self, name: str, stage: str) -> list[str]:
        """Return the phases of a stage's existing pods."""
        return [pod.get("status", {}).get("phase", "") for pod in self.pods(name, stage)]

    def order(self, attempt_name: str) -> Object:
        """Return job.json of an attempt."""
        found = self.api.get(self.path("v1", "configmaps", attempt_name))
        assert found is not None, f"ConfigMap {attempt_name} is not there"
        order: Object = json.loads(found["data"]["job.json"])
        return order

    def events(self, name: str) -> list[tuple[str, str, str]]:
        """Return type, reason and message of the job's events."""
        selector = f"involvedObject.name={name},involvedObject.kind={KIND}"
        items = self.api.items(self.path("v1", "events"), fieldSelector=selector)
        return [(item["type"], item["reason"], item["message"]) for item in items]

    def wait_event(self, name: str, goal: str, holds: Callable[[str, str, str], object]) -> None:
        """Wait for an event whose type, reason and message satisfy `holds`: the status may come before it."""
        wait_until(
            lambda: any(holds(*event) for event in self.events(name)),
            f"an event of {name}: {goal}",
            detail=lambda: self.events(name),
        )

    # ---- actions of a trainer

    def token(self, pod: Object) -> str:
        """Return a token as projected into this pod by the kubelet."""
        account = pod["spec"].get("serviceAccountName", "default")
        bound = {
            "kind": "Pod",
            "apiVersion": "v1",
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        }
        made = self.api.create(
            self.path("v1", "serviceaccounts", account, "token"),
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"audiences": [PROGRESS_AUDIENCE], "boundObjectRef": bound, "expirationSeconds": 3600},
            },
        )
        token: str = made["status"]["token"]
        return token

    def report(
        self,
        job: str,
        pod: Object,
        metrics: dict[str, float],
        remaining: int | None = None,
        token: str | None = None,
    ) -> requests.Response:
        """Post progress from `pod` like transformers: address, authority and token are those of the pod, unless `token`
        is given.
        """
        update = KubeflowUpdate(
            trainer_status=KubeflowStatus(
                estimated_remaining_seconds=remaining,
                metrics=tuple(KubeflowMetric(name=key, value=str(value)) for key, value in metrics.items()),
                last_updated_time="2026-01-01T00:00:00Z",
            )
        )
        return self.post(job, pod, update, token or self.token(pod))

    def post(self, job: str, pod: Object, update: KubeflowUpdate, token: str) -> requests.Response:
        """Post `update` from `pod`."""
        container = pod["spec"]["containers"][0]
        environment = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
        labels = pod["metadata"]["labels"]
        found = self.api.get(
            self.path("v1", "configmaps", f"{job}-{labels[STAGE_LABEL]}-{labels['finetune.dev/attempt']}")
        )
        assert found is not None
        authority = self.operator.folder / f"{job}.ca.crt"
        authority.write_text(found["data"]["ca.crt"])
        return new_session().post(
            str(environment["KUBEFLOW_TRAINER_SERVER_URL"]),
            data=update.to_json(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            verify=str(authority),
            timeout=patient(60),
        )


def stage_of(status: Object, stage: str) -> Object | None:
    return next((found for found in status.get("stages", []) if found["name"] == stage), None)


def states(status: Object) -> dict[str, tuple[str, int]]:
    """Return state and attempt of each stage."""
    return {found["name"]: (found["state"], found["attempt"]) for found in status["stages"]}


def conditions(status: Object) -> dict[str, str]:
    return {found["type"]: found["status"] for found in status.get("conditions", [])}


def condition(status: Object, name: str) -> Object:
    return next((found for found in status.get("conditions", []) if found["type"] == name), {})


def _age(item: Any) -> tuple[str, str]:
    return item["metadata"]["creationTimestamp"], item["metadata"]["name"]

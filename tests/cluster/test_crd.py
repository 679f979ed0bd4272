"""The CRD on a real API server: accepted and refused values, defaults, and immutable fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from explained import read
from finetune_operator.documents import read_documents
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.fields.shapes import Number, Text, leaves, spec_shape
from finetune_operator.spec.rules import RULES
from finetune_operator.spec.rules.column_rules import COLUMN_TASKS
from finetune_operator.spec.schema.crd import crd_yaml
from finetune_operator.spec.schema.explain import as_text, find_field
from finetune_operator.spec.settings.settings import LOCAL_SETTINGS
from finetune_operator.spec.types import FineTuneJobSpec
from suite_plugins.waiting import wait_until

JOBS = Path(__file__).parents[1] / "unit" / "jobs"
EXAMPLES = Path(__file__).parents[2] / "manifests" / "examples"
GOOD = [*sorted((JOBS / "good").glob("*.yaml")), *sorted(EXAMPLES.glob("*.yaml"))]
CRD = "finetunejobs.finetune.dev"
BASE: dict[str, Any] = {
    "task": "text-classification",
    "model": {"uri": "hf://a/b"},
    "dataset": {"uri": "hf://c/d"},
    "training": {},
}

# Files that the API server refuses by itself, with parts of its message. The others need settings, lists of another
# project's names, or a field of no fixed type.
REFUSED = {
    "unknown-field": ['unknown field "spec.resources.gpuPerNode"', 'unknown field "spec.training.learning_rate"'],
    "missing-required": ["spec.task: Required", "spec.model: Required", "spec.dataset.uri: Required"],
    "wrong-types": [
        "spec.training.epochs", "spec.training.microBatchSize", "spec.training.scheduler", "spec.training.seed",
        "spec.training.earlyStopping", "spec.resources.processesPerNode", "spec.resources.memory",
        "spec.resources.sharedMemory", "spec.evaluation.metrics",
    ],
    "epochs-and-steps": ["spec.training.maxSteps"],
    "nothing-to-do": ["spec.training"],
    "no-dataset": ["spec.dataset", "spec.predict.dataset"],
    "evaluation-without-dataset": ["spec.dataset"],
    "batch-not-divisible": ["spec.training.globalBatchSize"],
    "micro-batch-not-divisible": ["spec.training.globalBatchSize"],
    "script-beside-the-loop": [
        "spec.training.epochs", "spec.training.learningRate", "spec.parallelism.strategy", "spec.preparation.maxLength",
    ],
    "script-form": ["spec.training.script.git.ref", "spec.training.script.git.path"],
    "zero-stage-with-ddp": ["spec.parallelism.strategy"],
    "offload-at-stage-0": ["spec.parallelism.offload.optimizer"],
    "single-with-many": ["spec.parallelism.strategy"],
    "checkpoint-interval-twice": ["spec.checkpoints.every"],
    "checkpoint-interval-misspelt": ["spec.checkpoints.every"],
    "pair-for-tokens": ["spec.dataset.columns.textPair"],
    "labels-of-tags": ["spec.dataset.labels"],
    "bad-uri": ["spec.model.uri", "spec.dataset.uri"],
    "name-number": ["metadata.name"],
    "name-form": ["metadata"],
    "other-version": ["no matches for kind"],
    "misspelt-kind": ["no matches for kind"],
    "hub-only-fields": [
        "spec.model.revision", "spec.dataset.config", "spec.training.warmupSteps", "spec.resources.accelerator",
        "spec.predict.output",
    ],
    "too-many-processes": ["spec.resources.processesPerNode"],
    "claim-forms": [
        "spec.model.uri", "spec.dataset.uri", "spec.predict.dataset.uri", "spec.predict.output",
        "spec.storage.workspace", "spec.storage.cache",
    ],
    "host-namespaces": ['unknown field "spec.template.hostNetwork"', 'unknown field "spec.template.hostPID"'],
    "image-form": ["spec.image", "spec.imagePullPolicy"],
    "image-in-capitals": ["spec.image"],
    "launcher-of-others": ["spec.launcher"],
    "managed-by-form": ["spec.runPolicy.managedBy"],
    "network-of-none": ["spec.resources.network"],
    "run-policy-values": [
        "spec.runPolicy.activeDeadlineSeconds", "spec.runPolicy.ttlSecondsAfterFinished", "spec.runPolicy.maxRestarts",
        "spec.runPolicy.onOutOfMemory", "spec.runPolicy.priorityClassName",
    ],
    "secret-as-text": ["spec.secrets.hubToken", "spec.secrets.storage.name"],
    "secret-key-form": ["spec.secrets.hubToken.key"],
    "steps-too-many": [
        "spec.training.maxSteps", "spec.training.globalBatchSize", "spec.resources.nodes", "spec.resources.gpusPerNode",
    ],
    "storage-size": ["spec.storage.storageClassName"],
    "storage-size-form": ["spec.storage.size"],
    "template-labels": ["spec.template.labels", "spec.template.annotations"],
    "template-names": ["spec.template.serviceAccountName", "spec.template.imagePullSecrets"],
    "template-no-objects": [
        "spec.template.tolerations", "spec.template.env", "spec.template.volumes", "spec.template.securityContext",
    ],
    "affinity-misspelt": ['unknown field "spec.template.affinity.nodeAfinity"'],
    "env-forms": ['unknown field "spec.template.env[0].valeu"'],
    "env-of-the-contract": [f"spec.template.env[{index}].name" for index in range(6)],
    "mount-forms": ['unknown field "spec.template.volumeMounts[3].mountpath"'],
    "mount-reserved": ["spec.template.volumeMounts[3].mountPath"],
    "security-out": [
        'unknown field "spec.template.securityContext.privileged"',
        'unknown field "spec.template.securityContext.sysctls"',
    ],
    "security-root": ["spec.template.securityContext.runAsUser", "spec.template.securityContext.runAsNonRoot"],
    "token-in-plain-text": ["spec.template.env[0].value: Invalid value: looks like a Hub token"],
    "frame-odds": ["apiVersion"],
    "template-odds": ['unknown field "spec.template.tolerations[1].operater"'],
    "toleration-forms": ['unknown field "spec.template.tolerations[0].operater"'],
    "volume-forms": ['unknown field "spec.template.volumes[0].emtyDir"'],
    "volume-host-path": ['unknown field "spec.template.volumes[0].hostPath"'],
    "not-yet-supported": [
        "spec.storage.workspace: Invalid value", "is not supported in this version: write pvc://CLAIM/PATH",
        "spec.launcher: Invalid value", "is not supported in this version: use auto, pytorchjob, mpijob or job",
        "spec.runPolicy.queue: Invalid value", "is not supported in this version: leave it out",
    ],
    "launchers-to-come": ["spec.launcher"],
    "queue": ["spec.runPolicy.queue"],
    "storage-in-buckets": [
        "spec.model.uri", "spec.dataset.uri", "spec.storage.workspace", "spec.storage.cache", "spec.checkpoints.uri",
        "spec.predict.output",
    ],
    "volume-reserved": [f"spec.template.volumes[{index}].name" for index in range(4)],
}  # fmt: skip
ACCEPTED = {
    "gate-not-measured", "deepspeed-keys", "training-arguments", "remote-code", "script-host", "script-url", "no-name",
    "volume-sizes",
    # Rules across the fields of Kubernetes' objects, which the CRD does not repeat.
    "affinity-forms", "env-plain-secrets", "env-token-twice", "image-pull-secrets-twice", "mount-without-volume",
    "volume-progress-token",
    # Splits are free text for the Hub, whose slices have a syntax of their own, and files may have any ending.
    "other-files", "split-forms",
}  # fmt: skip


class Cluster(Protocol):
    def kubectl(self, *arguments: str, stdin: str | None = None) -> Any: ...

    def must(self, *arguments: str, stdin: str | None = None) -> str: ...

    def wait_served(self, *names: str) -> None: ...


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[Cluster]:
    cluster.must("apply", "--server-side", "-f", "-", stdin=crd_yaml())
    cluster.wait_served(CRD)
    yield cluster
    cluster.must("delete", "crd", CRD, "--timeout=120s")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "spec",
        "spec.resources",
        "spec.resources.network",
        "spec.training.globalBatchSize",
        "spec.checkpoints.every",
        "spec.template.env",
        "spec.template.labels",
        "status.stages",
    ],
)
def test_finetune_explain_matches_kubectl_explain(api: Cluster, path: str) -> None:
    # The API server describes a new kind some moments after it serves it.
    explained = ["explain", f"finetunejob.{path}".rstrip(".")]
    wait_until(lambda: api.kubectl(*explained).returncode == 0, "kubectl explains the kind", 120)
    theirs = read(api.must(*explained))
    ours = read(as_text(find_field(path), recursive=False))
    if path == "":  # the API server describes these three for every kind
        for name in ("apiVersion", "kind", "metadata"):
            del theirs["fields"][name], ours["fields"][name]
    assert ours == theirs


def job(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    whole = {field: value for field, value in {**BASE, **spec}.items() if value is not None}
    frame = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": name}}
    return {**frame, "spec": whole}


def stored(api: Cluster, text: str) -> dict[str, Any]:
    """Return the object that the API server would store."""
    ran = api.must("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", stdin=text)
    value: dict[str, Any] = json.loads(ran)
    return value


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_a_good_job_is_accepted_and_defaults_are_those_of_the_models(api: Cluster, path: Path) -> None:
    documents, _ = read_documents(path.read_text(encoding="utf-8"))
    there = stored(api, path.read_text(encoding="utf-8"))
    ours = json.dumps(_without_nulls(documents[0].value["spec"]))  # type: ignore[index, call-overload]
    assert FineTuneJobSpec.model_validate_json(json.dumps(there["spec"])) == FineTuneJobSpec.model_validate_json(ours)
    assert there["metadata"]["name"] == documents[0].value["metadata"]["name"]  # type: ignore[index, call-overload]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return value


def test_defaults_are_stored_where_kubectl_explain_promises_them(api: Cluster) -> None:
    spec = stored(api, json.dumps(job("defaults", {})))["spec"]
    expected = FineTuneJobSpec.model_validate_json(json.dumps(BASE)).model_dump(mode="json", by_alias=True)

    def filled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: filled(inner) for name, inner in value.items() if inner not in (None, [])}

    def without_empty(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: without_empty(inner) for name, inner in value.items() if without_empty(inner) != {}}

    assert without_empty(spec) == without_empty(filled(expected))


@pytest.mark.parametrize("name", REFUSED)
def test_the_api_server_refuses_a_bad_job_and_names_the_field(api: Cluster, name: str) -> None:
    text = (JOBS / "bad" / f"{name}.yaml").read_text(encoding="utf-8")
    ran = api.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    assert ran.returncode != 0
    assert [part for part in REFUSED[name] if part not in ran.stderr] == [], ran.stderr


AT_APPLY: dict[str, dict[str, Any]] = {
    "a variable twice": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
    "a variable of the contract by reference": {
        "env": [{"name": "RANK", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]
    },
    "a Hub token": {"env": [{"name": "A", "value": f"hf_{'A' * 34}"}]},
    "a library before all others": {"env": [{"name": "LD_PRELOAD", "value": "/x.so"}]},
    "a volume twice": {"volumes": [{"name": "v", "emptyDir": {}}, {"name": "v", "emptyDir": {}}]},
    "a volume of the operator's": {"volumes": [{"name": "workspace", "emptyDir": {}}]},
    "a folder of the node": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
    "root": {"securityContext": {"runAsUser": 0}},
    "a privileged pod": {"securityContext": {"privileged": True}},
    "a label that is too long": {"labels": {"a": "x" * 64}},
    "levels without end": {"affinity": {"nodeAffinity": {"a": {"b": {"c": {}}}}}},
}


def test_invalid_pod_template_is_refused_at_admission(api: Cluster) -> None:
    jobs = [job(f"t{number}", {"template": template}) for number, template in enumerate(AT_APPLY.values())]
    refused = refusals(api, jobs)
    assert [case for number, case in enumerate(AT_APPLY) if f"t{number}" not in refused] == []


def test_every_bad_file_is_refused_here_or_known_to_need_more(api: Cluster) -> None:
    names = {path.stem for path in (JOBS / "bad").glob("*.yaml") if not path.stem.startswith("yaml-")}
    assert names == {*REFUSED, *ACCEPTED}
    for name in sorted(ACCEPTED):
        ran = api.kubectl("create", "--dry-run=server", "-f", str(JOBS / "bad" / f"{name}.yaml"))
        assert ran.returncode == 0, (name, ran.stderr)


def refusals(api: Cluster, jobs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the error of each refused job by name; all jobs are tried in one call."""
    text = "\n---\n".join(json.dumps(value) for value in jobs)
    ran = api.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)
    created = set(re.findall(r"finetunejob.finetune.dev/(\S+) created", ran.stdout))
    errors = {
        match.group(1): match.group(0)
        for match in re.finditer(r'FineTuneJob.finetune.dev "([^"]+)" is invalid:.*', ran.stderr)
    }
    names = {value["metadata"]["name"] for value in jobs}
    assert created | set(errors) <= names
    assert not created & set(errors)
    # Strict decoding (unknown fields) does not name the object, but the number of errors has to be right.
    assert ran.stderr.count("Error from server (") == len(names - created)
    return {name: errors.get(name, "unknown field") for name in names - created}


def test_cel_agrees_with_python_on_every_row_of_every_rule(api: Cluster) -> None:
    rows: dict[str, dict[str, list[dict[str, Any]]]] = yaml.safe_load((JOBS / "rules.yaml").read_text())
    jobs, expected = [], {}
    for number, (rule_name, patches) in enumerate(rows.items()):
        rule = next(rule for rule in RULES if rule.name == rule_name)
        for kind in ("broken", "kept"):
            for index, patch in enumerate(patches[kind]):
                name = f"r{number}-{kind}-{index}"
                jobs.append(job(name, patch))
                if kind == "broken" and (rule.cel is not None or rule.schema):
                    expected[name] = f"spec.{rule.path}"
                elif kind == "broken" and rule.schema_around:
                    expected[name] = f"spec.{rule.path.rpartition('.')[0]}"
    assert len(expected) > 30
    errors = refusals(api, jobs)
    assert {name: errors[name] for name in errors if name not in expected} == {}
    assert [name for name in expected if name not in errors] == []
    assert [(name, errors[name]) for name, path in expected.items() if path not in errors[name]] == []


def test_cel_agrees_with_python_on_every_column_and_task(api: Cluster) -> None:
    tasks = sorted({task for several in COLUMN_TASKS.values() for task in several})
    jobs, expected = [], set()
    for number, (column, readers) in enumerate(COLUMN_TASKS.items()):
        for task in tasks:
            for block in ("dataset", "predict"):
                name = f"c{number}-{task}-{block}"
                dataset = {"uri": "hf://c/d", "columns": {column: "x"}}
                # Rows to predict have the form of those that are trained on.
                same = {"dataset": dataset} if task in readers else {}
                patch = {"dataset": dataset} if block == "dataset" else {"predict": {"dataset": dataset}, **same}
                jobs.append(job(name, {"task": task, **patch}))
                if task not in readers:
                    expected.add(name)
    assert set(refusals(api, jobs)) == expected


STRANGE: tuple[Any, ...] = (
    "text", "auto", "3", "8Gi", 1, 3, 0.5, True, [], {}, ["x"], {"k": "v"}, {"k": None}, [{"name": "x"}], {"steps": 2},
)  # fmt: skip
# Values of these are another project's names, or have rules across their fields, which the schema does not know.
NAMED_ELSEWHERE = ("parallelism.deepspeedConfig", "training.arguments", "template.volumes")
SLIPS = ("is less than ", "counts cores, ")
"""Starts of the rules that refuse sizes which can only be slips: the schema knows no order of quantities."""


def test_api_server_and_models_accept_the_same_specs(api: Cluster) -> None:
    """Fields vary one at a time. The other way omits fields of no fixed type, for which the schema says less."""
    jobs, accepted = [], set()
    for number, leaf in enumerate(leaves(spec_shape())):
        for index, strange in enumerate(STRANGE):
            spec = json.loads(json.dumps(BASE))
            *above, last = leaf.split(".")
            target = spec
            for part in above:
                target = target.setdefault(part, {})
            target[last] = strange
            name = f"s{number}-{index}"
            jobs.append(job(name, spec))
            _, problems = validate_job({**jobs[-1], "spec": spec}, LOCAL_SETTINGS)
            # The schema checks nothing that needs more than the object itself, but does check that an item is an
            # object.
            begins = "." if strange == ["x"] else ".["
            keys = tuple(f"spec.{path}{begin}" for path in NAMED_ELSEWHERE for begin in begins)
            if all(p.reason == "Forbidden" or p.path.startswith(keys) or p.rule.startswith(SLIPS) for p in problems):
                accepted.add(name)
    errors = refusals(api, jobs)
    assert len(accepted) > 150
    assert {name: errors[name] for name in errors if name in accepted} == {}
    mixed = tuple(
        f"s{number}-"
        for number, (leaf, shape) in enumerate(leaves(spec_shape()).items())
        if leaf in NAMED_ELSEWHERE or (shape.words and not isinstance(shape.body, Number | Text | None))
    )
    by_name = {value["metadata"]["name"]: value["spec"] for value in jobs}
    missed = [name for name in by_name if name not in errors and name not in accepted and not name.startswith(mixed)]
    assert [(list(leaves(spec_shape()))[int(n[1:].split("-")[0])], STRANGE[int(n.split("-")[1])]) for n in missed] == []


# Changes after a stage has started: those below are refused, each with its field's name.
FIXED = {
    "a field that was there": ({"training": {"epochs": 2}}, "spec.training"),
    "a block that goes": ({"evaluation": None}, "spec.evaluation"),
    "a block that comes": ({"predict": {}}, "spec.predict"),
    "a field of no fixed type": ({"checkpoints": {"every": {"steps": 5}}}, "spec.checkpoints"),
    "a free object": ({"training": {"arguments": {"tf32": True}}}, "spec.training"),
    "the number of nodes": ({"resources": {"nodes": 2}}, "spec.resources"),
    "another field of runPolicy": ({"runPolicy": {"maxRestarts": 9}}, "spec.runPolicy.maxRestarts"),
    "two blocks": (
        {"runPolicy": {"maxRestarts": 9}, "training": {"seed": 7}},
        "spec.training, spec.runPolicy.maxRestarts",
    ),
}
FREE = {
    "suspend": {"runPolicy": {"suspend": True}},
    "time to live": {"runPolicy": {"ttlSecondsAfterFinished": 60}},
    "an endpoint that comes": {"endpoint": {"replicas": 2}},
}


@pytest.fixture(scope="module")
def started(api: Cluster) -> Iterator[Cluster]:
    """Create a job `started` whose first stage has begun, and a job `waiting` whose has not."""
    for name, attempt in (("started", 1), ("waiting", 0)):
        api.must("create", "-f", "-", stdin=json.dumps(job(name, {"evaluation": {}})))
        status = {"stages": [{"name": "prepare", "state": "Running", "attempt": attempt}]}
        patch = json.dumps({"status": status})
        api.must("patch", "ftj", name, "--subresource=status", "--type=merge", "-p", patch)
    yield api
    api.must("delete", "ftj", "started", "waiting")


@pytest.mark.parametrize("change", FIXED)
def test_spec_cannot_change_after_the_first_stage_has_started(started: Cluster, change: str) -> None:
    spec, field = FIXED[change]
    patch = ("--type=merge", "--dry-run=server", "-p", json.dumps({"spec": spec}))
    ran = started.kubectl("patch", "ftj", "started", *patch)
    assert ran.returncode != 0
    assert f"{field} cannot change after the first stage has started" in ran.stderr
    started.must("patch", "ftj", "waiting", *patch)


def test_spec_stays_fixed_when_the_same_update_names_a_status(started: Cluster) -> None:
    change = {"spec": {"training": {"seed": 7}}, "status": {"phase": "Training", "stages": []}}
    ran = started.kubectl("patch", "ftj", "started", "--type=merge", "-p", json.dumps(change))
    assert ran.returncode != 0
    assert "spec.training cannot change after the first stage has started" in ran.stderr
    patch = ("patch", "ftj", "started", "--subresource=status", "--type=merge", "--dry-run=server", "-o", "json")
    written = json.loads(started.must(*patch, "-p", json.dumps(change)))
    assert (written["spec"]["training"]["seed"], written["status"]["phase"]) == (42, "Training")


@pytest.mark.parametrize("change", FREE)
def test_suspend_time_to_live_and_endpoint_may_change_at_any_time(started: Cluster, change: str) -> None:
    started.must(
        "patch", "ftj", "started", "--type=merge", "--dry-run=server", "-p", json.dumps({"spec": FREE[change]})
    )


def test_kubectl_explains_fields_and_shows_columns(started: Cluster) -> None:
    explained = started.must("explain", "ftj.spec.training")
    assert "Rows per optimizer step over all processes, kept exactly" in re.sub(r"\s+", " ", explained)
    columns = ["NAME", "PHASE", "STAGE", "REASON", "PROGRESS", "LOSS", "ETA", "ROWS/S", "RESULT", "RESTARTS", "AGE"]
    assert started.must("get", "ftj", "started").split("\n")[0].split() == columns
    assert started.must("get", "finetune", "-o", "wide").split("\n")[0].split() == [
        *columns,
        "STRATEGY",
        "LAUNCHER",
        "COST",
        "URL",
    ]


def test_our_reader_sees_the_scalars_that_kubectl_stores(api: Cluster) -> None:
    text = """
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: scalars}
spec:
  task: text-classification
  model: {uri: hf://a/b}
  dataset: {uri: hf://c/d}
  training:
    arguments: {a: 2e-5, b: 0x10, c: on, d: 1_000, e: 1:30, f: ~, g: 0o17, h: .5, i: 1e3, j: 010, k: y, l: "on",
                m: 2001-01-01, n: -0.0, p: +1, q: 0b11, r: <<, s: 1e400, t: NO}
"""
    documents, problems = read_documents(text)
    assert problems == []
    ours = documents[0].value["spec"]["training"]["arguments"]  # type: ignore[index, call-overload]
    there = stored(api, text)["spec"]["training"]["arguments"]
    assert ours == there
    assert {name: type(value) for name, value in ours.items()} == {name: type(value) for name, value in there.items()}

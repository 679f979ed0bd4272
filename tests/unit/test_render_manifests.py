"""Traps of Kubernetes and of the training operators, each in a test."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from finetune_contract.choices import Stage
from finetune_contract.layout import ENV_DELETE_CHECKPOINTS
from finetune_contract.plan_check import PlannedTraining
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.cli.terminal.console import emit
from finetune_operator.jobs.launchers.launcher_registry import render, stage
from finetune_operator.jobs.render import templates
from finetune_operator.jobs.render.contract import fingerprint, stage_files
from finetune_operator.jobs.render.manifests import shared
from finetune_operator.jobs.render.pod_parts import literal
from finetune_operator.jobs.render.render_types import (
    HASH_ANNOTATION,
    Attempt,
    Manifest,
    Owner,
    ProgressEndpoint,
    RenderContext,
)
from finetune_operator.jobs.render.templates import document
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, JobPlan, PlanRefused
from finetune_operator.spec.launcher_rows import ENGINES, TRAINING, LauncherName
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.types import FineTuneJob

LAUNCHERS = TRAINING
OWNER = Owner("reviews", "uid-1")
PROGRESS = ProgressEndpoint("https://progress.example:8443/", "CERTIFICATE\n")
LONGEST_NAME = "9" * 63


def spec_with(**fields: Any) -> dict[str, Any]:
    return {
        "task": "text-classification",
        "model": {"uri": "hf://org/model"},
        "dataset": {"uri": "hf://org/data"},
        "training": {"globalBatchSize": 48, "maxSteps": 5},
        "predict": {},
        "launcher": "job",
        **fields,
    }


def planned(
    spec: dict[str, Any], name: str = "reviews", settings: Settings = CLUSTER_SETTINGS
) -> tuple[JobPlan, RenderContext]:
    text = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": name}, "spec": spec}
    job = FineTuneJob.model_validate_json(json.dumps(text))
    result = plan(job, Facts(served=(*LAUNCHERS, *ENGINES)), settings)
    return result, RenderContext("team-a", job.spec, settings, OWNER, PROGRESS)


def rendered(spec: dict[str, Any], settings: Settings = CLUSTER_SETTINGS) -> tuple[Manifest, ...]:
    return render(*planned(spec, settings=settings))


def of(manifests: tuple[Manifest, ...], kind: str, name: str) -> Any:
    (found,) = [each for each in manifests if each["kind"] == kind and each["metadata"]["name"] == name]  # type: ignore[index, call-overload]
    return found


def pod_templates(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every pod template in a manifest, wherever its kind keeps it."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for inner in value.values():
            yield from pod_templates(inner)


def all_pods(manifests: tuple[Manifest, ...]) -> list[dict[str, Any]]:
    return [pod for manifest in manifests for pod in pod_templates(manifest)]


def the_pod(manifests: tuple[Manifest, ...], name: str) -> dict[str, Any]:
    (pod,) = pod_templates(of(manifests, "Job", name))
    return pod


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}


def mounted(pod: dict[str, Any]) -> dict[str, str]:
    """Return folder -> claim mounted there, with `ro:` before those that are read-only."""
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    return {
        mount["mountPath"]: ("ro:" if mount.get("readOnly") else "") + claims[mount["name"]]
        for mount in pod["spec"]["containers"][0]["volumeMounts"]
        if mount["name"] in claims
    }


# ---------------------------------------------------------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("launcher", "train"),
    [
        ("pytorchjob", ["ConfigMap reviews-train-1", "PyTorchJob reviews-train-1"]),
        ("mpijob", ["ConfigMap reviews-train-1", "MPIJob reviews-train-1"]),
        ("job", ["ConfigMap reviews-train-1", "Service reviews-train-1-ranks", "Job reviews-train-1"]),
    ],
)
def test_objects_come_in_the_order_in_which_they_are_needed(launcher: str, train: list[str]):
    manifests = rendered(spec_with(launcher=launcher, resources={"nodes": 2}))
    assert [f"{each['kind']} {each['metadata']['name']}" for each in manifests] == [  # type: ignore[index, call-overload]
        "NetworkPolicy reviews-network",
        "PersistentVolumeClaim reviews-workspace",
        *("ConfigMap reviews-prepare-1", "Job reviews-prepare-1"),
        *train,
        *("ConfigMap reviews-evaluate-1", "Job reviews-evaluate-1"),
        *("ConfigMap reviews-predict-1", "Job reviews-predict-1"),
    ]


def test_one_node_needs_no_service_and_meets_itself():
    manifests = rendered(spec_with(parallelism={"strategy": "ddp"}))
    assert not any(each["kind"] == "Service" for each in manifests)
    env = environment(the_pod(manifests, "reviews-train-1"))
    assert {name: value for name, value in env.items() if name.startswith("PET_")} == {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "127.0.0.1:29400",
        "PET_RDZV_ID": "reviews-train-1",
    }


def test_pods_of_an_indexed_job_meet_at_the_first_one_s_address():
    manifests = rendered(spec_with(resources={"nodes": 2}))
    service = of(manifests, "Service", "reviews-train-1-ranks")
    pod = the_pod(manifests, "reviews-train-1")
    assert environment(pod)["PET_RDZV_ENDPOINT"] == "reviews-train-1-0.reviews-train-1-ranks:29400"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_another_attempt_has_other_objects_with_the_same_configuration(launcher: str):
    result, context = planned(spec_with(launcher=launcher, resources={"nodes": 2}))
    first, second = (stage(result, context, Attempt(Stage.TRAIN, number)) for number in (1, 2))
    assert len(first) >= 2
    assert {each["metadata"]["name"] for each in first}.isdisjoint(each["metadata"]["name"] for each in second)  # type: ignore[index, call-overload]
    assert [each["kind"] for each in first] == [each["kind"] for each in second]
    assert first[0]["data"] == second[0]["data"]


# --------------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_objects_have_owner_references_and_pods_have_job_labels(launcher: str):
    result, context = planned(spec_with(launcher=launcher))
    policy, claim = shared(result, context)
    owners = policy["metadata"]["ownerReferences"]  # type: ignore[index, call-overload]
    assert [(owner["kind"], owner["uid"]) for owner in owners] == [("FineTuneJob", "uid-1")]  # type: ignore[index, call-overload, union-attr]
    assert claim["metadata"] == {
        "name": "reviews-workspace",
        "namespace": "team-a",
        "labels": {"app.kubernetes.io/managed-by": "finetune-operator", "finetune.dev/job": "reviews"},
    }
    for number, each in enumerate(stage(result, context, Attempt(Stage.TRAIN, 3))):
        labels = {
            "app.kubernetes.io/managed-by": "finetune-operator",
            "finetune.dev/job": "reviews",
            "finetune.dev/job-uid": "uid-1",
            "finetune.dev/stage": "train",
            "finetune.dev/attempt": "3",
        }
        assert each["metadata"] == {
            "name": "reviews-train-3",
            "namespace": "team-a",
            "labels": labels,
            "ownerReferences": [
                {
                    "apiVersion": "finetune.dev/v1alpha1",
                    "kind": "FineTuneJob",
                    "name": "reviews",
                    "uid": "uid-1",
                    "controller": True,
                }
            ],
        }
        pods = list(pod_templates(each))
        assert len(pods) == (0 if number == 0 else 2 if launcher == "mpijob" else 1)
        assert all(pod["metadata"]["labels"] == labels for pod in pods)


def test_labels_of_a_user_come_beside_ours():
    template = {"labels": {"team": "a"}}
    pods = all_pods(rendered(spec_with(template=template)))
    assert len(pods) == 4
    assert {(pod["metadata"]["labels"]["team"], pod["metadata"]["labels"]["finetune.dev/job"]) for pod in pods} == {
        ("a", "reviews")
    }


def test_without_a_cluster_there_is_no_owner_no_identity_and_no_progress():
    result, context = planned(spec_with())
    text = json.dumps(render(result, replace(context, owner=None, progress=None)))
    assert not re.search(r"ownerReferences|job-uid|KUBEFLOW|ca\.crt|progress|serviceAccountToken", text)
    assert '\\"run\\": null' in text


# ---------------------------------------------------------------------------------------------------------------- names

# The longest suffixes that the controllers of each kind append to the object's name.
POD_NAMES: dict[LauncherName, tuple[str, ...]] = {
    "pytorchjob": ("-worker-9999",),
    "mpijob": ("-worker-9999", "-launcher-abcde"),
    "job": ("-9999-abcde", "-9999"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", [1, 99_999])
def test_every_name_that_controllers_make_is_a_label(launcher: LauncherName, number: int):
    result, context = planned(spec_with(launcher=launcher, resources={"nodes": 2}), LONGEST_NAME)
    for each in (Stage.PREPARE, Stage.TRAIN, Stage.EVALUATE, Stage.PREDICT):
        for manifest in stage(result, context, Attempt(each, number)):
            name = manifest["metadata"]["name"]  # type: ignore[index, call-overload]
            suffixes = POD_NAMES[launcher] if each is Stage.TRAIN else ("-0-abcde",)
            names = [name] if manifest["kind"] in ("ConfigMap", "Service") else [f"{name}{end}" for end in suffixes]
            assert all(re.fullmatch(r"[a-z][-a-z0-9]{0,62}", found) for found in names)


# ----------------------------------------------------------------------------------------------------------------- text

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(value=JSON_VALUES)
def test_a_template_gives_back_every_value_as_it_was(value: Any):
    made = document("configmap", metadata={"name": value}, data=value)
    assert json.dumps(made) == json.dumps(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": value}, "immutable": True, "data": value}
    )


@given(text=TEXT)
def test_text_reaches_the_program_as_it_was_written(text: str):
    assert expanded(literal(text)) == text


def expanded(text: str) -> str:
    """Expand variables as the kubelet does (Kubernetes' third_party/forked/golang/expansion/expand.go)."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else "EXPANDED", text)


HOSTILE = "{{ 7 * 7 }} {% x %} $(HOME) $$(HOME) 'a' \"b\" \\ \n\r\t\u2028\u0085\ufeff ü漢🙂 yes"


def test_user_text_arrives_byte_for_byte_also_through_yaml(capsys: pytest.CaptureFixture[str]):
    columns = {"text": HOSTILE, "label": "on"}
    template = {"env": [{"name": "GREETING", "value": HOSTILE}], "annotations": {"note": HOSTILE}}
    manifests = rendered(spec_with(dataset={"uri": "hf://org/data", "columns": columns}, template=template))
    emit(manifests, "yaml")
    again = tuple(yaml.safe_load_all(capsys.readouterr().out))
    assert again == manifests
    for name in ("prepare", "train", "evaluate", "predict"):
        job = TrainerJob.model_validate_json(of(again, "ConfigMap", f"reviews-{name}-1")["data"]["job.json"])
        assert job.dataset is not None
        assert job.dataset.columns.text == HOSTILE
        pod = the_pod(again, f"reviews-{name}-1")
        assert pod["metadata"]["annotations"]["note"] == HOSTILE
        assert expanded(environment(pod)["GREETING"]) == HOSTILE


def test_a_folder_name_with_a_variable_in_it_is_the_folder_of_that_name():
    storage = {"workspace": "pvc://results/$(HOME)/$$", "cache": "pvc://results/$(PATH)"}
    pod = the_pod(rendered(spec_with(storage=storage)), "reviews-train-1")
    command = [expanded(argument) for argument in pod["spec"]["containers"][0]["command"]]
    assert command[command.index("--workspace") + 1] == "/workspace/$(HOME)/$$"
    assert expanded(environment(pod)["HF_HOME"]) == "/cache/$(PATH)"


def test_every_value_of_every_template_goes_through_the_filter():
    files = sorted(Path(templates.__file__).parents[2].rglob("*.yaml.jinja"))
    values = [value for file in files for value in re.findall(r"\{\{(.*?)\}\}", file.read_text(encoding="utf-8"))]
    assert len(files) == 17
    assert len(values) > 20
    assert [value for value in values if not re.fullmatch(r" [a-z_.]+ \| tojson ", value)] == []


def test_missing_value_of_a_template_is_an_error():
    with pytest.raises(UndefinedError, match="'data' is undefined"):
        document("configmap", metadata={})


TEXTS = ("🙂\\ud83d\\ude42", "value of the template, number 0", "a: &x {{ b }}\n--- #", "\x85\u2028\x00", "1e3", "no")


@pytest.mark.parametrize("text", TEXTS)
def test_values_keep_their_type_in_yaml(text: str):
    metadata, data = {"name": text, "labels": {text: [text, 1e-05, None]}}, {text: text}
    made = document("configmap", metadata=metadata, data=data)
    assert made == {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "data": data}


def test_a_value_that_is_no_json_is_an_error():
    with pytest.raises(TypeError, match="is not a JSON value"):
        document("configmap", metadata={}, data={"file": Path("x")})  # type: ignore[dict-item]


# -------------------------------------------------------------------------------------------------------------- secrets


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_secrets_are_named_and_never_held(launcher: str):
    secrets = {"hubToken": {"name": "hub", "key": "read"}, "storage": {"name": "keys"}}
    pods = all_pods(rendered(spec_with(launcher=launcher, secrets=secrets)))
    assert len(pods) == (5 if launcher == "mpijob" else 4)
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        (token,) = [each for each in container["env"] if each["name"] == "HF_TOKEN"]
        assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "read"}}}
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_only_pods_that_train_get_the_key_of_checkpoints(launcher: str):
    found = rendered(spec_with(launcher=launcher, checkpoints={"signingKey": {"name": "signing", "key": "hmac"}}))
    pods = all_pods(found)
    key = {"name": "FINETUNE_CHECKPOINT_SECRET", "valueFrom": {"secretKeyRef": {"name": "signing", "key": "hmac"}}}
    holding = [key in pod["spec"]["containers"][0]["env"] for pod in pods]
    assert sum(holding) == (2 if launcher == "mpijob" else 1)
    assert "signing" not in json.dumps([document for document in found if document["kind"] == "ConfigMap"])


# ------------------------------------------------------------------------------------------------------------- contract


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_equal_input_gives_equal_output_and_holds_no_auto(launcher: str):
    spec = spec_with(launcher=launcher, resources={"nodes": 2, "gpusPerNode": 2}, parallelism={"zeroStage": 2})
    first = json.dumps(rendered(spec))
    assert first == json.dumps(rendered(spec))
    assert "deepspeed.json" in first
    assert re.findall(r'.{30}\bauto\b\\?".{10}', first) == []


def test_configuration_hash_changes_only_with_the_configuration():
    def hashes(**fields: Any) -> list[str]:
        return [pod["metadata"]["annotations"][HASH_ANNOTATION] for pod in all_pods(rendered(spec_with(**fields)))]

    base = hashes()
    assert len(base) == 4
    assert hashes(image="another") == base
    changed = hashes(training={"globalBatchSize": 24, "maxSteps": 5})
    assert all(one != other for one, other in zip(base, changed, strict=True))


def test_the_hash_is_that_of_the_texts_that_the_trainer_reads():
    result, context = planned(spec_with(parallelism={"zeroStage": 1}))
    config, job = stage(result, context, Attempt(Stage.TRAIN))
    data: Any = config["data"]
    assert data == {**stage_files(result, context, Stage.TRAIN), "ca.crt": "CERTIFICATE\n"}
    assert set(data) == {"job.json", "deepspeed.json", "estimate.json", "ca.crt"}
    (pod,) = pod_templates(job)
    texts = {name: text for name, text in data.items() if name != "ca.crt"}
    assert pod["metadata"]["annotations"][HASH_ANNOTATION] == fingerprint(texts)
    # An operator that estimates otherwise replaces no pods.
    assert fingerprint({**texts, "estimate.json": "{}"}) == fingerprint(texts)
    planned_memory = PlannedTraining.model_validate_json(data["estimate.json"]).memory_bytes
    assert result.memory is not None
    assert planned_memory == result.memory.total_bytes
    assert "estimate.json" not in stage_files(result, context, Stage.EVALUATE)
    assert json.loads(data["job.json"])["run"] == "uid-1"
    assert config["immutable"] is True


@pytest.mark.parametrize(
    ("case", "fields", "starters"),
    [
        ("one process", {}, ["process", "process", "process", "process"]),
        ("several on one node", {"parallelism": {"strategy": "ddp"}}, ["process", "torchrun", "process", "process"]),
        ("several nodes", {"resources": {"nodes": 2}}, ["process", "torchrun", "process", "process"]),
    ],
)
@pytest.mark.parametrize("launcher", ["pytorchjob", "job"])
def test_only_a_training_of_several_processes_needs_torchrun(case, fields, starters, launcher):
    pods = all_pods(rendered(spec_with(launcher=launcher, **fields)))
    assert [pod["spec"]["containers"][0]["command"][-1] for pod in pods] == starters


def test_progress_goes_to_the_address_of_the_attempt_with_a_token_for_it():
    result, context = planned(spec_with())
    _, job = stage(result, context, Attempt(Stage.TRAIN, 4))
    (pod,) = pod_templates(job)
    env = environment(pod)
    assert {name: env[name] for name in env if name.startswith("KUBEFLOW")} == {
        "KUBEFLOW_TRAINER_SERVER_URL": "https://progress.example:8443/v1alpha1/namespaces/team-a/finetunejobs/reviews"
        "/stages/train/attempts/4",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/etc/finetune/ca.crt",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": "/var/run/secrets/finetune.dev/progress/token",
    }
    (token,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "progress-token"]
    assert token["projected"]["sources"] == [
        {"serviceAccountToken": {"audience": "finetune.dev/progress", "expirationSeconds": 3600, "path": "token"}}
    ]
    assert pod["spec"]["automountServiceAccountToken"] is False


# --------------------------------------------------------------------------------------------------------------- claims


def test_claims_are_mounted_at_the_paths_of_job_json_in_their_stages():
    spec = spec_with(
        model={"uri": "pvc://models/bert"},
        dataset={"uri": "pvc://rows/*.csv"},
        predict={"dataset": {"uri": "pvc://results/new.csv"}, "output": "pvc://models/out.jsonl"},
        storage={"workspace": "pvc://results/team/", "cache": "pvc://results/hub"},
    )
    manifests = rendered(spec)
    own = {"/workspace": "results", "/cache": "results"}
    assert {
        name: mounted(the_pod(manifests, f"reviews-{name}-1")) for name in ("prepare", "train", "evaluate", "predict")
    } == {
        "prepare": own | {"/claims/models": "ro:models", "/claims/rows": "ro:rows", "/claims/results": "ro:results"},
        "train": own | {"/claims/models": "ro:models"},
        "evaluate": own | {"/claims/models": "ro:models"},
        "predict": own | {"/claims/models": "models", "/claims/results": "ro:results"},
    }
    job = TrainerJob.model_validate_json(of(manifests, "ConfigMap", "reviews-prepare-1")["data"]["job.json"])
    assert job.dataset is not None
    assert job.predict is not None
    assert job.predict.dataset is not None
    assert (job.model.uri, job.dataset.uri, job.predict.dataset.uri, job.predict.output) == (
        "file:///claims/models/bert",
        "file:///claims/rows/*.csv",
        "file:///claims/results/new.csv",
        "file:///claims/models/out.jsonl",
    )
    pod = the_pod(manifests, "reviews-prepare-1")
    assert environment(pod)["HF_HOME"] == environment(pod)["FINETUNE_CACHE"] == "/cache/hub"
    assert "FINETUNE_CACHE" not in environment(the_pod(manifests, "reviews-evaluate-1"))
    assert "/workspace/team" in pod["spec"]["containers"][0]["command"]
    assert not any(each["kind"] == "PersistentVolumeClaim" for each in manifests)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"storage": {"workspace": "s3://bucket"}}, "spec.storage.workspace"),
        ({"storage": {"cache": "pvc://Upper"}}, "spec.storage.cache"),
        ({"model": {"uri": "pvc://models/../../etc"}}, "spec.model.uri"),
        ({"predict": {"output": "pvc://out/..jsonl/.."}}, "spec.predict.output"),
    ],
)
def test_uri_outside_of_a_claim_is_refused_with_its_field(fields: dict[str, Any], path: str):
    with pytest.raises(PlanRefused) as refused:
        rendered(spec_with(**fields))
    found = [problem for problem in refused.value.problems if problem.path == path]
    assert found
    assert all("pvc://" in problem.hint or ".jsonl" in problem.hint for problem in found)


@pytest.mark.parametrize(
    ("why", "fields", "defaults", "expected"),
    [
        ("one pod at a time", {}, {}, (["ReadWriteOnce"], None, "100Gi")),
        ("several nodes", {"resources": {"nodes": 2}}, {}, (["ReadWriteMany"], None, "100Gi")),
        ("a launcher beside the worker", {"launcher": "mpijob"}, {}, (["ReadWriteMany"], None, "100Gi")),
        (
            "several pods that prepare",
            {"preparation": {"engine": "job", "workers": 2}},
            {},
            (["ReadWriteMany"], None, "100Gi"),
        ),
        ("several pods that predict", {"predict": {"workers": 2}}, {}, (["ReadWriteMany"], None, "100Gi")),
        ("one that does", {"preparation": {"engine": "job"}}, {}, (["ReadWriteOnce"], None, "100Gi")),
        ("processes of one pod", {"preparation": {"workers": 2}}, {}, (["ReadWriteOnce"], None, "100Gi")),
        (
            "the administrator's wish",
            {"resources": {"nodes": 2}},
            {"accessModes": ["ReadWriteOncePod"], "storageClassName": "site"},
            (["ReadWriteOncePod"], "site", "100Gi"),
        ),
        (
            "the job's own class and size",
            {"storage": {"storageClassName": "fast", "size": "5Gi"}},
            {"storageClassName": "site"},
            (["ReadWriteOnce"], "fast", "5Gi"),
        ),
    ],
)
def test_default_claim_can_be_attached_by_all_pods_of_the_job(why, fields, defaults, expected):
    settings = Settings.model_validate_json(json.dumps({"defaults": defaults}))
    claim = of(rendered(spec_with(**fields), settings), "PersistentVolumeClaim", "reviews-workspace")["spec"]
    found = (claim["accessModes"], claim.get("storageClassName"), claim["resources"]["requests"]["storage"])
    assert found == expected


def test_claim_is_owned_by_the_job_only_to_be_deleted_with_it() -> None:
    owners = {
        retain: of(rendered(spec_with(storage={"retain": retain})), "PersistentVolumeClaim", "reviews-workspace")[
            "metadata"
        ].get("ownerReferences")
        for retain in ("keep", "delete")
    }
    owner = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "name": "reviews", "uid": "uid-1"}
    assert owners == {"keep": None, "delete": [{**owner, "controller": True}]}


@pytest.mark.parametrize(
    ("fields", "stages"),
    [
        ({}, {Stage.PREDICT}),
        ({"predict": None}, {Stage.EVALUATE}),
        ({"endpoint": {}, "predict": None}, {Stage.EVALUATE}),
        ({"checkpoints": {"afterSuccess": "keep"}}, set()),
        ({"training": None}, set()),
    ],
)
def test_only_pods_of_the_last_stage_delete_checkpoints(fields: dict[str, Any], stages: set[Stage]) -> None:
    job_plan, context = planned({key: value for key, value in spec_with(**fields).items() if value is not None})
    found = set()
    for name in job_plan.stages:
        child = stage(job_plan, context, Attempt(name))[-1]
        if any(ENV_DELETE_CHECKPOINTS in environment(pod) for pod in pod_templates(child)):
            found.add(name)
    assert found == stages


# ------------------------------------------------------------------------------------------------------------ resources

WHOLE_NODE = {"cpu": "16", "memory": "64Gi"}
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists"}


@pytest.mark.parametrize(
    ("case", "resources", "expected"),
    [
        (
            "CPU with sizes: every stage gets them",
            WHOLE_NODE,
            dict.fromkeys(("prepare", "train", "evaluate", "predict"), WHOLE_NODE),
        ),
        (
            "one GPU with sizes: what computes on it gets them",
            {**WHOLE_NODE, "gpusPerNode": 1},
            {
                "prepare": {},
                "train": WHOLE_NODE | {"nvidia.com/gpu": "1"},
                "evaluate": WHOLE_NODE | {"nvidia.com/gpu": "1"},
                "predict": WHOLE_NODE | {"nvidia.com/gpu": "1"},
            },
        ),
        (
            "eight GPUs with sizes: inference uses all of them",
            {**WHOLE_NODE, "gpusPerNode": 8},
            {
                "prepare": {},
                "train": WHOLE_NODE | {"nvidia.com/gpu": "8"},
                "evaluate": WHOLE_NODE | {"nvidia.com/gpu": "8"},
                "predict": WHOLE_NODE | {"nvidia.com/gpu": "8"},
            },
        ),
    ],
)
def test_stages_get_the_limits_of_the_job_and_gpus_only_to_compute(case, resources, expected):
    manifests = rendered(spec_with(resources=resources))
    pods = {name: the_pod(manifests, f"reviews-{name}-1")["spec"] for name in expected}
    containers = {name: pod["containers"][0]["resources"] for name, pod in pods.items()}
    assert {name: found.get("limits", {}) for name, found in containers.items()} == expected
    for name, found in containers.items():
        assert "memory" in found["requests"], "a pod without a memory request is the first to be evicted"
        on_gpu = "nvidia.com/gpu" in expected[name]
        assert pods[name].get("tolerations", []) == ([GPU_TAINT] if on_gpu else [])
        env = {each["name"]: each["value"] for each in pods[name]["containers"][0]["env"]}
        assert ("DS_ACCELERATOR" in env, env.get("CUDA_VISIBLE_DEVICES")) == ((False, None) if on_gpu else (True, ""))


def test_each_of_several_pods_that_predict_takes_the_gpus_of_one_model():
    manifests = rendered(spec_with(resources={**WHOLE_NODE, "gpusPerNode": 8}, predict={"workers": 3}))
    limits = the_pod(manifests, "reviews-predict-1")["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "1"}, "and no whole node"


def test_pod_that_evaluates_starts_its_processes_by_torchrun():
    manifests = rendered(spec_with(resources={"gpusPerNode": 8}))
    for name in ("evaluate", "predict"):
        pod = the_pod(manifests, f"reviews-{name}-1")
        assert pod["spec"]["containers"][0]["command"][-2:] == ["--with", "torchrun"]
        assert not [key for key in environment(pod) if key.startswith("PET_")]


def test_the_memory_request_follows_from_the_plan_rounded_up():
    result, context = planned(spec_with())
    assert result.memory is not None
    _, job = stage(result, context, Attempt(Stage.TRAIN))
    (pod,) = pod_templates(job)
    requests = pod["spec"]["containers"][0]["resources"]["requests"]
    requested = int(requests["memory"].removesuffix("Mi")) << 20
    assert set(requests) == {"memory"}
    assert result.memory.host_bytes <= requested < result.memory.host_bytes + (128 << 20)


@pytest.mark.parametrize(
    ("network", "nodes", "devices", "variables"),
    [
        ("auto", 2, {}, {"NCCL_SOCKET_IFNAME": "eth0"}),
        ("tcp", 2, {}, {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}),
        ("rdma", 2, {"rdma/ib": "1"}, {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_NET": "IB"}),
        (
            "efa",
            2,
            {"vpc.amazonaws.com/efa": "1", "hugepages-2Mi": "5120Mi"},
            {"NCCL_SOCKET_IFNAME": "eth0", "FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"},
        ),
        ("rdma", 1, {}, {}),
    ],
)
def test_network_devices_go_to_pods_that_talk_to_other_nodes(network, nodes, devices, variables):
    manifests = rendered(spec_with(resources={"nodes": nodes, "gpusPerNode": 1, "network": network}))
    for name in ("prepare", "train", "evaluate", "predict"):
        pod = the_pod(manifests, f"reviews-{name}-1")
        limits = pod["spec"]["containers"][0]["resources"].get("limits", {})
        special = {key: value for key, value in limits.items() if key != "nvidia.com/gpu"}
        found = {key: value for key, value in environment(pod).items() if key.startswith(("NCCL", "FI_"))}
        assert (special, found) == ((devices, variables) if name == "train" else ({}, {}))


def test_the_cluster_s_own_name_of_its_rdma_device_is_used():
    settings = Settings.model_validate_json('{"defaults": {"rdmaResource": "rdma/hca_shared_devices_a"}}')
    manifests = rendered(spec_with(resources={"nodes": 2, "gpusPerNode": 1, "network": "rdma"}), settings)
    limits = the_pod(manifests, "reviews-train-1")["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "1", "rdma/hca_shared_devices_a": "1"}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_only_pods_with_network_devices_get_the_network_of_their_node(launcher: str) -> None:
    settings = Settings.model_validate_json('{"network": {"hostNetwork": true}}')
    for network in ("rdma", "tcp", "auto"):
        resources = {"nodes": 2, "gpusPerNode": 1, "network": network}
        pods = all_pods(rendered(spec_with(launcher=launcher, resources=resources), settings))
        with_devices = [pod for pod in pods if "rdma/ib" in pod["spec"]["containers"][0]["resources"].get("limits", {})]
        assert bool(with_devices) is (network == "rdma")
        for pod in pods:
            found = (pod["spec"].get("hostNetwork"), pod["spec"].get("dnsPolicy"))
            assert found == ((True, "ClusterFirstWithHostNet") if pod in with_devices else (None, None))
        assert all("NCCL_SOCKET_IFNAME" not in environment(pod) for pod in with_devices)


def test_ranks_of_mpirun_get_the_variables_of_a_network_device() -> None:
    row = {"resource": "rdma/ib", "env": {"UCX_NET_DEVICES": "mlx5_0:1"}}
    settings = Settings.model_validate({"network": {"devices": (row,)}})
    resources = {"nodes": 2, "gpusPerNode": 1, "network": "rdma"}
    launcher, *_ = [
        pod
        for pod in all_pods(rendered(spec_with(launcher="mpijob", resources=resources), settings))
        if "FINETUNE_FORWARD_ENV" in environment(pod)
    ]
    assert "UCX_NET_DEVICES" in environment(launcher)["FINETUNE_FORWARD_ENV"].split(",")
    assert environment(launcher)["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_shared_memory_is_the_requested_or_grows_with_the_processes():
    def sizes(**resources: Any) -> list[str]:
        volumes = [pod["spec"]["volumes"] for pod in all_pods(rendered(spec_with(resources=resources)))]
        return [each["emptyDir"]["sizeLimit"] for some in volumes for each in some if each["name"] == "shared-memory"]

    assert sizes(sharedMemory="3Gi") == ["3Gi"] * 4
    assert sizes(processesPerNode=3) == ["256Mi", "768Mi", "256Mi", "256Mi"]
    assert sizes(gpusPerNode=4) == ["256Mi", "4096Mi", "1024Mi", "1024Mi"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_preparing_pods_are_an_indexed_job_and_know_their_attempt(launcher: LauncherName):
    manifests = rendered(spec_with(preparation={"engine": "job", "workers": 5}, launcher=launcher))
    names = [each["metadata"]["name"] for each in manifests]  # type: ignore[index, call-overload]
    assert names.count("reviews-prepare-1") == 2, "a ConfigMap and a Job"
    assert not any(each["kind"] == "Service" for each in manifests)
    job = of(manifests, "Job", "reviews-prepare-1")["spec"]
    assert [job[name] for name in ("completionMode", "completions", "parallelism", "backoffLimit")] == [
        "Indexed", 5, 5, 0,
    ]  # fmt: skip
    assert job["podFailurePolicy"]["rules"], "a pod that fails ends the Job all the same"
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][-2:] == ["--with", "index"]
    assert {"name": "FINETUNE_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOB_UID}']"}}} in (
        container["env"]
    )
    alone = the_pod(rendered(spec_with(preparation={"workers": 5})), "reviews-prepare-1")["spec"]["containers"][0]
    assert alone["command"][-2:] == ["--with", "process"]
    memory = [int(each["resources"]["requests"]["memory"].removesuffix("Mi")) for each in (container, alone)]
    assert memory[1] > 2 * memory[0], "one process that tokenises in each pod, or five in one"


JOB_UID = "batch.kubernetes.io/controller-uid"


def test_the_success_of_one_pod_is_the_jobs_in_a_preparation_by_pods_alone():
    def decided_by_one(**spec: Any) -> dict[str, Any]:
        manifests = rendered(spec_with(resources={"nodes": 2}, launcher="job", **spec))
        jobs = [each for each in manifests if each["kind"] == "Job"]
        assert len(jobs) == 4
        return {
            each["metadata"]["name"]: each["spec"]["successPolicy"]  # type: ignore[index, call-overload, misc]
            for each in jobs
            if "successPolicy" in each["spec"]  # type: ignore[operator]
        }

    by_pods = decided_by_one(preparation={"engine": "job", "workers": 5})
    assert by_pods == {"reviews-prepare-1": {"rules": [{"succeededIndexes": "0"}]}}
    assert decided_by_one(preparation={"workers": 5}) == {}


def test_pods_that_predict_share_the_rows_and_are_replaced_one_by_one():
    manifests = rendered(spec_with(predict={"workers": 5}))
    job = of(manifests, "Job", "reviews-predict-1")["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 5, 5)
    assert (job.get("backoffLimit"), job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (None, 3, 0)
    disrupted, ended = job["podFailurePolicy"]["rules"]
    assert (disrupted["action"], ended["action"]) == ("Count", "FailJob")
    assert (ended["onExitCodes"]["operator"], ended["onExitCodes"]["values"]) == ("NotIn", [0, 137, 143, 151, 152, 155])
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][-2:] == ["--with", "index"]
    assert {"name": "FINETUNE_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOB_UID}']"}}} in (
        container["env"]
    )
    assert not any(each["kind"] == "Service" for each in manifests)
    alone = of(rendered(spec_with(predict={"workers": 1})), "Job", "reviews-predict-1")["spec"]
    assert (alone["completions"], alone["backoffLimit"], "successPolicy" in alone) == (1, 0, False)


SPARK = Settings.model_validate(
    {**CLUSTER_SETTINGS.model_dump(by_alias=True), "spark": {"image": "spark:1", "serviceAccountName": "spark-driver"}}
)


def predicted_by_spark(**fields: Any) -> Any:
    spec = {"predict": {"workers": 5, "engine": "spark"}, **fields}
    manifests = rendered(spec_with(**spec), SPARK)
    assert not any((each["kind"], each["metadata"]["name"]) == ("Job", "reviews-predict-1") for each in manifests)  # type: ignore[index, call-overload]
    return of(manifests, "SparkApplication", "reviews-predict-1")["spec"]


def test_sparks_driver_and_executors_predict_as_large_as_a_pod_of_a_job() -> None:
    spec = predicted_by_spark(resources={"cpu": "6", "memory": "12Gi"})
    assert (spec["image"], spec["arguments"][0], spec["executor"]["instances"]) == ("spark:1", "predict", 4)
    for role in ("driver", "executor"):
        sizes = {name: value for name, value in spec[role].items() if name in ("cores", "memory") or "Over" in name}
        assert sizes == {"cores": 1, "memory": "1g", "memoryOverhead": "12288m"}
        assert (spec[role]["coreRequest"], spec[role]["coreLimit"]) == ("6", "6")
        (container,) = spec[role]["template"]["spec"]["containers"]
        assert (container["image"], container["command"], container["resources"]) == ("spark:1", [], {"requests": {}})
    # The stage's own process starts tasks; only Spark tells them apart.
    assert "FINETUNE_ATTEMPT" not in environment(spec["driver"]["template"])


def test_predicting_executors_get_a_gpu_and_memory_by_default() -> None:
    spec = predicted_by_spark(resources={"gpusPerNode": 2})
    assert "coreRequest" not in spec["executor"]
    assert int(spec["executor"]["memoryOverhead"].removesuffix("m")) >= 4096
    for role in ("driver", "executor"):
        (container,) = spec[role]["template"]["spec"]["containers"]
        assert container["resources"] == {
            "requests": {"nvidia.com/gpu": "1"},
            "limits": {"nvidia.com/gpu": "1"},
        }


def test_only_evaluate_reads_the_optimization_of_the_gate():
    endpoint, gate = {"optimization": "bf16"}, {"metric": "accuracy", "minimum": 0.8}
    manifests = rendered(spec_with(evaluation={"gate": gate}, endpoint=endpoint))

    def evaluation(name: str) -> Any:
        return json.loads(of(manifests, "ConfigMap", f"reviews-{name}-1")["data"]["job.json"])["evaluation"]

    assert evaluation("evaluate")["optimization"] == "bf16"
    assert [evaluation(name).get("optimization") for name in ("prepare", "train", "endpoint")] == [None] * 3
    assert evaluation("endpoint")["gate"] == evaluation("evaluate")["gate"]


def test_servers_mount_the_claims_of_adapters():
    adapters = [{"name": "mails", "uri": "pvc://tuned/mails/adapter"}, {"name": "other", "uri": "pvc://models/other"}]
    spec = spec_with(
        model={"uri": "pvc://models/bert"}, training=None, dataset=None, predict=None, endpoint={"adapters": adapters}
    )
    manifests = rendered(spec)

    job = TrainerJob.model_validate_json(of(manifests, "ConfigMap", "reviews-endpoint-1")["data"]["job.json"])
    assert job.serving is not None
    assert [(each.name, each.uri) for each in job.serving.adapters] == [
        ("mails", "file:///claims/tuned/mails/adapter"),
        ("other", "file:///claims/models/other"),
    ]
    pod = of(manifests, "Deployment", "reviews-endpoint-1")["spec"]["template"]
    assert {"/claims/tuned": "ro:tuned", "/claims/models": "ro:models"}.items() <= mounted(pod).items()


@pytest.mark.parametrize(
    ("output", "mounted_at"),
    [
        ("pvc://answers/2026/", "file:///claims/answers/2026/"),
        ("pvc://answers/", "file:///claims/answers/"),
        ("pvc://answers/out.jsonl", "file:///claims/answers/out.jsonl"),
    ],
)
def test_output_that_is_a_folder_stays_one_in_the_pod(output: str, mounted_at: str):
    manifests = rendered(spec_with(predict={"output": output}))
    assert json.loads(of(manifests, "ConfigMap", "reviews-predict-1")["data"]["job.json"])["predict"]["output"] == (
        mounted_at
    )


def test_only_pods_with_a_gpu_wait_for_its_product():
    template = {"nodeSelector": {"zone": "a"}}
    resources = {"gpusPerNode": 1, "accelerator": {"product": "NVIDIA-L4"}}
    pods = all_pods(rendered(spec_with(resources=resources, template=template)))
    product = {"nvidia.com/gpu.product": "NVIDIA-L4", "zone": "a"}
    assert [pod["spec"]["nodeSelector"] for pod in pods] == [{"zone": "a"}, product, product, product]


def test_pods_avoid_failed_nodes_and_keep_the_affinity_of_the_user():
    mine = {"weight": 1, "preference": {"matchExpressions": [{"key": "fast", "operator": "Exists"}]}}
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [mine]}, "podAffinity": {}}
    result, context = planned(spec_with(template={"affinity": affinity}))
    _, job = stage(result, context, Attempt(Stage.TRAIN, 2, ("node-7", "node-9")))
    (pod,) = pod_templates(job)
    broken = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-7", "node-9"]}
    ours = {"weight": 100, "preference": {"matchExpressions": [broken]}}
    assert pod["spec"]["affinity"] == {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [ours, mine]},
        "podAffinity": {},
    }


# ------------------------------------------------------------------------------------------------------------ launchers


def test_the_launcher_of_an_mpijob_starts_ranks_and_computes_nothing():
    manifests = rendered(spec_with(launcher="mpijob", resources={"nodes": 2, "gpusPerNode": 4}))
    spec = of(manifests, "MPIJob", "reviews-train-1")["spec"]
    replicas = spec.pop("mpiReplicaSpecs")
    assert spec == {
        "mpiImplementation": "OpenMPI",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "sshAuthMountPath": "/home/mpiuser/.ssh",
        "slotsPerWorker": 4,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
    }
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert (replicas["Launcher"]["replicas"], replicas["Worker"]["replicas"]) == (1, 2)
    assert {replica["restartPolicy"] for replica in replicas.values()} == {"Never"}
    assert launcher["command"][-2:] == ["--with", "mpirun"]
    assert launcher["resources"] == {"requests": {"cpu": "100m", "memory": "512Mi"}}
    assert worker["command"] == ["python", "-P", "-m", "finetune_trainer", "sshd"]
    assert worker["readinessProbe"]["tcpSocket"] == {"port": 2222}
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    env = {each["name"]: each["value"] for each in launcher["env"]}
    assert {name: env[name] for name in env if name.startswith("PRTE_")} == {
        "PRTE_MCA_prte_default_hostfile": "/etc/mpi/hostfile",
        "PRTE_MCA_prte_set_default_slots": "4",
        "PRTE_MCA_prte_keep_fqdn_hostnames": "false",
    }
    assert "HOME" not in env, "ranks get their home from passwd: two homes would be two caches"


def test_mpijob_launcher_forwards_variables_beside_the_contract():
    variables = [{"name": "WANDB_MODE", "value": "offline"}, {"name": "TRITON_CACHE_DIR", "value": "/extra"}]
    manifests = rendered(spec_with(launcher="mpijob", template={"env": variables}))
    launcher, worker = pod_templates(of(manifests, "MPIJob", "reviews-train-1"))
    names = environment(launcher)["FINETUNE_FORWARD_ENV"].split(",")
    assert names == ["XDG_CACHE_HOME", "TRITON_CACHE_DIR", "WANDB_MODE"]
    assert set(names) <= environment(launcher).keys()
    assert "FINETUNE_FORWARD_ENV" not in environment(worker)


def test_a_user_s_variable_takes_the_place_of_ours_and_is_there_once():
    template = {"env": [{"name": "TOKENIZERS_PARALLELISM", "value": "false"}]}
    pod = the_pod(rendered(spec_with(template=template)), "reviews-train-1")
    found = [each for each in pod["spec"]["containers"][0]["env"] if each["name"] == "TOKENIZERS_PARALLELISM"]
    assert found == [{"name": "TOKENIZERS_PARALLELISM", "value": "false"}]


def test_the_trainer_knows_how_long_it_has_to_stop():
    settings = Settings.model_validate_json('{"defaults": {"terminationGraceSeconds": 30}}')
    for pod in all_pods(rendered(spec_with(launcher="mpijob"), settings)):
        assert pod["spec"]["terminationGracePeriodSeconds"] == 30
        assert environment(pod)["FINETUNE_GRACE_SECONDS"] == "30"


def test_pytorchjob_has_workers_only_and_no_partial_restart():
    manifests = rendered(spec_with(launcher="pytorchjob", resources={"nodes": 3, "gpusPerNode": 2}))
    spec = of(manifests, "PyTorchJob", "reviews-train-1")["spec"]
    replicas = spec.pop("pytorchReplicaSpecs")
    # With an elasticPolicy the first worker to finish would end the job, and the others with it.
    assert spec == {"nprocPerNode": "2", "runPolicy": {"cleanPodPolicy": "Running"}}
    assert list(replicas) == ["Worker"]
    assert (replicas["Worker"]["replicas"], replicas["Worker"]["restartPolicy"]) == (3, "Never")
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 23456}]
    assert "readinessProbe" not in container, "its Service does not publish pods that are not ready"
    assert {each["name"]: each["value"] for each in container["env"] if each["name"].startswith("PET_")} == {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "reviews-train-1-worker-0:29400",
        "PET_RDZV_ID": "reviews-train-1",
    }


def test_any_failed_pod_ends_an_indexed_job():
    spec = of(rendered(spec_with(resources={"nodes": 2})), "Job", "reviews-train-1")["spec"]
    del spec["template"]
    assert spec == {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "pytorch", "operator": "NotIn", "values": [0]},
                },
            ]
        },
    }


def test_unsupported_launcher_is_refused_by_name():
    result, context = planned(spec_with())
    for launcher in ("trainjob", "jobset", "local"):
        with pytest.raises(PlanRefused, match=rf"spec\.launcher.*{launcher}"):
            render(result.model_copy(update={"launcher": launcher}), context)


def test_pods_meet_the_restricted_profile_and_have_no_api_token():
    for launcher in LAUNCHERS:
        for pod in all_pods(rendered(spec_with(launcher=launcher, resources={"nodes": 2, "gpusPerNode": 1}))):
            spec = pod["spec"]
            assert spec["securityContext"] == {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            assert spec["containers"][0]["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
            assert (spec["restartPolicy"], spec["terminationGracePeriodSeconds"]) == ("Never", 120)

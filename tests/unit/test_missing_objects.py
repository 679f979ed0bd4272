"""Objects that a job names: found in its fields, compared with what a cluster has; access modes of shared claims."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.jobs.missing_objects import Facts, Unread, compare, named_by
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from planning_support.cases import job

SPEC: dict[str, Any] = {
    "model": {"uri": "pvc://models/bert"},
    "dataset": {"uri": "pvc://rows/reviews"},
    "storage": {"workspace": "pvc://work", "cache": "pvc://cache"},
    "secrets": {"hubToken": {"name": "hub"}, "storage": {"name": "keys"}},
    "checkpoints": {"signingKey": {"name": "signing", "key": "hmac"}},
    "runPolicy": {"priorityClassName": "batch"},
    "template": {
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "registry"}],
        "env": [
            {"name": "A", "valueFrom": {"secretKeyRef": {"name": "env", "key": "a"}}},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "perhaps", "key": "b", "optional": True}}},
            {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "config", "key": "c"}}},
        ],
        "volumes": [
            {"name": "v", "secret": {"secretName": "files", "items": [{"key": "one", "path": "x"}]}},
            {"name": "w", "persistentVolumeClaim": {"claimName": "more"}},
            {"name": "p", "projected": {"sources": [{"configMap": {"name": "mixed"}}]}},
        ],
    },
}
NAMED = {
    ("PersistentVolumeClaim", "models", "spec.model.uri", ()),
    ("PersistentVolumeClaim", "rows", "spec.dataset.uri", ()),
    ("PersistentVolumeClaim", "work", "spec.storage.workspace", ()),
    ("PersistentVolumeClaim", "cache", "spec.storage.cache", ()),
    ("PersistentVolumeClaim", "more", "spec.template.volumes[1].persistentVolumeClaim.claimName", ()),
    ("ServiceAccount", "trainer", "spec.template.serviceAccountName", ()),
    ("PriorityClass", "batch", "spec.runPolicy.priorityClassName", ()),
    ("ConfigMap", "config", "spec.template.env[2].valueFrom.configMapKeyRef.name", ("c",)),
    ("ConfigMap", "mixed", "spec.template.volumes[2].projected.sources[0].configMap.name", ()),
    ("Secret", "hub", "spec.secrets.hubToken.name", ("token",)),
    ("Secret", "keys", "spec.secrets.storage.name", ()),
    ("Secret", "signing", "spec.checkpoints.signingKey.name", ("hmac",)),
    ("Secret", "registry", "spec.template.imagePullSecrets[0].name", ()),
    ("Secret", "env", "spec.template.env[0].valueFrom.secretKeyRef.name", ("a",)),
    ("Secret", "files", "spec.template.volumes[0].secret.secretName", ("one",)),
}


def test_all_objects_of_a_job_are_found_with_the_keys_that_pods_read() -> None:
    assert {(one.kind, one.name, one.field, one.keys) for one in named_by(job(SPEC), CLUSTER_SETTINGS)} == NAMED


def test_objects_that_the_settings_name_for_the_pods_are_found() -> None:
    defaults = {"imagePullSecrets": [{"name": "site"}], "storageClassName": "fast", "priorityClassName": "low"}
    settings, _ = check_settings({"defaults": defaults})
    assert settings is not None
    named = {(one.kind, one.name, one.field) for one in named_by(job(name="reviews"), settings)}
    assert named == {
        ("PersistentVolumeClaim", "reviews-workspace", "spec.storage.workspace"),
        ("StorageClass", "fast", "defaults.storageClassName of the settings"),
        ("PriorityClass", "low", "defaults.priorityClassName of the settings"),
        ("Secret", "site", "defaults.imagePullSecrets[0].name of the settings"),
    }


def test_absent_objects_and_keys_are_named_and_no_value_is_kept() -> None:
    asked = job({"secrets": {"hubToken": {"name": "hub"}, "storage": {"name": "keys"}}, "runPolicy": {}})
    named = named_by(asked, CLUSTER_SETTINGS)
    answers = {
        ("Secret", "hub"): Facts.of({"data": {"HF_TOKEN": "c2VjcmV0"}}),
        ("Secret", "keys"): None,
        ("PersistentVolumeClaim", "job-workspace"): None,
    }
    found = compare(asked, named, answers, "team")
    assert [(one.path, one.value, one.rule) for one in found.absent] == [
        ("spec.secrets.hubToken.name", '"token"', 'Secret "hub" has no such key; it has HF_TOKEN'),
        ("spec.secrets.storage.name", '"keys"', "namespace team has no Secret of this name"),
    ]
    assert "kubectl -n team create secret generic keys" in found.absent[1].hint
    assert (found.conflicts, found.unread, "c2VjcmV0" in repr((found, answers))) == ((), (), False)


def test_unreadable_objects_are_listed_once_and_never_taken_for_absent() -> None:
    asked = job({"secrets": {"hubToken": {"name": "hub"}, "storage": {"name": "hub"}}})
    unread = Unread("no permission to read secrets")
    answers = {("Secret", "hub"): unread, ("PersistentVolumeClaim", "job-workspace"): Facts()}
    found = compare(asked, named_by(asked, CLUSTER_SETTINGS), answers, "team")
    assert (found.absent, found.unread) == ((), ("Secret hub: no permission to read secrets",))
    assert found.existing == ("PersistentVolumeClaim job-workspace",)


ON_ONE_NODE = {"template": {"nodeSelector": {"kubernetes.io/hostname": "a"}}}
TWO = {"resources": {"nodes": 2}}
SHARING = [
    ("one node", {}, "pvc://work", None),
    ("two nodes", TWO, "pvc://work", "2 pods mount the claim (spec.resources.nodes), which is ReadWriteOnce"),
    ("two nodes, on the operator's own claim of an earlier job", TWO, None, "2 pods mount the claim"),
    ("two pods of one node", {**TWO, **ON_ONE_NODE}, "pvc://work", None),
    ("three pods that prepare", {"preparation": {"engine": "job", "workers": 3}}, "pvc://work", "3 pods mount"),
    (
        "two pods that predict",
        {"predict": {"workers": 2}},
        "pvc://work",
        "2 pods mount the claim (spec.predict.workers)",
    ),
    ("the launcher of an MPIJob beside one node", {"launcher": "mpijob"}, "pvc://work", "2 pods mount"),
]


@pytest.mark.parametrize(("spec", "workspace", "rule"), [row[1:] for row in SHARING], ids=[row[0] for row in SHARING])
def test_existing_claim_for_one_node_is_refused_to_pods_of_several(
    spec: dict[str, Any], workspace: str | None, rule: str | None
) -> None:
    asked = job({**spec, "storage": {} if workspace is None else {"workspace": workspace}})
    (claim,) = named_by(asked, CLUSTER_SETTINGS)
    for modes, refused in ((["ReadWriteOnce"], rule), (["ReadWriteMany", "ReadWriteOnce"], None)):
        found = compare(asked, (claim,), {(claim.kind, claim.name): Facts.of({"spec": {"accessModes": modes}})}, "team")
        assert [one.path for one in found.conflicts] == ([] if refused is None else ["spec.storage.workspace"])
        assert all(refused is not None and refused in one.rule for one in found.conflicts)


def test_read_write_once_pod_admits_no_second_pod_of_the_same_node() -> None:
    asked = job({**TWO, **ON_ONE_NODE, "storage": {"workspace": "pvc://work"}})
    answers = {("PersistentVolumeClaim", "work"): Facts(access_modes=("ReadWriteOncePod",))}
    (problem,) = compare(asked, named_by(asked, CLUSTER_SETTINGS), answers, "team").conflicts
    assert problem.hint == "use one pod, or use a ReadWriteMany claim"


def test_data_that_only_prepare_reads_may_be_on_one_node() -> None:
    spec = {**TWO, "dataset": {"uri": "pvc://rows"}, "storage": {"workspace": "pvc://work"}}
    answers = {
        ("PersistentVolumeClaim", "rows"): Facts(access_modes=("ReadWriteOnce",)),
        ("PersistentVolumeClaim", "work"): Facts(access_modes=("ReadWriteMany",)),
    }
    asked = job(spec)
    assert compare(asked, named_by(asked, CLUSTER_SETTINGS), answers, "team").conflicts == ()


def settings_of(*modes: str) -> Settings:
    settings, problems = check_settings({"defaults": {"accessModes": list(modes)}})
    assert settings is not None, problems
    return settings


@pytest.mark.parametrize(
    ("modes", "spec", "refused"),
    [
        (["ReadWriteOnce"], TWO, True),
        (["ReadWriteOncePod"], {**TWO, **ON_ONE_NODE}, True),
        (["ReadWriteOnce"], {}, False),
        (["ReadWriteOnce"], {**TWO, **ON_ONE_NODE}, False),
        (["ReadWriteOnce", "ReadWriteMany"], TWO, False),
        (["ReadWriteOnce"], {**TWO, "storage": {"workspace": "pvc://shared"}}, False),
    ],
    ids=["two nodes", "two pods", "one node", "on one node", "both modes", "own claim"],
)
def test_workspace_of_the_settings_is_refused_to_pods_of_several_nodes(
    modes: list[str], spec: dict[str, Any], refused: bool
) -> None:
    document = job(spec).model_dump(mode="json", by_alias=True, exclude_unset=True)
    _, problems = validate_job(document, settings_of(*modes))
    assert [one.path for one in problems] == (["spec.resources.nodes"] if refused else [])
    assert all("2 pods would mount the workspace" in one.rule and modes[0] in one.rule for one in problems)

"""Hints of messages that no file of `jobs/bad` causes: the settings forbid something, a document is too large, or
several files belong together. Following each one clears it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.cli.files import job_files
from finetune_operator.documents import read_documents
from finetune_operator.jobs.render import claims
from finetune_operator.plan.types.plan_types import PlanRefused
from finetune_operator.spec.checks import allow_check, cross_checks, validation
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.problems import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES, Problem
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings
from mending import GONE, Edit, alternatives, apply, created_at, job_document, missed_calls, without_gone

BAD = Path(__file__).parent / "jobs" / "bad"
SCRIPT: dict[str, Any] = {"git": {"url": "https://github.com/a/b", "ref": "main"}, "entryPoint": "a.py"}


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


def variable(source: str) -> dict[str, Any]:
    return {"env": [{"name": "A", "valueFrom": {source: {"name": "b", "key": "c"}}}]}


def hyperparameters(name: str, value: str) -> dict[str, Any]:
    return {"training": {"script": {**SCRIPT, "hyperparameters": {name: value}}}}


@dataclass(frozen=True)
class Case:
    """A job that is refused under these settings, and edits for a hint that leaves a choice to its reader."""

    document: Any
    allow: dict[str, Any] | None = None
    """Lists of the settings; None: the settings of a run on this machine."""
    edits: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        if self.allow is None:
            return LOCAL_SETTINGS
        read, _ = check_settings({"allow": self.allow, "gitHosts": ["github.com"], "images": ["finetune-trainer:*"]})
        assert read is not None
        return read

    def problems(self, document: Any) -> list[Problem]:
        return validate_job(document, self.settings)[1]


def spec(allow: dict[str, Any] | None = None, edits: dict[str, Any] | None = None, **fields: Any) -> Case:
    return Case(job_document(fields), allow, edits or {})


HUB_TOKEN = {"secrets": {"hubToken": {"name": "mine", "key": "t"}}}
CASES: dict[str, Case] = {
    "a Secret of a list": spec({"secrets": ["team-*"]}, {"spec.secrets.hubToken.name": "team-a"}, **HUB_TOKEN),
    "no Secret at all": spec({"secrets": []}, **HUB_TOKEN),
    "no Secret as a variable": spec({"secrets": []}, template=variable("secretKeyRef")),
    "no Secret for images": spec({"secrets": []}, template={"imagePullSecrets": [{"name": "a"}]}),
    "no key of a Secret": spec({"secrets": []}, checkpoints={"signingKey": {"name": "a"}}),
    "no ConfigMap": spec({"configMaps": []}, template=variable("configMapKeyRef")),
    "no ConfigMap as a volume": spec(
        {"configMaps": []}, template={"volumes": [{"name": "v", "configMap": {"name": "a"}}]}
    ),
    "no service account": spec({"serviceAccounts": []}, template={"serviceAccountName": "a"}),
    "no annotation": spec({"annotations": []}, template={"annotations": {"a": "b"}}),
    "no claim": spec({"claims": []}, {"spec.dataset.uri": "hf://a/b"}, dataset={"uri": "pvc://a/b"}),
    "no variable": spec({"env": []}, template={"env": [{"name": "A", "value": "b"}]}),
    "a priority of the system": spec({}, runPolicy={"priorityClassName": "system-node-critical"}),
    "nodes above the limit": spec({"maxNodes": 2}, {"spec.resources.nodes": 2}, resources={"nodes": 4}),
    "an image": spec({}, {"spec.image": "finetune-trainer:0.1.0"}, image="elsewhere/trainer:1"),
    "code of a model": spec({}, model={"uri": "hf://a/b", "trustRemoteCode": True}),
    "a scheme of this machine": spec({}, {"spec.dataset.uri": "hf://a/b"}, dataset={"uri": "file:///rows"}),
    "a host of git": spec(
        {}, {"spec.training.script.git.url": "https://github.com/a/b"},
        training={"script": {**SCRIPT, "git": {"url": "https://elsewhere.org/a/b", "ref": "main"}}},
    ),
    "a name that is no argument": spec(
        None, {"spec.training.script.hyperparameters": {"lr": "1"}}, **hyperparameters("l r", "1")
    ),
    "text with a NUL": spec(None, {"spec.training.script.hyperparameters": {}}, **hyperparameters("lr", "1\0")),
    "an argument that is too long": spec(
        None, {"spec.training.script.hyperparameters": {}}, **hyperparameters("rows", "x" * 130_000)
    ),
    "too many levels": spec(
        None, {"spec.training.arguments": {}}, training={"arguments": {"a": deep(MAX_DEPTH)}}
    ),
    "too many values": spec(
        None, {"spec.template.labels": {}}, template={"labels": {f"l{at}": "" for at in range(MAX_VALUES)}}
    ),
    "too much text": spec(
        None, {"spec.template.env": []}, template={"env": [{"name": "A", "value": "x" * MAX_CHARACTERS}]}
    ),
    "a namespace": Case({**job_document({}), "metadata": {"name": "a", "namespace": "My_Team"}}),
    "a path of Windows": spec(None, dataset={"uri": "file:///C:/data/rows.csv"}),
    "a path in a mounted claim": spec(
        None, dataset={"uri": "file:///data/rows"},
        template={
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "rows"}}],
            "volumeMounts": [{"name": "v", "mountPath": "/data"}],
        },
    ),
    "no metadata": Case({**job_document({}), "metadata": GONE}, None, {"metadata": {"name": "my-job"}}),
    "a spec in words": Case({**job_document({}), "spec": "lora"}, None, {"spec": job_document({})["spec"]}),
    "no spec": Case(
        {name: value for name, value in job_document({}).items() if name != "spec"}, None,
        {"spec": {"task": "text-classification", "model": {"uri": "hf://a/b"}, "endpoint": {}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_hint_of_a_refused_job_leads_to_a_valid_one(name: str) -> None:
    case = CASES[name]
    problems = case.problems(case.document)
    assert problems, "nothing is refused"
    edits = [Edit(path, value) for path, value in case.edits.items()]
    for problem in () if edits else problems:
        ways = alternatives(problem)
        assert ways, f"no hint can be followed: {problem.path}: {problem.hint}"
        edits += ways[0]
    after = without_gone(apply(case.document, edits))
    assert [f"{each.path}: {each.rule}. {each.hint}" for each in case.problems(after)] == []


def test_hints_about_files_are_followed(tmp_path: Path) -> None:
    """A name that two jobs have, and a model and rows that are not there."""
    uris = {"model": {"uri": "file://model"}, "dataset": {"uri": "file://rows.csv"}}
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_text(yaml.safe_dump(job_document(uris)), encoding="utf-8")
    inputs = job_files.read_inputs(list(map(str, files)))
    assert [problem.hint for _, problem in inputs.problems] == ["give one of them another name"]
    absent = job_files.absent_inputs(inputs.entries[0])
    assert [problem.hint.partition(" that exists")[0] for problem in absent] == [
        "name a folder with a model", "name a folder, a file or a glob",
    ]  # fmt: skip
    files[1].write_text(yaml.safe_dump(apply(job_document(uris), [Edit("metadata.name", "b")])), encoding="utf-8")
    (tmp_path / "model").mkdir()
    for there in ("model/config.json", "rows.csv"):
        (tmp_path / there).touch()
    inputs = job_files.read_inputs(list(map(str, files)))
    assert (list(inputs.problems), [job_files.absent_inputs(entry) for entry in inputs.entries]) == ([], [(), ()])


@pytest.mark.parametrize("uri", ["pvc://Models/a", "file:///a", "pvc://models/../a"])
def test_hint_of_a_place_in_no_claim_is_followed(uri: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        claims.ClaimPath.parse(uri, "spec.model.uri")
    (problem,) = refused.value.problems
    assert problem.hint == "write pvc://claim or pvc://claim/path"
    for written in problem.hint.removeprefix("write ").split(" or "):
        assert claims.ClaimPath.parse(written, "spec.model.uri").claim == "claim"


# ------------------------------------------------------------------------------------------------------------- coverage

MODULES = (allow_check, cross_checks, validation)


def test_bad_files_and_these_cases_reach_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with created_at(monkeypatch) as reached:
        for case in CASES.values():
            case.problems(case.document)
        for file in BAD.glob("*.yaml"):
            for document in read_documents(file.read_bytes())[0]:
                validate_job(document.value, LOCAL_SETTINGS)
                validate_job(document.value, CLUSTER_SETTINGS)
        validate_job([], LOCAL_SETTINGS)
    assert [call for module in MODULES for call in missed_calls(module, reached)] == []

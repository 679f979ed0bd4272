"""Names that a job's template may not use are those that rendering uses: the two lists are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune_operator.documents import read_documents
from finetune_operator.jobs.launchers.launcher_registry import render
from finetune_operator.jobs.render.render_types import Owner, ProgressEndpoint, RenderContext
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.checks.template import (
    ALLOWED_SOURCES,
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    RESERVED_FOLDERS,
    RESERVED_VOLUME_PREFIX,
    RESERVED_VOLUMES,
)
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.rules.resource_rules import RESERVED_PREFIXES
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS

JOBS = Path(__file__).parent / "jobs" / "good"
NAMES = ("claims", "pytorchjob-eight-gpus", "mpijob-efa", "indexed-job", "secrets-and-image", "minimal")
# Set for the trainer, and harmless if a job sets them as well: the job's own value wins.
FREE_ENV = {"TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_TOKEN"}


def pods(value: Any) -> list[dict[str, Any]]:
    """Return the pod templates anywhere in a manifest."""
    if isinstance(value, list):
        return [found for item in value for found in pods(item)]
    if not isinstance(value, dict):
        return []
    here = [value] if isinstance(value.get("spec"), dict) and "containers" in value["spec"] else []
    return here + [found for inner in value.values() for found in pods(inner)]


def rendered(name: str) -> list[dict[str, Any]]:
    (document,), _ = read_documents((JOBS / f"{name}.yaml").read_text(encoding="utf-8"))
    job, problems = validate_job(document.value, CLUSTER_SETTINGS)
    assert job is not None, problems
    planned = plan(job, Facts(served=("pytorchjob", "mpijob", "job")), CLUSTER_SETTINGS)
    context = RenderContext(
        "team", job.spec, owner=Owner(name, "uid"), progress=ProgressEndpoint("https://p:8443", "ca")
    )
    found = pods(list(render(planned, context)))
    assert len(found) >= 2
    return found


@pytest.mark.parametrize("name", NAMES)
def test_everything_that_the_trainers_pods_have_is_reserved(name: str) -> None:
    for pod in rendered(name):
        assert [key for key in pod["metadata"]["labels"] if "/" in key and not key.startswith(RESERVED_PREFIXES)] in (
            [],
            ["app.kubernetes.io/managed-by"],
        )
        for volume in pod["spec"]["volumes"]:
            assert volume["name"] in RESERVED_VOLUMES or volume["name"].startswith(RESERVED_VOLUME_PREFIX)
            assert len(set(volume) & set(ALLOWED_SOURCES)) == 1
        for container in pod["spec"]["containers"]:
            for mount in container["volumeMounts"]:
                folder = mount["mountPath"]
                assert any(folder == own or folder.startswith(f"{own}/") for own in RESERVED_FOLDERS), folder
            free = {
                variable["name"]
                for variable in container["env"]
                if variable["name"] not in RESERVED_ENV and not variable["name"].startswith(RESERVED_ENV_PREFIXES)
            }
            assert {variable for variable in free if not variable.startswith(("NCCL_", "FI_"))} <= FREE_ENV


def problems_of(**template: Any) -> list[tuple[str, str]]:
    value: Any = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "a"},
        "spec": {
            "task": "text-classification",
            "model": {"uri": "hf://a/b"},
            "dataset": {"uri": "hf://c/d"},
            "training": {},
            "template": template,
        },
    }
    return [(problem.path, problem.hint) for problem in validate_job(value)[1]]


def test_job_cannot_set_the_managed_by_label() -> None:
    assert [path for path, _ in problems_of(labels={"app.kubernetes.io/managed-by": "me"})] == ["spec.template.labels"]


@pytest.mark.parametrize(
    ("size", "hints"),
    [
        ("64", ["write 64Gi"]),
        ("2048", ["write 2048Mi"]),
        ("512m", ["write 512Mi"]),
        ("1k", ["write a size such as 10Gi"]),
    ]
    + [(size, []) for size in ("0", "1Mi", "20Gi")],
)
def test_a_size_of_a_volume_has_a_unit(size: str, hints: list[str]) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    volumes = [
        {"name": "a", "emptyDir": {"sizeLimit": size}},
        {"name": "b", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}},
    ]
    paths = ("[0].emptyDir.sizeLimit", "[1].ephemeral.volumeClaimTemplate.spec.resources.requests.storage")
    wanted = [(f"spec.template.volumes{path}", hint) for path in paths for hint in hints]
    assert problems_of(volumes=volumes) == wanted

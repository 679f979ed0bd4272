"""`finetune images`: every image to pull, and its place in a private registry."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_command import finetune
from finetune_operator.cli.files.images import moved

DIGEST = f"sha256:{'a' * 64}"
JOB: dict[str, Any] = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTuneJob",
    "metadata": {"name": "first"},
    "spec": {
        "task": "text-classification",
        "model": {"uri": "hf://a/b"},
        "dataset": {"uri": "hf://c/d"},
        "training": {},
        "image": "ghcr.example.com/team/trainer:2",
    },
}
GLOB_NOTE = "Note: jobs may also use images that match *; name the job files to list theirs\n"


def images(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return finetune("images", *arguments, folder=folder)


def test_without_anything_they_are_those_of_the_manifests(tmp_path: Path) -> None:
    ran = images(folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (
        0, "finetune-operator:0.1.0\nfinetune-trainer:0.1.0\nvllm/vllm-openai:v0.33.0\n",
    )  # fmt: skip
    assert ran.stderr == GLOB_NOTE


def test_each_line_with_a_registry_has_source_and_target(tmp_path: Path) -> None:
    ran = images("--registry", "registry.example.com/mirror/", folder=tmp_path)
    assert ran.stdout.splitlines() == [
        "finetune-operator:0.1.0 registry.example.com/mirror/finetune-operator:0.1.0",
        "finetune-trainer:0.1.0 registry.example.com/mirror/finetune-trainer:0.1.0",
        "vllm/vllm-openai:v0.33.0 registry.example.com/mirror/vllm/vllm-openai:v0.33.0",
    ]


def test_settings_and_job_files_add_theirs_and_each_image_comes_once(tmp_path: Path) -> None:
    defaults = {"image": "t.example.com/trainer:1", "vllmImage": "t.example.com/vllm:1"}
    settings = {"defaults": defaults, "images": ["t.example.com/*", JOB["spec"]["image"]]}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    ran = images("-f", "job.yaml", "--settings", "settings.yaml", "-o", "json", folder=tmp_path)
    assert json.loads(ran.stdout) == {
        "images": [
            {"image": "finetune-operator:0.1.0", "usedBy": ["operator"]},
            {"image": "t.example.com/trainer:1", "usedBy": ["jobs that name no image"]},
            {"image": "t.example.com/vllm:1", "usedBy": ["endpoints with optimization vllm"]},
            {"image": "ghcr.example.com/team/trainer:2", "usedBy": ["images in the settings", "job first"]},
        ]
    }


def test_values_of_the_chart_name_images_as_the_chart_does(tmp_path: Path) -> None:
    values = {
        "global": {"imageRegistry": "registry.example.com"},
        "image": {"registry": "ghcr.example.com/", "repository": "ml/finetune-operator", "digest": DIGEST},
        "trainer": {"image": {"tag": "1-cpu"}},
        "vllm": {"image": {"registry": "quay.example.com", "tag": "v1"}},
        "settings": {"images": ["registry.example.com/*"]},
        "replicas": 3,
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    assert yaml.safe_load(images("--values", "values.yaml", "-o", "yaml", folder=tmp_path).stdout) == {
        "images": [
            {
                "image": f"ghcr.example.com/ml/finetune-operator@{DIGEST}",
                "target": f"registry.example.com/ml/finetune-operator@{DIGEST}",
                "usedBy": ["operator"],
            },
            {
                "image": "finetune-trainer:1-cpu",
                "target": "registry.example.com/finetune-trainer:1-cpu",
                "usedBy": ["jobs that name no image"],
            },
            {
                "image": "quay.example.com/vllm/vllm-openai:v1",
                "target": "registry.example.com/vllm/vllm-openai:v1",
                "usedBy": ["endpoints with optimization vllm"],
            },
        ]
    }


MOVED: dict[str, tuple[str, str, str]] = {
    "no registry": ("a/b:1", "", "a/b:1"),
    "a name without one": ("a/b:1", "r.example.com", "r.example.com/a/b:1"),
    "a host with a dot": ("ghcr.example.com/a/b:1", "r.example.com/x", "r.example.com/x/a/b:1"),
    "a host with a port": ("registry:5000/b", "r.example.com", "r.example.com/b"),
    "this machine": ("localhost/b:1", "r.example.com", "r.example.com/b:1"),
    "there already": ("r.example.com/b:1", "r.example.com", "r.example.com/b:1"),
}


@pytest.mark.parametrize("case", MOVED)
def test_an_image_in_another_registry_is_named_for(case: str) -> None:
    image, registry, target = MOVED[case]
    assert moved(image, registry) == target


WRONG: dict[str, tuple[str, str]] = {
    "a file that is not there": ("", "--values: cannot read values.yaml: No such file or directory"),
    "text where values are": ("image: finetune", "--values: values.yaml: image: "),
    "a setting that is none": ("settings: {colour: blue}", "colour"),
    "a key twice": ("image: {}\nimage: {}\n", "values.yaml:2"),
    "two documents": ("a: 1\n---\nb: 1\n", "expected one document, found 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_unusable_values_are_reported_for(case: str, tmp_path: Path) -> None:
    text, message = WRONG[case]
    if text:
        (tmp_path / "values.yaml").write_text(text)
    ran = images("--values", "values.yaml", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr


def test_values_and_settings_exclude_each_other(tmp_path: Path) -> None:
    ran = images("--values", "a", "--settings", "b", folder=tmp_path)
    assert ran.returncode == 2
    assert "exclude each other" in ran.stderr

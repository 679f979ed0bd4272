"""The overlays of the kustomize base: each builds, and equals the chart with the values of the same name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from chart_files import ROOT
from chart_rendering import Object, kustomize, one, render
from finetune_operator.cli.files.images import read_values
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.settings.settings import Settings

OVERLAYS = ROOT / "manifests" / "overlays"
NAMES = sorted(folder.name for folder in OVERLAYS.iterdir())


def test_there_is_an_overlay_for_each_way_to_install() -> None:
    assert NAMES == ["air-gap", "high-availability", "monitoring", "namespaced"]


def pods(found: tuple[Object, ...]) -> Any:
    return one(found, "Deployment", "finetune-operator")["spec"]["template"]["spec"]


def settings_of(found: tuple[Object, ...]) -> Settings:
    mounted = next(volume["configMap"]["name"] for volume in pods(found)["volumes"] if "configMap" in volume)
    (config,) = (
        each
        for each in found
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].startswith("finetune-operator-settings")
    )
    assert config["metadata"]["name"] == mounted
    settings, problems = check_settings(yaml.safe_load(config["data"]["settings.yaml"]))
    assert problems == []
    assert settings is not None
    return settings


@pytest.mark.parametrize("name", NAMES)
def test_overlay_has_usage_notes_and_valid_settings(name: str) -> None:
    text = (OVERLAYS / name / "kustomization.yaml").read_text()
    assert f"kubectl apply --server-side -k manifests/overlays/{name}\n" in text
    found = kustomize(OVERLAYS / name)
    assert {each["metadata"].get("namespace", "finetune-system") for each in found} <= {"finetune-system", "team-a"}
    assert settings_of(found)


def without_selectors(constraints: list[Object]) -> list[Object]:
    return [{key: value for key, value in each.items() if key != "labelSelector"} for each in constraints]


SAME: dict[str, tuple[str, Callable[[tuple[Object, ...]], Any]]] = {
    "the settings without access to others": ("air-gap", lambda found: settings_of(found).model_dump()),
    "the pull secrets without access to others": ("air-gap", lambda found: pods(found)["imagePullSecrets"]),
    "replicas that stay": ("high-availability", lambda found: one(found, "PodDisruptionBudget", "finetune-operator")[
        "spec"]["minAvailable"]),
    "replicas": ("high-availability", lambda found: one(found, "Deployment", "finetune-operator")["spec"]["replicas"]),
    "priority": ("high-availability", lambda found: pods(found)["priorityClassName"]),
    "resources": ("high-availability", lambda found: pods(found)["containers"][0]["resources"]),
    "spread": ("high-availability", lambda found: without_selectors(pods(found)["topologySpreadConstraints"])),
    "the monitor": ("monitoring", lambda found: one(found, "ServiceMonitor", "finetune-operator")["spec"]),
    "the monitor of servers": ("monitoring", lambda found: one(found, "PodMonitor", "finetune-endpoints")["spec"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_overlay_and_values_of_the_same_name_agree_on(case: str) -> None:
    name, part = SAME[case]
    more: Object = {"global": {"imageRegistry": "registry.example.com"}} if name == "air-gap" else {}
    assert part(kustomize(OVERLAYS / name)) == part(render(more, name))


def test_namespaced_overlay_has_no_cluster_objects_and_the_chart_rules() -> None:
    found = kustomize(OVERLAYS / "namespaced")
    assert [each["kind"] for each in found if "namespace" not in each["metadata"]] == []
    chart = render({"watchNamespaces": ["team-a"]})

    def rights(objects: tuple[Object, ...]) -> dict[tuple[str, str], Any]:
        return {
            (each["metadata"]["namespace"], each["metadata"]["name"]): each["rules"]
            for each in objects
            if each["kind"] == "Role" and not each["metadata"]["name"].endswith("-test")
        }

    assert rights(found) == rights(chart)
    assert settings_of(found) == settings_of(chart)
    bound = {
        (each["metadata"]["namespace"], each["roleRef"]["name"], each["subjects"][0]["namespace"])
        for each in found
        if each["kind"] == "RoleBinding"
    }
    assert bound == {
        ("team-a", "finetune-operator-jobs", "finetune-system"),
        ("finetune-system", "finetune-operator", "finetune-system"),
    }


def test_the_monitor_finds_the_service_with_the_metrics_and_no_other() -> None:
    found = kustomize(OVERLAYS / "monitoring")
    wanted = one(found, "ServiceMonitor", "finetune-operator")["spec"]["selector"]["matchLabels"].items()
    services = [each["metadata"] for each in found if each["kind"] == "Service"]
    assert [each["name"] for each in services if wanted <= each["labels"].items()] == ["finetune-operator"]


def test_air_gapped_release_pulls_all_images_from_one_registry() -> None:
    found = kustomize(OVERLAYS / "air-gap")
    images = [pods(found)["containers"][0]["image"], settings_of(found).defaults.image]
    assert images == ["registry.example.com/finetune-operator:0.1.0", "registry.example.com/finetune-trainer:0.1.0"]
    installation = read_values(ROOT / "tests" / "chart" / "values" / "air-gap.yaml")
    assert installation.registry == "registry.example.com/mirror"

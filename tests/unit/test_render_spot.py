"""Allowed nodes for the pods of a training on spot nodes, beside the user's template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_operator.jobs.launchers.launcher_registry import render, stage
from finetune_operator.jobs.render.render_types import Attempt, RenderContext
from finetune_operator.jobs.render.spot_affinity import only_on
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.launcher_rows import TRAINING, LauncherName
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.types import Capacity, FineTuneJob

LAUNCHERS = TRAINING
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
SITE = Settings.model_validate_json(
    json.dumps(
        {
            "spot": {
                "nodes": [{"pool": "cheap"}, {"pool": "mixed", "tier": "preemptible"}],
                "tolerations": [{"key": "cheap", "operator": "Exists", "effect": "NoSchedule"}],
            }
        }
    )
)


def label(key: str, *values: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}


def terms(*expressions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a required node affinity with these alternatives."""
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": list(one)} for one in expressions]}}}


NODES = ({"pool": "cheap"}, {"pool": "mixed", "tier": "preemptible"})
CHEAP, MIXED = [label("pool", "cheap")], [label("pool", "mixed"), label("tier", "preemptible")]
EU, US = [label("zone", "eu")], [label("zone", "us")]
AVOIDED = {
    PREFERRED: [{"weight": 100, "preference": {"matchExpressions": [label("kubernetes.io/hostname", "node-7")]}}]
}
ON_NODE_A = {"matchFields": [label("metadata.name", "node-a")]}

AFFINITIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing is asked for: one of the kinds of spot nodes": ({}, terms(CHEAP, MIXED)),
    "each alternative of the user's holds together with each of ours": (
        terms(EU, US),
        terms([*EU, *CHEAP], [*EU, *MIXED], [*US, *CHEAP], [*US, *MIXED]),
    ),
    "what holds together in the user's term still does": (
        terms([*EU, label("disk", "ssd")]),
        terms([*EU, label("disk", "ssd"), *CHEAP], [*EU, label("disk", "ssd"), *MIXED]),
    ),
    "a condition on a field of the node stays": (
        {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [ON_NODE_A]}}},
        {
            "nodeAffinity": {
                REQUIRED: {
                    "nodeSelectorTerms": [
                        {**ON_NODE_A, "matchExpressions": CHEAP},
                        {**ON_NODE_A, "matchExpressions": MIXED},
                    ]
                }
            }
        },
    ),
    "a wish, such as to avoid a node, stays a wish": (
        {"nodeAffinity": AVOIDED, "podAntiAffinity": {"x": 1}},
        {"nodeAffinity": {**AVOIDED, **terms(CHEAP, MIXED)["nodeAffinity"]}, "podAntiAffinity": {"x": 1}},
    ),
    "an empty term matches no node, also beside ours": (
        {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}, {"matchExpressions": EU}, {"matchExpressions": []}]}}},
        terms([*EU, *CHEAP], [*EU, *MIXED]),
    ),
    "nothing but empty terms goes on matching no node": (
        {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}]}}},
        {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}]}}},
    ),
}


@pytest.mark.parametrize("case", AFFINITIES)
def test_pods_are_kept_on_spot_nodes(case: str) -> None:
    given, expected = AFFINITIES[case]
    before = json.dumps(given)
    assert only_on(given, NODES) == expected
    assert json.dumps(given) == before


def test_without_labels_an_affinity_stays_as_it_is() -> None:
    assert only_on(terms(EU), ()) == terms(EU)


# ---------------------------------------------------------------------------------------------------------- whole pods


def context(settings: Settings, launcher: LauncherName, **fields: Any) -> RenderContext:
    spec = {
        "task": "text-classification",
        "model": {"uri": "hf://org/model"},
        "dataset": {"uri": "hf://org/data"},
        "training": {"maxSteps": 5},
        "predict": {},
        "resources": {"nodes": 2},
        "launcher": launcher,
        "spot": {"enabled": True},
        **fields,
    }
    text = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "reviews"}, "spec": spec}
    return RenderContext("team-a", FineTuneJob.model_validate_json(json.dumps(text)).spec, settings)


def rendered(made: RenderContext, attempt: Attempt | None = None) -> tuple[Any, ...]:
    job = FineTuneJob.model_validate(
        {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJob",
            "metadata": {"name": "reviews"},
            "spec": made.spec,
        }
    )
    planned = plan(job, Facts(served=LAUNCHERS), made.settings)
    return render(planned, made) if attempt is None else stage(planned, made, attempt)


def pods(value: Any) -> Iterator[Any]:
    """Yield every pod template in manifests, wherever their kind keeps it."""
    match value:
        case {"metadata": _, "spec": {"containers": _}}:
            yield value
        case dict():
            for inner in value.values():
                yield from pods(inner)
        case list() | tuple():
            for inner in value:
                yield from pods(inner)


@pytest.mark.parametrize(("launcher", "count"), [("pytorchjob", 1), ("mpijob", 2), ("job", 1)])
def test_all_pods_of_the_training_and_no_others_are_kept_there(launcher: LauncherName, count: int) -> None:
    found: dict[str, list[Any]] = {}
    for pod in pods(rendered(context(SITE, launcher))):
        found.setdefault(pod["metadata"]["labels"]["finetune.dev/stage"], []).append(pod)
    assert [(name, len(made)) for name, made in found.items()] == [
        ("prepare", 1), ("train", count), ("evaluate", 1), ("predict", 1),
    ]  # fmt: skip
    for name, made in found.items():
        for pod in made:
            spec, capacity = pod["spec"], pod["metadata"]["labels"].get("finetune.dev/capacity")
            kept = {"affinity": spec.get("affinity"), "tolerations": spec.get("tolerations"), "capacity": capacity}
            assert kept == (
                {
                    "affinity": terms(CHEAP, MIXED),
                    "tolerations": [{"key": "cheap", "operator": "Exists", "effect": "NoSchedule"}],
                    "capacity": "spot",
                }
                if name == "train"
                else {"affinity": None, "tolerations": None, "capacity": None}
            )


@pytest.mark.parametrize("capacity", ["onDemand", None])
def test_pods_after_a_fallback_may_run_on_any_node(capacity: Capacity | None) -> None:
    (pod,) = pods(rendered(context(CLUSTER_SETTINGS, "job"), Attempt(Stage.TRAIN, 2, capacity=capacity)))
    assert ("affinity" in pod["spec"], "tolerations" in pod["spec"]) == (False, False)
    assert pod["metadata"]["labels"].get("finetune.dev/capacity") == capacity


def test_avoided_nodes_the_users_terms_and_tolerations_all_hold_together() -> None:
    template = {
        "nodeSelector": {"team": "a"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "affinity": terms(EU, US),
    }
    made = context(SITE, "job", template=template)
    (pod,) = pods(rendered(made, Attempt(Stage.TRAIN, 2, avoid_nodes=("node-7",), capacity="spot")))
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    assert (
        affinity[REQUIRED]
        == terms([*EU, *CHEAP], [*EU, *MIXED], [*US, *CHEAP], [*US, *MIXED])["nodeAffinity"][REQUIRED]
    )
    assert affinity[PREFERRED] == [
        {
            "weight": 100,
            "preference": {
                "matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["node-7"]}]
            },
        }
    ]
    assert pod["spec"]["nodeSelector"] == {"team": "a"}
    assert [one["key"] for one in pod["spec"]["tolerations"]] == ["cheap", "dedicated"]


def test_as_shipped_the_nodes_are_those_of_the_common_clouds() -> None:
    (pod,) = pods(rendered(context(CLUSTER_SETTINGS, "job"), Attempt(Stage.TRAIN, capacity="spot")))
    assert pod["spec"]["affinity"] == terms(
        [label("eks.amazonaws.com/capacityType", "SPOT")],
        [label("karpenter.sh/capacity-type", "spot")],
        [label("cloud.google.com/gke-spot", "true")],
        [label("kubernetes.azure.com/scalesetpriority", "spot")],
    )
    assert pod["spec"]["tolerations"] == [
        {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
        {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot", "effect": "NoSchedule"},
    ]

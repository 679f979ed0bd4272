"""An administrator's settings: all problems are reported at once, and the documentation is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune_operator.documents import read_documents
from finetune_operator.documents.settings_file import SettingsError, read_settings_file
from finetune_operator.spec.checks import settings_check
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.schema.reference_docs import SETTINGS_EXAMPLE
from finetune_operator.spec.settings.settings import Price, Settings
from mending import GONE, Edit, alternatives, apply, created_at, missed_calls, without_gone

PRICE = {"product": "H100", "gpus": 8, "perHour": 90.0}
WRONG: dict[str, tuple[Any, list[tuple[str, str | None, str]]]] = {
    "a list in place of settings": ([], [("", "a list of 0 items", "Invalid")]),
    "misspelt settings, on two levels": (
        {"namespace": ["a"], "limits": {"imagePullSecond": 5}},
        [("limits.imagePullSecond", "5", "Unknown"), ("namespace", "a list of 1 item", "Unknown")],
    ),
    "a launcher that the cluster is asked for, and not the file": (
        {"servedLaunchers": ["job"]},
        [("servedLaunchers", "a list of 1 item", "Unknown")],
    ),
    "an address without https, one with a path": (
        {"progress": {"url": "http://progress:8443"}},
        [("progress.url", '"http://progress:8443"', "Invalid")],
    ),
    "a first delay above the longest": (
        {"limits": {"restartDelaySeconds": 60, "restartDelayMostSeconds": 30}},
        [("limits.restartDelaySeconds", "60.0", "Invalid")],
    ),
    "a default image that no job may name": (
        {"images": ["registry.example.com/*"]},
        [("defaults.image", '"finetune-trainer:0.1.0"', "Forbidden")],
    ),
    "rules for the network that the API server would refuse of every job": (
        {
            "networkPolicy": {
                "extraEgress": [
                    {"to": [{"ipBlock": {"cidr": "10.0.0.1/8", "except": ["10/8"]}}, {}]},
                    {"to": [{"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}]},
                ]
            }
        },
        [
            ("networkPolicy.extraEgress[0].to[0].ipBlock.cidr", '"10.0.0.1/8"', "Invalid"),
            ("networkPolicy.extraEgress[0].to[0].ipBlock.except[0]", '"10/8"', "Invalid"),
            ("networkPolicy.extraEgress[0].to[1]", None, "Invalid"),
            ("networkPolicy.extraEgress[1].to[0]", None, "Invalid"),
        ],
    ),
    "ports that are none, and a misspelt rule": (
        {"networkPolicy": {"egressPorts": [443, 0], "extraEgress": [{"ports": [{"prot": 1}]}]}},
        [
            ("networkPolicy.egressPorts[1]", "0", "Invalid"),
            ("networkPolicy.extraEgress[0].ports[0].port", None, "Required"),
            ("networkPolicy.extraEgress[0].ports[0].prot", "1", "Unknown"),
        ],
    ),
    "a bound of costs without prices": ({"allow": {"maxCost": 5}}, [("allow.maxCost", "5.0", "Required")]),
    "huge pages that are none, and a variable that is none": (
        {"network": {"devices": [{"resource": "a.com/rdma", "hugePages": "3Mi", "env": {"NCCL-IB": "mlx5"}}]}},
        [
            ("network.devices[0].hugePages", '"3Mi"', "Invalid"),
            ("network.devices[0].env.NCCL-IB", None, "Invalid"),
        ],
    ),
    "two rows of one GPU": (
        {"hardware": [{"name": "X1", "memory": "80Gi"}, {"name": "x1", "memory": "40Gi"}]},
        [("hardware[1].name", '"x1"', "Duplicate")],
    ),
    "a currency in words": ({"currency": "dollars"}, [("currency", '"dollars"', "Invalid")]),
    "two prices for the same node": (
        {"prices": [PRICE, {**PRICE, "gpus": 4}, PRICE]},
        [("prices[2]", '"H100 with 8 GPUs"', "Duplicate")],
    ),
    "a namespace twice, and one that cannot be": (
        {"namespaces": ["a", "a"], "defaults": {"storageClassName": "Fast"}},
        [("defaults.storageClassName", '"Fast"', "Invalid"), ("namespaces[1]", '"a"', "Duplicate")],
    ),
    "a namespace that cannot be hides no other fault": (
        {"namespaces": ["My_Team"], "schemes": ["hf", "ftp"], "prices": [{"product": "cpu", "gpus": 0}]},
        [
            ("namespaces[0]", '"My_Team"', "Invalid"),
            ("schemes[1]", '"ftp"', "NotSupported"),
            ("prices[0].perHour", None, "Required"),
        ],
    ),
    "labels and tolerations of spot nodes that no node can have": (
        {
            "spot": {
                "nodes": [{"pool": "cheap", "tier": 3}],
                "tolerations": [{"key": "spot", "effect": "Never"}],
            }
        },
        [
            ("spot.nodes[0].tier", "3", "Invalid"),
            ("spot.tolerations[0].effect", '"Never"', "NotSupported"),
        ],
    ),
    "spot nodes without a label, a label that is none, and a toleration that says nothing": (
        {"spot": {"nodes": [{"pool": "spot nodes"}, {}], "tolerations": [{"value": "x"}]}},
        [
            ("spot.nodes[0].pool", '"spot nodes"', "Invalid"),
            ("spot.nodes[1]", None, "Required"),
            ("spot.tolerations[0].operator", '"Equal"', "Invalid"),
        ],
    ),
    "no spot nodes at all": ({"spot": {"nodes": []}}, [("spot.nodes", "a list of 0 items", "Invalid")]),
    "numbers outside of their bounds": (
        {"progress": {"statusSeconds": 0}, "defaults": {"terminationGraceSeconds": "120"}},
        [("defaults.terminationGraceSeconds", '"120"', "Invalid"), ("progress.statusSeconds", "0", "Invalid")],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_all_problems_of_the_settings_are_reported_at_once(case: str) -> None:
    value, expected = WRONG[case]
    settings, problems = check_settings(value)
    assert settings is None
    assert [(problem.path, problem.value, problem.reason) for problem in problems] == expected
    assert all(problem.rule and problem.hint for problem in problems)


CHOSEN: dict[str, dict[str, Any]] = {
    "limits.restartDelaySeconds": {"limits.restartDelaySeconds": 30, "limits.restartDelayMostSeconds": 60},
    "defaults.image": {"defaults.image": "registry.example.com/finetune-trainer:0.1.0"},
    "networkPolicy.extraEgress[0].to[0].ipBlock.cidr": {
        "networkPolicy.extraEgress[0].to[0].ipBlock.cidr": "10.0.0.0/8"
    },
    "networkPolicy.extraEgress[0].to[0].ipBlock.except[0]": {
        "networkPolicy.extraEgress[0].to[0].ipBlock.except": ["10.1.0.0/16"]
    },
    "networkPolicy.extraEgress[0].to[1]": {"networkPolicy.extraEgress[0].to[1]": {"podSelector": {}}},
    "networkPolicy.extraEgress[1].to[0]": {"networkPolicy.extraEgress[1].to[0]": {"podSelector": {}}},
    "networkPolicy.extraEgress[0].ports[0].port": {},
    "prices[2]": {"prices[2]": GONE},
    "namespaces[1]": {"namespaces[1]": GONE},
    "prices[0].perHour": {"prices[0].perHour": 1.0},
    "spot.nodes[0].pool": {"spot.nodes[0].pool": "spot"},
    "spot.nodes[1]": {"spot.nodes[1]": GONE},
    "allow.maxCost": {"prices": [PRICE]},
    "network.devices[0].hugePages": {"network.devices[0].hugePages": "5120Mi"},
    "network.devices[0].env.NCCL-IB": {"network.devices[0].env": {"NCCL_IB_HCA": "mlx5"}},
    "hardware[1].name": {"hardware[1]": GONE},
}
"""Blamed path -> edits, where the hint leaves a choice to the administrator."""


@pytest.mark.parametrize("case", WRONG)
def test_settings_are_valid_once_their_hints_are_followed(case: str) -> None:
    value, _ = WRONG[case]
    value = value or {}  # settings are an object
    for _ in range(2):
        edits: list[Edit] = []
        for problem in check_settings(value)[1]:
            chosen = CHOSEN.get(problem.path)
            ways = alternatives(problem) if chosen is None else [[Edit(*edit) for edit in chosen.items()]]
            assert ways, f"no hint can be followed: {problem.path}: {problem.hint}"
            edits += ways[0]
        value = without_gone(apply(value, edits))
    assert check_settings(value)[1] == []


def test_cases_reach_every_message_about_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with created_at(monkeypatch) as reached:
        for value, _ in WRONG.values():
            check_settings(value)
    assert missed_calls(settings_check, reached) == []


@pytest.mark.parametrize("value", [None, {}, {"namespaces": None, "defaults": {"image": None}}])
def test_omitted_or_null_setting_has_its_default(value: Any) -> None:
    assert check_settings(value) == (Settings(), [])


def test_problem_has_rule_and_hint() -> None:
    assert check_settings({"limits": {"restartDelaySeconds": 60, "restartDelayMostSeconds": 30}})[1] == [
        Problem(
            "limits.restartDelaySeconds",
            "60.0",
            "must not be above limits.restartDelayMostSeconds, 30",
            "swap the two, or raise limits.restartDelayMostSeconds",
        )
    ]


def test_the_example_of_the_documentation_can_be_used() -> None:
    (document,), problems = read_documents(SETTINGS_EXAMPLE)
    settings, wrong = check_settings(document.value)
    assert (list(problems), wrong) == ([], [])
    assert settings is not None
    assert settings.namespaces == ("ml-team", "research")
    assert settings.prices[1] == Price(product="cpu", gpus=0, perHour=1.2)


def test_a_file_with_wrong_settings_is_refused_with_all_their_paths(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("currency: dollars\nlimits:\n  imagePullSecond: 5\n", encoding="utf-8")
    with pytest.raises(SettingsError) as refused:
        read_settings_file(file)
    assert refused.value.problems == (
        f"{file}: limits.imagePullSecond 5: there is no such field; did you mean imagePullSeconds?",
        f'{file}: currency "dollars": must be an ISO 4217 currency code, such as USD; change it, or leave it out',
    )


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("# nothing\n", encoding="utf-8")
    assert read_settings_file(file) == Settings()

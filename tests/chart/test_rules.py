"""The alerts: promtool's verdict on each, and their messages to people."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring import FILES, ROOT, TARGET_LABELS, lived, matchers, names, of_operator, of_servers, promtool

RULES: dict[str, Any] = yaml.safe_load((FILES / "rules.yaml").read_text(encoding="utf-8"))
TESTS: dict[str, Any] = yaml.safe_load((FILES / "rules.test.yaml").read_text(encoding="utf-8"))
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
MEANING = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_alerts_that_a_fleet_needs_are_there() -> None:
    assert set(ALERTS) == {
        "FineTuneJobFailed", "FineTuneJobStuck", "FineTuneJobsQueuedTooLong", "FineTuneEstimatesFarOff",
        "FineTuneOperatorDown", "FineTuneOperatorNobodyLeads", "FineTuneOperatorTwoLead", "FineTuneReconcileErrors",
        "FineTuneApiErrors", "FineTuneProgressRefused", "FineTuneCertificateEndsSoon", "FineTuneEndpointErrors",
        "FineTuneEndpointOverloaded", "FineTuneEndpointSlow",
    }  # fmt: skip


def test_prometheus_takes_the_rules() -> None:
    done = promtool("check", "rules", FILES / "rules.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_alerts_pass_their_promtool_tests() -> None:
    done = promtool("test", "rules", FILES / "rules.test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_has_a_firing_and_a_silent_test(alert: str) -> None:
    named = f'alertname="{alert}"'
    queries = [one for test in TESTS["tests"] for one in test["promql_expr_test"] if named in one["expr"]]
    assert [one for one in queries if one["exp_samples"]]
    assert [one for one in queries if not one["exp_samples"]]


@pytest.mark.parametrize("instead", ["vector(0) > 1", "vector(1)"], ids=["never fire", "always fire"])
def test_promtool_tests_detect_alerts_that(instead: str, tmp_path: Path) -> None:
    groups = [
        {
            **group,
            "rules": [{"alert": rule["alert"], "expr": instead, "labels": rule["labels"]} for rule in group["rules"]],
        }
        for group in RULES["groups"]
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    (tmp_path / "rules.test.yaml").write_text(yaml.safe_dump(TESTS))
    done = promtool("test", "rules", tmp_path / "rules.test.yaml")
    assert done.returncode == 1, done.stdout + done.stderr
    for alert in ALERTS:
        assert alert in done.stdout + done.stderr


def test_exposition_follows_the_conventions_of_prometheus() -> None:
    done = promtool("check", "metrics", stdin=lived().exposition().decode())
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_has_severity_and_runbook(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook"}
    assert len(annotations["summary"]) < 100
    assert annotations["summary"].endswith(".")
    assert annotations["description"].endswith(".")
    page, _, anchor = annotations["runbook"].partition("#")
    assert (page, anchor) == ("docs/metrics.md", alert.lower())
    headings = re.findall(r"^### (\w+)$", MEANING, re.MULTILINE)
    assert alert in headings, "docs/metrics.md does not tell what to do about it"


def test_no_runbook_is_of_an_alert_that_is_not_there() -> None:
    assert set(re.findall(r"^### (FineTune\w+)$", MEANING, re.MULTILINE)) == set(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_queries_only_existing_metrics_and_labels(alert: str) -> None:
    known: dict[str, dict[str, set[str]]] = {}
    for series in (*of_operator(), *of_servers()):
        for label, value in series.labels.items():
            known.setdefault(series.name, {}).setdefault(label, set()).add(value)
    expression = ALERTS[alert]["expr"]
    queried = names(expression)
    assert queried
    assert queried <= set(known)
    for metric, label, _, _ in matchers(expression):
        assert label in {*known[metric], *TARGET_LABELS}
    for label in re.findall(r"\b(\w+)\b", " ".join(re.findall(r"by \(([^)]*)\)", expression))):
        assert any(label in {*known[metric], *TARGET_LABELS} for metric in queried), label


def test_the_links_of_the_page_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https:)([^)#]*)#?([^)]*)\)", MEANING)
    assert len(links) > 3
    for page, anchor in links:
        text = (ROOT / "docs" / (page or "metrics.md")).read_text(encoding="utf-8")
        anchors = {
            re.sub(r"[^\w -]", "", line).replace(" ", "-").lower() for line in re.findall(r"^#+ (.+)$", text, re.M)
        }
        assert not anchor or anchor in anchors, (page, anchor)

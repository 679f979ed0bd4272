"""The dashboards: every panel queries existing series, and Grafana can read them anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from finetune_operator.spec.types import API_VERSION, KIND, Phase
from monitoring import (
    FILES,
    ROOT,
    TARGET_LABELS,
    Series,
    jobs,
    matchers,
    names,
    of_operator,
    of_servers,
    of_state,
    promtool,
    state_config,
)
from served_series import server_metrics

DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted((FILES / "dashboards").glob("*.json"))
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OPERATOR = of_operator()
STATE = [series for document in jobs().values() for series in of_state(document, state_config())]
OF_DASHBOARD: dict[str, list[Series]] = {
    "fleet": OPERATOR,
    "operator": OPERATOR,
    "job": STATE,
    "endpoints": of_servers(),
}
FOR_GRAFANA = {"$__rate_interval": "5m", "$__range": "1h", "$namespace": "ops", "$endpoint": ".*"}


def panels(dashboard: str) -> list[dict[str, Any]]:
    """Return all panels but the headings of rows."""
    return [panel for panel in DASHBOARDS[dashboard]["panels"] if panel["type"] != "row"]


def expressions(dashboard: str) -> Iterator[tuple[str, str]]:
    """Yield the panel's title, and the expression as Grafana would send it but for the job's name."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in FOR_GRAFANA.items():
                expression = expression.replace(name, value)
            yield panel["title"], expression


def variables(dashboard: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = DASHBOARDS[dashboard]["templating"]["list"]
    return listed


def test_dashboards_show_fleet_operator_one_job_and_endpoints() -> None:
    assert set(DASHBOARDS) == set(OF_DASHBOARD)


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_a_dashboard_can_be_read_into_any_grafana(dashboard: str) -> None:
    whole = DASHBOARDS[dashboard]
    assert "uid" not in whole, "Grafana gives it one; a fixed one is taken where two installations meet"
    assert whole.get("id") is None
    assert 36 <= whole["schemaVersion"] <= 41, "Grafana 9 to 12"
    assert whole["title"]
    assert whole["tags"] == ["finetune-operator"]
    ids = [panel["id"] for panel in whole["panels"]]
    assert len(ids) == len(set(ids))
    assert (variables(dashboard)[0]["type"], variables(dashboard)[0]["name"]) == ("datasource", "datasource")
    sources = [panel["datasource"] for panel in panels(dashboard)]
    sources += [target["datasource"] for panel in panels(dashboard) for target in panel["targets"]]
    sources += [variable["datasource"] for variable in variables(dashboard)[1:]]
    assert sources
    assert all(source == SOURCE for source in sources)


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_panels_have_a_place_of_their_own(dashboard: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARDS[dashboard]["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"], (x, y)
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len(titles) == len({(panel["type"], panel["title"]) for panel in panels(dashboard)})


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_every_variable_that_is_used_is_there(dashboard: str) -> None:
    text = json.dumps([panel["targets"] for panel in panels(dashboard)] + variables(dashboard))
    used = {name for pair in re.findall(r"\$(?:\{(\w+)\}|(\w+))", text) for name in pair if name}
    used = {name for name in used if not name.startswith("__")}
    assert used <= {variable["name"] for variable in variables(dashboard)}


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_panel_queries_only_existing_metrics_labels_and_values(dashboard: str) -> None:
    known: dict[str, dict[str, set[str]]] = {}
    for series in OF_DASHBOARD[dashboard]:
        for label, value in series.labels.items():
            known.setdefault(series.name, {}).setdefault(label, set()).add(value)
    queries = [(one["name"], one["definition"]) for one in variables(dashboard)[1:]]
    looked_at = 0
    for title, expression in [*expressions(dashboard), *queries]:
        expression = re.sub(r"^label_values\((.*), (\w+)\)$", r"count by (\2) (\1)", expression)
        queried = names(expression)
        assert queried, title
        assert queried <= set(known), title
        for metric, label, operator, value in matchers(expression):
            assert label in {*known[metric], *TARGET_LABELS}, (title, label)
            if operator in ("=", "=~") and "$" not in value and label not in TARGET_LABELS:
                assert any(re.fullmatch(value, one) for one in known[metric][label]), (title, label, value)
            looked_at += 1
    assert looked_at > 10


@pytest.mark.parametrize("dashboard", DASHBOARDS)
def test_no_panel_is_empty(dashboard: str, tmp_path: Path) -> None:
    """Prometheus' own engine answers each expression, on the series of an operator or of two jobs."""
    tests = []
    for _, expression in expressions(dashboard):
        of_one = [expression.replace("$job", job) for job in jobs()] if "$job" in expression else [expression]
        query = " or ".join(f"count({one})" for one in of_one)
        tests.append({"expr": f"({query}) > bool 0", "eval_time": "3h", "exp_samples": [{"labels": "{}", "value": 1}]})
    assert len(tests) > 15
    given = [{"series": one.notation, "values": one.values} for one in OF_DASHBOARD[dashboard]]
    document = {
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "promql_expr_test": tests}],
    }
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump(document))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_job_that_is_over_has_no_progress_and_no_time_left(tmp_path: Path) -> None:
    """Its status keeps the last stage's report: 54 % and 2 s left of an evaluation that failed the gate."""
    live = {"Completed", "Time left", "Last report", "Loss", "Steps", "Rows per second", "Tokens per second"}
    queried = [(title, expression) for title, expression in expressions("job") if title in live]
    assert {title for title, _ in queried} == live
    tests = [
        {
            "expr": f"count({expression.replace('$job', job)}) or vector(0)",
            "eval_time": "3h",
            "exp_samples": [{"labels": "{}", "value": shown}],
        }
        for _, expression in queried
        for job, shown in (("running", 1), ("over", 0))
    ]
    given = [{"series": one.notation, "values": one.values} for one in STATE]
    document = {
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "promql_expr_test": tests}],
    }
    file = tmp_path / "over.yaml"
    file.write_text(yaml.safe_dump(document))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_amounts_in_another_currency_are_shown_where_there_are_any(tmp_path: Path) -> None:
    """Each metric of money has a series for a currency that was set before, which is usually 0."""
    queried = [expression for _, expression in expressions("fleet") if "by (currency)" in expression]
    metrics = {name for expression in queried for name in names(expression)}
    assert metrics == {"finetune_cost_total", "finetune_cost_saved_total", "finetune_estimated_cost"}
    documents = [
        {
            "interval": "1m",
            "input_series": [
                {"series": f'{metric}{{namespace="ops",currency="{currency}"}}', "values": values}
                for metric in metrics
                for currency, values in (("EUR", own), ("other", other))
            ],
            "promql_expr_test": [
                {"expr": f"count({one})", "eval_time": "3h", "exp_samples": [{"labels": "{}", "value": shown}]}
                for one in queried
            ],
        }
        for own, other, shown in (("0x240", "0x240", 1), ("0+1x240", "0x240", 1), ("0+1x240", "0+2x240", 2))
    ]
    file = tmp_path / "money.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": documents}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_page_lists_every_metric_of_servers_with_type_and_labels() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = {
        (name, kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in re.findall(r"^\| `(finetune_serving_\w+)` \| (\w+) \| ([^|]*) \|", page, re.MULTILINE)
    }
    exported = {
        (family.name + "_total" * (family.type == "counter"), family.type, frozenset(sample.labels) - {"le"})
        for family in text_string_to_metric_families(server_metrics().text().decode())
        for sample in family.samples
        if family.name.startswith("finetune_serving_") and not sample.name.endswith("_created")
    }
    assert listed == exported


# -------------------------------------------------------------------------------------------------- kube-state-metrics


def test_the_state_of_a_job_is_read_from_fields_that_a_status_has() -> None:
    (resource,) = state_config()["spec"]["resources"]
    kind = resource["groupVersionKind"]
    assert (f"{kind['group']}/{kind['version']}", kind["kind"]) == (API_VERSION, KIND)
    made = {series.name for series in STATE}
    assert made == {f"{resource['metricNamePrefix']}_{metric['name']}" for metric in resource["metrics"]}
    assert all(metric["help"] for metric in resource["metrics"])
    phases = {series.labels["phase"] for series in STATE if series.name == "kube_finetunejob_phase"}
    assert phases == set(get_args(Phase))


def test_the_state_of_a_job_has_its_values_and_names() -> None:
    found = {series.notation: series.values for series in of_state(jobs()["over"], state_config())}
    assert found['kube_finetunejob_cost{namespace="ops", finetunejob="over", currency="EUR"}'] == "1.5x240"
    assert found['kube_finetunejob_metric{namespace="ops", finetunejob="over", metric="accuracy"}'] == "0.5x240"
    assert found['kube_finetunejob_phase{namespace="ops", finetunejob="over", phase="Failed"}'] == "1x240"
    assert found['kube_finetunejob_phase{namespace="ops", finetunejob="over", phase="Training"}'] == "0x240"
    attempt = 'kube_finetunejob_stage_attempt{namespace="ops", finetunejob="over", stage="train", state="Running"}'
    assert found[attempt] == "2x240"


def test_state_metrics_of_a_new_job_have_no_errors() -> None:
    new = {
        "metadata": {"name": "a", "namespace": "b", "creationTimestamp": "2026-01-01T12:00:00Z"},
        "spec": {"task": "t"},
    }
    assert {series.name for series in of_state(new, state_config())} == {
        "kube_finetunejob_info", "kube_finetunejob_created_time",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- the reader of PromQL


NAMES: dict[str, tuple[str, set[str]]] = {
    "a selector with a range": ('rate(a_total{x="b{c}"}[5m])', {"a_total"}),
    "labels to group by are no metrics": (
        "sum by (x, le) (rate(a_bucket[1h])) / sum without (y) (b)",
        {"a_bucket", "b"},
    ),
    "words between operands": ("a and on (x) b unless c or time() - d > bool 0", {"a", "b", "c", "d"}),
    "numbers and modifiers": ("1e3 * a offset 5m > 1.5", {"a"}),
}


@pytest.mark.parametrize("case", NAMES)
def test_the_metrics_of_an_expression_are_found(case: str) -> None:
    expression, expected = NAMES[case]
    assert names(expression) == expected

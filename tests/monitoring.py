"""Series of an operator and of kube-state-metrics as in Prometheus, and Prometheus' own tool to query them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from finetune_operator.controller.servers.operator_metrics import Metrics
from finetune_operator.spec.types import FineTuneJobStatus
from reconcile_world import World
from served_series import TARGET as SERVER
from served_series import VLLM_TARGET, server_metrics, vllm_metrics
from suite_plugins.patience import patient

ROOT = Path(__file__).parents[1]
FILES = ROOT / "charts" / "finetune-operator" / "files"
TARGET_LABELS = frozenset({"cluster", "namespace", "pod", "instance"})
"""Labels that Prometheus adds to all series of a target; `cluster` in installations that set it."""
TARGET = {"namespace": "ops", "pod": "finetune-operator-0", "instance": "10.0.0.1:8080"}

_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_LISTS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_KEYWORDS = frozenset({"and", "or", "unless", "bool", "offset", "by", "on", "without", "ignoring", "inf", "nan"})
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_NAMES = re.compile(r'__name__\s*=~?\s*"([^"]*)"')
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


@dataclass(frozen=True)
class Series:
    """One series, of one replica or one object."""

    name: str
    labels: Mapping[str, str]
    values: str
    """Values in promtool's notation."""

    @property
    def notation(self) -> str:
        return f"{self.name}{{{', '.join(f'{key}={json.dumps(value)}' for key, value in self.labels.items())}}}"


# ------------------------------------------------------------------------------------------------------------- queries


def names(expression: str) -> set[str]:
    """Return the metrics in a PromQL expression, also those of a condition on `__name__`."""
    listed = {name for text in _NAMES.findall(expression) for name in text.split("|")}
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", _LISTS.sub("", _TEXT.sub("", expression)))
    found = re.finditer(r"(?<![\w:.])([a-zA-Z_:][\w:]*)\b(?!\s*\()", bare)
    return {match[1] for match in found} - _KEYWORDS | listed


def matchers(expression: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield metric, label, operator and value of each condition."""
    for metric, inner in _SELECTOR.findall(expression):
        for label, operator, value in _MATCHER.findall(inner):
            yield metric, label, operator, value


# -------------------------------------------------------------------------------------------------------------- series


def lived() -> Metrics:
    """Return the metrics of a replica that has recorded each of them once."""
    metrics = Metrics()
    metrics.reconcile_done(0.1, "failed")
    metrics.request_done("list", "pods", 200, 0.1)
    metrics.progress_post(200)
    metrics.relisted("start")
    metrics.claims_left_over([2**30])
    metrics.follow_certificate("progress", lambda: datetime.now(UTC))
    world = World()
    world.settle()
    job = world.job()
    world.succeed()
    metrics.status_written(job, world.step().status)
    return metrics


def of_operator() -> list[Series]:
    """Return all series of such a replica; all of them grow."""
    return _growing(lived().exposition(), TARGET)


def of_servers() -> list[Series]:
    """Return all series of a server of ours and of one of vLLM; all of them grow."""
    ours = _growing(server_metrics().text(), SERVER)
    return [*ours, *_growing(generate_latest(vllm_metrics().registry), VLLM_TARGET)]


def _growing(exposition: bytes, target: Mapping[str, str]) -> list[Series]:
    return [
        Series(sample.name, {**sample.labels, **target}, "0+1x240")
        for family in text_string_to_metric_families(exposition.decode())
        for sample in family.samples
    ]


def of_state(document: Mapping[str, Any], config: Mapping[str, Any]) -> list[Series]:
    """Return the series of kube-state-metrics for an unchanging object."""
    return [Series(name, labels, f"{value:g}x240") for name, labels, value in state(document, config)]


def state(document: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield metric, labels and value of an object by kube-state-metrics' configuration for custom resources, as
    documented on its pages.

    `path` leads to a value, a list or a map; the labels of a metric start at the object, those of `each` at `path`.
    """
    (resource,) = config["spec"]["resources"]
    for metric in resource["metrics"]:
        base = _labels(document, resource["labelsFromPath"]) | _labels(document, metric.get("labelsFromPath", {}))
        name = f"{resource['metricNamePrefix']}_{metric['name']}"
        for labels, value in _values(document, metric["each"]):
            yield name, {**base, **labels}, value


def _values(document: Mapping[str, Any], each: Mapping[str, Any]) -> Iterator[tuple[dict[str, str], float]]:
    kind = each["type"]
    settings = each[kind[0].lower() + kind[1:]]
    at = _at(document, settings.get("path", ()))
    if at is None:
        return
    match kind:
        case "Info":
            yield _labels(at, settings["labelsFromPath"]), 1.0
        case "StateSet":
            assert at in settings["list"], at
            yield from (({settings["labelName"]: choice}, float(choice == at)) for choice in settings["list"])
        case "Gauge" if "labelFromKey" in settings:
            yield from (({settings["labelFromKey"]: key}, float(value)) for key, value in at.items())
        case "Gauge" if isinstance(at, list):
            for one in at:
                yield _labels(one, settings["labelsFromPath"]), _number(_at(one, settings["valueFrom"]))
        case "Gauge":
            yield {}, _number(at)
        case _:
            raise AssertionError(f"type {kind}")


def _at(value: Any, path: Iterable[str]) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _labels(value: Any, paths: Mapping[str, Sequence[str]]) -> dict[str, str]:
    found = {label: _at(value, path) for label, path in paths.items()}
    return {label: str(one) for label, one in found.items() if one is not None}


def _number(value: Any) -> float:
    """Convert to a number; a time becomes its Unix time."""
    return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else float(value)


def state_config() -> dict[str, Any]:
    """Return the configuration of kube-state-metrics."""
    config: dict[str, Any] = yaml.safe_load((FILES / "kube-state-metrics.yaml").read_text(encoding="utf-8"))
    return config


def jobs() -> dict[str, dict[str, Any]]:
    """Return a training job, and one that failed after a successful training, with all fields of a status."""
    noon = "2026-01-01T12:00:00Z"
    common: dict[str, Any] = {
        "startTime": noon, "restarts": 1, "spot": {"preemptions": 1},
        "plan": {
            "strategy": "ddp", "launcher": "job", "worldSize": 2,
            "estimated": {"durationSeconds": 900.0, "cost": 2.5, "currency": "EUR"},
        },
        "stages": [{"name": "train", "state": "Running", "attempt": 2}],
        "cost": {"nodeSeconds": 50.0, "billableSeconds": 60.0, "amount": 1.5, "currency": "EUR"},
    }  # fmt: skip
    progress = {
        "step": 40, "totalSteps": 100, "percent": 40, "loss": 0.5, "samplesPerSecond": 32.0, "tokensPerSecond": 900.0,
        "remainingSeconds": 60.0, "lastUpdateTime": noon,
    }  # fmt: skip
    statuses = {
        "running": {**common, "phase": "Training", "progress": progress},
        "over": {
            **common, "phase": "Failed", "completionTime": "2026-01-01T13:00:00Z", "progress": progress,
            "failure": {"class": "GateNotMet", "reason": "BelowMinimum", "message": "m", "stage": "evaluate"},
            "artifacts": {"metrics": {"accuracy": 0.5, "train_loss": 0.25}},
        },
    }  # fmt: skip
    found = {}
    for name, status in statuses.items():
        # Drops values that are no fields of a status.
        status_document = FineTuneJobStatus.model_validate(status).model_dump(
            mode="json", by_alias=True, exclude_none=True
        )
        found[name] = {
            "metadata": {"name": name, "namespace": "ops", "creationTimestamp": noon},
            "spec": {"task": "text-classification", "model": {"uri": "hf://org/encoder"}},
            "status": status_document,
        }
    return found


# ------------------------------------------------------------------------------------------------------------ promtool


def promtool(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Prometheus' own tool, which has its parser and its engine; skip the test without it."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not in PATH (Debian's package prometheus has it)")
    return subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True, timeout=patient(300))

"""Renderings of the chart by Helm, for the tests."""

from __future__ import annotations

import functools
import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart_files import CHART, ROOT
from cluster_support.control_plane import assets_folder
from suite_plugins.patience import patient

VALUES = ROOT / "tests" / "chart" / "values"
VALUE_SETS = ("default", "namespaced", "high-availability", "air-gap", "monitoring", "everything")
RELEASE, NAMESPACE = "finetune-operator", "finetune-system"
STAND_INS = {
    "files/rules.yaml": 'groups: [{name: stand-in, rules: [{alert: A, expr: "1", labels: {of: "{{ $value }}"}}]}]\n',
    "files/dashboards/stand-in.json": '{"title": "{{ stand-in }}"}\n',
}
"""Stand-ins for missing files; the texts contain braces, like the real ones."""

Object = dict[str, Any]


def program(name: str) -> str:
    """Return the program in KUBEBUILDER_ASSETS or in PATH; skip the test if there is neither."""
    found = shutil.which(name, path=f"{assets_folder()}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"no {name} in PATH, nor in the folder that KUBEBUILDER_ASSETS names")
    return found


def helm(*arguments: str, stdin: str | None = None, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Run Helm; the caller checks the exit code."""
    return subprocess.run(
        [program("helm"), *arguments], input=stdin, capture_output=True, text=True, timeout=patient(seconds)
    )


def complete_chart(folder: Path) -> Path:
    """Copy the chart with stand-ins for missing rules and dashboards."""
    chart = folder / CHART.name
    shutil.copytree(CHART, chart)
    for name, text in STAND_INS.items():
        file = chart / name
        if not list(file.parent.glob(f"*{file.suffix}")) or (file.parent == chart / "files" and not file.is_file()):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return chart


def template(
    values: Mapping[str, Any] | None = None, *names: str, chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    """Run `helm template` with sets of values, overridden by `values`; cached for the same input."""
    return _template(yaml.safe_dump(dict(values or {})), names, chart, _state(chart))


@functools.cache
def _template(
    values: str, names: tuple[str, ...], chart: Path, _: frozenset[tuple[Path, int, int]]
) -> subprocess.CompletedProcess[str]:
    files = [part for name in names for part in ("--values", str(VALUES / f"{name}.yaml"))]
    return helm("template", RELEASE, str(chart), "--namespace", NAMESPACE, *files, "--values", "-", stdin=values)


def _state(folder: Path) -> frozenset[tuple[Path, int, int]]:
    """Return the files of a folder with size and time of change."""
    found = ((file, file.stat()) for file in folder.rglob("*"))
    return frozenset((file, stat.st_size, stat.st_mtime_ns) for file, stat in found)


def render(values: Mapping[str, Any] | None = None, *names: str, chart: Path = CHART) -> tuple[Object, ...]:
    """Return the objects rendered by `template`."""
    ran = template(values, *names, chart=chart)
    assert ran.returncode == 0, ran.stderr
    return objects(ran.stdout)


def kustomize(folder: Path) -> tuple[Object, ...]:
    """Return the objects that `kubectl apply -k` would send; kubectl runs once per folder."""
    return objects(_kustomize(folder))


@functools.cache
def _kustomize(folder: Path) -> str:
    ran = subprocess.run(
        [program("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, timeout=patient(300)
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def objects(text: str) -> tuple[Object, ...]:
    """Return the documents of a text, as copies that the caller may change."""
    found = (pickle.loads(_parsed(part)) for part in re.split(r"^---$", text, flags=re.MULTILINE))
    return tuple(each for each in found if each)


@functools.cache
def _parsed(text: str) -> bytes:
    """Parse a document; cached, as most are the same in every rendering, and the CRD is long."""
    return pickle.dumps(yaml.load(text, Loader=yaml.CSafeLoader))


def one(found: Sequence[Object], kind: str, name: str) -> Object:
    """Return the object of that kind and name, which must exist once."""
    (only,) = (each for each in found if each["kind"] == kind and each["metadata"]["name"] == name)
    return only


def without_tests(found: Sequence[Object]) -> tuple[Object, ...]:
    """Return the objects that `helm install` creates."""
    return tuple(each for each in found if "helm.sh/hook" not in each["metadata"].get("annotations", {}))


def nested(path: str, value: Any) -> Object:
    """Return `a.b: value` as {a: {b: value}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value

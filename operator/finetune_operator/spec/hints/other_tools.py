"""Complete configurations of other tools: reported once, with the names that correspond here, not name by name.

Only names at the top of a document or of its `spec` are read. A Kubernetes object that runs a program is fine beside a
FineTuneJob; in a file without one, somebody mistook it for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from finetune_contract.arguments import known_arguments
from finetune_operator.spec.fields.field_names import DOCUMENT, spec_fields
from finetune_operator.spec.hints.foreign_table import find_name, marks_of_tools
from finetune_operator.spec.launcher_rows import LAUNCHERS
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.types import API_VERSION, KIND

_LEAST = 3
"""Minimum names of another tool that make a document its configuration; fewer are reported one by one."""
_WORKLOADS = frozenset({
    "CronJob", "Pod", "Deployment", "StatefulSet", "TFJob", "RayJob", "XGBoostJob", "PaddleJob", "JAXJob", "Workflow",
    *(launcher.kind for launcher in LAUNCHERS),
})  # fmt: skip


def recognise(value: Mapping[str, JsonValue]) -> Problem | None:
    """Return the one problem of a document that is, or whose spec is, another tool's configuration; else None."""
    spec = value.get("spec")
    for path, inner, known in (
        ("", value, DOCUMENT),
        ("spec", spec if isinstance(spec, dict) else {}, tuple(spec_fields())),
    ):
        tool = _tool([name for name in inner if name not in known])
        # Blocks of a FineTuneJob among them are checked with the names, one by one.
        if tool is not None and not any(isinstance(inner.get(name), dict) for name in known if name != "metadata"):
            return _configuration(path, tool, inner)
    return None


def _tool(names: Sequence[str]) -> str | None:
    theirs = {tool: len(set(marks) & set(names)) for tool, marks in marks_of_tools().items()}
    best = max(theirs, key=lambda tool: theirs[tool])
    known = [name for name in names if find_name(name, "") is not None or name in known_arguments()]
    return best if theirs[best] and len(known) >= _LEAST and (theirs[best] >= 2 or len(known) > _LEAST) else None


def _configuration(path: str, tool: str, given: Mapping[str, JsonValue]) -> Problem:
    begin = f"begin with apiVersion: {API_VERSION}, kind: {KIND}, metadata.name and spec.task; " if not path else ""
    if path and "task" not in given:
        begin = "begin with spec.task, e.g. text-generation; "
    rule = f"this is a configuration of {tool}, whose field names differ from those of a {KIND}"
    return Problem(path, None, rule, f"{begin}docs/names.md lists the names that correspond here", reason="Unknown")


def workload(value: JsonValue) -> Problem | None:
    """Return the problem of a Kubernetes object that runs a program, in a file without a FineTuneJob; else None."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _WORKLOADS:
        return None
    return Problem(
        "kind", f'"{kind}"', f"runs containers, and there is no {KIND} in the input",
        f"write a {KIND} (apiVersion: {API_VERSION}) with spec.task, spec.model.uri, spec.dataset.uri and "
        "spec.training; nvidia.com/gpu is spec.resources.gpusPerNode, replicas is spec.resources.nodes, backoffLimit "
        "is spec.runPolicy.maxRestarts, --lr is spec.training.learningRate, a program of your own is "
        "spec.training.script; leave image and command out; docs/names.md lists all names",
        reason="Unknown",
    )  # fmt: skip

"""Committed files equal those generated from the models, and have the form that their readers need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from each_case import each_case
from finetune_operator.spec.schema.crd import FREE_LEVELS, TYPED, crd, json_schema
from finetune_operator.spec.types import QUANTITY_PATTERN
from generate import GENERATED

ROOT = Path(__file__).parents[2]


@each_case("path", GENERATED)
def test_generated_file_is_up_to_date(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == GENERATED[path](), "run: make generate"


def nodes(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if isinstance(node.get(keyword), dict):
            yield from nodes(node[keyword], f"{path}[]")


def schema() -> dict[str, Any]:
    found: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def test_the_crd_is_structural_and_described() -> None:
    found = dict(nodes(schema()))
    assert len(found) > 250
    mixed = ("x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string")
    assert [path for path, node in found.items() if "type" not in node and not any(key in node for key in mixed)] == []
    assert {key for node in found.values() for key in node} & {"$ref", "$defs", "title", "const"} == set()
    # Levels that others define hold null where those allow it, and are described there.
    free, typed = (tuple(f".spec.{path}" for path in paths) for paths in (FREE_LEVELS, TYPED))
    assert [path for path, node in found.items() if "nullable" in node and not path.startswith(free)] == []
    theirs = [path for path in found if path.startswith((*free, *typed)) and path not in (*free, *typed)]
    named = [path for path in found if not path.endswith("[]") and path.count(".") > 1 and path not in theirs]
    assert [path for path in named if not found[path].get("description")] == []


def test_every_list_map_and_text_of_spec_is_bounded() -> None:
    unbounded = []
    for path, node in nodes(schema()["properties"]["spec"]):
        if node.get("type") == "array" and "maxItems" not in node:
            unbounded.append(path)
        if node.get("type") == "object" and "properties" not in node and "maxProperties" not in node:
            unbounded.append(path)
        if node.get("type") == "string" and not {"enum", "maxLength"} & set(node):
            unbounded.append(path)
    assert unbounded == []


def test_quantities_are_numbers_or_text_of_their_form() -> None:
    found = {path: node for path, node in nodes(schema()) if node.get("x-kubernetes-int-or-string")}
    assert found[".spec.resources.cpu"] == {
        "description": "CPU cores of each node's pod, e.g. 8 or 500m. If unset, none are requested.",
        "x-kubernetes-int-or-string": True,
        "pattern": QUANTITY_PATTERN,
        "maxLength": 32,
        "minimum": 0,
    }
    assert found[".spec.resources.sharedMemory"]["pattern"] == f"^auto$|{QUANTITY_PATTERN}"
    assert [path for path, node in found.items() if not node["pattern"]] == []


def test_kubectl_get_shows_the_columns_of_a_job() -> None:
    columns = crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [column["name"].upper() for column in columns if not column["priority"]] == [
        "PHASE", "STAGE", "REASON", "PROGRESS", "LOSS", "ETA", "ROWS/S", "RESULT", "RESTARTS", "AGE",
    ]  # fmt: skip
    assert [column["name"].upper() for column in columns if column["priority"]] == [
        "STRATEGY", "LAUNCHER", "COST", "URL",
    ]  # fmt: skip
    found = dict(nodes(schema()))
    for column in columns:
        path = re.sub(r"\[\?.*\]", "[]", column["jsonPath"])
        assert path in found or path.startswith(".metadata."), column


def test_the_editor_schema_takes_the_good_jobs_and_refuses_a_typo() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    validator = jsonschema.Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    job = yaml.safe_load((ROOT / "tests/unit/jobs/good/fsdp-two-nodes.yaml").read_text())
    assert list(validator.iter_errors(job)) == []
    job["spec"]["resources"]["gpuPerNode"] = 8
    job["spec"]["training"]["microBatchSize"] = "many"
    assert sorted(error.json_path for error in validator.iter_errors(job)) == [
        "$.spec.resources", "$.spec.training.microBatchSize",
    ]  # fmt: skip

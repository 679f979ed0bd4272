"""Nothing of the API is accepted and ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic.alias_generators import to_snake

import finetune_operator
from finetune_operator.spec.checks.notices import RETIRED
from finetune_operator.spec.fields.field_names import DOCUMENT, spec_fields
from finetune_operator.spec.fields.shapes import Fields, find, leaves, spec_shape
from finetune_operator.spec.fields.support import ROWS, Row, unsupported
from finetune_operator.spec.schema.crd import crd
from finetune_operator.spec.schema.explain import find_field
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings
from finetune_operator.spec.types import FineTuneJob, FineTuneJobSpec, SpecModel, StatusModel

OPERATOR = Path(finetune_operator.__file__).parent
PASSED_ON = ("dataset.columns", "predict.dataset.columns", "generation", "preference")
"""Blocks that the plan passes on to the trainer as a whole."""


def test_every_field_without_a_mark_is_read() -> None:
    folders = ("cli", "controller", "endpoints", "jobs", "plan")
    sources = [path.read_text() for folder in folders for path in sorted((OPERATOR / folder).rglob("*.py"))]
    sources.append(
        (OPERATOR / "spec" / "settings" / "settings.py").read_text()
    )  # its limits apply where a job sets none
    read = {name for source in sources for name in re.findall(r"\.(\w+)", source)}
    found = list(leaves(spec_shape()))
    assert len(found) > 120
    marked = [*RETIRED, *(row.path for row in ROWS if not row.values and not row.schemes)]
    unread = [
        path
        for path in found
        if not path.startswith((*marked, *(f"{block}." for block in PASSED_ON)))
        and to_snake(path.rpartition(".")[2]) not in read
    ]
    assert unread == []


def test_marks_are_found_at_every_depth() -> None:
    assert {"launcher", "resources.elastic", "predict.dataset.uri", "endpoint.adapters.uri"} <= {r.path for r in ROWS}
    shapes = [find(spec_shape(), row.path.replace("adapters", "adapters.0").split(".")) for row in ROWS]
    assert None not in shapes


def test_api_server_has_a_rule_for_each_mark_with_the_same_sentence() -> None:
    spec = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    rules = [rule for node in (spec, *spec["properties"].values()) for rule in node.get("x-kubernetes-validations", ())]
    messages = {rule["message"] for rule in rules}
    assert {f"{row.path} is not supported in this version: {row.text(row.schemes)}" for row in ROWS} <= messages


def test_rules_on_one_block_cost_nothing_without_it() -> None:
    spec = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    read = [set(re.findall(r"self\.(\w+)", rule["rule"])) for rule in spec["x-kubernetes-validations"]]
    optional = {name for name, block in spec["properties"].items() if "default" not in block and "properties" in block}
    assert {"training", "predict", "endpoint"} <= optional
    assert [names for names in read if len(names) == 1 and names <= optional] == []


def test_write_of_a_status_compares_no_field_of_spec() -> None:
    rules = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["x-kubernetes-validations"]
    (frozen,) = [rule["rule"] for rule in rules if "oldSelf" in rule["rule"]]
    assert "spec" not in frozen.partition("self.status != oldSelf.status || ")[0]


def test_defaults_need_nothing_that_is_missing() -> None:
    spec = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "dataset": {"uri": "hf://c/d"}, "training": {}}
    assert unsupported(FineTuneJobSpec.model_validate_json(json.dumps(spec))) == []
    spelled_out = {**spec, "endpoint": None, "runPolicy": {"maxRestarts": 3}, "storage": {"size": "100Gi"}, "spot": {}}
    assert unsupported(FineTuneJobSpec.model_validate_json(json.dumps(spelled_out))) == []


def test_defaults_that_are_made_without_validation_are_valid() -> None:
    models = [*SpecModel.__subclasses__(), *StatusModel.__subclasses__()]
    defaults = [field.default for model in models for field in model.model_fields.values()]
    blocks = [default for default in defaults if isinstance(default, SpecModel | StatusModel)]
    assert len(blocks) > 25
    for block in (*blocks, CLUSTER_SETTINGS, LOCAL_SETTINGS):
        assert type(block).model_validate_json(block.model_dump_json(by_alias=True)) == block
    assert Settings() == CLUSTER_SETTINGS


def test_known_names_of_a_document_are_those_of_its_models() -> None:
    body = spec_shape().body
    assert isinstance(body, Fields)
    assert tuple(spec_fields()) == tuple(body.fields)
    assert tuple(FineTuneJob.model_json_schema()["properties"]) == DOCUMENT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_description_marks_unsupported_values(row: Row) -> None:
    field = find_field(f"spec.{row.path}")
    assert "not supported yet" in field.description.lower()
    served = [*row.values, *(f"{scheme}://" for scheme in row.schemes)]
    unserved = [value for value in field.schema.get("enum", ()) if served and value not in served]
    assert [value for value in unserved if value not in field.description.split("yet")[0]] == []

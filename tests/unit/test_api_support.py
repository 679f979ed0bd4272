"""Nothing of the API is accepted and ignored."""

from __future__ import annotations

import json

import pytest

from finetune_operator.api.explain import find_field
from finetune_operator.api.field_names import DOCUMENT, spec_fields
from finetune_operator.api.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings
from finetune_operator.api.shapes import Fields, find, leaves, spec_shape
from finetune_operator.api.support import ROWS, SUPPORTED, Row, unsupported
from finetune_operator.api.types import FineTuneJob, FineTuneJobSpec, SpecModel, StatusModel


def within(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def test_every_leaf_of_the_spec_is_supported_or_has_a_row() -> None:
    found = list(leaves(spec_shape()))
    assert len(found) > 120
    blocks = [*SUPPORTED, *(row.path for row in ROWS)]
    assert [leaf for leaf in found if not any(within(leaf, block) for block in blocks)] == []


def test_every_listed_path_exists_once() -> None:
    blocks = [*SUPPORTED, *(row.path for row in ROWS)]
    assert [path for path in blocks if find(spec_shape(), path.split(".")) is None] == []
    assert len(set(blocks)) == len(blocks)


def test_rows_in_supported_blocks_only_exclude_schemes_or_a_field() -> None:
    inside = [row.path for row in ROWS if any(within(row.path, block) for block in SUPPORTED)]
    assert inside == [
        "dataset.uri", "storage.workspace", "storage.cache", "predict.dataset.uri", "endpoint.adapters.uri",
            "runPolicy.queue",
    ]  # fmt: skip


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

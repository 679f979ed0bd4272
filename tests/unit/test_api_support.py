"""Nothing of the API is accepted and ignored."""

from __future__ import annotations

import json

import pytest

from finetune_operator.api.explain import find_field
from finetune_operator.api.shapes import find, leaves, spec_shape
from finetune_operator.api.support import ROWS, SUPPORTED, Row, unsupported
from finetune_operator.api.types import FineTuneJobSpec


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
        "dataset.uri", "storage.workspace", "storage.cache", "predict.dataset.uri", "runPolicy.queue",
    ]  # fmt: skip


def test_defaults_need_nothing_that_is_missing() -> None:
    spec = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "dataset": {"uri": "hf://c/d"}, "training": {}}
    assert unsupported(FineTuneJobSpec.model_validate_json(json.dumps(spec))) == []
    spelled_out = {**spec, "endpoint": None, "runPolicy": {"maxRestarts": 3}, "storage": {"size": "100Gi"}, "spot": {}}
    assert unsupported(FineTuneJobSpec.model_validate_json(json.dumps(spelled_out))) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_description_marks_unsupported_values(row: Row) -> None:
    field = find_field(f"spec.{row.path}")
    assert "not supported yet" in field.description.lower()
    served = [*row.values, *(f"{scheme}://" for scheme in row.schemes)]
    unserved = [value for value in field.schema.get("enum", ()) if served and value not in served]
    assert [value for value in unserved if value not in field.description.split("yet")[0]] == []

"""`finetune explain`: fields as the CRD has them, and the answer for an unknown field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from explained import read
from finetune_operator.cli.commands.documents import fields_like
from finetune_operator.cli.main import app
from finetune_operator.spec.schema.crd import crd
from finetune_operator.spec.schema.explain import Field, NoSuchFieldError, as_text, find_field

ROOT: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def every_field(field: Field) -> list[Field]:
    return [field, *(inner for each in field.fields for inner in every_field(each))]


def in_schema(path: str) -> tuple[dict[str, Any], bool]:
    """Return the node of the CRD, and whether its object requires it."""
    node, required = ROOT, False
    for part in path.split("."):
        while "properties" not in node:
            node = node["items"] if "items" in node else node["additionalProperties"]
        required = part in node.get("required", ())
        node = node["properties"][part]
    return node, required


def test_explain_shows_every_field_as_in_the_crd() -> None:
    fields = every_field(find_field(""))[1:]
    assert len(fields) > 250
    for field in fields:
        node, required = in_schema(field.path)
        page = read(as_text(field, recursive=False))
        ours = field.path in ("apiVersion", "kind", "metadata")
        assert field.required is required, field.path
        assert ours or page["text"] == (node.get("description") or "<empty>").split(), field.path
        assert page["enum"] == [str(choice) for choice in node.get("enum", ()) if choice != ""], field.path
        assert {name: needed for name, (_, needed, _) in page["fields"].items()} == {
            each.name: each.required for each in field.fields
        }
        base = page["type"].removeprefix("[]").removeprefix("map[string]")
        assert base == node.get("type", "Object") or node["type"] in ("object", "array"), field.path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("spec.training.epochs", "number"),
        ("spec.resources.cpu", "integer or string"),
        ("spec.template.labels", "map[string]string"),
        ("spec.template.env", "[]Object"),
        ("spec.checkpoints.every", "any"),
        ("status.stages", "[]Object"),
        ("spec.model", "Object"),
    ],
)
def test_explain_shows_types_like_kubectl_or_better(path: str, kind: str) -> None:
    assert find_field(path).type == kind


@pytest.mark.parametrize(
    "written",
    ["spec.template.env.name", "template.env.name", "finetunejob.spec.template.env.name", "spec.template.env[0].name"],
)
def test_field_is_found_however_it_is_written(written: str) -> None:
    assert find_field(written).path == "spec.template.env.name"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("spec.traning", "there is no field spec.traning; did you mean spec.training?"),
        ("spec.microBatchSize", "there is no field spec.microBatchSize; did you mean spec.training.microBatchSize?"),
        ("num_train_epochs", "there is no field spec.num_train_epochs; did you mean spec.training.epochs?"),
        ("statu", "there is no field spec.statu; did you mean status?"),
        ("status.phse", "there is no field status.phse; did you mean status.phase?"),
        (
            "training.epochs.x",
            "there is no field spec.training.epochs.x: spec.training.epochs, a number, has no fields",
        ),
        (
            "spec.checkpoints.every.zzz",
            "there is no field spec.checkpoints.every.zzz; spec.checkpoints.every has the fields minutes, steps",
        ),
    ],
)
def test_unknown_field_is_refused_with_a_suggestion(written: str, message: str) -> None:
    with pytest.raises(NoSuchFieldError) as refused:
        find_field(written)
    assert str(refused.value) == message
    ran = CliRunner().invoke(app, ["explain", written])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert f"Error: {message}" in ran.stderr


def test_field_is_data_for_programs() -> None:
    described = json.loads(CliRunner().invoke(app, ["explain", "training.globalBatchSize", "-o", "json"]).stdout)
    node, _ = in_schema("spec.training.globalBatchSize")
    kept = {key: node[key] for key in ("description", "default", "minimum", "maximum") if key in node}
    assert described == {"field": "spec.training.globalBatchSize", "type": "integer", "required": False, **kept}
    resources = json.loads(CliRunner().invoke(app, ["explain", "resources", "-o", "json", "--recursive"]).stdout)
    inner = {each["field"]: each for each in resources["fields"]}
    assert [each["field"] for each in inner["spec.resources.elastic"]["fields"]] == [
        "spec.resources.elastic.maxNodes",
        "spec.resources.elastic.minNodes",
    ]


def test_shell_completes_fields() -> None:
    assert fields_like("training.glo") == ["training.globalBatchSize"]
    assert fields_like("spec.resources.accelerator.") == [
        "spec.resources.accelerator.memory",
        "spec.resources.accelerator.product",
        "spec.resources.accelerator.resource",
    ]
    assert fields_like("spec.nothing.") == []
    assert fields_like("st") == ["storage", "status"]

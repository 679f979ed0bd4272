"""Comparison of the served FineTuneJob with that of this release."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.spec.schema.crd import crd
from finetune_operator.spec.schema.served_schema import in_status, lacking, listed
from finetune_operator.spec.types import GROUP, KIND, VERSION


def served() -> dict[str, Any]:
    """Return the schema as an API server that has this release's CRD serves it."""
    schema: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def document(schema: dict[str, Any]) -> dict[str, Any]:
    kind = {"group": GROUP, "version": VERSION, "kind": KIND}
    return {"components": {"schemas": {"dev.finetune": {**schema, "x-kubernetes-group-version-kind": [kind]}}}}


def test_served_schema_of_this_release_lacks_nothing():
    assert lacking(document(served())) == ()


@pytest.mark.parametrize(
    ("path", "key", "found"),
    [
        (("status", "plan"), "reasons", "status.plan.reasons"),
        (("status", "stages", "items"), "replacedPods", "status.stages[].replacedPods"),
        (("spec",), "endpoint", "spec.endpoint"),
    ],
)
def test_a_lacking_field_is_listed_once_with_its_path(path: tuple[str, ...], key: str, found: str):
    schema = at = served()
    for name in path:
        at = at["items"] if name == "items" else at["properties"][name]
    del at["properties"][key]
    assert lacking(document(schema)) == (found,)
    assert in_status((found,)) == ((found,) if found.startswith("status") else ())


def test_a_lacking_value_is_listed_with_its_field():
    schema = served()
    schema["properties"]["status"]["properties"]["phase"]["enum"].remove("Serving")
    assert lacking(document(schema)) == ("status.phase=Serving",)


def test_kept_unknown_fields_and_unknown_schemas_lack_nothing():
    schema = served()
    schema["properties"]["status"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    assert lacking(document(schema)) == ()
    assert lacking({}) == ()


def test_a_long_list_is_cut_with_a_count():
    assert listed(tuple("abcdefg")) == "a, b, c, d, e and 2 more"

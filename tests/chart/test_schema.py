"""values.schema.json: its refusals, in Helm's own words, and that nothing is left open by mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from chart_files import CHART, DECIDED_ELSEWHERE
from chart_rendering import template
from finetune_operator.spec.fields.shapes import leaves, shape_of
from finetune_operator.spec.schema.reference_docs import SETTINGS_EXAMPLE
from finetune_operator.spec.settings.settings import Settings

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown value": ({"replicaCount": 3}, "replicaCount"),
    "an unknown value in a section": ({"image": {"name": "a"}}, "name"),
    "an unknown setting": ({"settings": {"colour": "blue"}}, "colour"),
    "an unknown setting in a block": ({"settings": {"limits": {"imagePullSecond": 5}}}, "imagePullSecond"),
    "namespaces as a setting, which are watchNamespaces": ({"settings": {"namespaces": ["a"]}}, "namespaces"),
    "the trainer's image as a setting": ({"settings": {"defaults": {"image": "a"}}}, "image"),
    "text for a number": ({"replicas": "two"}, "replicas"),
    "no replica": ({"replicas": 0}, "replicas"),
    "a number for text": ({"image": {"tag": 1.2}}, "tag"),
    "text for a switch": ({"crds": {"install": "yes"}}, "install"),
    "a digest without its method": ({"image": {"digest": "a" * 64}}, "digest"),
    "a registry with its protocol": ({"global": {"imageRegistry": "https://registry.example.com"}}, "imageRegistry"),
    "a tag in the repository": ({"image": {"repository": "finetune-operator:1"}}, "repository"),
    "an image pull secret as text": ({"imagePullSecrets": ["registry"]}, "imagePullSecrets"),
    "a namespace that cannot be": ({"watchNamespaces": ["Team_A"]}, "watchNamespaces"),
    "a namespace twice": ({"watchNamespaces": ["a", "a"]}, "watchNamespaces"),
    "a word that is none": ({"log": {"level": "loud"}}, "level"),
    "a number as a label": ({"labels": {"cost-centre": 42}}, "labels"),
    "a scheme that is none": ({"settings": {"schemes": ["ftp"]}}, "schemes"),
    "a price without its GPUs": ({"settings": {"prices": [{"product": "cpu", "perHour": 1}]}}, "gpus"),
    "an unknown key of a toleration": ({"tolerations": [{"keys": "a"}]}, "keys"),
    "a handler of a probe": ({"probes": {"liveness": {"httpGet": {}}}}, "httpGet"),
    "a condition that jobs have not": ({"tests": {"waitFor": "Done"}}, "waitFor"),
    "a duration without its unit": ({"metrics": {"serviceMonitor": {"interval": "30"}}}, "interval"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_is(case: str) -> None:
    values, named = REFUSED[case]
    ran = template(values)
    assert ran.returncode != 0
    assert "values don't meet the specifications of the schema" in ran.stderr
    assert named in ran.stderr


def test_an_umbrella_charts_own_global_values_are_let_through() -> None:
    assert template({"global": {"domain": "example.com"}}).returncode == 0


def test_the_example_of_the_settings_reference_is_taken() -> None:
    settings = yaml.safe_load(SETTINGS_EXAMPLE)
    namespaces, image = settings.pop("namespaces"), settings["defaults"].pop("image")
    registry, _, tag = image.rpartition("/finetune-trainer:")
    ran = template(
        {
            "watchNamespaces": namespaces,
            "trainer": {"image": {"registry": registry, "tag": tag}},
            "settings": settings,
        }
    )
    assert ran.returncode == 0, ran.stderr


def test_it_is_a_schema_of_draft_07_and_takes_the_defaults() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    assert SCHEMA["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert list(jsonschema.Draft7Validator(SCHEMA).iter_errors(values)) == []


def nodes(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if isinstance(node.get(keyword), dict):
            yield from nodes(node[keyword], f"{path}[]")
    for keyword in ("anyOf", "allOf"):
        for inner in node.get(keyword, ()):
            yield from nodes(inner, path)


def test_only_kubernetes_types_allow_unknown_properties() -> None:
    found = [*nodes(SCHEMA, ""), *(pair for name, d in SCHEMA["definitions"].items() for pair in nodes(d, f"#{name}"))]
    assert len(found) > 200
    objects = [(path, node) for path, node in found if node.get("type") == "object"]
    opened = {path for path, node in objects if "additionalProperties" not in node}
    # An umbrella chart's global values, and values whose description says that another project defines them.
    foreign = {path for path, node in objects if node.get("description", "").startswith(("A ", "An ", "As "))}
    own = {".podSecurityContext", ".securityContext", ".tests.spec"}
    assert opened - foreign - own == {".global"}
    assert [path for path, node in objects if node.get("additionalProperties") is True] == []


def test_every_value_is_typed_and_described() -> None:
    named = [(path, node) for path, node in nodes(SCHEMA, "") if path and not path.startswith(".settings")]
    known = {"type", "enum", "anyOf", "allOf", "$ref"}
    assert [path for path, node in named if not known & set(node)] == []
    values = [path for path, node in named if "default" in node and not node.get("description")]
    assert values == []


def test_all_settings_are_values_but_those_that_other_values_decide() -> None:
    def found(node: Any, prefix: str = "") -> set[str]:
        for part in node.get("allOf", ()):
            node = {**node, **SCHEMA["definitions"][part["$ref"].rpartition("/")[2]]}
        if "properties" not in node:
            return {prefix}
        nested_paths = (
            found(inner, f"{prefix}.{name}" if prefix else name) for name, inner in node["properties"].items()
        )
        return set().union(*nested_paths)

    assert set(leaves(shape_of(Settings))) - found(SCHEMA["properties"]["settings"]) == set(DECIDED_ELSEWHERE)

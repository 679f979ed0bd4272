"""The API for other readers: CustomResourceDefinition for the API server, JSON schema for editors.

Both derive from `shapes` and `rules` and add nothing. The CRD keeps to the API server's demands: a type on every node
except those of mixed form, bounds on everything in spec (CEL cost is estimated from them), defaults only where there is
a value, and immutability at the root with `has()` on both sides, because a transition rule on an optional block does
not run when the block is added or removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel

from finetune_operator.spec.checks.syntax import DNS_LABEL_RULE, LABEL_VALUE_PATTERN, MAX_NAME, NAME_PATTERN
from finetune_operator.spec.checks.template import (
    CODE_ENV,
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    RESERVED_VOLUME_PREFIX,
    RESERVED_VOLUMES,
)
from finetune_operator.spec.fields.shapes import (
    Anything,
    Body,
    Boolean,
    Fields,
    Items,
    Map,
    Number,
    Scalars,
    Shape,
    Text,
    shape_of,
    spec_shape,
    status_shape,
)
from finetune_operator.spec.fields.support import admission_rules
from finetune_operator.spec.problems import HUB_TOKEN_PATTERN
from finetune_operator.spec.rules import RULES
from finetune_operator.spec.rules.resource_rules import MUTABLE
from finetune_operator.spec.types import (
    API_VERSION,
    CATEGORY,
    GROUP,
    KIND,
    PLURAL,
    SHORT_NAME,
    SINGULAR,
    VERSION,
)
from finetune_operator.spec.types.pod_types import Affinity, EnvVar, PodSecurityContext, Volume, VolumeMount
from finetune_operator.spec.types.selector_types import Toleration

Schema: TypeAlias = dict[str, Any]

_ANY: Schema = {"x-kubernetes-preserve-unknown-fields": True}
FREE_LEVELS: Mapping[str, int] = {"training.arguments": 3, "parallelism.deepspeedConfig": 5}
"""Levels below the names of an object whose form another project defines; the schema doubles with each. The deepest in
DeepSpeed's documentation is `compression_training`, with four.
"""
FREE_NAMES = 256
FREE_ITEMS = 1024
FREE_TEXT = 32_768
"""Maximum fields, items and characters in one value of such an object."""
TYPED: Mapping[str, type[BaseModel]] = {
    "template.affinity": Affinity,
    "template.env": EnvVar,
    "template.securityContext": PodSecurityContext,
    "template.tolerations": Toleration,
    "template.volumeMounts": VolumeMount,
    "template.volumes": Volume,
}
"""Kubernetes' own objects, or lists of them. The API server refuses the faults that it would refuse in the pod."""
KUBERNETES_TEXT = 1024
KUBERNETES_ITEMS = 256
LABELS = ("template.labels", "template.nodeSelector")
KEYS: Mapping[str, str] = {"template.env": "name", "template.volumes": "name", "template.volumeMounts": "mountPath"}
"""List -> field by which its items are unique."""

# Name, type, jsonPath, priority (1: `-o wide` only).
_COLUMNS: tuple[tuple[str, str, str, int], ...] = (
    ("Phase", "string", ".status.phase", 0),
    ("Stage", "string", ".status.stage", 0),
    ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason', 0),
    ("Progress", "string", ".status.progress.complete", 0),
    ("Loss", "number", ".status.progress.loss", 0),
    ("ETA", "string", ".status.progress.remaining", 0),
    ("Rows/s", "number", ".status.progress.samplesPerSecond", 0),
    ("Result", "string", ".status.artifacts.result", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Strategy", "string", ".status.plan.strategy", 1),
    ("Launcher", "string", ".status.plan.launcher", 1),
    ("Cost", "number", ".status.cost.amount", 1),
    ("URL", "string", ".status.artifacts.endpointUrl", 1),
)


def crd() -> Schema:
    """Return the CustomResourceDefinition, apiextensions.k8s.io/v1."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": [CATEGORY],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root()},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority}
                        for name, kind, path, priority in _COLUMNS
                    ],
                }
            ],
        },
    }


def crd_yaml() -> str:
    """Return the CustomResourceDefinition as YAML text; equal models give equal text."""
    return yaml.dump(crd(), Dumper=_PlainDumper, sort_keys=False, width=120, allow_unicode=True)


class _PlainDumper(yaml.SafeDumper):
    """YAML dumper that writes shared values in full instead of as anchors, which would make the file unreadable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _root() -> Schema:
    spec = _crd_node(spec_shape())
    for rule in RULES:
        if rule.schema:
            _node_at(spec, rule.path).update(rule.schema)
        if rule.schema_around:
            _node_at(spec, rule.path.rpartition(".")[0]).update(rule.schema_around)
    for path, levels in FREE_LEVELS.items():
        free = _node_at(spec, path)
        del free["x-kubernetes-preserve-unknown-fields"]
        free["additionalProperties"] = _free(levels)
    for path, model in TYPED.items():
        typed = _node_at(spec, path)
        schema = _kubernetes_node(_crd_node(shape_of(model)))
        if typed["type"] == "array":
            typed["items"] = schema | _item_rules(path)
            if path in KEYS:
                typed |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [KEYS[path]]}
        else:
            del typed["x-kubernetes-preserve-unknown-fields"]
            typed.pop("maxProperties", None)
            typed.update(schema)
    for path in LABELS:
        _node_at(spec, path)["additionalProperties"] = {
            "type": "string",
            "pattern": LABEL_VALUE_PATTERN,
            "maxLength": 63,
        }
    for rule in RULES:
        if rule.cel is not None:
            _add_rule(spec, rule.cel, f"{rule.path} {rule.text}: {rule.hint}", f".{rule.path}")
    for row in admission_rules():
        _add_rule(spec, row["rule"], row["message"], row["fieldPath"])
    return {
        "type": "object",
        "description": "Fine-tunes, evaluates and serves a Hugging Face model.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": _crd_node(status_shape()),
        },
        "x-kubernetes-validations": [
            {
                "rule": f"self.metadata.name.size() <= {MAX_NAME} && self.metadata.name.matches('{NAME_PATTERN}')",
                "message": f"metadata.name {DNS_LABEL_RULE}",
            },
            _immutability(),
        ],
    }


def _item_rules(path: str) -> Schema:
    """Return the checks of `template.py` on one item that CEL can express."""
    match path:
        case "template.env":
            reserved = [f"self.name == '{name}'" for name in sorted(RESERVED_ENV | CODE_ENV)]
            reserved += [f"self.name.startsWith('{prefix}')" for prefix in RESERVED_ENV_PREFIXES]
            rules = [
                (f"!({' || '.join(reserved)})", "is reserved for the operator, the launcher or the image", ".name"),
                (f"!has(self.value) || !self.value.matches('{HUB_TOKEN_PATTERN}')", "looks like a Hub token: "
                 "put it into a Secret, and reference that in spec.secrets.hubToken", ".value"),
            ]  # fmt: skip
        case "template.volumes":
            reserved = [f"self.name == '{name}'" for name in sorted(RESERVED_VOLUMES)]
            reserved.append(f"self.name.startsWith('{RESERVED_VOLUME_PREFIX}')")
            rules = [(f"!({' || '.join(reserved)})", "is reserved for a volume of the operator", ".name")]
        case _:
            return {}
    return {
        "x-kubernetes-validations": [
            {"rule": rule, "message": message, "fieldPath": field} for rule, message, field in rules
        ]
    }


def _free(levels: int) -> Schema:
    """Return the schema of a free value with up to `levels` levels of objects and lists. CEL does not look into nodes
    without a type, but bounds hold in them; `items` is there because lists would slip through otherwise.
    """
    if levels == 0:
        return {**_ANY, "nullable": True, "maxProperties": 0, "maxItems": 0, "maxLength": FREE_TEXT}
    inner = _free(levels - 1)
    bounds = {"maxProperties": FREE_NAMES, "maxItems": FREE_ITEMS, "maxLength": FREE_TEXT}
    return {**_ANY, "nullable": True, **bounds, "additionalProperties": inner, "items": inner}


def _kubernetes_node(node: Schema) -> Schema:
    """Return a node of a Kubernetes object with bounds on everything, which Kubernetes leaves to the size of an object;
    and without defaults, as the API server adds none of ours to them.
    """
    bounded = {key: value for key, value in node.items() if key != "default"}
    match bounded.get("type"):
        case "string" if "enum" not in bounded:
            bounded.setdefault("maxLength", KUBERNETES_TEXT)
        case "array":
            bounded.setdefault("maxItems", KUBERNETES_ITEMS)
            bounded["items"] = _kubernetes_node(bounded["items"])
        case "object" if "properties" in bounded:
            bounded["properties"] = {name: _kubernetes_node(inner) for name, inner in bounded["properties"].items()}
        case "object":
            bounded.setdefault("maxProperties", KUBERNETES_ITEMS)
            bounded["additionalProperties"] = _kubernetes_node(bounded["additionalProperties"])
    return bounded


def _add_rule(spec: Schema, cel: str, message: str, path: str) -> None:
    """Add a rule on spec to the block that has all fields that it reads, else to spec.

    The API server evaluates all rules at each write of a status, and copies the schemas of all fields beside one that
    it reads: a rule costs less in a block, and nothing without the block.
    """
    blocks = set(re.findall(r"self\.(\w+)", cel))
    name = path.split(".")[1]
    node = spec["properties"][name]
    # The API server evaluates the rules of a block on its default too, without the defaults of its fields.
    if blocks == {name} and node.get("type") == "object" and "default" not in node:
        there = rf"has\(self\.{name}\)"
        # There is the block, where the rule is evaluated: `true && x` and, at the start, `!true || x` are x.
        cel = re.sub(rf"(?<!!){there} && |(?<![^(])!{there} \|\| ", "", cel)
        cel = re.sub(there, "true", cel).replace(f"self.{name}.", "self.")
        spec, path = node, path.removeprefix(f".{name}")
    rule = {"rule": cel, "message": message, **({"fieldPath": path} if path else {})}
    spec.setdefault("x-kubernetes-validations", []).append(rule)


def _immutability() -> Schema:
    """Return the rule that freezes every field of spec once a stage has started, except those in MUTABLE.

    It is one rule, so that the API server asks once, and not for each field, what a write of a status answers at once:
    an update changes spec or status, as status is a subresource.
    """
    body = spec_shape().body
    assert isinstance(body, Fields)
    fixed: dict[str, str] = {}
    for name, shape in body.fields.items():
        changeable = MUTABLE.get(name)
        if changeable is None:
            fixed[f"spec.{name}"] = _same(f"spec.{name}", optional=not shape.required)
        elif changeable:
            assert isinstance(shape.body, Fields)
            inner = (f"spec.{name}.{field}" for field in shape.body.fields if field not in changeable)
            fixed |= {path: _same(path, optional=True) for path in inner}
    waits = "!has(oldSelf.status) || !has(oldSelf.status.stages) || oldSelf.status.stages.all(s, s.attempt == 0)"
    changed = " + ".join(f"({same} ? '' : '{path}, ')" for path, same in fixed.items())
    return {
        "rule": f"{waits} || self.status != oldSelf.status || ({' && '.join(f'({same})' for same in fixed.values())})",
        "messageExpression": f"({changed} + 'cannot change after the first stage has started: create a new job')"
        ".replace(', cannot', ' cannot')",
        "reason": "FieldValueForbidden",
    }


def _same(path: str, *, optional: bool) -> str:
    """Return CEL that is true if an update leaves the field as it was."""
    new, old = f"self.{path}", f"oldSelf.{path}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})" if optional else f"{new} == {old}"


def _node_at(node: Schema, path: str) -> Schema:
    for part in path.split("."):
        node = node["properties"][part]
    return node


def _crd_node(shape: Shape) -> Schema:
    node: Schema = {"description": shape.description} if shape.description else {}
    node |= _crd_mixed(shape) if shape.words and shape.body is not None else _crd_plain(shape)
    if shape.default not in (None, []) and not (shape.default == {} and isinstance(shape.body, Map)):
        node["default"] = shape.default
    return node


def _crd_plain(shape: Shape) -> Schema:
    match shape.body:
        case None:
            flags = all(isinstance(word, bool) for word in shape.words)
            return {"type": "boolean" if flags else "string", "enum": list(shape.words)}
        case Text(quantity=True) as text:
            return _quantity(text, ())
        case Text() as text:
            return {"type": "string", **_text_bounds(text)}
        case Number() as number:
            return {"type": "integer" if number.integer else "number", **_number_bounds(number)}
        case Boolean():
            return {"type": "boolean"}
        case Items(item) as items:
            return {"type": "array", "items": _crd_node(item), **_count_bounds(items)}
        case Map(value, maximum):
            bounds = {} if maximum is None else {"maxProperties": maximum}
            if isinstance(value.body, Anything):
                return {"type": "object", **_ANY, **bounds}
            return {"type": "object", "additionalProperties": _crd_node(value), **bounds}
        case Fields(fields):
            required = [name for name, inner in fields.items() if inner.required]
            properties = {name: _crd_node(inner) for name, inner in fields.items()}
            return {"type": "object", "properties": properties, **({"required": required} if required else {})}
        case Scalars() | Anything():
            return dict(_ANY)


def _crd_mixed(shape: Shape) -> Schema:
    """Return the schema of a word or another form. Integers and quantities have a type for that; bounds need none."""
    pattern = f"^({'|'.join(map(re.escape, shape.words))})$"
    match shape.body:
        case Number(integer=True) as number:
            return {"x-kubernetes-int-or-string": True, "pattern": pattern, **_number_bounds(number)}
        case Text(quantity=True) as text:
            return _quantity(text, shape.words)
        case Items() as items:
            return {**_ANY, "pattern": pattern, **_count_bounds(items)}
        case Fields(fields):
            properties = {name: _crd_node(inner) for name, inner in fields.items()}
            required_fields = [{"required": [name]} for name in fields]
            return {**_ANY, "pattern": pattern, "properties": properties, "anyOf": required_fields}
        case other:
            raise TypeError(f"no CRD schema takes {shape.words} and {other}")


def _quantity(text: Text, words: tuple[str, ...]) -> Schema:
    pattern = "|".join([*(f"^{re.escape(word)}$" for word in words), text.pattern or ""])
    return {"x-kubernetes-int-or-string": True, "pattern": pattern, "maxLength": text.maximum, "minimum": 0}


def _text_bounds(text: Text) -> Schema:
    bounds = {"pattern": text.pattern, "minLength": text.minimum, "maxLength": text.maximum}
    return {name: value for name, value in bounds.items() if value is not None}


def _number_bounds(number: Number) -> Schema:
    """Return the bounds as in OpenAPI v3.0, where an exclusive bound is a flag beside the bound."""
    bounds: Schema = {}
    if number.minimum is not None:
        bounds |= {"minimum": number.minimum} | ({"exclusiveMinimum": True} if number.exclusive_minimum else {})
    if number.maximum is not None:
        bounds |= {"maximum": number.maximum} | ({"exclusiveMaximum": True} if number.exclusive_maximum else {})
    return bounds


def _count_bounds(items: Items) -> Schema:
    bounds = {"minItems": items.minimum, "maxItems": items.maximum}
    return {name: value for name, value in bounds.items() if value is not None}


def json_schema() -> Schema:
    """Return the JSON schema (draft 2020-12) for editors: refer to its file by `# yaml-language-server: $schema=`."""
    name = {
        "type": "string",
        "pattern": NAME_PATTERN,
        "maxLength": MAX_NAME,
        "description": "Name of the job. Required.",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": KIND,
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": API_VERSION, "description": "API group and version of the object. Required."},
            "kind": {"const": KIND, "description": "Kind of the object. Required."},
            "metadata": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": name,
                    "namespace": {
                        "type": "string",
                        "description": "Namespace of the job. Defaults to the current namespace.",
                    },
                },
            },
            "spec": _editor_node(spec_shape()),
            "status": {"type": "object", "description": status_shape().description},
        },
    }


def _editor_node(shape: Shape) -> Schema:
    node: Schema = {"description": shape.description} if shape.description else {}
    if shape.default is not None:
        node["default"] = shape.default
    forms: list[Schema] = [{"enum": list(shape.words)}] if shape.words else []
    if shape.body is not None:
        forms.extend(_editor_forms(shape.body))
    return node | (forms[0] if len(forms) == 1 else {"anyOf": forms})


def _editor_forms(body: Body) -> list[Schema]:
    match body:
        case Text() as text:
            form = {"type": "string", **_text_bounds(text)}
            return [form, {"type": "integer", "minimum": 0}] if text.quantity else [form]
        case Number(integer, minimum, maximum, exclusive_minimum, exclusive_maximum):
            form = {"type": "integer" if integer else "number"}
            form |= {} if minimum is None else {"exclusiveMinimum" if exclusive_minimum else "minimum": minimum}
            form |= {} if maximum is None else {"exclusiveMaximum" if exclusive_maximum else "maximum": maximum}
            return [form]
        case Boolean():
            return [{"type": "boolean"}]
        case Items(item) as items:
            return [{"type": "array", "items": _editor_node(item), **_count_bounds(items)}]
        case Map(value, maximum):
            bounds = {} if maximum is None else {"maxProperties": maximum}
            return [{"type": "object", "additionalProperties": _editor_node(value), **bounds}]
        case Fields(fields):
            required = [name for name, inner in fields.items() if inner.required]
            properties = {name: _editor_node(inner) for name, inner in fields.items()}
            closed = {"type": "object", "additionalProperties": False, "properties": properties}
            return [{**closed, **({"required": required} if required else {})}]
        case Scalars():
            return [{"type": ["string", "number", "boolean"]}]
        case Anything():
            return [{}]

"""Outer documents as jinja2 templates.

Every value enters by the filter `tojson`, so text of users can neither break out of its place nor be read as something
else; a name that a template uses and nobody gave is an error. Templates hold no decision beyond an optional block.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Literal, NoReturn, TypeAlias

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import JsonValue

from finetune_operator.rendering.types import Manifest

TemplateName: TypeAlias = Literal["claim", "configmap", "service", "job", "pytorchjob", "mpijob"]

_ESCAPES = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|\\.")


def document(template: TemplateName, **values: JsonValue) -> Manifest:
    """The object that `template` makes of `values`."""
    text = _environment().get_template(f"{template}.yaml.jinja").render(**values)
    made: Manifest = yaml.load(text, _Loader)
    return made


def to_flow(value: JsonValue) -> str:
    """`value` as JSON that YAML 1.1 reads as the same value, in plain ASCII.

    JSON writes characters beyond U+FFFF as two halves, which YAML takes for two characters: they get YAML's own form.
    """
    return _ESCAPES.sub(_whole_character, json.dumps(value, allow_nan=False, default=_no_json))


def _no_json(value: object) -> NoReturn:
    raise TypeError(f"{value} is no JSON value")  # A name that nobody gave tells itself when it becomes text.


def _whole_character(escape: re.Match[str]) -> str:
    high, low = escape.groups()
    if high is None:
        return escape.group()
    character = 0x10000 + ((int(high, 16) - 0xD800) << 10) + (int(low, 16) - 0xDC00)
    return f"\\U{character:08x}"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("finetune_operator.rendering"),
        undefined=StrictUndefined,
        autoescape=False,  # no HTML: `tojson` quotes
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tojson"] = to_flow
    return environment


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # The one in C reads a manifest some ten times as fast.


class _Loader(_Base):  # type: ignore[misc]
    """Knows JSON's scalars and no others: YAML 1.1 reads `1e-05` as text and `on` as true."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own form


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"null\Z"), ["n"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|false)\Z"), ["t", "f"])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"-?(?:0|[1-9][0-9]*)\Z"), list("-0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\Z"),
    list("-0123456789"),
)

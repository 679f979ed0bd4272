"""Outer documents as jinja2 templates.

Every value enters by the filter `tojson`. It puts a mark in the value's place, and the value itself only once the
document has been read: text of users never passes a reader of YAML, and so can neither break out of its place nor be
read as something else. A name that a template uses and nobody gave is an error. Templates hold no decision beyond an
optional block.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Literal, NoReturn, TypeAlias

import yaml
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from pydantic import JsonValue

from finetune_operator.launchers.launcher_rows import LauncherName
from finetune_operator.rendering.render_types import Manifest

TemplateName: TypeAlias = (
    Literal[
        "claim",
        "configmap",
        "networkpolicy",
        "service",
        "server_configmap",
        "server_deployment",
        "server_inferenceservice",
        "server_service",
        "server_scaling",
        "server_disruption",
        "server_network",
    ]
    | LauncherName
)
"""A launcher's template has the launcher's name."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C where there is one: it reads some ten times as fast."""
_TAKEN = "values_taken"
"""Name under which a template's context holds the values that its marks stand for."""
_MARK = "value of the template, number "


def document(template: TemplateName, **values: JsonValue) -> Manifest:
    """The object that `template` makes of `values`."""
    taken: list[JsonValue] = []
    text = _environment().get_template(f"{template}.yaml.jinja").render({**values, _TAKEN: taken})
    made = _put_in(yaml.load(text, _Loader), taken)
    if not isinstance(made, dict):
        raise TypeError(f"the template {template} makes no object")
    return made


@pass_context
def _mark(context: Context, value: Any) -> str:
    """The filter `tojson`."""
    taken: list[JsonValue] = context[_TAKEN]
    # By way of JSON: what is no JSON value ends here, and nothing is shared with what the caller holds.
    taken.append(json.loads(json.dumps(value, allow_nan=False, default=_no_json)))
    return json.dumps(f"{_MARK}{len(taken) - 1}")


def _no_json(value: object) -> NoReturn:
    raise TypeError(f"{value} is no JSON value")  # A name that nobody gave tells itself when it becomes text.


def _put_in(read: Any, taken: list[JsonValue]) -> JsonValue:
    """What was read of a template's text, with the values in their places."""
    match read:
        case dict():
            return {name: _put_in(inner, taken) for name, inner in read.items()}
        case list():
            return [_put_in(inner, taken) for inner in read]
        case str() if read.startswith(_MARK):
            return taken[int(read.removeprefix(_MARK))]
        case None | bool() | int() | float() | str():
            return read
        case _:
            raise TypeError(f"a template holds {read!r}, which is no JSON value")


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(f"finetune_operator.{name}") for name in ("rendering", "launchers")]),
        undefined=StrictUndefined,
        autoescape=False,  # no HTML, and no text of users either
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tojson"] = _mark
    return environment

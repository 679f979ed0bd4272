"""Outer documents as jinja2 templates.

Every value enters by the filter `tojson`, which writes a mark; once the document is parsed, the value replaces it. So
users' text never reaches the YAML parser, and can neither break out of its place nor change its type. A name without a
value is an error. Templates hold no decision beyond an optional block.

jinja2 and yaml are imported with the first template: programs that only read a status import this module as well.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

from pydantic import JsonValue

from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.spec.launcher_rows import SUPPORTED, LauncherName

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.runtime import Context

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
        "server_route",
        "server_idle",
    ]
    | LauncherName
)
"""Name of a template; a launcher's template has the launcher's name."""

_LAUNCHERS = tuple(f"jobs/launchers/{launcher.name}" for launcher in SUPPORTED)
_FOLDERS = ("jobs/render/templates", "endpoints/render/templates", *_LAUNCHERS)
"""Folders of templates, in the package."""
_MARKED = "values_taken"
"""Key of a template's context for the values that its marks stand for."""
_MARK = "value of the template, number "


def document(template: TemplateName, **values: JsonValue) -> Manifest:
    """Render `template` with `values` to an object."""
    marked: list[JsonValue] = []
    text = _environment().get_template(f"{template}.yaml.jinja").render({**values, _MARKED: marked})
    rendered = _replace_marks(_parsed(text), marked)
    if not isinstance(rendered, dict):
        raise TypeError(f"template {template} does not render an object")
    return rendered


def program(name: Literal["endpoint_guard"]) -> str:
    """Return the source of a program beside the templates, which runs in another image."""
    environment = _environment()
    assert environment.loader is not None, "the environment has a loader"
    return environment.loader.get_source(environment, f"{name}.py")[0]


def _parsed(text: str) -> Any:
    import yaml

    # The loader in C, if available, is about ten times as fast.
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _mark(context: Context, value: Any) -> str:
    """Store a value and return its mark: the filter `tojson`."""
    marked: list[JsonValue] = context[_MARKED]
    # The round trip refuses non-JSON values and copies the rest, so that nothing is shared with the caller.
    marked.append(json.loads(json.dumps(value, allow_nan=False, default=_no_json)))
    return json.dumps(f"{_MARK}{len(marked) - 1}")


def _no_json(value: object) -> NoReturn:
    raise TypeError(f"{value} is not a JSON value")  # A name without a value names itself when it becomes text.


def _replace_marks(read: Any, marked: list[JsonValue]) -> JsonValue:
    """Replace the marks in a parsed template by their values."""
    match read:
        case dict():
            return {name: _replace_marks(inner, marked) for name, inner in read.items()}
        case list():
            return [_replace_marks(inner, marked) for inner in read]
        case str() if read.startswith(_MARK):
            return marked[int(read.removeprefix(_MARK))]
        case None | bool() | int() | float() | str():
            return read
        case _:
            raise TypeError(f"a template holds {read!r}, which is not a JSON value")


@functools.cache
def _environment() -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, pass_context

    environment = Environment(
        loader=ChoiceLoader([PackageLoader("finetune_operator", folder) for folder in _FOLDERS]),
        undefined=StrictUndefined,
        autoescape=False,  # no HTML, and no text of users either
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["tojson"] = pass_context(_mark)
    return environment

"""Parts of hints: the values around a field, a value as a message shows it, settings to write instead."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from finetune_operator.api.field_names import plain
from finetune_operator.api.foreign_names import find_name
from finetune_operator.api.foreign_rows import ForeignValue
from finetune_operator.api.meant_uris import CLAIM, as_uri, on_hub
from finetune_operator.api.problems import describe_value, is_secret_name, presentable
from finetune_operator.api.shapes import (
    Shape,
    accepts,
    find,
    spec_shape,
)
from finetune_operator.api.support import served_schemes

_HUB_SLASHES = 3
"""Slashes of hf://organisation/name; a file or a configuration may follow in addresses of other tools."""


@dataclass(frozen=True)
class Around:
    """Other fields of a job on which the meaning of a name depends."""

    task: JsonValue = None
    """Task that the job means: column names depend on it."""
    data: JsonValue = None
    """URI of the data."""
    beside: Mapping[str, JsonValue] = field(default_factory=dict)
    """Object with the name."""
    processes: int | None = None
    """Processes of the training; None: the job does not say."""

    @property
    def hub(self) -> bool:
        """True if the data are on the Hub, whose splits have slices."""
        return on_hub(self.data)


MICRO_BATCH, GLOBAL_BATCH = "spec.training.microBatchSize", "spec.training.globalBatchSize"
NOTHING_AROUND = Around()


def rows_of_a_step(beside: Mapping[str, JsonValue], processes: int | None) -> tuple[int, str]:
    """Return the micro-batch among an object's fields and, as text, the rows of a step that follow; empty text: the
    micro-batch is unknown, or the rows of a step are given.
    """
    counts: dict[str, int] = {}
    for name, given in beside.items():
        other = find_name(name, "training")
        if plain(name) in ("globalbatchsize", "microbatchsize") or (
            other is not None and other.field == GLOBAL_BATCH and other.same
        ):
            return 0, ""
        if other is not None and other.field is not None and isinstance(given, int) and given > 0:
            counts[other.field] = given
    micro, accumulated = counts.get(MICRO_BATCH), counts.get(GLOBAL_BATCH, 1)
    if micro is None:
        return 0, ""
    if processes is None:
        return micro, f"{micro * accumulated} ({micro} x {accumulated}) x the number of processes"
    factors = f"{micro} row{'' if micro == 1 else 's'}" + (f" x {accumulated} steps" if GLOBAL_BATCH in counts else "")
    factors += f" x {processes} process{'' if processes == 1 else 'es'}"
    return micro, f"{micro * accumulated * processes} ({factors})"


def further_hint(hint: str) -> str:
    return "" if not hint else f", {hint}" if hint.startswith("which ") else f" ({hint})"


def uri_of(field: str, shape: Shape, value: JsonValue) -> str | None:
    """Return the value as a URI that the field accepts; None: it is none and no name or path that becomes one."""
    if isinstance(value, str) and value.startswith("hf://") and value.count("/") > _HUB_SLASHES:
        value = "/".join(value.split("/")[: _HUB_SLASHES + 1])
    if isinstance(value, str) and not is_secret_name(value) and accepts(shape, value):
        return str(json.loads(describe_value(value, limit=200)))
    prefixes = [f"{scheme}://" for scheme in served_schemes(field.removeprefix("spec."), None)]
    uri = as_uri(value)
    if uri is not None and uri.startswith(tuple(prefixes)) and accepts(shape, uri):
        return uri
    return f"pvc://{value}" if isinstance(value, str) and "pvc://" in prefixes and CLAIM.fullmatch(value) else None


def settings_instead(row: ForeignValue) -> str:
    hint = further_hint(row.hint) if row.instead else row.hint
    steps = [f"{field} to {shown_value(value, field)}" for field, value in row.instead.items()]
    return (f"set {' and '.join(steps)}" if steps else "") + hint


def shown_value(value: JsonValue, field: str) -> str:
    """Return a value as YAML shows it; credentials are hidden."""
    if isinstance(value, dict | list):
        return presentable(json.dumps(value, ensure_ascii=False))
    shown = describe_value(value, field.split("."))
    return shown[1:-1] if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.:/-]*", value) else shown


def shape_at(field: str) -> Shape | None:
    head, *rest = field.split(".")
    return find(spec_shape(), rest) if head == "spec" else None

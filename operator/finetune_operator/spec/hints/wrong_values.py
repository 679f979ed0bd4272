"""Hints for a value that a field does not accept, and for a missing one.

The value that is meant has another form: a text for a list, `10%` for 0.1, `8h` for seconds, one field for its object.
A hint writes only values that the field accepts. Values of other tools by name are rows of `foreign_names.yaml`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from finetune_operator.spec.fields.field_names import plain
from finetune_operator.spec.fields.shapes import (
    Boolean,
    Fields,
    Items,
    Map,
    Number,
    Scalars,
    Shape,
    Text,
    accepts,
    sentence,
)
from finetune_operator.spec.fields.support import served_schemes, served_words, works
from finetune_operator.spec.fields.uri_hints import is_uri, listed, rows_in_files, uri_hint
from finetune_operator.spec.hint_values import Drop, Hint, ReplaceBy, SetTo
from finetune_operator.spec.hints.field_lookup import NOTHING_AROUND, FieldContext, dotted, meant_task, shape_at
from finetune_operator.spec.hints.foreign_table import convert, find_value
from finetune_operator.spec.hints.number_readings import number_in, seconds_of
from finetune_operator.spec.problems import PathPart, holds_secret, is_secret_name

_LONGEST = 200
"""Maximum characters of a text whose meaning is searched for."""
_UNITS = re.compile(
    r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtpe])(?:(i|ibi|ebi|obi)|ilo|ega|iga|era|eta|xa)?(?:b|bytes?)?", re.IGNORECASE
)
_COMPARED = re.compile(
    r"(?P<metric>[A-Za-z][\w/ +-]*?)\s*(?P<sign>>=|<=|=>|=<|==?|>|<|:|\u2265|\u2264)\s*"
    r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<percent>%?)"
)
"""Condition on a metric: `accuracy >= 0.85`."""
_GPUS = re.compile(
    r"(?:(?P<before>[0-9]+)\s*(?:[x*\u00d7]\s*)?(?=[A-Za-z]))?(?P<product>[A-Za-z][\w -]*?)"
    r"(?:\s*[x:*\u00d7]\s*(?P<after>[0-9]+))?"
)
"""Product of GPUs with their number before or behind it: `2x H100`, `A100-80GB:4`."""
_GPU_WORD = re.compile(
    r"\b(?:[ABHLTVP][0-9]{1,3}[A-Z]{0,2}|GH[0-9]{3}|GB[0-9]{3}|MI[0-9]{3}[A-Z]?|RTX|GTX|Tesla|NVIDIA)\b", re.IGNORECASE
)
_SECRET_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")
_KINDS = ("type", "name", "mode", "kind", "method", "field", "column", "uri", "path", "scheduler_type")
"""Fields of an object with the word or text that a field here expects by itself."""
_SWITCHES: Mapping[str, bool] = {
    **dict.fromkeys(("yes", "on", "y", "true", "always", "enabled"), True),
    **dict.fromkeys(("no", "off", "n", "false", "never", "disabled"), False),
}
_LEAST_SIZE = 2**20
"""Bytes under which a size without a unit is meant in GiB."""
_EXAMPLES = ("hf://org/name", "pvc://claim/path", "file:///path")


def wrong_value(
    shape: Shape,
    path: Sequence[PathPart],
    value: JsonValue,
    schemes: Sequence[str] | None,
    around: FieldContext = NOTHING_AROUND,
) -> tuple[str, Hint]:
    """Return the rule that a value breaks at `path`, and the hint; `schemes` are those that the settings allow."""
    shape, field = _served(shape, path), dotted(path)
    rule = f"must be {sentence(shape)}"
    if is_uri(shape):
        prefixes = [f"{scheme}://" for scheme in served_schemes(dotted(path[1:]), schemes)]
        if not prefixes:
            return "is not supported in this version", Drop()
        rule = f"must be a URI that begins with {listed(prefixes)}"
        if not isinstance(value, dict | list):
            return rule, uri_hint(field, value, prefixes)
    if isinstance(value, int | float) and isinstance(shape.body, Text) and not shape.body.quantity:
        rule = "must be text"
        if path[-2:-1] == ("splits",):
            rule = "must be the name of a split, or a file name without its extension"
            slices = convert(f"held_out {path[-1]}", value, {}) if around.hub and path[-1] != "train" else {}
            return rule, SetTo(slices) if slices else rows_in_files(str(path[-1]), around.data)
    try:
        hint = meant(shape, field, value, around)
    except OverflowError:  # The value is a number too large for the unit of any field.
        hint = None
    return rule, hint or ("change it" if shape.required else "change it, or leave it out")


def _served(shape: Shape, path: Sequence[PathPart]) -> Shape:
    """Return the shape of a spec field without the words that have no behaviour yet."""
    return replace(shape, words=served_words(dotted(path[1:]), shape.words)) if path[:1] == ("spec",) else shape


def fitting(field: str, value: JsonValue) -> JsonValue:
    """Return the value that the field at the dotted path accepts for one under another name or in another form; None:
    it accepts none.
    """
    shape = shape_at(field)
    if field.endswith((".memory", ".size", ".sharedMemory")) and isinstance(value, int) and value < _LEAST_SIZE:
        value = f"{value}Gi"
    if shape is None or value is None or accepts(shape, value):
        return value if shape is not None or field.startswith("metadata.") else None
    if isinstance(value, dict):
        return value if takes(shape, value) else None
    prefixes = [f"{scheme}://" for scheme in served_schemes(field.removeprefix("spec."), None)]
    hint = uri_hint(field, value, prefixes) if is_uri(shape) else meant(shape, field, value)
    return hint.value if isinstance(hint, ReplaceBy) and takes(shape, hint.value) else None


def takes(shape: Shape, value: JsonValue) -> bool:
    """Return True if the field accepts the value; of an object each of its fields."""
    if isinstance(shape.body, Scalars):
        return not isinstance(value, dict | list)
    if isinstance(shape.body, Map) and isinstance(value, dict):
        return all(takes(shape.body.value, inner) for inner in value.values())
    if not isinstance(shape.body, Fields) or not isinstance(value, dict):
        return accepts(shape, value)
    fields = shape.body.fields
    missing = any(inner.required for name, inner in fields.items() if name not in value)
    return not missing and all(name in fields and takes(fields[name], inner) for name, inner in value.items())


def meant(shape: Shape, field: str, value: JsonValue, around: FieldContext = NOTHING_AROUND) -> Hint | None:
    """Return the hint for a value with a plain meaning at the dotted path; None: it has none. Raise OverflowError for a
    number beyond floating point.
    """
    row, leaf = find_value(field, value), field.rpartition(".")[2]
    if row is not None and not isinstance(shape.body, Boolean):
        return row.answer
    if isinstance(value, str) and (len(value) > _LONGEST or holds_secret(value)):
        return None
    if leaf in ("gpusPerNode", "accelerator") and isinstance(value, str) and (gpus := _gpus(value, leaf)) is not None:
        return gpus
    match shape.body:
        case Number(integer, minimum):
            hint = _number(shape, leaf, value, minimum if integer else None)
        case Boolean():
            switch = _SWITCHES.get(value.lower()) if isinstance(value, str) else None
            hint = "write true or false" if switch is None else ReplaceBy(switch)
        case Text():
            hint = _text(shape.body, field, value)
        case Items(item):
            hint = _list(shape, item, leaf, value)
        case Fields(fields):
            works_here = {name: inner for name, inner in fields.items() if _works(f"{field}.{name}")}
            hint = _object(shape, works_here, field, value, around)
        case Map():
            hint = _free_object(leaf, value)
        case _:
            hint = None
    return hint or _word(shape, field, value)


def _works(field: str) -> bool:
    return works(field.removeprefix("spec."))


def _number(shape: Shape, leaf: str, value: JsonValue, minimum: float | None) -> Hint | None:
    match value:
        case str():
            number = number_in(shape, leaf, value)
            quoted = re.fullmatch(r"[-+.\deE]+", value) is not None
            if number is not None:
                return ReplaceBy(number, "without quotes" if quoted else "")
            if accepts(shape, 0) and plain(value) in ("none", "never", "no", "off"):
                return ReplaceBy(0)
            return Drop("the default applies") if plain(value) in ("auto", "default") and not shape.required else None
        case -1 if not shape.required:
            return Drop("the default applies")
        case int() if minimum is not None and value < minimum:
            return ReplaceBy(int(minimum))
    return None


def _text(body: Text, field: str, value: JsonValue) -> Hint | None:
    match value:
        case str() if body.quantity and (size := _UNITS.fullmatch(value.strip())):
            number, unit, binary = size.groups()
            decimal = "k" if unit in "kK" else unit.upper()
            if binary:
                return ReplaceBy(f"{number}{unit.upper()}i")
            return ReplaceBy(f"{number}{decimal}", f"or {number}{unit.upper()}i for powers of 1024")
        case int() | float() if not body.quantity:
            return ReplaceBy(json.dumps(value), "with the quotes")
        case [str() | int() as only]:
            return ReplaceBy(only, words="write its one item without the list")
        case [_, *_]:
            return "write one of its items, without the list: only one is supported"
        case dict():
            named = [text for kind in _KINDS if isinstance(text := value.get(kind), str)]
            return ReplaceBy(named[0]) if named else None
    return None


def _list(shape: Shape, item: Shape, leaf: str, value: JsonValue) -> Hint | None:
    readings: list[JsonValue]
    match value:
        case str() if value.strip():
            # Names of columns have spaces.
            between = r"\s*,\s*" if "," in value or leaf == "columns" else r"\s+"
            readings = [[part for part in re.split(between, value.strip().strip("[]")) if part], [value]]
        case dict() if not value and not shape.required:
            return Drop()
        case dict() if leaf == "env" and value and not any(map(is_secret_name, value)):
            texts = {name: given if isinstance(given, str) else json.dumps(given) for name, given in value.items()}
            return ReplaceBy([{"name": name, "value": text} for name, text in texts.items()])
        case dict() if not isinstance(item.body, Text):
            asked = "make it a list: put a dash before its first field, and indent the others below that"
            return ReplaceBy([value], words=asked) if value else "write a list"
        case dict():
            readings = [*(inner for inner in value.values() if isinstance(inner, list)), list(value.values())]
        case _:
            readings = [[value]]
    return next((ReplaceBy(reading) for reading in readings if accepts(shape, reading)), None)


def _object(
    shape: Shape, fields: Mapping[str, Shape], field: str, value: JsonValue, around: FieldContext
) -> Hint | None:
    """Return the hint for a value in place of an object: that of the object's field that it belongs to."""
    leaf = field.rpartition(".")[2]
    match value:
        case list():
            return _object_in_list(shape, fields, field, value)
        case bool() if "enabled" in fields:
            return ReplaceBy({"enabled": value})
        case False if not shape.required:
            return Drop()
        case str() if "uri" in fields:
            uri = fitting(f"{field}.uri", value)
            return "write its URI one level deeper, as uri" if uri is None else ReplaceBy({"uri": uri})
        case str() if leaf == "adapter" and "/" in value:
            return Drop("training cannot continue from an adapter; spec.model.uri is a whole model")
        case str() if leaf == "secrets" or set(fields) == {"name", "key"}:
            name = value if _SECRET_NAME.fullmatch(value) and not is_secret_name(leaf) else "my-secret"
            entry = f"{{name: {name}, key: token}}"
            entry = f"{{hubToken: {entry}}}" if leaf == "secrets" else entry
            return f"write {entry}, with the names of your Secret and of its key"
        case str() if leaf == "gate" and (condition := _COMPARED.fullmatch(value.strip())) is not None:
            number = float(condition["number"]) / (100 if condition["percent"] else 1)
            limit = "maximum" if condition["sign"] in ("<", "<=", "=<", "\u2264") else "minimum"
            return ReplaceBy({"metric": condition["metric"].strip(), limit: number})
        case str() if "minutes" in fields and (seconds := seconds_of(value)) is not None:
            return ReplaceBy({"minutes": max(1, round(seconds / 60))})
    if (implied := _implied(fields, field, value)) is not None:
        return implied
    if value is True and not any(inner.required for inner in fields.values()):
        return ReplaceBy({}, "which takes the defaults")
    return None


def _object_in_list(shape: Shape, fields: Mapping[str, Shape], field: str, value: list[JsonValue]) -> Hint | None:
    """Return the hint for a list in place of an object."""
    if field.endswith(".splits") and value and set(map(str, value)) <= set(fields):
        return ReplaceBy({str(split): split for split in value})
    if not value:
        return "write its fields in place of the brackets" if shape.required else Drop()
    if len(value) > 1 and "splits" in fields:
        return (
            "only one dataset is supported: write all rows, with the same column names, to one folder, and set "
            f"{field}.uri to file://FOLDER"
        )
    if (merged := unwrapped(value)) is not None:
        one = len(value) == 1
        asked = "write its one item without the list" if one else "write its fields below it, without the dashes"
        return ReplaceBy(merged, words=asked)
    if len(value) == 1:
        return ReplaceBy(value[0], words="write its one item without the list")
    return "write one of its items, without the list: only one is supported" if isinstance(value[0], dict) else None


def unwrapped(value: JsonValue) -> JsonValue:
    """Return the object whose fields are the items of a list; None: the items are no objects, or share a field."""
    merged: dict[str, JsonValue] = {}
    for item in value if isinstance(value, list) else []:
        if not isinstance(item, dict) or merged.keys() & item.keys():
            return None
        merged |= item
    return merged or None


def _implied(fields: Mapping[str, Shape], field: str, value: JsonValue) -> ReplaceBy | None:
    """Return the hint for a value that one field of an object accepts: by its word, by the table, with its own name
    (`3 epochs`), or as the only one; steps take precedence over minutes.
    """
    for name, inner in fields.items():
        row = find_value(f"{field}.{name}", value)
        beside = {place.rpartition(".")[2]: given for place, given in row.sets.items()} if row is not None else {}
        # The default of a field says nothing about the object.
        if beside and beside.keys() <= fields.keys() and not (beside.get(name) == "auto" and value is True):
            return ReplaceBy(beside)
        word = next((word for word in inner.words if isinstance(value, str) and plain(word) == plain(value)), None)
        alone = sum(word in shape.words for shape in fields.values()) == 1
        if word is not None and (alone or word not in ("auto", "none")):
            return ReplaceBy({name: word})
    readings: list[JsonValue] = []
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        readings = [value, [value]]
    for reading in readings:
        others = (name for name, inner in fields.items() if isinstance(reading, list) or not inner.words)
        accepting = [name for name in others if accepts(fields[name], reading)]
        if len(accepting) == 1 or "steps" in accepting[:1]:
            return ReplaceBy({accepting[0]: reading})
    return None


def _free_object(leaf: str, value: JsonValue) -> Hint | None:
    match value:
        case str() if re.search(r"\.(json|ya?ml)$", value):
            strategy = ", and set spec.parallelism.strategy to deepspeed" if leaf == "deepspeedConfig" else ""
            return f"write the fields of that file here{strategy}"
        case list() if leaf == "labels" and value and all(isinstance(label, str) for label in value):
            return ReplaceBy({str(at): label for at, label in enumerate(value)})
    return None


def _gpus(value: str, leaf: str) -> Hint | None:
    """Return the hint for a product of GPUs, with or without their number, in place of the field `leaf`."""
    if leaf == "accelerator" and plain(value) in ("amd", "rocm"):
        return ReplaceBy({"resource": "amd.com/gpu"})
    match = _GPUS.fullmatch(value.strip())
    if match is None or not _GPU_WORD.search(match["product"]):
        return None
    product, count = match["product"].strip().replace(" ", "-"), match["before"] or match["after"]
    if count is None and leaf == "accelerator":
        return ReplaceBy({"product": product})
    return SetTo({"spec.resources.accelerator.product": product, "spec.resources.gpusPerNode": int(count or 1)})


def _word(shape: Shape, field: str, value: JsonValue) -> Hint | None:
    """Return the hint for an object with one of the field's words, or for a misspelt word; None: it is neither."""
    names: list[str] = [value] if isinstance(value, str) else []
    if isinstance(value, dict):
        on = [name for name, inner in value.items() if inner is True]
        names = [*(on if len(on) == 1 else ()), *(text for kind in _KINDS if isinstance(text := value.get(kind), str))]
    words = {plain(word): word for word in shape.words}
    for name in names:
        row = find_value(field, name)
        if row is not None and row.value is not None:
            return ReplaceBy(row.value, row.note)
        if field == "spec.task":
            return ReplaceBy(task) if (task := meant_task(name)) in shape.words else None
        near = difflib.get_close_matches(plain(name), words, n=1)
        near = near or [word for word in words if word not in ("none", "auto") and plain(name).endswith(word)]
        if near:
            return ReplaceBy(words[near[0]])
    return None


def missing(shape: Shape, path: Sequence[PathPart], schemes: Sequence[str] | None) -> str:
    """Return the hint for a missing required field."""
    shape = _served(shape, path)
    if shape.words:
        return f"write one of {', '.join(shape.words)}"
    if isinstance(shape.body, Fields):
        needed = [name for name, field in shape.body.fields.items() if field.required]
        example = ", e.g. {uri: hf://org/name}" if needed == ["uri"] else ""
        return f"write it with {' and '.join(needed)} below it{example}"
    if is_uri(shape):
        prefixes = [f"{scheme}://" for scheme in served_schemes(dotted(path[1:]), schemes)]
        example = next((uri for uri in _EXAMPLES if uri.startswith(tuple(prefixes))), "")
        return f"set it to a URI that begins with {listed(prefixes)}" + (f", e.g. {example}" if example else "")
    meaning = shape.description.removesuffix("Required.").strip().removesuffix(".")
    begin = meaning[:1] if meaning[1:2].isupper() else meaning[:1].lower()
    return f"set it: {begin}{meaning[1:]}" if meaning else f"set it to {sentence(shape)}"

"""Search for the intended value behind one of another form: `10%` for 0.1, `8h` for seconds, a text for a list.

A suggestion is always a value that the field accepts. Values of other tools by name are in `foreign_names`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping

import yaml
from pydantic import JsonValue

from finetune_operator.api.field_names import plain
from finetune_operator.api.foreign_names import find_value
from finetune_operator.api.meant_numbers import (
    DURATION,
    EVERY,
    MINUS,
    Shown,
    number_hint,
    numbers_of,
    range_ends,
    range_hint,
    seconds_of,
)
from finetune_operator.api.problems import CUT, HIDDEN, holds_secret, is_secret_name
from finetune_operator.api.shapes import Boolean, Fields, Items, Map, Number, Shape, Text, accepts

_EQUALS = re.compile(r"([A-Za-z]\w*)\s*=\s*([^\s,;=]+)")
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
_ROLES: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Name of a split -> its role."""
_COUNT_OF = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s+([A-Za-z]+)")
_SEEDS = ("random", "none", "null", "auto", "time", "any", "true", "false", "default")
_NAMED_VALUE = re.compile(r"(?:write|did you mean) (\{[^{}]*\}|\[[^\[\]]*\]|\"[^\"]*\"|[\w.:/+-]*[\w/])(?=$|[,;?])")
"""Start of a hint that names one value: text after a comma is another form of the same."""
_LONGEST = 60
"""Maximum characters of a value that a message shows in full."""
_BOOLEAN_TEXTS = {
    **dict.fromkeys(("yes", "on", "y", "true", "always", "enabled"), True),
    **dict.fromkeys(("no", "off", "n", "false", "never", "disabled"), False),
}
_SECRET_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?")
_KINDS = ("type", "name", "mode", "kind", "method", "scheduler_type")
"""Fields of an object with the word that a field here expects by itself."""

NAMING = ("field", "name", "column", "uri", "path")
"""Fields of an object with the text that a field here expects by itself."""


def form_hint(shape: Shape, path: str, value: JsonValue, shown: Shown) -> str | None:
    """Return the hint for a value at the dotted `path` with a wrong form and a plain meaning; None: it has none."""
    leaf = path.rpartition(".")[2]
    if isinstance(value, str) and (len(value) > _LONGEST or holds_secret(value)):
        return None

    def write(intended: JsonValue) -> str | None:
        return f"write {shown(intended, leaf)}" if accepts(shape, intended) else None

    match shape.body, value:
        case Number(), _ if leaf == "seed" and not isinstance(value, list) and plain(str(value)) in _SEEDS:
            return "write 42, or another number of your choice: runs with the same seed are equal"
        case Number(), str():
            return number_hint(shape, leaf, value, shown) or range_hint(shape, path, range_ends(value))
        case Number(), dict():
            return range_hint(shape, path, range_ends(value))
        case Number(), [first, *_] if leaf != "nodes" and accepts(shape, first):
            return f"write {shown(first, leaf)}, without the list: a job has one value here, so write a job for each"
        case Number(integer=True, minimum=minimum), -1 if minimum is not None and minimum >= 0 and not shape.required:
            return "leave it out to take the default"
        case Number(integer=True, minimum=minimum), int() if minimum is not None and value < minimum:
            return f"write {minimum:.0f}" + ("" if shape.required else ", or leave it out")
        case Boolean(), str() if value.lower() in _BOOLEAN_TEXTS:
            return write(_BOOLEAN_TEXTS[value.lower()])
        case Boolean(), str() if DURATION.search(value):
            return "write true; the duration is not a field of a job"
        case Boolean(), _:
            return "write true or false"
        case Items(), str() if value.strip():
            return write(_listed(value)) or write([value])
        case Items(), dict() if not value:
            return write([]) or ("write a list" if shape.required else "leave it out, or write a list")
        case Items(item), dict() if not isinstance(item.body, Text):
            return "make it a list: put a dash before its first field, and indent the others below that"
        case Items(), dict():
            lists = [each for each in value.values() if accepts(shape, each)]
            return write(lists[0] if len(lists) == 1 else list(value.values())) or "write a list"
        case Fields(fields), str():
            return _object(fields, value, leaf, shown)
        case Fields() | Text(), [only] if not isinstance(only, list):
            return "write its one item without the list"
        case Fields(), []:
            fields_below = "write its fields in place of the brackets"
            return fields_below if shape.required else write({}) or f"leave it out, or {fields_below}"
        case Fields() | Text(), [_, *_]:
            return "write one of its items, without the list: only one is supported"
        case Text(), dict() if names := [value[name] for name in NAMING if isinstance(value.get(name), str)]:
            return write(names[0])
        case Number(integer=True), list() if leaf == "nodes":
            return f"write their number, {len(value)}; choose nodes by spec.template.nodeSelector"
        case Map(), str() if re.search(r"\.(json|ya?ml)$", value):
            strategy = ", and set spec.parallelism.strategy to deepspeed" if leaf == "deepspeedConfig" else ""
            return f"write the fields of that file here{strategy}"
    return _choice_hint(shape, path, value, shown)


_PROGRAM = re.compile(r"\.(py|sh)$")


def in_other_form(shape: Shape, path: str, value: JsonValue) -> str | None:
    """Return the hint for GPUs, a gate, splits and labels in a common other form; None: it is none of them."""
    above, _, leaf = path.rpartition(".")
    if leaf.isdigit() and isinstance(value, str):
        return _pod_item(above.rpartition(".")[2], value)
    match leaf, shape.body, value:
        case "gpusPerNode" | "accelerator", _, str():
            return _gpus(value, leaf)
        case "gpusPerNode", _, list() if value and all(isinstance(each, int) for each in value):
            return f"write {len(value)}"
        case "gate", Fields(), str() if (limit := compared(value)) is not None:
            return f"write {{metric: {limit[0]}, {limit[1]}: {limit[2]:g}}}"
        case "gate", Fields(), [dict(), dict(), *_] if unwrapped(value) is None:
            return "write one of its items, without the list: only one is supported"
        case "splits", Fields(), str() if (role := role_of(value)) or value == "train":
            return f"write {{{role or value}: {value}}}"
        case "metrics", Items(), dict() if value and all(isinstance(each, bool) for each in value.values()):
            return f"write {json.dumps([name for name, each in value.items() if each])}"
        case "nodeSelector", Map(), str() if labels := re.fullmatch(r"([\w./-]+)\s*[=:]\s*([\w.-]+)", value):
            return f"write {json.dumps({labels[1]: labels[2]})}"
        case "entryPoint", Text(), list() if (
            len(programs := [one for one in value if str(one).endswith((".py", ".sh"))]) == 1
        ):
            return f"write {programs[0]}"
        case "hyperparameters", Map(), list() if (flags := _flags(value)) is not None:
            return f"write {json.dumps(flags, ensure_ascii=False)}"
        case _, Fields(fields), str() if (named := _joined_fields(fields, value)) is not None:
            return f"write {{{named}}}, with a space after each colon"
        case "splits", Fields(), list() if value and all(isinstance(each, str) for each in value):
            roles = {_ROLES.get(plain(str(each)), ""): each for each in value}
            named = ", ".join(f"{role}: {each}" for role, each in roles.items())
            return f"write {{{named}}}" if "" not in roles and len(roles) == len(value) else None
        case "secrets", Fields(), str() | [str()]:
            name = value if isinstance(value, str) else str(value[0])
            named = name if _SECRET_NAME.fullmatch(name) else "my-secret"
            return f"write {{hubToken: {{name: {named}, key: token}}}}, with the names of your Secret and of its key"
        case _, Fields(fields), str() if "=" in value and (given := _EQUALS.findall(value)):
            if all(name in fields for name, _ in given):
                return f"write {{{', '.join(f'{name}: {each}' for name, each in given)}}}: a colon after each name"
        case "env", Items(), dict() if value and not any(isinstance(each, dict | list) for each in value.values()):
            pairs = [{"name": name, "value": scalar_text(each)} for name, each in value.items()]
            return None if any(map(is_secret_name, value)) else f"write {json.dumps(pairs, ensure_ascii=False)}"
        case "targetModules", Items(), str() if re.fullmatch(r"[\w.]+(?: [\w.]+)+", value):
            return f"write {json.dumps(value.split())}"
        case _, Fields(), [dict(), dict(), *_] if "uri" not in shape.body.fields:
            return "write its fields below it, without the dashes"
        case "labels", Map(), list() if value and all(isinstance(each, str) for each in value):
            return f"write {json.dumps({str(at): each for at, each in enumerate(value)}, ensure_ascii=False)}"
    return None


def _pod_item(list_name: str, value: str) -> str | None:
    """Return the hint for text in place of an item of a list of pods: `A=b` in env, a taint in tolerations."""
    name, equals, rest = value.partition("=")
    if list_name == "env" and equals and re.fullmatch(r"[A-Za-z_]\w*", name) and not is_secret_name(name):
        return f"write {{name: {name}, value: {json.dumps(rest)}}}"
    if list_name == "tolerations" and (taint := _TAINT.fullmatch(value)) is not None:
        matched = f"value: {taint['value']}" if taint["value"] else "operator: Exists"
        effect = f", effect: {taint['effect']}" if taint["effect"] else ""
        return f"write {{key: {taint['key']}, {matched}{effect}}}"
    return None


_TAINT = re.compile(r"(?P<key>[\w./-]+)(?:=(?P<value>[\w.-]+))?(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?")
"""Taint as kubectl writes it: `dedicated=ml:NoSchedule`."""


def compared(text: str) -> tuple[str, str, float] | None:
    """Return metric, limit (`minimum` or `maximum`) and number of a condition such as `accuracy >= 85 %`; None: it is
    none.
    """
    found = _COMPARED.fullmatch(text.strip())
    if found is None:
        return None
    number = float(found["number"]) / (100 if found["percent"] else 1)
    limit = "maximum" if found["sign"] in ("<", "<=", "=<", "\u2264") else "minimum"
    return found["metric"].strip(), limit, number


def _joined_fields(fields: Mapping[str, Shape], text: str) -> str | None:
    """Return fields that were written without a space after the colon, as `epochs:3`; None: they are none of these."""
    pairs = [part.partition(":") for part in text.split()]
    if not pairs or any(name not in fields or not value for name, _, value in pairs):
        return None
    return ", ".join(f"{name}: {value}" for name, _, value in pairs)


def _flags(words: list[JsonValue]) -> dict[str, JsonValue] | None:
    """Return the arguments of a command line, `--lr 1e-4` or `--lr=1e-4`, by name; None: they are none."""
    found: dict[str, JsonValue] = {}
    name = ""
    for word in (part for each in words if isinstance(each, str | int | float) for part in str(each).split()):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = _scalar(value) if value else True
        elif name and found.get(name) is True:
            found[name] = _scalar(word)
        else:
            return None
    return found or None


def _scalar(text: str) -> JsonValue:
    """Return the number in a text; else the text."""
    return next(numbers_of(text), text)


def _gpus(value: str, leaf: str) -> str | None:
    """Return the hint for a product of GPUs, with or without their number, in place of the field `leaf`."""
    if leaf == "accelerator" and plain(value) in ("gpu", "gpus", "nvidia", "cuda", "any", "auto", "nvidiacomgpu"):
        return "leave it out: any GPU is used; spec.resources.gpusPerNode is their number"
    if leaf == "accelerator" and plain(value) in ("amd", "rocm"):
        return "write {resource: amd.com/gpu}"
    if leaf == "accelerator" and plain(value) in ("cpu", "none"):
        return "leave it out: spec.resources.gpusPerNode 0 trains on CPUs"
    found = _GPUS.fullmatch(value.strip())
    if found is None or not _GPU_WORD.search(found["product"]):
        return None
    product = found["product"].strip().replace(" ", "-")
    count = found["before"] or found["after"]
    if count is None and leaf == "accelerator":
        return f"write {{product: {product}}}"
    count = count or "1"
    return f"set spec.resources.accelerator.product to {product} and spec.resources.gpusPerNode to {count}"


_TO = re.compile(r"(spec(?:\.\w+)+) to (\{[^{}]*\}|\[[^\[\]]*\]|\"[^\"]*\"|[^\s,;]*[^\s,;.])")
_IS = re.compile(r"(?:is|are) (spec(?:\.\w+)+): (\{[^{}]*\}|\[[^\[\]]*\]|\"[^\"]*\"|[^\s,;]*[^\s,;.])(?=$|[,;])")


def named_settings(hint: str) -> Mapping[str, JsonValue]:
    """Return the values by dotted path that a hint asks to set: `set A to 1 and B to 2`, `X is A: 1`. A hint with
    alternatives names none.
    """
    if HIDDEN in hint or CUT in hint or re.search(r"(?:, or|; or) (?:set|leave|replace)", hint):
        return {}
    found = [*_TO.findall(hint.partition(" (")[0] if hint.startswith("set ") else ""), *_IS.findall(hint)]
    values: dict[str, JsonValue] = {}
    for field, text in found:
        try:
            value: JsonValue = yaml.safe_load(text)
        except yaml.YAMLError:
            continue
        values.setdefault(field, next(numbers_of(value), value) if isinstance(value, str) else value)
    return values


def scalar_text(value: JsonValue) -> str:
    """Return a scalar as the text of an environment variable, or as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def role_of(split: str) -> str:
    """Return the role of a split with a common name; empty: the name has no role."""
    return _ROLES.get(plain(split), "")


def _listed(value: str) -> list[JsonValue]:
    """Return the items of a list that was written as text, with commas."""
    return [part for part in re.split(r"\s*,\s*", value.strip().strip("[]")) if part]


def plain_meaning(shape: Shape, value: JsonValue, hint: str) -> JsonValue:
    """Return the one value named by the hint for `value`, as in "write 28800" and "did you mean lora?"; None: it leaves
    a choice. Of a list in place of one text, return the first item, as an example of those that can be written.
    """
    if isinstance(value, list) and isinstance(shape.body, Fields) and "without the" in hint:
        return unwrapped(value)
    if isinstance(value, list) and value and isinstance(shape.body, Text):
        return value[0] if accepts(shape, value[0]) else None
    if HIDDEN in hint or CUT in hint:
        return None
    if hint == "remove the quotes" and isinstance(value, str):
        return next((number for number in numbers_of(MINUS.sub("-", value.strip())) if accepts(shape, number)), None)
    named = _NAMED_VALUE.match(hint)
    if named is None:
        return None
    try:
        intended: JsonValue = yaml.safe_load(named[1])
    except yaml.YAMLError:
        return None
    readings = (named[1], intended, *(numbers_of(named[1]) if isinstance(intended, str) else ()))
    return next((each for each in readings if _takes(shape, each)), None)


def unwrapped(value: JsonValue) -> JsonValue:
    """Return the object whose fields are the items of a list; None: the items are no objects, or share a field."""
    items = value if isinstance(value, list) else []
    merged: dict[str, JsonValue] = {}
    for item in items:
        if not isinstance(item, dict) or merged.keys() & item.keys():
            return None
        merged |= item
    return merged or None


def _takes(shape: Shape, value: JsonValue) -> bool:
    """Return True if the field accepts the value; of an object each of its fields."""
    if not isinstance(shape.body, Fields) or not isinstance(value, dict):
        return accepts(shape, value)
    fields = shape.body.fields
    missing = any(inner.required for name, inner in fields.items() if name not in value)
    return not missing and all(name in fields and _takes(fields[name], inner) for name, inner in value.items())


def _object(fields: Mapping[str, Shape], value: str, leaf: str, shown: Shown) -> str | None:
    """Return the hint for text in place of an object: the object's field that the text belongs to."""
    if (found := _COUNT_OF.fullmatch(EVERY.sub("", value.strip(), count=1))) is not None:
        for number in numbers_of(found[1]):
            named = next((name for name, inner in fields.items() if plain(name) == plain(found[2])), None)
            if named is not None and accepts(fields[named], number):
                return f"write {{{named}: {shown(number, named)}}}"
    if "minutes" in fields and (seconds := seconds_of(value)) is not None:
        return f"write {{minutes: {max(1, round(seconds / 60))}}}"
    if set(fields) == {"name", "key"}:
        name = value if _SECRET_NAME.fullmatch(value) and not is_secret_name(leaf) else "my-secret"
        return f"write {{name: {name}, key: token}}, with the names of your Secret and of its key"
    accepting = [name for name, inner in fields.items() if isinstance(inner.body, Items) and accepts(inner, [value])]
    if len(accepting) == 1:
        return f"write {{{accepting[0]}: [{shown(value, accepting[0])}]}}"
    return None


def _choice_hint(shape: Shape, path: str, value: JsonValue, shown: Shown) -> str | None:
    """Return the hint for an object or a misspelt word in place of a word."""
    if isinstance(value, dict):
        if set(value) >= {"repository", "tag"} and isinstance(shape.body, Text):
            image = f"{value['repository']}:{value['tag']}".lower()
            return f"write {shown(image, path.rpartition('.')[2])}" if accepts(shape, image) else None
        on = [name for name, inner in value.items() if inner is True]
        names = [*(on if len(on) == 1 else ()), *(value[kind] for kind in _KINDS if isinstance(value.get(kind), str))]
        for name in names:
            word = _nearest(shape, path, str(name))
            if word is not None:
                return f"write {shown(word, path.rpartition('.')[2])}"
    if isinstance(value, str) and shape.words:
        near = _nearest(shape, path, value)
        return None if near is None else f"did you mean {near}?"
    return None


def _nearest(shape: Shape, path: str, value: str) -> str | None:
    row = find_value(path, value)
    if row is not None and isinstance(word := row.instead.get(path), str):
        return word
    lowered = {plain(word): word for word in shape.words}
    endings = [word for word in shape.words if word != "none" and plain(value).endswith(plain(word)) and len(word) > 2]
    near = difflib.get_close_matches(value.lower(), shape.words, n=1)
    return lowered.get(plain(value)) or next(iter(near or endings), None)

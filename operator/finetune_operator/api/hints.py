"""Hint for an unknown field, or for a value that a field does not accept.

A hint names only features that this version serves and the settings allow: a user who follows it has solved the
problem. Names and values of other tools are answered from `foreign_names`; a misplaced field of ours is answered with
its place.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from pydantic import JsonValue

from finetune_contract.arguments import FREE
from finetune_contract.metrics import METRICS, metrics_of
from finetune_operator.api.deepspeed_keys import KNOWN_KEYS
from finetune_operator.api.foreign_names import ForeignName, ForeignValue, find_name, find_value, plain, written
from finetune_operator.api.meant_columns import column_of, columns_in_order, columns_of, task_by_words
from finetune_operator.api.meant_uris import CLAIM, as_uri, is_uri, listed, uri_hint
from finetune_operator.api.meant_values import (
    NAMING,
    compared,
    form_hint,
    in_other_form,
    named_settings,
    plain_meaning,
    role_of,
)
from finetune_operator.api.meant_words import NAMES_OF_METRICS, gate_of, meaning, words_of
from finetune_operator.api.problems import PathPart, describe_value, is_secret_name, presentable
from finetune_operator.api.shapes import (
    Boolean,
    Fields,
    Items,
    Map,
    Shape,
    Text,
    accepts,
    find,
    leaves,
    sentence,
    spec_shape,
)
from finetune_operator.api.support import served_schemes, served_words, works

_CLOSE = 0.6
_ALIKE = 0.72
"""Similarity above which a name counts as a misspelt column: names of columns are words of their own."""
_CLOSER = 0.84
"""Similarity above which a name counts as a misspelt one of another object; letters alone are weaker evidence there."""
_MOST_PLACES = 3
_ANYWHERE = ("name", "key", "path", "url", "ref", "enabled", "degree")
"""Names of fields that are meaningless without their object."""
_MOST_INSIDE = 16
"""Maximum number of an object's names that a message translates."""
_UNITS = re.compile(
    r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtpe])(?:(i|ibi|ebi|obi)|ilo|ega|iga|era|eta|xa)?(?:b|bytes?)?", re.IGNORECASE
)
_CORES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*v?(?:cores?|cpus?)", re.IGNORECASE)
_CONTAINERS = ("template", "spec", "metadata", "containers")
"""Objects of Kubernetes that give no meaning to their content."""
_HUB_SLASHES = 3
"""Slashes of hf://organisation/name; a file or a configuration may follow in addresses of other tools."""
_STOPPING_METRIC = "spec.training.earlyStopping.metric"
_COLUMNS = "spec.dataset.columns."
_LOADERS = ("csv", "json", "jsonl", "parquet", "text", "arrow", "tsv")
"""Names of `datasets`' readers of files."""
_COLUMN_NAME = re.compile(r"[A-Za-z_][\w ]*")


# --------------------------------------------------------------------------------------------------------- unknown name


@dataclass(frozen=True)
class NameHint:
    """Replacement for a field that does not exist."""

    text: str
    place: str | None = None
    """Dotted path of the field that accepts the value as it is, so that its checks can continue; None: none does."""
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    """Values by dotted path that the hint asks to set."""


@dataclass(frozen=True)
class Around:
    """Other fields of a job on which the meaning of a name depends."""

    task: JsonValue = None
    """Task that the job means: column names depend on it."""
    hub: bool = False
    """True if the data are on the Hub, whose splits have slices."""
    beside: Mapping[str, JsonValue] = field(default_factory=dict)
    """Object with the name."""
    processes: int | None = None
    """Processes of the training; None: the job does not say."""


def unknown_name(
    path: Sequence[PathPart],
    value: JsonValue,
    names: Sequence[str],
    *,
    of_job: bool,
    around: Around | None = None,
) -> NameHint:
    """Find the hint for a field that the object at the path's parent, which has `names`, does not have."""
    try:
        text = presentable(_unknown_name(path, value, names, of_job, around or Around()))
    except OverflowError:  # The value is a number too large for the unit of any field.
        text = _names_here(names)
    if tuple(path[:3]) == ("spec", "predict", "dataset"):
        text = text.replace(" spec.dataset.", " spec.predict.dataset.")
    above = ".".join(str(part) for part in path[:-1])
    if (renamed := re.match(r"did you mean (\w+)\?", text)) is not None:
        return NameHint(text, f"{above}.{renamed[1]}" if above else renamed[1])
    moved = re.fullmatch(r"move it below (spec(?:\.\w+)*)(?:, as (\w+))?", text)
    if moved is not None:
        return NameHint(text, f"{moved[1]}.{moved[2] or path[-1]}")
    return NameHint(text, settings=named_settings(text))


def _unknown_name(
    path: Sequence[PathPart],
    value: JsonValue,
    names: Sequence[str],
    of_job: bool,
    around: Around,
) -> str:
    name = str(path[-1])
    own = {plain(known): known for known in names}
    if plain(name) in own:
        return f"did you mean {own[plain(name)]}?"
    parent = str(path[-2]) if len(path) > 1 else ""
    if of_job:
        row = find_name(name, parent)
        column = column_of(around.task, name)
        if (special := _by_value(path, value, names, around)) is not None:
            return special
        if column is not None and parent == "columns" and (row is None or row.field is None):
            return f"did you mean {column}?"
        if column is not None and row is not None and row.field is not None and row.field.startswith(_COLUMNS):
            return _set(f"{_COLUMNS}{column}", value)
        if column is not None and row is None and parent == "dataset" and _COLUMN_NAME.fullmatch(str(value)):
            return _set(f"{_COLUMNS}{column}", value)
        if row is not None and row.under:
            return _by_row(row, path, value, around)
        if parent == "columns" and "textPair" in names:
            return _no_column(name, value, names, around)
        places = _places(name, path)
        fitting = tuple(place for place in places if _could_hold(place, value))
        if fitting:
            return _moved(fitting, name, value)
        if row is not None:
            return _by_row(row, path, value, around)
        if isinstance(value, dict):
            places = tuple(place for place in places if _is_block(place))
        if places:
            return _moved(places, name, value)
    if not of_job and (special := _of_pods(path, value, names)):
        return special
    near = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    if of_job and not difflib.get_close_matches(name, names, n=1, cutoff=_CLOSER):
        place = _same_words(path, value)
        if place is not None and list(place[:-1]) == list(path[:-1]):
            return f"did you mean {place[-1]}?"
        if place is not None:
            return _moved((place,), name, value)
    if near and (not of_job or _resembles(near[0], path, value)):
        return f"did you mean {near[0]}?"
    if of_job and isinstance(value, dict) and (inner := "; ".join(_inner(".".join(map(str, path)), value, own=name))):
        return f"leave it out, and move its content: {inner}"
    if of_job:
        argument = _argument(name)
        if argument is not None:
            return f"move it below spec.training.arguments, as {argument}"
        far = difflib.get_close_matches(plain(name), _index(), n=1, cutoff=_CLOSER)
        if far and (places := tuple(place for place in _places(far[0], path) if _could_hold(place, value))):
            return _moved(places, name, value)
    return _names_here(names)


def _of_pods(path: Sequence[PathPart], value: JsonValue, names: Sequence[str]) -> str:
    """Return the hint for a common abbreviation in an object of Kubernetes; empty: it is none."""
    name = str(path[-1])
    misspelt = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    is_variable = tuple(names[:2]) == ("name", "value") and not misspelt and not is_secret_name(name)
    if is_variable and isinstance(value, str | int | float):
        return f"write it as name: {name} and value: {json.dumps(value if isinstance(value, str) else str(value))}"
    if plain(name) in ("pvc", "claim", "claimname") and "persistentVolumeClaim" in names and isinstance(value, str):
        return f"write it as persistentVolumeClaim: {{claimName: {value}}}"
    return "did you mean mountPath?" if plain(name) in ("path", "mountpath", "mount") and "mountPath" in names else ""


def _no_column(name: str, value: JsonValue, names: Sequence[str], around: Around) -> str:
    """Return the hint for a column that no task reads, and for the name of a column of the data in our place."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=_ALIKE)
    near = near or [known for known in names if known.lower() in words_of(name)]
    if near:
        return f"did you mean {near[0]}?"
    read = columns_of(around.task)
    return f"leave it out: {around.task} reads {', '.join(read)}" if read else _names_here(names)


def _names_here(names: Sequence[str]) -> str:
    return f"rename it, or leave it out: the fields here are {', '.join(names)}"


_ROLE_NAMES = frozenset({
    "input", "inputs", "output", "outputs", "source", "target", "targets", "feature", "features", "x", "y", "prompt",
    "completion", "question", "answer",
})  # fmt: skip
"""Names of columns that stand for a role in any data set: the value beside one of them is the name in the data."""


def _by_value(path: Sequence[PathPart], value: JsonValue, names: Sequence[str], around: Around) -> str | None:
    """Return the hint for an unknown name whose value or place gives its meaning; None: neither does."""
    name, above = str(path[-1]), ".".join(map(str, path[:-1]))
    for hint in (
        _of_data(name, above, value, names, around),
        _of_results(name, above, value),
        _of_servers(name, above, value, names),
    ):
        if hint:
            return hint
    if plain(name) == "dosample" and value is True and around.beside.get("temperature"):
        return "leave it out: a temperature above 0 samples"
    if plain(name) == "dosample" and isinstance(value, bool):
        return f"set spec.generation.temperature to {'1.0' if value else '0'}"
    if name == "enabled" and above and isinstance(value, bool):
        return f"leave it out: {above} is in effect if it is set" if value else f"leave {above} out"
    if name in _REFERENCES and isinstance(value, dict) and (secret := _secret_of(value)) is not None:
        return f"set {above}.name to {secret[0]} and {above}.key to {secret[1]}"
    if isinstance(value, int | float) and not isinstance(value, bool) and (timed := _in_other_unit(path, value, names)):
        return timed
    listed = find_name(name, above.rpartition(".")[2]) is not None
    generic = not listed and words_of(name)[-1:] and words_of(name)[-1] in _GENERIC
    if generic and isinstance(value, str) and (word := _one_word(value)):
        return f"set {word[0]} to {word[1]}"
    if not listed and name in DEEPSPEED_KEYS:
        return f"move it below spec.parallelism.deepspeedConfig.zero_optimization, as {name}"
    if above == "spec" and name in ("labels", "annotations") and isinstance(value, dict):
        return "move it below metadata"
    return None


def _of_data(name: str, above: str, value: JsonValue, names: Sequence[str], around: Around) -> str:
    """Return the hint for a name of a model or a data set, or below its columns or splits; empty: it has none."""
    parent = above.rpartition(".")[2]
    if above in ("spec.model", "spec.dataset") and "uri" not in around.beside and "/" in str(value):
        uri = as_uri(value)
        if uri is not None and uri.startswith("hf://") and find_name(name, parent) is None:
            return f"set {above}.uri to {uri}"
    if parent == "dataset" and name in ("path", "name", "type") and value in _LOADERS:
        return "leave it out: the extension of a file determines its format"
    reversed_columns = not set(around.beside) & set(names) and all(each in names for each in around.beside.values())
    if parent == "columns" and reversed_columns and value in names and plain(name) not in _ROLE_NAMES:
        return (
            f"set {above}.{value} to {shown_value(name, str(value))}: our name is on the left, that of the data right"
        )
    if above == "spec.predict.dataset" and name == "split":
        return _set(f"{above}.splits.test", value)
    if parent == "splits" and (role := role_of(name)) in names:
        return f"did you mean {role}?"
    return ""


def _of_results(name: str, above: str, value: JsonValue) -> str:
    """Return the hint for a metric with its limit below `evaluation` or its gate; empty: it is none."""
    if above not in ("spec.evaluation", "spec.evaluation.gate"):
        return ""
    if isinstance(value, dict) and len(value) == 1 and plain(name) != "gate":
        ((name, value),) = value.items()
        if name not in NAMES_OF_METRICS:
            return ""
    if isinstance(value, str) and name in NAMES_OF_METRICS and (limit := compared(f"{name} {value}")) is not None:
        _, limit_name, number = limit
        return f"set spec.evaluation.gate.metric to {name} and spec.evaluation.gate.{limit_name} to {number:g}"
    return gate_of(name, value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _of_servers(name: str, above: str, value: JsonValue, names: Sequence[str]) -> str:
    """Return the hint for Kubernetes' requests below an object with cpu and memory of its own; empty: it is none."""
    if above not in _SERVER_RESOURCES or name not in ("limits", "requests") or not isinstance(value, dict):
        return ""
    inner = {f"{above}.{key}": each for key, each in value.items() if key in names}
    if any(key.endswith("/gpu") for key in value):
        inner["spec.resources.gpusPerNode"] = 1  # A server uses one GPU at most.
    sets = " and ".join(f"{field} to {shown_value(each, field)}" for field, each in inner.items())
    return f"set {sets}" if sets else "leave it out: servers have cpu and memory of their own, and one GPU at most"


DEEPSPEED_KEYS = frozenset(key for key in KNOWN_KEYS.get(("zero_optimization",), ()) if "_" in key)
"""Keys of DeepSpeed's own file below `zero_optimization` that no other tool has."""
_REFERENCES = ("secretKeyRef", "secretRef", "valueFrom", "secret")
"""Names of Kubernetes for the reference to an entry of a Secret."""


def _secret_of(value: Mapping[str, JsonValue]) -> tuple[str, str] | None:
    """Return name and key of a reference to an entry of a Secret; None: it is none."""
    inner = value.get("secretKeyRef", value)
    name, key = (inner.get("name"), inner.get("key", "token")) if isinstance(inner, dict) else (None, None)
    return (name, key) if isinstance(name, str) and isinstance(key, str) and CLAIM.fullmatch(name) else None


_GENERIC = ("type", "kind", "method", "mode", "technique", "approach", "algorithm", "strategy")
"""Last words of names that say nothing: the value has the meaning."""
_SECONDS_OF: Mapping[str, int] = {
    **dict.fromkeys(("minutes", "mins", "min", "minute"), 60),
    **dict.fromkeys(("hours", "hour", "hrs"), 3600),
    **dict.fromkeys(("days", "day"), 86400),
}


def _in_other_unit(path: Sequence[PathPart], value: float, names: Sequence[str]) -> str:
    """Return the hint for a time in another unit than its field has, such as `timeoutMinutes`; empty: it is none."""
    name, above = str(path[-1]), ".".join(map(str, path[:-1]))
    *words, unit = words_of(name) or [""]
    if unit not in _SECONDS_OF:
        return ""
    seconds = round(value * _SECONDS_OF[unit])
    if not words:
        minutes = seconds / 60
        return f"set {above}.minutes to {minutes:g}" if "minutes" in names else ""
    base = "".join(words)
    own = next((known for known in names if plain(known) == f"{base}seconds"), None)
    row = find_name(base, str(path[-2]) if len(path) > 1 else "")
    field = f"{above}.{own}" if own else row.field if row is not None and row.field is not None else ""
    return f"set {field} to {seconds}" if "Seconds" in field else ""


@cache
def _word_places() -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Return, by plain word, the fields of the spec that have it among their fixed words."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for place, shape in leaves(spec_shape()).items():
        for word in served_words(place, shape.words):
            if word not in ("auto", "none") and works(place):
                found[plain(word)] = (*found.get(plain(word), ()), (f"spec.{place}", word))
    return found


def _one_word(value: str) -> tuple[str, str] | None:
    """Return the one field with a word of this value, and the word; None: there is none, or several."""
    found = _word_places().get(plain(value), ())
    return found[0] if len(found) == 1 else None


@cache
def _meanings() -> Mapping[tuple[str, ...], tuple[frozenset[str], frozenset[str]]]:
    """Return, by the path of each field of the spec, the words of the whole path and those of its last part."""
    places = {place for each in _index().values() for place in each if place != ("spec",)}
    return {place: (frozenset().union(*map(meaning, place[1:])), meaning(place[-1])) for place in sorted(places)}


def _same_words(path: Sequence[PathPart], value: JsonValue) -> tuple[str, ...] | None:
    """Return the one field whose path has all words of an unknown name, such as `gateMinimum` and `adapterRank`; first
    below the object with the name, then anywhere. None: there is none, or several.
    """
    words, above = meaning(str(path[-1])), tuple(map(str, path[:-1]))
    if not words:
        return None
    for inside in (True, False) if above else (False,):
        found = [
            place
            for place, (whole, last) in _meanings().items()
            if words & last
            and words <= whole
            and _could_hold(place, value)
            and not _is_free(place)
            and (
                place[: len(above)] == above
                if inside
                else len(words) > 1 or (words == last and isinstance(value, dict))
            )
        ]
        least = min(map(len, found), default=0)
        nearest = [place for place in found if len(place) == least]
        if len(nearest) == 1:
            return nearest[0]
    return None


_SERVER_RESOURCES = ("spec.endpoint.resources",)
"""Objects with cpu and memory of their own."""


@cache
def _index() -> Mapping[str, tuple[tuple[str, ...], ...]]:
    """Return the paths of the spec's fields by their plain names, without those that have no behaviour yet."""
    found: dict[str, tuple[tuple[str, ...], ...]] = {}

    def walk(shape: Shape, path: tuple[str, ...]) -> None:
        for name, inner in shape.body.fields.items() if isinstance(shape.body, Fields) else ():
            if name in _ANYWHERE or not works(".".join((*path, name)[1:])):
                continue
            found[plain(name)] = (*found.get(plain(name), ()), (*path, name))
            walk(inner, (*path, name))

    walk(spec_shape(), ("spec",))
    found["spec"] = (("spec",),)
    return found


def argument_name(name: str, value: JsonValue) -> str | None:
    """Return the hint for a name under `training.arguments` that is not free there; None: it is not in the table."""
    row = find_name(name, "arguments")
    if row is None:
        return None
    hint = _by_row(row, ("spec", "training", "arguments", name), value)
    return hint if hint.startswith("leave") else f"{hint}, and leave this argument out"


def owned_key(field: str, value: JsonValue) -> str:
    """Return the hint for a key or argument that the field at the dotted path (from `spec`) decides."""
    if not works(field):
        return f"leave it out: spec.{field} is not supported in this version"
    return f"{_set(f'spec.{field}', value)}, and leave this out"


def _places(name: str, path: Sequence[PathPart]) -> tuple[tuple[str, ...], ...]:
    """Return the highest places of the spec with a field of that name, without the one that was tried."""
    places = tuple(place for place in _index().get(plain(name), ()) if place[:-1] != tuple(path[:-1]))
    least = min((len(place) for place in places), default=0)
    return tuple(place for place in places if len(place) == least)


def _could_hold(place: tuple[str, ...], value: JsonValue) -> bool:
    """Return True if a place of the spec accepts the value's kind (object, list or scalar), whatever its content."""
    shape = _shape_at(".".join(place))
    match None if shape is None else shape.body:
        case Fields() | Map():
            if isinstance(value, dict) or (shape is not None and value in shape.words):
                return True
            field = ".".join(place)
            return shape is not None and bool(shape.words) and _meant(field, shape, value) is not None
        case Items():
            return isinstance(value, list) or (shape is not None and value in shape.words)
        case None if isinstance(value, str) and shape is not None:
            field = ".".join(place)
            known = find_value(field, value) is not None or form_hint(shape, field, value, shown_value) is not None
            return known or accepts(shape, value)
        case _:
            return not isinstance(value, dict | list)


def _is_block(place: tuple[str, ...]) -> bool:
    """Return True if the spec has an object or a list at this place."""
    shape = _shape_at(".".join(place))
    return shape is not None and isinstance(shape.body, Fields | Map | Items)


def _resembles(name: str, path: Sequence[PathPart], value: JsonValue) -> bool:
    """Return False for an object that has no field of the one with a name that is only somewhat similar."""
    if not isinstance(value, dict) or difflib.SequenceMatcher(None, name, str(path[-1])).ratio() >= _CLOSER:
        return True
    shape = _shape_at(".".join(map(str, (*path[:-1], name))))
    own = set(map(plain, shape.body.fields)) if shape is not None and isinstance(shape.body, Fields) else set()
    return bool(own & set(map(plain, value)))


def _is_free(place: tuple[str, ...]) -> bool:
    """Return True if the spec has an object at this place whose names are the user's."""
    shape = _shape_at(".".join(place))
    return shape is not None and isinstance(shape.body, Map)


def _moved(places: Sequence[tuple[str, ...]], name: str, value: JsonValue) -> str:
    instead = find_value(".".join(places[0]), value) if len(places) == 1 else None
    if instead is not None:
        return _instead(instead)
    parents = [".".join(place[:-1]) for place in places[:_MOST_PLACES] if place[:-1]]
    if not parents:
        return "move it to the top level of the document, next to kind"
    leaf = places[0][-1]
    return f"move it below {' or '.join(parents)}" + ("" if leaf == name else f", as {leaf}")


def place_of(name: str, above: Sequence[PathPart]) -> str | None:
    """Return the dotted path of the one field of the spec with this name, misplaced in the object at `above`."""
    places = _places(name, (*above, name))
    if len(places) == 1:
        return ".".join(places[0])
    argument = _argument(name)
    return None if argument is None else f"spec.training.arguments.{argument}"


def _argument(name: str) -> str | None:
    """Return the free field of TrainingArguments with that name."""
    return _free_arguments().get(plain(name))


@cache
def _free_arguments() -> Mapping[str, str]:
    return {plain(name): name for name in FREE}


def _by_row(
    row: ForeignName,
    path: Sequence[PathPart],
    value: JsonValue,
    around: Around = Around(),
) -> str:
    hint = _joined(row.hint)
    if row.field is not None and row.field.startswith("spec.dataset.splits.") and isinstance(value, int | float):
        held_out = find_name("test_size" if row.field.endswith(".test") else "val_size", "dataset")
        assert held_out is not None, "the table has a row for fractions of rows"
        row = held_out
    if row.field is not None and row.field.endswith("hubToken.name") and _is_secret_key(value):
        return _renamed_to("spec.secrets.hubToken", path)
    if row.field == _STRATEGY and (strategy := find_value(_STRATEGY, value)) is not None and len(strategy.instead) > 1:
        return _instead(strategy)
    if row.field == _GLOBAL_BATCH and not row.same and value == 1:
        return "leave it out: gradients are accumulated only if spec.training.globalBatchSize requires it"
    if rows := _sets_rows_of_a_step(row, value, around):
        return rows
    if converted := written(row, value, hub=around.hub, beside=around.beside):
        sets = " and ".join(f"{field} to {shown_value(each, field)}" for field, each in converted.items())
        on_sagemaker = isinstance(value, str) and value.startswith("ml.")
        return f"set {sets}" + (f" ({value} on SageMaker HyperPod)" if on_sagemaker else "")
    if value is None:
        return "leave it out"
    if isinstance(value, str) and is_secret_name(str(path[-1])) and row.field is not None:
        return f"set {row.field}{hint}"
    if row.field is None:
        own = str(path[1]) if tuple(path[:2]) == ("spec", "evaluation") else str(path[-1])
        inside = "; ".join(_inner("spec.training", value, own=own, with_value=True)) if isinstance(value, dict) else ""
        return f"{row.hint}; {inside}" if inside else row.hint
    if row.value is not None and (value is False or value is None or value == ""):
        return "leave it out"
    if row.value == {} and isinstance(value, dict) and value:
        return _renamed_to(row.field, path)
    if row.value is None and isinstance(value, dict) and _has_own_fields(row.field, value):
        return _renamed_to(row.field, path)
    inner = "; ".join(_inner(row.field, value, own=str(path[-1]))) if isinstance(value, dict) else ""
    if inner and (row.value is None or row.value == {}):
        return f"leave it out, and move its content: {inner}"
    hint = f"; {inner}" if inner else hint
    *above, leaf = row.field.split(".")
    if row.value is not None:
        return f"set {row.field} to {shown_value(row.value, row.field)}{hint}"
    shape = _shape_at(row.field)
    if row.same and shape is not None and is_uri(shape) and _uri_of(row.field, shape, value):
        return _set(row.field, value)
    if above == list(path[:-1]) and row.same and find_value(row.field, value) is None:
        return f"did you mean {leaf}?" + (f" ({row.hint})" if row.hint else "")
    return f"{_set(row.field, value) if row.same else f'set {row.field}'}{hint}"


_STRATEGY = "spec.parallelism.strategy"


def _is_secret_key(value: JsonValue) -> bool:
    """Return True for name and key of a Secret."""
    return isinstance(value, dict) and "name" in value and set(value) <= {"name", "key"}


def _renamed_to(field: str, path: Sequence[PathPart]) -> str:
    """Return the hint to give an object at `path` the place and name of the field at the dotted path."""
    *above, leaf = field.split(".")
    return f"did you mean {leaf}?" if above == list(path[:-1]) else f"move it below {'.'.join(above)}, as {leaf}"


def _has_own_fields(field: str, value: Mapping[str, JsonValue]) -> bool:
    """Return True if an object consists of fields of ours at the dotted path."""
    shape = _shape_at(field)
    if not value or shape is None:
        return False
    # An object whose names are the user's has any; training.arguments are named in the table one by one.
    free = isinstance(shape.body, Map) and field.endswith(".hyperparameters")
    return free or (isinstance(shape.body, Fields) and set(value) <= set(shape.body.fields))


_MICRO_BATCH, _GLOBAL_BATCH = "spec.training.microBatchSize", "spec.training.globalBatchSize"


def _sets_rows_of_a_step(row: ForeignName, value: JsonValue, around: Around) -> str:
    """Return the hint for a micro-batch or an accumulation of other tools: the rows of a step follow from both; empty:
    it is neither, or the rows of a step are given, or the number of processes is not.
    """
    if row.field not in (_MICRO_BATCH, _GLOBAL_BATCH) or (row.field == _GLOBAL_BATCH and row.same):
        return ""
    if around.processes is None or not isinstance(value, int):
        return ""
    micro, rows = rows_of_a_step(around.beside, around.processes)
    if not rows:
        return ""
    begin = f"set {_MICRO_BATCH} to {micro} and " if row.field == _MICRO_BATCH else "set "
    return f"{begin}{_GLOBAL_BATCH} to {rows}"


def rows_of_a_step(beside: Mapping[str, JsonValue], processes: int | None) -> tuple[int, str]:
    """Return the micro-batch among an object's fields and, as text, the rows of a step that follow; empty text: the
    micro-batch is unknown, or the rows of a step are given.
    """
    counts: dict[str, int] = {}
    for name, given in beside.items():
        other = find_name(name, "training")
        if plain(name) in ("globalbatchsize", "microbatchsize") or (
            other is not None and other.field == _GLOBAL_BATCH and other.same
        ):
            return 0, ""
        if other is not None and other.field is not None and isinstance(given, int) and given > 0:
            counts[other.field] = given
    micro, accumulated = counts.get(_MICRO_BATCH), counts.get(_GLOBAL_BATCH, 1)
    if micro is None:
        return 0, ""
    if processes is None:
        return micro, f"{micro * accumulated} ({micro} x {accumulated}) x the number of processes"
    factors = f"{micro} row{'' if micro == 1 else 's'}" + (f" x {accumulated} steps" if _GLOBAL_BATCH in counts else "")
    factors += f" x {processes} process{'' if processes == 1 else 'es'}"
    return micro, f"{micro * accumulated * processes} ({factors})"


def _joined(hint: str) -> str:
    return "" if not hint else f", {hint}" if hint.startswith("which ") else f" ({hint})"


def _inner(field: str, value: dict[str, JsonValue], *, own: str = "", with_value: bool = False) -> Iterator[str]:
    """Yield names inside an unknown object at `field`, called `own`, with our fields and their values.

    `with_value`: only those for which a row of the table gives a value. A field that corresponds to several of them is
    named without a value: replicas of masters and of workers are added up.
    """
    found = list(dict.fromkeys(named_inside(["", *field.split(".")][-2], "", value, own)))
    counted_at: dict[str, str] = {}
    left_out: dict[str, list[str]] = {}
    for name, place, given in found:
        if not place:
            left_out.setdefault(given, []).append(name)
            if not with_value and len(left_out[given]) == 1:
                names = " and ".join(dict.fromkeys(n for n, p, other in found if not p and other == given))
                yield f"{names}: {given}"
            continue
        if with_value and not given and not place.startswith("spec.template."):
            continue
        values = {other for _, other_place, other in found if other_place == place}
        counts = [
            other[2:]
            for other_name, other_place, other in found
            if other_place == place and "auncher" not in other_name
        ]
        if place == "spec.resources.nodes" and len(counts) > 1 and all(count.isdigit() for count in counts):
            if name == counted_at.setdefault(place, name):
                yield f"{' and '.join(n for n, p, _ in found if p == place)} are {place}: {sum(map(int, counts))}"
            continue
        yield f"{name} is {place}" + (given if len(values) == 1 else "")


def named_inside(parent: str, above: str, value: JsonValue, own: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield each name in an object called `above`, our field with its meaning, and the accepted value: `: VALUE`.

    A name without a counterpart has an empty field, and the hint in place of the value.

    `parent` is our object in which the outermost one is looked up, `own` the outermost one's name.
    """
    beside = value if isinstance(value, dict) else {}
    for name, given in list(beside.items())[:_MOST_INSIDE]:
        if name.startswith("nvidia.com/mig-"):
            yield name, "spec.resources.accelerator.resource", f": {name}"
            yield name, "spec.resources.gpusPerNode", accepted_field_value("spec.resources.gpusPerNode", given)
            continue
        row = _row_inside(name, above or own, parent)
        places = _places(name, ()) if row is None else ()
        outer = above or own
        if row is None and not places and outer and (same := _same_words((f"{outer}_{name}",), given)) is not None:
            places = (same,)
        first = given[0] if isinstance(given, list) and given and isinstance(given[0], dict) else given
        inside = list(_own_inside(places, name, given) or named_inside(parent, name, first))
        shown = f"{above}.{name}" if above and above not in _CONTAINERS else name
        if row is not None and (converted := written(row, given, hub=False, beside=beside)):
            yield from ((shown, field, f": {shown_value(each, field)}") for field, each in converted.items())
        elif row is not None and row.field is None and not inside and row.hint.startswith("leave it out"):
            yield shown, "", row.hint
        elif row is not None and row.field is not None and (row.value is not None or not inside):
            rows = rows_of_a_step(beside, None)[1] if row.field == _GLOBAL_BATCH and not row.same else ""
            yield shown, row.field, f": {rows}" if rows else accepted_value(row, given)
        elif inside:
            yield from inside
        elif len(places) == 1 and name not in _CONTAINERS:
            place = ".".join(places[0])
            shape = _shape_at(place)
            yield shown, place, "" if shape is None else accepted_field_value(place, given)


def _row_inside(name: str, above: str, parent: str) -> ForeignName | None:
    """Return the row of a name in the object `above` of another tool: of both names together, as `gpu_type` for `type`
    below `gpu`, or of the name alone.
    """
    row = find_name(name, above or parent)
    if row is not None and row.under:
        return row
    joined = find_name(f"{above}_{name}", parent) if above and above not in _CONTAINERS else None
    return joined or row or (None if name in _ANYWHERE else find_name(name, parent))


def _own_inside(places: Sequence[tuple[str, ...]], name: str, given: JsonValue) -> list[tuple[str, str, str]]:
    """Return the same for an object with the name and fields of one of ours."""
    if len(places) != 1 or not isinstance(given, dict):
        return []
    found = []
    for child, value in given.items():
        shape = _shape_at(".".join((*places[0], child)))
        if shape is not None:
            place = ".".join((*places[0], child))
            found.append((f"{name}.{child}", place, accepted_field_value(place, value)))
        elif (row := find_name(child, name)) is not None and row.field is not None:
            found.append((f"{name}.{child}", row.field, accepted_value(row, value)))
    return found


def accepted_value(row: ForeignName, given: JsonValue) -> str:
    """Return the value that a row's field accepts for the given one, as `: VALUE`; empty: it has to be found."""
    if row.field is None or given is None or given is False:
        return ""
    if row.value is not None:
        return f": {shown_value(row.value, row.field)}"
    if isinstance(given, dict) and row.field.endswith(".name") and isinstance(given.get("name"), str):
        return f": {shown_value(given['name'], row.field)}"
    shape = _shape_at(row.field)
    instead = find_value(row.field, given)
    if instead is not None and row.field in instead.instead:
        return f": {shown_value(instead.instead[row.field], row.field)}"
    if shape is None or not row.same or isinstance(given, dict):
        return ""
    if is_uri(shape):
        uri = _uri_of(row.field, shape, given)
        return f": {uri}" if uri else ""
    word = {plain(each): each for each in shape.words}.get(plain(given)) if isinstance(given, str) else None
    if word or accepts(shape, given):
        return f": {shown_value(word or given, row.field)}"
    meant = _meant(row.field, shape, given)
    return "" if meant is None else f": {shown_value(meant, row.field)}"


_LEAST_SIZE = 2**20
"""Bytes below which a size without a unit is meant in GiB."""


def _is_size(field: str) -> bool:
    return field.endswith((".memory", ".size", ".sharedMemory"))


def _meant(field: str, shape: Shape, given: JsonValue) -> JsonValue:
    """Return the value that the field at the dotted path accepts for one in another form, such as "2"; None: none."""
    if isinstance(given, dict | list):
        return None
    return plain_meaning(shape, given, wrong_value(shape, field.split("."), given, None)[1])


def accepted_field_value(field: str, given: JsonValue) -> str:
    """Return the value that our field accepts for one given under a similar name, as `: VALUE`; else empty."""
    return accepted_value(ForeignName((), "", field), given)


def _set(field: str, value: JsonValue) -> str:
    """Return `set FIELD to VALUE`, without the value if the field does not accept it."""
    instead = find_value(field, value)
    if instead is not None:
        return _instead(instead)
    shape = _shape_at(field)
    if shape is None:
        return f"set {field}"
    if field == _STOPPING_METRIC and isinstance(value, str):
        value = value.removeprefix("eval_")
    if is_uri(shape):
        uri = _uri_of(field, shape, value)
        return f"set {field} to {uri}" if uri else f"set {field}"
    if isinstance(value, str) and (word := {plain(each): each for each in shape.words}.get(plain(value))):
        return f"set {field} to {word}"
    if _is_size(field) and isinstance(value, int) and value < _LEAST_SIZE:
        value = f"{value}Gi"
    if accepts(shape, value) and not isinstance(value, dict):
        return f"set {field} to {shown_value(value, field)}"
    meant = _meant(field, shape, value)
    return f"set {field}" if meant is None else f"set {field} to {shown_value(meant, field)}"


def _uri_of(field: str, shape: Shape, value: JsonValue) -> str | None:
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


def _instead(row: ForeignValue) -> str:
    hint = _joined(row.hint) if row.instead else row.hint
    steps = [f"{field} to {shown_value(value, field)}" for field, value in row.instead.items()]
    return (f"set {' and '.join(steps)}" if steps else "") + hint


def shown_value(value: JsonValue, field: str) -> str:
    """Return a value as YAML shows it; credentials are hidden."""
    if isinstance(value, dict | list):
        return presentable(json.dumps(value, ensure_ascii=False))
    shown = describe_value(value, field.split("."))
    return shown[1:-1] if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.:/-]*", value) else shown


def _shape_at(field: str) -> Shape | None:
    head, *rest = field.split(".")
    return find(spec_shape(), rest) if head == "spec" else None


# ---------------------------------------------------------------------------------------------------------- wrong value


def served(shape: Shape, path: Sequence[PathPart]) -> Shape:
    """Return the shape of a spec field without the words that have no behaviour yet."""
    field = ".".join(str(part) for part in path[1:])
    return replace(shape, words=served_words(field, shape.words)) if path[:1] == ("spec",) else shape


def wrong_value(
    shape: Shape,
    path: Sequence[PathPart],
    value: JsonValue,
    schemes: Sequence[str] | None,
    around: Around = Around(),
) -> tuple[str, str]:
    """Return the rule that a value breaks at `path`, and the hint; `schemes` are those that the settings allow."""
    try:
        rule, hint = _wrong_value(shape, path, value, schemes, around)
    except OverflowError:  # As in `unknown_name`.
        shape = served(shape, path)
        rule, hint = f"must be {sentence(shape)}", _general_hint(shape)
    return rule, presentable(hint)


def _general_hint(shape: Shape) -> str:
    return "change it" if shape.required else "change it, or leave it out"


def _wrong_value(
    shape: Shape, path: Sequence[PathPart], value: JsonValue, schemes: Sequence[str] | None, around: Around
) -> tuple[str, str]:
    shape = served(shape, path)
    rule = f"must be {sentence(shape)}"
    if is_uri(shape):
        prefixes = [f"{scheme}://" for scheme in served_schemes(".".join(map(str, path[1:])), schemes)]
        rule = f"must be a URI that begins with {listed(prefixes)}"
    row = find_value(".".join(str(part) for part in path), value)
    if row is not None and not isinstance(shape.body, Boolean):
        same = list(row.instead) == [row.field]
        hint = _joined(row.hint)
        return rule, f"write {shown_value(row.instead[row.field], row.field)}{hint}" if same else _instead(row)
    if (instead := in_other_form(shape, ".".join(map(str, path)), value)) is not None:
        return rule, instead
    if (scalar := _wrong_text(shape, path, value, schemes, around)) is not None:
        return scalar[0] or rule, scalar[1]
    meant = _in_place_of_object(shape, path, value, around) or _form_hint(shape, path, value)
    if meant is None and tuple(path) == ("spec", "task") and (by_words := task_by_words(value)) is not None:
        meant = f"write {by_words}"
    return rule, meant or _general_hint(shape)


def _wrong_text(
    shape: Shape, path: Sequence[PathPart], value: JsonValue, schemes: Sequence[str] | None, around: Around
) -> tuple[str, str] | None:
    """Return the rule (empty: that of the shape) and the hint for a wrong value of a text field; None: no answer."""
    match shape.body:
        case Text() if is_uri(shape) and not isinstance(value, dict | list):
            prefixes = [f"{scheme}://" for scheme in served_schemes(".".join(map(str, path[1:])), schemes)]
            return f"must be a URI that begins with {listed(prefixes)}", uri_hint(value, prefixes)
        case Text(quantity=True) if isinstance(value, str) and (found := _UNITS.fullmatch(value.strip())):
            number, unit, binary = found.groups()
            decimal = f"write {number}{'k' if unit in 'kK' and not binary else unit.upper()}{'i' if binary else ''}"
            return "", decimal + ("" if binary else f", or {number}{unit.upper()}i for powers of 1024")
        case Text(quantity=True) if isinstance(value, str) and (found := _CORES.fullmatch(value.strip())):
            return "", f"write {found[1]}"
        case Text() if path[-2:-1] == ("splits",) and around.hub and (percent := _percent(value)):
            if path[-1] == "train":
                return "must be the name of a split", f"write train[:{percent}%]"
            rest = "" if "train" in around.beside else f", and train[:{100 - percent}%] for spec.dataset.splits.train"
            return "must be the name of a split", f"write train[{100 - percent}%:]{rest}"
        case Text() if isinstance(value, int | float) and path[:3] == ("spec", "dataset", "splits"):
            return (
                "must be the name of a split, or a file name without its extension",
                "leave it out: 5 % of train are held out if no split is named validation; the Hub also has slices such "
                "as train[90%:]",
            )
        case Text(quantity=False) if isinstance(value, int | float):
            return "must be text", "put it in quotes"
    return None


def _in_place_of_object(shape: Shape, path: Sequence[PathPart], value: JsonValue, around: Around) -> str | None:
    """Return the hint for a value in place of an object, or of a list of columns; None: no answer."""
    leaf = path[-1] if path else ""
    match shape.body:
        case Fields() if leaf == "gate" and isinstance(value, int | float):
            metrics = next((metrics_of(task) for task in METRICS if task == around.task), ())
            return f"write {{metric: {metrics[0]}, minimum: {value}}}" if metrics else None
        case Fields(fields) if "textPair" in fields and (columns := columns_in_order(value, around.task)):
            return f"write {{{', '.join(f'{name}: {shown_value(given, name)}' for name, given in columns)}}}"
        case Fields(fields) if isinstance(value, list) and len(value) > 1 and "splits" in fields:
            return (
                "only one dataset is supported: write all rows, with the same column names, to one folder, and set "
                "spec.dataset.uri to file://FOLDER"
            )
        case Fields(fields) if isinstance(value, str) and "uri" in fields:
            return f"write the URI one level deeper, as uri: {shown_value(as_uri(value) or value, 'uri')}"
        case Items() if isinstance(value, dict) and leaf == "columns" and "dataset" not in around.beside:
            return f"write {json.dumps([each for each in value.values() if isinstance(each, str)])}"
        case Items() if isinstance(value, dict) and value and set(value) <= set(_column_names()) and leaf == "columns":
            return "move it below spec.predict.dataset, as columns"
        case Text() if is_uri(shape) and isinstance(value, list) and len(value) > 1:
            return "write one URI: a folder with all files, or a glob such as file://data/*.csv"
        case Fields(fields) if "entryPoint" in fields and isinstance(value, str):
            program = shown_value(value, "entryPoint")
            given = f"{{git: {{url: REPOSITORY}}, entryPoint: {program}}}"
            return f"write {given}, with the https:// address of its git repository"
        case Fields(fields) if leaf == "adapter" and isinstance(value, str) and "/" in value:
            return "leave it out: training cannot continue from an adapter; spec.model.uri is a whole model"
        case Fields(fields) if isinstance(value, bool) and "enabled" in fields:
            return f"write {{enabled: {json.dumps(value)}}}"
        case Fields() if value is False and not shape.required:
            return "leave it out"
        case Fields(fields) if value is True and (implied := _implied_by_true(fields, path)):
            return f"write {{{implied}}}"
        case Fields(fields) if value is True and not any(field.required for field in fields.values()):
            return "write {} to take the defaults"
        case Fields(fields) if isinstance(value, str | int | float) and (name := _only_accepting_field(fields, value)):
            return f"write {{{name}: {shown_value(value, name)}}}"
        case Fields(fields) if isinstance(value, str) and (implied := _implied_by_word(fields, path, value)):
            return f"write {{{implied}}}"
    return None


def _form_hint(shape: Shape, path: Sequence[PathPart], value: JsonValue) -> str | None:
    """Return the hint for a value that means another one, and for the fields inside it; None: it means none."""
    field = ".".join(str(part) for part in path)
    hint = form_hint(shape, field, value, shown_value)
    if isinstance(shape.body, Text) and isinstance(value, dict):
        value = {name: each for name, each in value.items() if name not in NAMING}
    if hint is not None and isinstance(value, dict) and len(path) > 1 and not isinstance(shape.body, Items):
        hint = "; ".join(
            [
                hint,
                *(part for part in _inner(field, value) if not re.search(rf" is {re.escape(field)}(?![\w.])", part)),
            ]
        )
    return hint


def _percent(value: JsonValue) -> int:
    """Return a fraction of rows in percent; 0: the value is none."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    percent = round(100 * number) if 0 < number < 1 else 0
    return percent if 0 < percent < 100 else 0


def _implied_by_true(fields: Mapping[str, Shape], path: Sequence[PathPart]) -> str:
    """Return the first field of an object, with its value, that `true` in the object's place stands for."""
    return _implied_by_word(fields, path, True)


def _implied_by_word(fields: Mapping[str, Shape], path: Sequence[PathPart], value: str | bool) -> str:
    """Return the first field of an object that has a word of its own for a value in the object's place, with it."""
    for name, inner in fields.items():
        field = ".".join(map(str, (*path, name)))
        row = find_value(field, value)
        word = row.instead.get(field) if row is not None else None
        beside = {each.rpartition(".")[2]: given for each, given in row.instead.items()} if row is not None else {}
        if len(beside) > 1 and set(beside) <= set(fields):
            return ", ".join(f"{each}: {shown_value(given, each)}" for each, given in beside.items())
        if word is None and isinstance(value, str):
            word = next((each for each in inner.words if each != "none" and plain(each) == plain(value)), None)
        if word is not None:
            return f"{name}: {shown_value(word, name)}"
    return ""


@cache
def _column_names() -> tuple[str, ...]:
    shape = find(spec_shape(), ("dataset", "columns"))
    assert shape is not None
    assert isinstance(shape.body, Fields)
    return tuple(shape.body.fields)


def _only_accepting_field(fields: Mapping[str, Shape], value: JsonValue) -> str | None:
    """Return the field of an object that accepts a value written in the object's place: by its word, or as the only
    one; steps take precedence over minutes.
    """
    by_choice = [name for name, inner in fields.items() if isinstance(value, str) and value in inner.words]
    if by_choice and value not in ("auto", "none"):
        return by_choice[0]
    accepting = by_choice or [name for name, inner in fields.items() if not inner.words and accepts(inner, value)]
    return accepting[0] if len(accepting) == 1 or "steps" in accepting[:1] else None


def missing(shape: Shape, path: Sequence[PathPart], schemes: Sequence[str] | None) -> str:
    """Return the hint for a missing required field."""
    shape = served(shape, path)
    if shape.words:
        return f"write one of {', '.join(shape.words)}"
    if isinstance(shape.body, Fields):
        needed = [name for name, field in shape.body.fields.items() if field.required]
        example = ", e.g. {uri: hf://org/name}" if needed == ["uri"] else ""
        return f"write it with {' and '.join(needed)} below it{example}"
    if is_uri(shape):
        prefixes = [f"{scheme}://" for scheme in served_schemes(".".join(map(str, path[1:])), schemes)]
        return f"set it to a URI that begins with {listed(prefixes)}, e.g. hf://org/name"
    meaning = shape.description.removesuffix("Required.").strip().removesuffix(".")
    begin = meaning[:1] if meaning[1:2].isupper() else meaning[:1].lower()
    return f"set it: {begin}{meaning[1:]}" if meaning else f"set it to {sentence(shape)}"

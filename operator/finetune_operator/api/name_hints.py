"""Hint for an unknown field: its own name in this API, or its place.

A hint names only features that this version serves and the settings allow. Names of other tools are answered from
`foreign_names`; a misplaced field of ours is answered with its place."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from finetune_operator.api.deepspeed_keys import KNOWN_KEYS
from finetune_operator.api.field_names import plain
from finetune_operator.api.foreign_names import find_name, find_value, written
from finetune_operator.api.foreign_rows import ALWAYS_EVALUATED, DEFAULT_EVALUATION, ForeignName
from finetune_operator.api.hint_parts import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    NOTHING_AROUND,
    Around,
    further_hint,
    rows_of_a_step,
    settings_instead,
    shape_at,
    shown_value,
    uri_of,
)
from finetune_operator.api.hints import COLUMNS, could_hold, is_block, meant_inside, places_by_words, set_field
from finetune_operator.api.meant_columns import column_of, columns_of
from finetune_operator.api.meant_uris import CLAIM, as_uri, is_uri
from finetune_operator.api.meant_values import compared, named_settings, role_of
from finetune_operator.api.meant_words import NAMES_OF_METRICS, gate_of, words_of
from finetune_operator.api.name_index import (
    free_argument,
    place_of_word,
    places_by_name,
    places_elsewhere,
)
from finetune_operator.api.problems import PathPart, is_secret_name, presentable
from finetune_operator.api.shapes import (
    Fields,
    Map,
)

_CLOSE = 0.6
_ALIKE = 0.72
"""Similarity above which a name counts as a misspelt column: names of columns are words of their own."""
_CLOSER = 0.84
"""Similarity above which a name counts as a misspelt one of another object; letters alone are weaker evidence there."""
_MOST_PLACES = 3
_LOADERS = ("csv", "json", "jsonl", "parquet", "text", "arrow", "tsv")
"""Names of `datasets`' readers of files."""
_COLUMN_NAME = re.compile(r"[A-Za-z_][\w ]*")


@dataclass(frozen=True)
class NameHint:
    """Replacement for a field that does not exist."""

    text: str
    place: str | None = None
    """Dotted path of the field that accepts the value as it is, so that its checks can continue; None: none does."""
    settings: Mapping[str, JsonValue] = field(default_factory=dict)
    """Values by dotted path that the hint asks to set."""


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
    elif tuple(path[:2]) == ("spec", "predict"):
        text = text.replace(" spec.dataset.columns.", " spec.predict.dataset.columns.")
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
        if (special := _by_value(path, value, names, around)) is not None:
            return special
        if column := _by_column(name, parent, value, row, around):
            return column
        if row is not None and row.under:
            return _by_row(row, path, value, around)
        if parent == "columns" and "textPair" in names:
            return _no_column(name, names, around)
        places = places_elsewhere(name, path)
        fitting = tuple(place for place in places if could_hold(place, value))
        if fitting:
            return _moved(fitting, name, value)
        if row is not None:
            return _by_row(row, path, value, around)
        if isinstance(value, dict):
            places = tuple(place for place in places if is_block(place))
        if places:
            return _moved(places, name, value)
    if not of_job and (special := _of_pods(path, value, names)):
        return special
    near = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    if of_job and not difflib.get_close_matches(name, names, n=1, cutoff=_CLOSER):
        place = places_by_words(path, value)
        if place is not None and list(place[:-1]) == list(path[:-1]):
            return f"did you mean {place[-1]}?"
        if place is not None:
            return _moved((place,), name, value)
    if near and (not of_job or _resembles(near[0], path, value)):
        return f"did you mean {near[0]}?"
    if (
        of_job
        and isinstance(value, dict)
        and (inner := "; ".join(meant_inside(".".join(map(str, path)), value, own=name)))
    ):
        return f"leave it out, and move its content: {inner}"
    if of_job:
        argument = free_argument(name)
        if argument is not None:
            return f"move it below spec.training.arguments, as {argument}"
        far = difflib.get_close_matches(plain(name), places_by_name(), n=1, cutoff=_CLOSER)
        if far and (places := tuple(place for place in places_elsewhere(far[0], path) if could_hold(place, value))):
            return _moved(places, name, value)
    return _names_here(names)


def _by_column(name: str, parent: str, value: JsonValue, row: ForeignName | None, around: Around) -> str:
    """Return the hint for a common name of one of the task's columns; empty: it is none."""
    column = column_of(around.task, name)
    if column is None:
        return ""
    if parent == "columns" and (row is None or row.field is None):
        return f"did you mean {column}?"
    listed = row is not None and row.field is not None and row.field.startswith(COLUMNS)
    named = row is None and parent == "dataset" and _COLUMN_NAME.fullmatch(str(value)) is not None
    return set_field(f"{COLUMNS}{column}", value) if listed or named else ""


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


def _no_column(name: str, names: Sequence[str], around: Around) -> str:
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
        _of_servers(name, above, value),
    ):
        if hint:
            return hint
    if plain(name) == "dosample" and value is True and around.beside.get("temperature"):
        return "leave it out: a temperature above 0 samples"
    if plain(name) == "dosample" and isinstance(value, bool):
        return f"set spec.generation.temperature to {'1.0' if value else '0'}"
    if above == "spec.evaluation" and plain(name) in _SWITCHES and _is_off(value):
        return ALWAYS_EVALUATED.replace("leave it out", "leave spec.evaluation out")
    if name == "enabled" and above and isinstance(value, bool):
        return f"leave it out: {above} is in effect if it is set" if value else f"leave {above} out"
    # The name of a variable is not that of the Secret which it refers to.
    named = around.beside.get("valueFrom") if (above, name) == ("spec.secrets", "name") else None
    reference = value if name in _REFERENCES else named
    if isinstance(reference, dict) and (secret := _secret_of(reference)) is not None:
        place = f"{above}.hubToken" if above == "spec.secrets" else above
        return f"set {place}.name to {secret[0]} and {place}.key to {secret[1]}"
    if isinstance(value, int | float) and not isinstance(value, bool) and (timed := _in_other_unit(path, value, names)):
        return timed
    listed = find_name(name, above.rpartition(".")[2]) is not None
    generic = not listed and words_of(name)[-1:] and words_of(name)[-1] in _GENERIC
    if generic and isinstance(value, str) and (word := place_of_word(value)):
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
        return set_field(f"{above}.splits.test", value)
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


def _of_servers(name: str, above: str, value: JsonValue) -> str:
    """Return the hint for Kubernetes' requests below an object with cpu and memory of its own; empty: it is none."""
    if above not in _SERVER_RESOURCES or name not in ("limits", "requests") or not isinstance(value, dict):
        return ""
    inner = {f"{_SERVER_RESOURCES[above]}.{key}": each for key, each in value.items() if key in ("cpu", "memory")}
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


_SERVER_RESOURCES: Mapping[str, str] = dict.fromkeys(
    ("spec.endpoint", "spec.endpoint.resources"), "spec.endpoint.resources"
)
"""Objects with requests of servers -> the object with their cpu and memory."""


def argument_name(name: str, value: JsonValue) -> str | None:
    """Return the hint for a name under `training.arguments` that is not free there; None: it is not in the table."""
    row = find_name(name, "arguments")
    if row is None:
        return None
    hint = _by_row(row, ("spec", "training", "arguments", name), value)
    return hint if hint.startswith("leave") else f"{hint}, and leave this argument out"


def _resembles(name: str, path: Sequence[PathPart], value: JsonValue) -> bool:
    """Return False for an object that has no field of the one with a name that is only somewhat similar."""
    if not isinstance(value, dict) or difflib.SequenceMatcher(None, name, str(path[-1])).ratio() >= _CLOSER:
        return True
    shape = shape_at(".".join(map(str, (*path[:-1], name))))
    own = set(map(plain, shape.body.fields)) if shape is not None and isinstance(shape.body, Fields) else set()
    return bool(own & set(map(plain, value)))


def _moved(places: Sequence[tuple[str, ...]], name: str, value: JsonValue) -> str:
    instead = find_value(".".join(places[0]), value) if len(places) == 1 else None
    if instead is not None:
        return settings_instead(instead)
    parents = [".".join(place[:-1]) for place in places[:_MOST_PLACES] if place[:-1]]
    if not parents:
        return "move it to the top level of the document, next to kind"
    leaf = places[0][-1]
    return f"move it below {' or '.join(parents)}" + ("" if leaf == name else f", as {leaf}")


def _by_row(
    row: ForeignName,
    path: Sequence[PathPart],
    value: JsonValue,
    around: Around = NOTHING_AROUND,
) -> str:
    hint = further_hint(row.hint)
    if row.field is not None and row.field.startswith("spec.dataset.splits.") and isinstance(value, int | float):
        held_out = find_name("test_size" if row.field.endswith(".test") else "val_size", "dataset")
        assert held_out is not None, "the table has a row for fractions of rows"
        row = held_out
    if row.field is not None and row.field.endswith("hubToken.name") and _is_secret_key(value):
        return _renamed_to("spec.secrets.hubToken", path)
    if row.field == _STRATEGY and (strategy := find_value(_STRATEGY, value)) is not None and len(strategy.instead) > 1:
        return settings_instead(strategy)
    if row.field == GLOBAL_BATCH and not row.same and value == 1:
        return "leave it out: gradients are accumulated only if spec.training.globalBatchSize requires it"
    if rows := _sets_rows_of_a_step(row, value, around):
        return rows
    if converted := written(row, value, hub=around.hub, beside=around.beside):
        sets = " and ".join(f"{field} to {shown_value(each, field)}" for field, each in converted.items())
        on_sagemaker = isinstance(value, str) and value.startswith("ml.")
        beyond = f" ({value} on SageMaker HyperPod)" if on_sagemaker else _of_variables(converted)
        return f"set {sets}{beyond}"
    if _is_off(value) and (row.hint == DEFAULT_EVALUATION or row.field == "spec.evaluation"):
        return ALWAYS_EVALUATED
    if value is None:
        return "leave it out"
    if isinstance(value, str) and is_secret_name(str(path[-1])) and row.field is not None:
        return f"set {row.field}{hint}"
    if row.field is None:
        own = str(path[1]) if tuple(path[:2]) == ("spec", "evaluation") else str(path[-1])
        inside = (
            "; ".join(meant_inside("spec.training", value, own=own, with_value=True)) if isinstance(value, dict) else ""
        )
        return f"{row.hint}; {inside}" if inside else row.hint
    if row.value is not None and (value is False or value is None or value == ""):
        return "leave it out"
    if row.value == {} and isinstance(value, dict) and value:
        return _renamed_to(row.field, path)
    if row.value is None and isinstance(value, dict) and _has_own_fields(row.field, value):
        return _renamed_to(row.field, path)
    inner = "; ".join(meant_inside(row.field, value, own=str(path[-1]))) if isinstance(value, dict) else ""
    if inner and (row.value is None or row.value == {}):
        return f"leave it out, and move its content: {inner}"
    hint = f"; {inner}" if inner else hint
    *above, leaf = row.field.split(".")
    if row.value is not None:
        return f"set {row.field} to {shown_value(row.value, row.field)}{hint}"
    shape = shape_at(row.field)
    if row.same and shape is not None and is_uri(shape) and uri_of(row.field, shape, value):
        return set_field(row.field, value)
    if above == list(path[:-1]) and row.same and find_value(row.field, value) is None:
        return f"did you mean {leaf}?" + (f" ({row.hint})" if row.hint else "")
    return f"{set_field(row.field, value) if row.same else f'set {row.field}'}{hint}"


def _of_variables(converted: Mapping[str, JsonValue]) -> str:
    """Return what a tracker needs besides the given variables; empty: nothing is converted into variables, or no more
    is needed. Databricks refuses every request without a token.
    """
    variables = converted.get("spec.template.env")
    if not isinstance(variables, list):
        return ""
    given = {each.get("name"): each.get("value") for each in variables if isinstance(each, dict)}
    uri = str(given.get("MLFLOW_TRACKING_URI", ""))
    if uri.startswith("databricks"):
        return "; add DATABRICKS_HOST and DATABRICKS_TOKEN"
    if any(str(name).startswith("WANDB_") for name in given) and "WANDB_MODE" not in given:
        key = "" if "WANDB_API_KEY" in given else " and WANDB_API_KEY is set"
        return f"; offline unless WANDB_MODE is online{key}"
    return ""


_STRATEGY = "spec.parallelism.strategy"


_SWITCHES = ("enabled", "enable", "run", "do", "active")
"""Names for whether a block is in effect."""


def _is_off(value: JsonValue) -> bool:
    """Return True for a value that switches something off."""
    return value is False or value == 0 or (isinstance(value, str) and plain(value) in ("no", "none", "never", "off"))


def _is_secret_key(value: JsonValue) -> bool:
    """Return True for name and key of a Secret."""
    return isinstance(value, dict) and "name" in value and set(value) <= {"name", "key"}


def _renamed_to(field: str, path: Sequence[PathPart]) -> str:
    """Return the hint to give an object at `path` the place and name of the field at the dotted path."""
    *above, leaf = field.split(".")
    return f"did you mean {leaf}?" if above == list(path[:-1]) else f"move it below {'.'.join(above)}, as {leaf}"


def _has_own_fields(field: str, value: Mapping[str, JsonValue]) -> bool:
    """Return True if an object consists of fields of ours at the dotted path."""
    shape = shape_at(field)
    if not value or shape is None:
        return False
    # An object whose names are the user's has any; training.arguments are named in the table one by one.
    free = isinstance(shape.body, Map) and field.endswith(".hyperparameters")
    return free or (isinstance(shape.body, Fields) and set(value) <= set(shape.body.fields))


def _sets_rows_of_a_step(row: ForeignName, value: JsonValue, around: Around) -> str:
    """Return the hint for a micro-batch or an accumulation of other tools: the rows of a step follow from both; empty:
    it is neither, or the rows of a step are given, or the number of processes is not.
    """
    if row.field not in (MICRO_BATCH, GLOBAL_BATCH) or (row.field == GLOBAL_BATCH and row.same):
        return ""
    if around.processes is None or not isinstance(value, int):
        return ""
    micro, rows = rows_of_a_step(around.beside, around.processes)
    if not rows:
        return ""
    begin = f"set {MICRO_BATCH} to {micro} and " if row.field == MICRO_BATCH else "set "
    return f"{begin}{GLOBAL_BATCH} to {rows}"

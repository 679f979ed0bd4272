"""Conversions of values that stand under another tool's name into values of our fields.

Each gets the given value, the object with the name, and the arguments that `foreign_names.yaml` names behind it. It
returns values by dotted path, or nothing where it cannot convert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from pydantic import JsonValue

from finetune_contract.metrics import LOWER_IS_BETTER
from finetune_operator.spec.fields.field_names import plain
from finetune_operator.spec.tables.machine_types import TYPE_LABEL, gpus_of

Values = Mapping[str, JsonValue]
_SPLITS = "spec.dataset.splits."
_GPUS = "spec.resources.gpusPerNode"
_CLAIM_NAME = r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?"


def convert(conversion: str, given: JsonValue, beside: Values) -> Values:
    """Return what a conversion, written with its arguments, makes of a value."""
    name, *arguments = conversion.split()
    return _CONVERSIONS[name](given, beside, *arguments)


def _held_out(given: JsonValue, _beside: Values, role: str) -> Values:
    """Split the rows of a role, given as a fraction (0.2) or a percentage (20), off the end of the split train."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return {}
    percent = round(100 * given) if given < 1 else round(given)
    if not 0 < percent < 100:
        return {}
    kept = 100 - percent
    return {f"{_SPLITS}train": f"train[:{kept}%]", f"{_SPLITS}{role}": f"train[{kept}%:]"}


_DATA_FILE = re.compile(
    r"(?P<scheme>file://|pvc://)?(?![A-Za-z][\w+.-]*:)(?P<folder>.*/)?(?P<stem>[^/]+?)"
    r"\.(?:jsonl?|csv|tsv|txt|parquet|arrow)(?:\.\w+)?"
)
"""Path of a file with rows, of no other scheme."""
_OTHER_FILES = re.compile(r"(?:validation|valid|val|dev|eval|evaluation|test)(?:file|files|data|dataset|path|uri|set)?")
"""Names of the files beside that of the train split, as `plain` writes them."""


def _of_databricks(given: JsonValue) -> JsonValue:
    """Return a path of Databricks' file system as the URI of its folder; any other value unchanged."""
    return re.sub(r"^dbfs:/+", "file:///dbfs/", given) if isinstance(given, str) else given


def _data_file(given: JsonValue, beside: Values, role: str) -> Values:
    """Convert the file of a split into the folder of all files and the split's name there, and a train file alone into
    its address.
    """
    given = _of_databricks(given)
    found = _DATA_FILE.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        return {}
    split: Values = {f"{_SPLITS}{role}": found["stem"]}
    if role != "train":
        return split
    scheme = found["scheme"] or "file://"
    if not any(_OTHER_FILES.fullmatch(plain(name)) for name in beside):
        return {"spec.dataset.uri": f"{scheme}{str(given).removeprefix(scheme).removeprefix('./')}"}
    folder = (found["folder"] or "").removeprefix("./").removesuffix("/") or ("/" if found["folder"] == "/" else "./")
    return {"spec.dataset.uri": f"{scheme}{folder}", **split}


_COLUMNS_OF_TYPES: Mapping[str, Mapping[str, str]] = {
    "chattemplate": {"messages": "messages"}, "sharegpt": {"messages": "conversations"},
    "completion": {"text": "text"},
}  # fmt: skip
"""Type of a data set in axolotl -> its columns. Rows of alpaca have two of input, which a job joins first."""


def _data_sets(given: JsonValue, _beside: Values) -> Values:
    """Convert axolotl's list of one data set: its address, and the columns that its type means."""
    match given:
        case [{"path": str(path), **others}]:
            kind = str(others.get("type", "")).split(".")[0].split(":")[0]
            columns = dict(_COLUMNS_OF_TYPES.get(plain(kind), {}))
            if isinstance(named := others.get("field_messages"), str) and "messages" in columns:
                columns["messages"] = named
            uri = path if "://" in path else f"hf://{path}"
            return {"spec.dataset.uri": uri} | {f"spec.dataset.columns.{role}": name for role, name in columns.items()}
    return {}


def _config_name(given: JsonValue, beside: Values) -> Values:
    """Convert the name of a data set whose address stands beside it: it is that of its configuration."""
    named = any(isinstance(beside.get(address), str) for address in ("uri", "path", "id", "repo", "repo_id"))
    return {"spec.dataset.config": given} if named and isinstance(given, str) and "/" not in given else {}


_CLAIM_NAMES = frozenset({"pvc", "pvcname", "claim", "claimname", "persistentvolumeclaim", "volumeclaim"})
_CLAIM_PATHS = frozenset({"path", "subpath", "folder", "dir", "directory", "file", "pathinclaim"})


def _claim_of(given: JsonValue, beside: Values, block: str) -> Values:
    """Convert a claim, with a path beside or below it, into the URI of a block."""
    if isinstance(given, dict):
        beside = {"claimName": given.get("name")} | given
    claim = next((each for name, each in beside.items() if plain(name) in _CLAIM_NAMES), None)
    if not isinstance(claim, str) or not re.fullmatch(_CLAIM_NAME, claim):
        return {}
    rest = str(next((each for name, each in beside.items() if plain(name) in _CLAIM_PATHS), "")).strip("/")
    return {f"spec.{block}.uri": f"pvc://{claim}/{rest}".rstrip("/")} if "://" not in rest else {}


def _claim_size(given: JsonValue, _beside: Values) -> Values:
    """Convert the resources, or the requests, of a claim into its size."""
    requests = given.get("requests", given) if isinstance(given, dict) else None
    size = requests.get("storage") if isinstance(requests, dict) else None
    return {"spec.storage.size": size} if isinstance(size, str) else {}


def _gate_limit(given: JsonValue, beside: Values) -> Values:
    """Convert a limit whose side follows from the operator or the metric beside it."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return {}
    named = next((str(beside[name]) for name in ("metric", "name", "metric_name") if name in beside), "")
    operators = {"operator", "op", "comparison", "direction", "mode", "condition"}
    sign = next((str(beside[name]) for name in beside if plain(name) in operators), "")
    lower = plain(sign) in ("lt", "lte", "le", "max", "below", "less") or sign.startswith("<")
    lower |= not sign and plain(named).removeprefix("eval") in {*map(plain, LOWER_IS_BETTER), "ppl"}
    return {f"spec.evaluation.gate.{'maximum' if lower else 'minimum'}": given}


def _numbered(given: JsonValue, _beside: Values) -> Values:
    """Convert the names of classes by number."""
    named = isinstance(given, dict) and all(isinstance(name, str) for name in given.values())
    return {"spec.dataset.labels": given} if named and given else {}


_VARIABLES: Mapping[str, str] = {
    "wandbproject": "WANDB_PROJECT", "wandbentity": "WANDB_ENTITY", "wandbname": "WANDB_NAME",
    "mlflowtrackinguri": "MLFLOW_TRACKING_URI", "mlflowexperimentname": "MLFLOW_EXPERIMENT_NAME",
    "mlflowuri": "MLFLOW_TRACKING_URI", "mlflowexperiment": "MLFLOW_EXPERIMENT_NAME",
}  # fmt: skip
"""Tracker and setting -> the environment variable that the tracker reads."""


def _tracked(given: JsonValue, _beside: Values, tracker: str, variable: str = "") -> Values:
    """Report to a tracker, with the given text, or the texts of an object, in the variables that it reads."""
    settings = {variable: given} if variable else {}
    for name, value in given.items() if isinstance(given, dict) else ():
        settings[_VARIABLES.get(f"{tracker}{plain(name)}", "")] = value
    texts: list[JsonValue] = [{"name": name, "value": text} for name, text in settings.items() if name and text]
    if not texts or not all(isinstance(text, str) for name, text in settings.items() if name):
        return {}
    return {"spec.training.arguments.report_to": [tracker], "spec.template.env": texts}


_SECONDS: Mapping[str, int] = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _deadline(given: JsonValue, _beside: Values) -> Values:
    """Convert a time such as `6h`, or a duration of Composer: `3ep` are epochs, `1000ba` batches."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ep|ba|[smhd])[a-z]*", str(given))
    if found is None:
        return {}
    number, unit = float(found[1]), found[2]
    if unit in _SECONDS:
        return {"spec.runPolicy.activeDeadlineSeconds": round(number * _SECONDS[unit])}
    return {"spec.training.epochs" if unit == "ep" else "spec.training.maxSteps": round(number)}


def _predictions(given: JsonValue, _beside: Values) -> Values:
    """Convert the path of a file into the URI of predictions, which are JSON Lines or Parquet."""
    given = _of_databricks(given)
    if not isinstance(given, str) or not given or re.search(r"\s|^(?!(?:file|pvc)://)[A-Za-z][\w+.-]*:", given):
        return {}
    uri = given if "://" in given else f"file://{given.removeprefix('./')}"
    named = re.sub(r"\.(?:csv|tsv|json|txt|xlsx?)$", ".jsonl", uri)
    return {"spec.predict.output": named if named.endswith((".jsonl", ".parquet", "/")) else f"{named}/"}


def _results_claim(given: JsonValue, _beside: Values) -> Values:
    """Convert the claim of results; results on a machine have their folder already."""
    claim = re.match(rf"pvc://{_CLAIM_NAME}", given) if isinstance(given, str) else None
    return {} if claim is None else {"spec.storage.workspace": claim[0]}


def _on_instances(given: JsonValue, beside: Values) -> Values:
    """Convert a type of machine into a selector of its nodes, and into their GPUs where its name tells them."""
    named = given.removeprefix("ml.") if isinstance(given, str) else ""  # Nodes outside SageMaker have no such prefix.
    selector: Values = {"spec.template.nodeSelector": {TYPE_LABEL: named}} if named else {}
    gpus = gpus_of(named)
    told = any(plain(name).startswith("gpu") or plain(name) in ("numgpus", "ngpus") for name in beside)
    return selector if gpus is None or told else {**selector, _GPUS: gpus}


_CONVERSIONS: Mapping[str, Callable[..., Values]] = {
    "held_out": _held_out, "data_file": _data_file, "data_sets": _data_sets, "config_name": _config_name,
    "claim_of": _claim_of, "claim_size": _claim_size, "gate_limit": _gate_limit, "tracked": _tracked,
    "deadline": _deadline, "predictions": _predictions,
    "results_claim": _results_claim, "numbered": _numbered, "on_instances": _on_instances,
}  # fmt: skip

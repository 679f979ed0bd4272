"""Conversions of values that stand under another tool's name into values of our fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from pydantic import JsonValue

from finetune_contract.metrics import LOWER_IS_BETTER
from finetune_operator.api.field_names import plain
from finetune_operator.api.foreign_rows import ARGUMENTS, SPLITS
from finetune_operator.api.machine_types import TYPE_LABEL, gpus_of


def held_out(role: str) -> Callable[[JsonValue], Mapping[str, JsonValue]]:
    """Return a function that splits the rows of a role, given as a fraction (0.2) or a percentage (20), off the end of
    the split train.
    """

    def write(given: JsonValue) -> Mapping[str, JsonValue]:
        if isinstance(given, bool) or not isinstance(given, int | float):
            return {}
        percent = round(100 * given) if given < 1 else round(given)
        if not 0 < percent < 100:
            return {}
        kept = 100 - percent
        return {f"{SPLITS}train": f"train[:{kept}%]", f"{SPLITS}{role}": f"train[{kept}%:]"}

    return write


def claim_size(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert the resources, or the requests, of a claim into its size."""
    requests = given.get("requests", given) if isinstance(given, dict) else None
    size = requests.get("storage") if isinstance(requests, dict) else None
    return {"spec.storage.size": size} if isinstance(size, str) else {}


def _from_databricks(given: JsonValue) -> JsonValue:
    """Return a path of Databricks' file system as the URI of its folder; any other value unchanged."""
    return re.sub(r"^dbfs:/+", "file:///dbfs/", given) if isinstance(given, str) else given


_DATA_FILE = re.compile(
    r"(?P<scheme>file://|pvc://)?(?![A-Za-z][\w+.-]*:)(?P<folder>.*/)?(?P<stem>[^/]+?)"
    r"\.(?:jsonl?|csv|tsv|txt|parquet|arrow)(?:\.\w+)?"
)
"""Path of a file with rows, of no other scheme."""
_OTHER_FILES = re.compile(
    r"(?:validation|valid|val|dev|eval|evaluation|test)(?:file|files|data|dataset|path|uri|set|csv)?"
)
"""Names of the files beside that of the train split, as `plain` writes them."""


def data_file(role: str) -> Callable[[JsonValue, Mapping[str, JsonValue]], Mapping[str, JsonValue]]:
    """Return a function that converts the file of a split into the folder of all files and the split's name there, and
    a train file alone into its address.
    """

    def write(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        given = _from_databricks(given)
        found = _DATA_FILE.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            return {}
        split: Mapping[str, JsonValue] = {f"{SPLITS}{role}": found["stem"]}
        if role != "train":
            return split
        scheme = found["scheme"] or "file://"
        if not any(_OTHER_FILES.fullmatch(plain(name)) for name in beside):
            return {"spec.dataset.uri": f"{scheme}{str(given).removeprefix(scheme).removeprefix('./')}"}
        folder = (found["folder"] or "").removeprefix("./").removesuffix("/") or (
            "/" if found["folder"] == "/" else "./"
        )
        return {"spec.dataset.uri": f"{scheme}{folder}", **split}

    return write


_COLUMNS_OF_TYPES: Mapping[str, Mapping[str, str]] = {
    "chattemplate": {"messages": "messages"}, "sharegpt": {"messages": "conversations"},
    "alpaca": {"source": "instruction", "target": "output"}, "completion": {"text": "text"},
}  # fmt: skip
"""Type of a data set in axolotl -> its columns."""


def data_sets(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert axolotl's list of one data set: its address, and the columns that its type means."""
    match given:
        case [{"path": str(path), **others}] if "://" in path:
            kind = str(others.get("type", "")).split(".")[0].split(":")[0]
            columns = dict(_COLUMNS_OF_TYPES.get(plain(kind), {}))
            if isinstance(field := others.get("field_messages"), str) and "messages" in columns:
                columns["messages"] = field
            return {
                "spec.dataset.uri": path,
                **{f"spec.dataset.columns.{role}": name for role, name in columns.items()},
            }
    return {}


def config_name(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Convert the name of a data set whose address stands beside it: it is that of its configuration."""
    named = any(isinstance(beside.get(address), str) for address in ("uri", "path", "id", "repo", "repo_id"))
    return {"spec.dataset.config": given} if named and isinstance(given, str) and "/" not in given else {}


_GATE = "spec.evaluation.gate."
_LIMITS = frozenset(
    name.replace("_", "")
    for name in (
        "threshold", "min", "max", "at_least", "at_most", "lower_bound", "upper_bound", "min_value", "max_value",
        "value", "minimum", "maximum", "target", "goal",
    )
)  # fmt: skip
"""Names of the limit of a gate."""


def measured_metric(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Convert one metric below `evaluation`: with a limit beside it, it is that of the gate."""
    if not isinstance(given, str) or not given:
        return {}
    if any(plain(name) in _LIMITS for name in beside):
        return {f"{_GATE}metric": given}
    return {"spec.evaluation.metrics": [given]}


def gate_limit(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Convert a limit whose side follows from the operator or the metric beside it."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return {}
    named = next((beside[name] for name in ("metric", "name", "metric_name") if isinstance(beside.get(name), str)), "")
    sign = next((str(beside[name]) for name in beside if plain(name) in _OPERATORS), "")
    metric = plain(str(named)).removeprefix("eval")
    lower = plain(sign) in ("lt", "lte", "le", "max", "below", "less") or sign.startswith("<")
    lower = lower or (not sign and metric in {*map(plain, LOWER_IS_BETTER), "ppl"})
    return {f"{_GATE}{'maximum' if lower else 'minimum'}": given}


_OPERATORS = frozenset({"operator", "op", "comparison", "direction", "mode", "condition"})


def first_rows(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert a number of rows into a slice of the split train."""
    whole = isinstance(given, int) and not isinstance(given, bool) and given > 0
    return {"spec.dataset.splits.train": f"train[:{given}]"} if whole else {}


def betas(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert the pair of Adam's decay rates."""
    match given:
        case [float() | int() as first, float() | int() as second]:
            return {f"{ARGUMENTS}.adam_beta1": first, f"{ARGUMENTS}.adam_beta2": second}
    return {}


def tracked(tracker: str, variable: str) -> Callable[[JsonValue], Mapping[str, JsonValue]]:
    """Return a function that reports to a tracker, with a setting of it in the variable that it reads."""

    def write(given: JsonValue) -> Mapping[str, JsonValue]:
        report: Mapping[str, JsonValue] = {f"{ARGUMENTS}.report_to": [tracker]}
        if not isinstance(given, str) or not given:
            return {} if given in (None, False, "") else report
        return {**report, "spec.template.env": [{"name": variable, "value": given}]}

    return write


_CLAIM_NAMES = frozenset({"pvc", "pvcname", "claim", "claimname", "persistentvolumeclaim", "volumeclaim"})
_CLAIM_PATHS = frozenset({"path", "subpath", "folder", "dir", "directory", "file", "pathinclaim"})


def claim_of(block: str) -> Callable[[JsonValue, Mapping[str, JsonValue]], Mapping[str, JsonValue]]:
    """Return a function that converts a claim, with a path beside or below it, into the URI of a block."""

    def write(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        names = _CLAIM_NAMES
        if isinstance(given, dict):
            beside, names = given, names | {"name"}
        claim = next((each for name, each in beside.items() if plain(name) in names), None)
        if not isinstance(claim, str) or not re.fullmatch(r"[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?", claim):
            return {}
        path = next((each for name, each in beside.items() if plain(name) in _CLAIM_PATHS), "")
        rest = str(path).strip("/")
        return {f"spec.{block}.uri": f"pvc://{claim}/{rest}".rstrip("/")} if "://" not in rest else {}

    return write


def duration(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert a duration of Composer: `3ep` are epochs, `1000ba` batches."""
    found = re.fullmatch(r"([0-9]+)\s*(ep|ba)", given) if isinstance(given, str) else None
    if found is None:
        return {}
    return {"spec.training.epochs" if found[2] == "ep" else "spec.training.maxSteps": int(found[1])}


_SECONDS: Mapping[str, int] = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def deadline(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert a time such as `6h`, or a duration of Composer."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])[a-z]*", given) if isinstance(given, str) else None
    if found is None or str(given).endswith("ep"):
        return duration(given)
    return {"spec.runPolicy.activeDeadlineSeconds": round(float(found[1]) * _SECONDS[found[2]])}


GPUS_PER_NODE = "spec.resources.gpusPerNode"


def on_device(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert the device of torch: `cpu`, `cuda`, `cuda:0`."""
    device = plain(given).rstrip("0123456789") if isinstance(given, str) else ""
    return {GPUS_PER_NODE: 0} if device == "cpu" else {GPUS_PER_NODE: 1} if device in ("cuda", "gpu", "rocm") else {}


def gpus_in_total(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Convert the number of all GPUs into that of a node."""
    nodes = next((each for name, each in beside.items() if plain(name) in ("nodes", "numnodes", "nnodes")), 1)
    if not isinstance(given, int) or not isinstance(nodes, int) or isinstance(given, bool) or nodes < 1:
        return {}
    return {GPUS_PER_NODE: given // nodes} if given % nodes == 0 and given <= 64 * nodes else {}


def spot_capacity(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert a kind of capacity: `spot`, `on-demand`."""
    known = {"spot": True, "preemptible": True, "ondemand": False, "standard": False, "regular": False}
    enabled = known.get(plain(given)) if isinstance(given, str) else None
    return {} if enabled is None else {"spec.spot.enabled": enabled}


_FOUR_BITS = ("4", "4bit", "int4", "nf4", "fp4", "true", "bnb4bit", "bitsandbytes4bit")


def in_four_bits(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert a quantization to 4 bits into the adapter that trains on it."""
    return {"spec.model.adapter.method": "qlora"} if plain(str(given)) in _FOUR_BITS else {}


def predictions_uri(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert the path of a file into the URI of predictions, which are JSON Lines or Parquet."""
    given = _from_databricks(given)
    if not isinstance(given, str) or not given or re.search(r"\s|^(?!(?:file|pvc)://)[A-Za-z][\w+.-]*:", given):
        return {}
    uri = given if "://" in given else f"file://{given.removeprefix('./')}"
    named = re.sub(r"\.(?:csv|tsv|json|txt|xlsx?)$", ".jsonl", uri)
    return {"spec.predict.output": named if named.endswith((".jsonl", ".parquet", "/")) else f"{named}/"}


def results_claim(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert the claim of results; results on a machine have their folder already."""
    claim = re.match(r"pvc://[a-z0-9][a-z0-9.-]*", given) if isinstance(given, str) else None
    return {} if claim is None else {"spec.storage.workspace": claim[0]}


def tracker_settings(tracker: str) -> Callable[[JsonValue], Mapping[str, JsonValue]]:
    """Return a function that converts an object of a tracker's settings into its variables."""

    def write(given: JsonValue) -> Mapping[str, JsonValue]:
        inner = given if isinstance(given, dict) else {}
        variables: list[JsonValue] = [
            {"name": variable, "value": str(value)}
            for name, value in inner.items()
            if (variable := _VARIABLES.get(f"{tracker}{plain(name)}")) is not None
        ]
        if not variables:
            return {}
        return {f"{ARGUMENTS}.report_to": [tracker], "spec.template.env": variables}

    return write


def key_variable(variable: str) -> Callable[[JsonValue], Mapping[str, JsonValue]]:
    """Return a function that converts name and key of a Secret into a variable of the pods."""

    def write(given: JsonValue) -> Mapping[str, JsonValue]:
        match given:
            case {"name": str(name), "key": str(key)}:
                reference: JsonValue = {"secretKeyRef": {"name": name, "key": key}}
                return {"spec.template.env": [{"name": variable, "valueFrom": reference}]}
        return {}

    return write


_VARIABLES: Mapping[str, str] = {
    "wandbproject": "WANDB_PROJECT", "wandbentity": "WANDB_ENTITY", "wandbteam": "WANDB_ENTITY",
    "wandbname": "WANDB_NAME", "wandbrunname": "WANDB_NAME",
    "mlflowtrackinguri": "MLFLOW_TRACKING_URI", "mlflowuri": "MLFLOW_TRACKING_URI", "mlflowurl": "MLFLOW_TRACKING_URI",
    "mlflowexperimentname": "MLFLOW_EXPERIMENT_NAME", "mlflowexperiment": "MLFLOW_EXPERIMENT_NAME",
}  # fmt: skip
"""Tracker and setting -> the environment variable that the tracker reads."""


def on_instances(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Convert a type of machine into a selector of its nodes, and into their GPUs where its name tells them."""
    named = given.removeprefix("ml.") if isinstance(given, str) else ""  # Nodes outside SageMaker have no such prefix.
    selector: dict[str, JsonValue] = {"spec.template.nodeSelector": {TYPE_LABEL: named}} if named else {}
    gpus = gpus_of(named)
    told = any(plain(name).startswith("gpu") or plain(name) in ("numgpus", "ngpus") for name in beside)
    return selector if gpus is None or told else {**selector, "spec.resources.gpusPerNode": gpus}


def pull_secrets(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert names of Secrets into Kubernetes' objects for them."""
    secrets: list[JsonValue] = []
    for each in given if isinstance(given, list) else [given]:
        name = each.get("name") if isinstance(each, dict) else each
        if not isinstance(name, str) or not name:
            return {}
        secrets.append({"name": name})
    return {"spec.template.imagePullSecrets": secrets} if secrets else {}

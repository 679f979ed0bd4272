"""Other tools' names for the fields and values of a FineTuneJob: one table, for messages and for documentation.

People bring configurations of Hugging Face (transformers, TRL, peft, accelerate), axolotl, LLaMA-Factory, DeepSpeed and
Kubernetes. A name of theirs that is no field here, or a value that a field does not accept, is answered with its
replacement. Each row points to an existing field, or gives an instruction if there is no counterpart; a test checks
both. Nothing here is accepted in place of our own names: `copied` lists the accepted ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cache
from types import MappingProxyType

from pydantic import JsonValue

from finetune_contract.metrics import LOWER_IS_BETTER
from finetune_operator.api.field_names import plain
from finetune_operator.launchers.launcher_rows import SUPPORTED

HF, AXOLOTL, FACTORY, DEEPSPEED, KUBERNETES = "Hugging Face", "axolotl", "LLaMA-Factory", "DeepSpeed", "Kubernetes"
EVERYBODY = f"{HF}, {AXOLOTL}, {FACTORY}"

_NOTHING: Mapping[str, JsonValue] = MappingProxyType({})


@dataclass(frozen=True)
class ForeignName:
    """Names for one setting, and the field with its meaning."""

    names: tuple[str, ...]
    tools: str
    field: str | None
    """Dotted path from the document; None: there is no counterpart, and `hint` is the instruction."""
    hint: str = ""
    """Further information, or the instruction, without a full stop."""
    value: JsonValue = None
    """Value to write there, if the name itself implies it; None: the given value, if the field accepts it."""
    under: tuple[str, ...] = ()
    """Names of the object that must contain it; empty: any."""
    same: bool = True
    """True if the given value can be written there unchanged."""
    writes: Callable[[JsonValue], Mapping[str, JsonValue]] | None = None
    """Function that converts the given value into values by field path, if one field does not accept it unchanged;
    empty result: no conversion, and `field` and `hint` are the answer.
    """
    writes_beside: Callable[[JsonValue, Mapping[str, JsonValue]], Mapping[str, JsonValue]] | None = None
    """Function like `writes` that also gets the object with the name, if the meaning depends on its other fields."""


@dataclass(frozen=True)
class ForeignValue:
    """Values that a field does not accept, and their equivalents."""

    field: str
    """Dotted path of the field from the document."""
    names: tuple[str | bool, ...]
    tools: str
    instead: Mapping[str, JsonValue] = dataclass_field(default_factory=dict)
    """Dotted path of the accepting field -> value; empty: there is no counterpart."""
    hint: str = ""
    """Hint, as in `ForeignName`."""


DEFAULT_EVALUATION = "leave it out: validation is measured after each epoch"
_ONE_AT_A_TIME = (
    "leave it out: concurrencyPolicy belongs to a CronJob that creates the job and runs `finetune wait` until it ends"
)
ALWAYS_EVALUATED = (
    "leave it out: the built-in training always evaluates its model, and without a gate any result is a success"
)
"""Hint for every way to ask for a training without evaluation."""
_REPORTED = "leave it out: every step is reported"
_RESULTS = (
    "leave it out: results are in runs/NAME (finetune run --workspace DIR), in a cluster in spec.storage.workspace"
)
_TOKENIZER = "leave it out: the tokenizer comes with the model"
_NO_COUNTERPART = "leave it out: there is no counterpart"

_ARGUMENTS = "spec.training.arguments"
_SPLITS = "spec.dataset.splits."
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"


def _held_out(role: str) -> Callable[[JsonValue], Mapping[str, JsonValue]]:
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
        return {f"{_SPLITS}train": f"train[:{kept}%]", f"{_SPLITS}{role}": f"train[{kept}%:]"}

    return write


def _claim_size(given: JsonValue) -> Mapping[str, JsonValue]:
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


def _data_file(role: str) -> Callable[[JsonValue, Mapping[str, JsonValue]], Mapping[str, JsonValue]]:
    """Return a function that converts the file of a split into the folder of all files and the split's name there, and
    a train file alone into its address.
    """

    def write(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        given = _from_databricks(given)
        found = _DATA_FILE.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            return {}
        split: Mapping[str, JsonValue] = {f"{_SPLITS}{role}": found["stem"]}
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


def _data_sets(given: JsonValue) -> Mapping[str, JsonValue]:
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


def _config_name(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
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


def _measured(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Convert one metric below `evaluation`: with a limit beside it, it is that of the gate."""
    if not isinstance(given, str) or not given:
        return {}
    if any(plain(name) in _LIMITS for name in beside):
        return {f"{_GATE}metric": given}
    return {"spec.evaluation.metrics": [given]}


def _limit(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
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


def _first_rows(given: JsonValue) -> Mapping[str, JsonValue]:
    whole = isinstance(given, int) and not isinstance(given, bool) and given > 0
    return {"spec.dataset.splits.train": f"train[:{given}]"} if whole else {}


def _betas(given: JsonValue) -> Mapping[str, JsonValue]:
    match given:
        case [float() | int() as first, float() | int() as second]:
            return {f"{_ARGUMENTS}.adam_beta1": first, f"{_ARGUMENTS}.adam_beta2": second}
    return {}


def _tracked(tracker: str, variable: str) -> Callable[[JsonValue], Mapping[str, JsonValue]]:
    """Return a function that reports to a tracker, with a setting of it in the variable that it reads."""

    def write(given: JsonValue) -> Mapping[str, JsonValue]:
        report: Mapping[str, JsonValue] = {f"{_ARGUMENTS}.report_to": [tracker]}
        if not isinstance(given, str) or not given:
            return {} if given in (None, False, "") else report
        return {**report, "spec.template.env": [{"name": variable, "value": given}]}

    return write


_CLAIM_NAMES = frozenset({"pvc", "pvcname", "claim", "claimname", "persistentvolumeclaim", "volumeclaim"})
_CLAIM_PATHS = frozenset({"path", "subpath", "folder", "dir", "directory", "file", "pathinclaim"})


def _claim(block: str) -> Callable[[JsonValue, Mapping[str, JsonValue]], Mapping[str, JsonValue]]:
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


def _duration(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert a duration of Composer: `3ep` are epochs, `1000ba` batches."""
    found = re.fullmatch(r"([0-9]+)\s*(ep|ba)", given) if isinstance(given, str) else None
    if found is None:
        return {}
    return {"spec.training.epochs" if found[2] == "ep" else "spec.training.maxSteps": int(found[1])}


_SECONDS: Mapping[str, int] = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _deadline(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert a time such as `6h`, or a duration of Composer."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])[a-z]*", given) if isinstance(given, str) else None
    if found is None or str(given).endswith("ep"):
        return _duration(given)
    return {"spec.runPolicy.activeDeadlineSeconds": round(float(found[1]) * _SECONDS[found[2]])}


_GPUS = "spec.resources.gpusPerNode"


def _on_device(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert the device of torch: `cpu`, `cuda`, `cuda:0`."""
    device = plain(given).rstrip("0123456789") if isinstance(given, str) else ""
    return {_GPUS: 0} if device == "cpu" else {_GPUS: 1} if device in ("cuda", "gpu", "rocm") else {}


def _gpus_in_total(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Convert the number of all GPUs into that of a node."""
    nodes = next((each for name, each in beside.items() if plain(name) in ("nodes", "numnodes", "nnodes")), 1)
    if not isinstance(given, int) or not isinstance(nodes, int) or isinstance(given, bool) or nodes < 1:
        return {}
    return {_GPUS: given // nodes} if given % nodes == 0 and given <= 64 * nodes else {}


def _spot(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert a kind of capacity: `spot`, `on-demand`."""
    known = {"spot": True, "preemptible": True, "ondemand": False, "standard": False, "regular": False}
    enabled = known.get(plain(given)) if isinstance(given, str) else None
    return {} if enabled is None else {"spec.spot.enabled": enabled}


_FOUR_BITS = ("4", "4bit", "int4", "nf4", "fp4", "true", "bnb4bit", "bitsandbytes4bit")


def _in_four_bits(given: JsonValue) -> Mapping[str, JsonValue]:
    return {"spec.model.adapter.method": "qlora"} if plain(str(given)) in _FOUR_BITS else {}


def _predictions(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert the path of a file into the URI of predictions, which are JSON Lines or Parquet."""
    given = _from_databricks(given)
    if not isinstance(given, str) or not given or re.search(r"\s|^(?!(?:file|pvc)://)[A-Za-z][\w+.-]*:", given):
        return {}
    uri = given if "://" in given else f"file://{given.removeprefix('./')}"
    named = re.sub(r"\.(?:csv|tsv|json|txt|xlsx?)$", ".jsonl", uri)
    return {"spec.predict.output": named if named.endswith((".jsonl", ".parquet", "/")) else f"{named}/"}


def _results_in(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert the claim of results; results on a machine have their folder already."""
    claim = re.match(r"pvc://[a-z0-9][a-z0-9.-]*", given) if isinstance(given, str) else None
    return {} if claim is None else {"spec.storage.workspace": claim[0]}


def _tracker_settings(tracker: str) -> Callable[[JsonValue], Mapping[str, JsonValue]]:
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
        return {f"{_ARGUMENTS}.report_to": [tracker], "spec.template.env": variables}

    return write


def _key_variable(variable: str) -> Callable[[JsonValue], Mapping[str, JsonValue]]:
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


_GPUS_OF_INSTANCES = (
    (r"(g4dn|g5|g6|g6e)\.(\d?xlarge|16xlarge)", 1),
    (r"(g4dn|g5|g6|g6e)\.12xlarge|(g5|g6|g6e)\.24xlarge", 4),
    (r"g4dn\.metal|(g5|g6|g6e)\.48xlarge", 8),
    (r"p3\.2xlarge", 1),
    (r"p3\.8xlarge", 4),
    (r"p3\.16xlarge|p3dn\.24xlarge|p4de?\.24xlarge|p5e?n?\.48xlarge|p6-b200\.48xlarge", 8),
    (r"p5\.4xlarge|a2-(high|ultra)gpu-1g|a3-highgpu-1g|g2-standard-(4|8|12|16|32)", 1),
    (r"a2-(high|ultra)gpu-2g|a3-highgpu-2g|g2-standard-24", 2),
    (r"a2-(high|ultra)gpu-4g|a3-highgpu-4g|g2-standard-48", 4),
    (r"a2-(high|ultra)gpu-8g|a3-(high|mega|ultra)gpu-8g|g2-standard-96", 8),
)
"""Types of machines of AWS and Google Cloud, by their documentation, and their GPUs."""


def _on_instances(given: JsonValue, beside: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    """Convert a type of machine into a selector of its nodes, and into their GPUs where its name tells them."""
    named = given.removeprefix("ml.") if isinstance(given, str) else ""  # Nodes outside SageMaker have no such prefix.
    selector: dict[str, JsonValue] = {"spec.template.nodeSelector": {_INSTANCE_TYPE: named}} if named else {}
    gpus = next((count for pattern, count in _GPUS_OF_INSTANCES if re.fullmatch(pattern, named)), None)
    told = any(plain(name).startswith("gpu") or plain(name) in ("numgpus", "ngpus") for name in beside)
    return selector if gpus is None or told else {**selector, "spec.resources.gpusPerNode": gpus}


def _pull_secrets(given: JsonValue) -> Mapping[str, JsonValue]:
    """Convert names of Secrets into Kubernetes' objects for them."""
    secrets: list[JsonValue] = []
    for each in given if isinstance(given, list) else [given]:
        name = each.get("name") if isinstance(each, dict) else each
        if not isinstance(name, str) or not name:
            return {}
        secrets.append({"name": name})
    return {"spec.template.imagePullSecrets": secrets} if secrets else {}


NAMES: tuple[ForeignName, ...] = (
    # ---- model
    ForeignName(
        ("model_name_or_path", "base_model", "model_name", "model_id", "base_model_name_or_path", "pretrained_model",
         "pretrained_model_name_or_path", "model_path", "pretrained", "backbone"),
        EVERYBODY, "spec.model.uri", "hf:// before the name of a Hub repository, file:// before a path",
    ),
    ForeignName(
        ("name", "path", "id", "repo", "repo_id", "hub_id", "checkpoint", "source"), EVERYBODY, "spec.model.uri",
        "hf:// before the name of a Hub repository, file:// before a path", under=("model",),
    ),
    ForeignName(
        ("tokenizer_name", "tokenizer_name_or_path", "tokenizer_config", "tokenizer_type", "tokenizer", "model_type",
         "config_name", "use_fast_tokenizer", "special_tokens"),
        EVERYBODY, None, _TOKENIZER,
    ),
    ForeignName(("model_revision", "revision_of_model"), f"{HF}, {AXOLOTL}", "spec.model.revision"),
    ForeignName(("branch", "tag", "commit", "version", "ref"), HF, "spec.model.revision", under=("model",)),
    ForeignName(
        ("adapter", "finetuning_type", "peft_type", "peft_method", "tuner_type"), EVERYBODY, "spec.model.adapter.method"
    ),
    ForeignName(
        ("lora", "peft", "lora_config", "peft_config", "use_lora", "use_peft"), EVERYBODY, "spec.model.adapter.method",
        "beside it, r is rank, lora_alpha alpha, lora_dropout dropout and target_modules targetModules", "lora",
    ),
    ForeignName(("qlora",), EVERYBODY, "spec.model.adapter.method", "beside it, r is rank, lora_alpha alpha", "qlora"),
    ForeignName(("use_dora", "peft_use_dora"), EVERYBODY, "spec.model.adapter.method", value="dora"),
    ForeignName(("type", "name", "kind"), HF, "spec.model.adapter.method", under=("adapter",)),
    ForeignName(("type", "kind"), HF, "spec.model.adapter.method", under=("peft", "lora", "qlora")),
    ForeignName(("lora_r", "lora_rank"), EVERYBODY, "spec.model.adapter.rank"),
    ForeignName(("r",), HF, "spec.model.adapter.rank", under=("adapter", "model")),
    ForeignName(("lora_alpha",), EVERYBODY, "spec.model.adapter.alpha"),
    ForeignName(("lora_dropout",), EVERYBODY, "spec.model.adapter.dropout"),
    ForeignName(
        ("lora_target_modules", "lora_target"), EVERYBODY, "spec.model.adapter.targetModules",
        "auto stands for all linear layers",
    ),
    ForeignName(
        ("target", "targets", "modules"), HF, "spec.model.adapter.targetModules", "auto stands for all linear layers",
        under=("adapter", "lora", "peft", "qlora", "lora_config", "peft_config"),
    ),
    ForeignName(("lora_target_linear",), AXOLOTL, "spec.model.adapter.targetModules", "which is the default", "auto"),
    ForeignName(
        ("load_in_4bit", "quantization_bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "quantization_config",
         "quantization", "quantize"),
        EVERYBODY, "spec.model.adapter.method", value="qlora",
    ),
    ForeignName(
        ("bits", "nbits", "num_bits"), EVERYBODY, None,
        "leave it out: qlora holds the weights in 4 bits, every other method in 16 or 32", under=("adapter", "lora"),
        writes=_in_four_bits,
    ),
    ForeignName(
        ("load_in_8bit",), EVERYBODY, None,
        "leave it out, or set spec.model.adapter.method to qlora, which holds the weights in 4 bits",
    ),
    ForeignName(
        ("modules_to_save", "use_rslora", "loftq_config", "lora_bias", "bias"), EVERYBODY, None,
        "leave it out: only the adapter and the task's head are trained",
    ),
    ForeignName(
        ("num_labels", "id2label", "label2id", "label_list", "labels", "classes", "num_classes"), HF, None,
        "leave it out: labels are read from the data",
    ),
    ForeignName(
        ("flash_attention", "flash_attn", "attn_implementation", "use_flash_attention_2", "sdp_attention",
         "xformers_attention"),
        EVERYBODY, None, "leave it out: torch's fused attention is used where the model supports it",
    ),
    # ---- data
    ForeignName(
        ("dataset_name", "datasets", "dataset_path", "data_path", "data_files", "dataset_dir", "data", "dataset_id"),
        EVERYBODY, "spec.dataset.uri", "hf:// before the name of a Hub repository, file:// before a path",
        writes=_data_sets,
    ),
    ForeignName(
        ("train_file", "train_data", "train_dataset", "training_data", "training_file", "train_path", "train_uri",
         "train_csv", "train_set"),
        EVERYBODY, "spec.dataset.uri",
        "hf:// before the name of a Hub repository, file:// before a path", writes_beside=_data_file("train"),
    ),
    *(
        ForeignName(
            names, EVERYBODY, f"{_SPLITS}{role}", under=("dataset", "data_files", "files"),
            writes_beside=_data_file(role),
        )
        for role, names in (
            ("train", ("train", "training")),
            ("validation", ("validation", "val", "valid", "dev", "eval")),
            ("test", ("test", "testing")),
        )
    ),
    ForeignName(
        ("name",), EVERYBODY, "spec.dataset.uri",
        "hf:// before the name of a Hub repository; the name of a configuration is spec.dataset.config",
        under=("dataset",), writes_beside=_config_name,
    ),
    ForeignName(
        ("path", "id", "repo", "repo_id", "file", "files", "folder"), EVERYBODY, "spec.dataset.uri",
        "hf:// before the name of a Hub repository, file:// before a path", under=("dataset",),
        writes_beside=_claim("dataset"),
    ),
    ForeignName(
        ("format", "data_format", "file_format"), EVERYBODY, None,
        "leave it out: the extension of a file determines its format", under=("dataset",),
    ),
    ForeignName(("dataset_config_name", "dataset_config", "subset"), HF, "spec.dataset.config"),
    ForeignName(
        ("revision", "dataset_revision", "data_revision"), HF, None,
        "append it to spec.dataset.uri, as hf://org/name@REVISION", under=("dataset",),
    ),
    ForeignName(
        ("delimiter", "separator", "sep", "encoding", "header", "quotechar", "has_header"), HF, None,
        "leave it out: the delimiter of CSV is detected, files are UTF-8, and the first line names the columns",
        under=("dataset",),
    ),
    ForeignName(
        ("dataset", "data", "eval_dataset", "test_dataset", "rows", "dataset_split"), EVERYBODY, None,
        "leave it out: rows of spec.dataset.splits.test are evaluated, or of validation", under=("evaluation",),
    ),
    ForeignName(("train_split", "dataset_train_split", "split"), EVERYBODY, "spec.dataset.splits.train"),
    ForeignName(
        ("eval_split", "validation_split", "dataset_test_split", "dev_split"), EVERYBODY,
        "spec.dataset.splits.validation",
    ),
    ForeignName(("test_split",), EVERYBODY, "spec.dataset.splits.test"),
    ForeignName(
        ("uri", "file", "data", "data_file", "input", "inputs", "input_path", "input_file", "input_uri", "input_data",
         "path"),
        EVERYBODY, "spec.predict.dataset.uri",
        under=("predict",),
    ),
    ForeignName(
        ("num_workers", "parallelism", "replicas", "completions", "num_processes", "num_proc", "concurrency",
         "partitions", "num_partitions", "num_shards", "shards"),
        EVERYBODY, "spec.predict.workers", under=("predict",),
    ),
    ForeignName(("output_format", "file_format", "file_type"), EVERYBODY, "spec.predict.format", under=("predict",)),
    ForeignName(
        ("id", "id_column", "row_id", "idx", "guid", "key"), HF, "spec.predict.idColumn",
        "which identifies the predictions; without spec.predict leave it out", under=("columns",),
    ),
    ForeignName(
        ("id", "id_field", "id_key", "key", "row_id", "index_column"), EVERYBODY, "spec.predict.idColumn",
        under=("predict",),
    ),
    ForeignName(("split",), EVERYBODY, "spec.dataset.splits.test", under=("evaluation", "predict")),
    ForeignName(("truncation", "truncate"), HF, None, "leave it out: rows are truncated to spec.preparation.maxLength"),
    ForeignName(
        ("validation_file", "eval_dataset", "eval_file", "validation_data", "dev_file", "eval_data", "eval_path",
         "validation_path", "val_path", "val_file", "dev_path", "eval_set", "validation_set"),
        EVERYBODY,
        "spec.dataset.splits.validation",
        "the file's name without its extension; spec.dataset.uri is the folder of all files", same=False,
        writes_beside=_data_file("validation"),
    ),
    ForeignName(
        ("test_file", "test_datasets", "test_dataset", "test_data", "test_path", "test_set"), EVERYBODY,
        "spec.dataset.splits.test",
        "the file's name without its extension; spec.dataset.uri is the folder of all files", same=False,
        writes_beside=_data_file("test"),
    ),
    ForeignName(
        ("val_set_size", "val_size", "validation_split_percentage", "validation_size", "eval_size",
         "validation_fraction", "dev_size"),
        EVERYBODY, None,
        "leave it out: 5 % are held out if no split is named validation; for another fraction, write the rows to "
        "train.csv and validation.csv of a folder that spec.dataset.uri names",
        writes=_held_out("validation"),
    ),
    ForeignName(
        ("test_size", "test_fraction", "test_ratio", "test_split_percentage"), EVERYBODY, None,
        "leave it out: write the rows to train.csv and test.csv of a folder that spec.dataset.uri names",
        writes=_held_out("test"),
    ),
    ForeignName(
        ("max_train_samples", "max_samples", "max_rows", "num_samples"), EVERYBODY, None,
        "leave it out: all rows of files are read; spec.training.maxSteps limits the training",
        writes=_first_rows,
    ),
    ForeignName(
        ("text_column", "text_column_name", "dataset_text_field", "text_field", "input_column"), EVERYBODY,
        "spec.dataset.columns.text",
    ),
    ForeignName(("label_column", "label_column_name", "label_field"), HF, "spec.dataset.columns.label"),
    ForeignName(("question_column", "question_column_name"), HF, "spec.dataset.columns.question"),
    ForeignName(("context_column", "context_column_name"), HF, "spec.dataset.columns.context"),
    ForeignName(("answer_column", "answer_column_name"), HF, "spec.dataset.columns.answers"),
    ForeignName(("source_column", "prompt_column"), HF, "spec.dataset.columns.source"),
    ForeignName(
        ("summary_column", "target_column", "completion_column", "response_column"), HF, "spec.dataset.columns.target"
    ),
    ForeignName(
        ("max_seq_length", "max_seq_len", "cutoff_len", "sequence_len", "block_size", "model_max_length", "seq_length",
         "seq_len", "max_source_length", "max_length", "max_input_length", "max_prompt_length", "max_len",
         "context_length", "max_position_embeddings", "context_window"),
        EVERYBODY, "spec.preparation.maxLength", "in tokens",
    ),
    ForeignName(("sample_packing", "pack_sequences"), f"{AXOLOTL}, {FACTORY}", "spec.preparation.packing"),
    ForeignName(
        ("pad_to_sequence_len", "pad_to_max_length", "pad_to_multiple_of", "padding"), EVERYBODY, None,
        "leave it out: rows are padded to the longest of their micro-batch",
    ),
    ForeignName(
        ("preprocessing_num_workers", "dataset_num_proc", "dataset_processes", "num_proc"), EVERYBODY,
        "spec.preparation.workers",
    ),
    ForeignName(("doc_stride",), HF, "spec.preparation.stride"),
    ForeignName(
        ("template", "chat_template", "conversation", "prompt_template"), f"{AXOLOTL}, {FACTORY}", None,
        "leave it out: conversations use the chat template of the model's tokenizer",
        under=("dataset", "training", "preparation", "model", ""),
    ),
    ForeignName(
        ("train_on_inputs", "mask_prompt", "completion_only_loss", "assistant_only_loss"), EVERYBODY, None,
        "leave it out: the loss covers the answer and not its prompt",
    ),
    ForeignName(
        ("overwrite_cache", "dataset_prepared_path", "cache_dir", "streaming", "shuffle", "tokenized_path"), EVERYBODY,
        None, "leave it out: prepared rows are kept in the workspace, and shuffled with spec.training.seed",
    ),
    # ---- training
    ForeignName(("num_train_epochs", "num_epochs", "n_epochs", "max_epochs", "epoch"), EVERYBODY,
        "spec.training.epochs"),
    ForeignName(
        ("max_train_steps", "num_steps", "total_steps", "num_training_steps", "train_steps", "steps"), EVERYBODY,
        "spec.training.maxSteps",
    ),
    ForeignName(
        ("per_device_train_batch_size", "per_gpu_train_batch_size", "micro_batch_size", "device_batch_size",
         "train_micro_batch_size_per_gpu", "per_device_batch_size"),
        f"{EVERYBODY}, {DEEPSPEED}", "spec.training.microBatchSize",
        "rows per process and micro-batch; spec.training.globalBatchSize is rows per step",
    ),
    ForeignName(
        ("train_batch_size", "batch_size", "batch", "total_batch_size", "effective_batch_size"), f"{HF}, {DEEPSPEED}",
        "spec.training.globalBatchSize", "rows per step of all processes",
    ),
    ForeignName(
        ("gradient_accumulation_steps", "grad_accumulation_steps", "gradient_accumulation", "grad_accum",
         "accumulate_grad_batches"),
        f"{EVERYBODY}, {DEEPSPEED}", "spec.training.globalBatchSize",
        "which is micro-batch x accumulation x processes and determines the accumulation", same=False,
    ),
    ForeignName(
        ("per_device_eval_batch_size", "eval_batch_size", "per_gpu_eval_batch_size"), EVERYBODY, None,
        "leave it out: evaluate and predict use the largest batch that fits the memory",
    ),
    ForeignName(("lr", "base_lr", "peak_lr", "max_lr"), EVERYBODY, "spec.training.learningRate"),
    ForeignName(
        ("lr_scheduler_type", "lr_scheduler", "scheduler_type", "lr_schedule", "learning_rate_schedule"), EVERYBODY,
        "spec.training.scheduler",
    ),
    ForeignName(
        ("warmup_ratio", "warmup_proportion", "lr_warmup_ratio"), EVERYBODY, "spec.training.warmupSteps",
        "a fraction of all steps below 1, and a number of steps from 1 on",
    ),
    ForeignName(
        ("lr_warmup_steps", "num_warmup_steps", "warmup_num_steps", "warmup"), f"{EVERYBODY}, {DEEPSPEED}",
        "spec.training.warmupSteps",
    ),
    ForeignName(
        ("min_lr", "lr_end", "end_lr", "final_lr", "min_learning_rate", "min_lr_ratio"), EVERYBODY, None,
        "leave it out: the learning rate decays to 0, and with scheduler polynomial to the lr_end of "
        "spec.training.arguments.lr_scheduler_kwargs",
    ),
    ForeignName(("warmup_max_lr",), DEEPSPEED, "spec.training.learningRate"),
    ForeignName(
        ("gradient_clip_val", "gradient_clipping", "clip_grad_norm", "grad_clip", "max_norm"), f"{HF}, {DEEPSPEED}",
        "spec.training.maxGradNorm",
    ),
    ForeignName(("optim", "optimizer_type", "optimizer_name"), EVERYBODY, "spec.training.optimizer"),
    ForeignName(("random_seed", "random_state", "data_seed"), EVERYBODY, "spec.training.seed"),
    ForeignName(("label_smoothing_factor",), HF, "spec.training.labelSmoothing"),
    ForeignName(
        ("monitor", "watch", "metric_name"), f"{HF}, {AXOLOTL}", "spec.training.earlyStopping.metric",
        under=("earlyStopping", "early_stopping"),
    ),
    ForeignName(
        ("mode", "direction"), HF, None, "leave it out: the metric determines it",
        under=("earlyStopping", "early_stopping"),
    ),
    ForeignName(
        ("early_stopping_patience",), f"{HF}, {AXOLOTL}", "spec.training.earlyStopping.patience",
        "by the loss, unless spec.training.earlyStopping.metric names another metric",
    ),
    ForeignName(("metric_for_best_model",), EVERYBODY, "spec.training.earlyStopping.metric"),
    ForeignName(
        ("greater_is_better",), EVERYBODY, None, "leave it out: the metric determines it"
    ),
    ForeignName(
        ("early_stopping_threshold", "early_stopping_min_delta", "min_delta"), EVERYBODY, None,
        "leave it out: any improvement counts",
    ),
    ForeignName(
        ("load_best_model_at_end", "save_best", "save_best_only", "save_best_model", "keep_best"), EVERYBODY, None,
        "leave it out: spec.training.earlyStopping with a patience keeps the weights of the best evaluation",
    ),
    ForeignName(("fp16",), EVERYBODY, "spec.training.precision", value="fp16"),
    ForeignName(("bf16", "bfloat16"), EVERYBODY, "spec.training.precision", value="bf16"),
    ForeignName(("fp8",), AXOLOTL, "spec.training.precision", value="fp8"),
    ForeignName(
        ("mixed_precision", "dtype", "torch_dtype", "compute_dtype", "amp", "half_precision"), EVERYBODY,
        "spec.training.precision", writes=lambda given: {"spec.training.precision": "auto"} if given is True else {},
    ),
    ForeignName(
        ("gradient_checkpointing", "activation_checkpoint", "use_gradient_checkpointing", "recompute"), EVERYBODY,
        "spec.parallelism.activationCheckpointing",
    ),
    ForeignName(
        ("group_by_length", "length_grouped"), EVERYBODY, "spec.training.arguments.train_sampling_strategy",
        value="group_by_length",
    ),
    ForeignName(
        ("wandb", "use_wandb"), AXOLOTL,
        "spec.training.arguments.report_to", "set WANDB_PROJECT in spec.template.env",
        ["wandb"], writes=_tracker_settings("wandb"),
    ),
    *(
        ForeignName(
            names, AXOLOTL, "spec.training.arguments.report_to",
            f"set {variable} in spec.template.env", [tracker], writes=_tracked(tracker, variable),
        )
        for names, tracker, variable in (
            (("wandb_project",), "wandb", "WANDB_PROJECT"),
            (("wandb_entity",), "wandb", "WANDB_ENTITY"),
            (("mlflow_tracking_uri",), "mlflow", "MLFLOW_TRACKING_URI"),
            (("mlflow_experiment_name",), "mlflow", "MLFLOW_EXPERIMENT_NAME"),
        )
    ),
    ForeignName(("tensorboard", "use_tensorboard"), HF, "spec.training.arguments.report_to", value=["tensorboard"]),
    ForeignName(
        ("mlflow", "use_mlflow"), HF, "spec.training.arguments.report_to", value=["mlflow"],
        writes=_tracker_settings("mlflow"),
    ),
    ForeignName(
        ("hub", "upload", "publish", "hub_upload", "push"), HF, None,
        "leave it out: model/ of the results has the Hub's layout; upload it with the Hub's own command",
        under=("", "spec", "training", "model"),
    ),
    ForeignName(
        ("notifications", "notify", "email", "slack", "webhook", "alerts", "callbacks"), EVERYBODY, None,
        "leave it out: a job sends no notifications; `finetune wait` ends when the job does",
        under=("", "spec", "training", "runPolicy"),
    ),
    ForeignName(
        ("betas", "adam_betas"), f"{HF}, {DEEPSPEED}", "spec.training.arguments.adam_beta1",
        "the second beta is adam_beta2", same=False, writes=_betas,
    ),
    ForeignName(("beta1",), f"{HF}, {DEEPSPEED}", "spec.training.arguments.adam_beta1"),
    ForeignName(("beta2",), f"{HF}, {DEEPSPEED}", "spec.training.arguments.adam_beta2"),
    ForeignName(
        ("eps", "epsilon"), f"{HF}, {DEEPSPEED}", "spec.training.arguments.adam_epsilon",
        under=("params", "optimizer", "training"),
    ),
    ForeignName(
        ("logging_steps", "logging_strategy", "logging_dir", "log_level", "log_interval", "plot_loss", "disable_tqdm",
         "logging_first_step", "verbose", "logging"),
        EVERYBODY, None, _REPORTED,
    ),
    ForeignName(
        ("ddp_timeout", "ddp_backend", "ddp_find_unused_parameters", "local_rank", "clean_pod_policy", "access_mode",
         "access_modes", "pull_secrets_policy"),
        f"{HF}, {KUBERNETES}", None, _NO_COUNTERPART,
        under=("", "spec", "training", "parallelism", "runPolicy", "storage"),
    ),
    ForeignName(
        ("no_eval", "skip_eval", "skip_evaluation", "no_evaluation", "disable_eval", "disable_evaluation",
         "without_evaluation", "run_evaluation", "run_eval"),
        EVERYBODY, None, ALWAYS_EVALUATED,
    ),
    ForeignName(
        ("eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch", "eval_interval", "do_eval"),
        EVERYBODY, None, DEFAULT_EVALUATION,
    ),
    ForeignName(("do_train",), f"{HF}, {FACTORY}", "spec.training", "{} takes the defaults", {}),
    ForeignName(("do_predict", "inference", "prediction"), f"{HF}, {FACTORY}", "spec.predict",
        "{} takes the defaults", {}),
    ForeignName(
        ("eval", "evaluate", "validate", "testing", "do_test"), f"{HF}, {AXOLOTL}", "spec.evaluation",
        "{} takes the defaults", {}, under=("spec", ""),
    ),
    ForeignName(("save_steps", "save_interval", "checkpoint_interval"), EVERYBODY, "spec.checkpoints.every.steps"),
    ForeignName(
        ("interval", "frequency", "save_every", "period", "save_interval", "checkpoint_every", "schedule"), EVERYBODY,
        "spec.checkpoints.every", under=("checkpoints",),
    ),
    ForeignName(
        ("save_strategy", "saves_per_epoch"), EVERYBODY, None,
        "leave it out: spec.checkpoints.every sets the interval, as auto, {steps: N} or {minutes: N}",
    ),
    ForeignName(
        ("save_total_limit", "keep_last_n_checkpoints", "max_checkpoints", "max_to_keep", "keep_last_n",
         "keep_checkpoints"),
        EVERYBODY, "spec.checkpoints.keep",
    ),
    ForeignName(
        ("path", "dir", "directory", "folder", "location", "output", "storage"), EVERYBODY, None,
        "leave it out: checkpoints are kept in spec.storage.workspace", under=("checkpoints",),
    ),
    ForeignName(
        ("resume_from_checkpoint", "auto_resume_from_checkpoints", "resume"), EVERYBODY, "spec.checkpoints.resume",
        "which resumes from the newest checkpoint of the workspace", "auto",
    ),
    ForeignName(
        ("output_dir", "overwrite_output_dir", "save_dir", "logdir", "checkpoint_dir", "results_dir"), EVERYBODY, None,
        _RESULTS,
    ),
    ForeignName(
        ("output", "results", "output_uri", "output_path", "model_output", "results_path"), EVERYBODY, None,
        f"{_RESULTS}; nothing is pushed to the Hub, whose own command uploads model/",
        under=("", "spec", "training", "model", "storage"), writes=_results_in,
    ),
    ForeignName(("run_name", "experiment_name", "job_name", "wandb_name"), EVERYBODY, "metadata.name"),
    ForeignName(
        ("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"), EVERYBODY, None,
        "leave it out: model/ of the results has the Hub's layout; upload it with the Hub's own command",
    ),
    ForeignName(
        ("hub_token", "hf_token", "token", "use_auth_token", "hf_hub_token", "huggingface_token"), EVERYBODY,
        "spec.secrets.hubToken.name", "the name of a Secret that holds the token; on your machine set HF_TOKEN",
        same=False,
    ),
    ForeignName(
        ("stage", "rl", "task_type", "task_name", "problem_type", "training_type"), EVERYBODY, "spec.task",
        under=("", "spec", "model", "training", "metadata"),
    ),
    ForeignName(
        ("dpo_beta", "pref_beta", "rl_beta", "kl_beta"), EVERYBODY, "spec.preference.beta",
    ),
    ForeignName(
        ("compute_metrics", "eval_metric", "eval_metrics", "metric_name"), HF, "spec.evaluation.metrics",
        "a list", same=False,
    ),
    ForeignName(
        ("metric",), HF, "spec.evaluation.metrics", "a list", under=("evaluation",), same=False,
        writes_beside=_measured,
    ),
    ForeignName(
        ("threshold", "value", "target", "goal"), EVERYBODY, "spec.evaluation.gate.minimum",
        under=("gate", "evaluation"), writes_beside=_limit,
    ),
    ForeignName(
        ("min", "at_least", "lower_bound", "min_value"), EVERYBODY, "spec.evaluation.gate.minimum",
        under=("gate", "evaluation"),
    ),
    ForeignName(
        ("max", "at_most", "upper_bound", "max_value"), EVERYBODY, "spec.evaluation.gate.maximum",
        under=("gate", "evaluation"),
    ),
    ForeignName(
        ("operator", "op", "comparison", "direction", "mode", "condition"), EVERYBODY, None,
        "leave it out: minimum is a lower limit, maximum an upper one", under=("gate", "evaluation"),
    ),
    ForeignName(
        ("name", "metric_name"), EVERYBODY, "spec.evaluation.gate.metric", under=("gate",),
    ),
    ForeignName(
        ("every", "frequency", "interval", "strategy", "steps"), EVERYBODY, None, DEFAULT_EVALUATION,
        under=("evaluation",),
    ),
    ForeignName(
        ("batch_size", "batch", "per_device_batch_size", "max_batch_size"), EVERYBODY, None,
        "leave it out: evaluate, predict and endpoints use the largest batch that fits the memory",
        under=("predict", "evaluation", "endpoint"),
    ),
    ForeignName(("max_target_length", "max_gen_length", "max_tokens"), HF, "spec.generation.maxNewTokens"),
    ForeignName(("do_sample",), HF, "spec.generation.temperature", "above 0 tokens are sampled", same=False),
    ForeignName(("top_k", "repetition_penalty"), HF, None,
        f"{_NO_COUNTERPART}; spec.generation.topP narrows the choice"),
    ForeignName(("temp",), HF, "spec.generation.temperature"),
    ForeignName(
        ("output_file", "predictions_file", "output_path", "output_uri", "output_dir", "save_to"), HF,
        "spec.predict.output", "a .jsonl or .parquet file, or a folder, which ends in /", same=False,
        under=("predict",), writes=_predictions,
    ),
    ForeignName(
        ("output_file", "predictions_file"), HF, "spec.predict.output",
        "a .jsonl or .parquet file, or a folder, which ends in /", same=False, writes=_predictions,
    ),
    # ---- parallelism
    ForeignName(
        ("deepspeed", "ds_config", "deepspeed_config_file", "deepspeed_plugin"), f"{EVERYBODY}, {DEEPSPEED}",
        "spec.parallelism.strategy",
        "the stage is spec.parallelism.zeroStage, and other keys of its file go below spec.parallelism.deepspeedConfig",
        "deepspeed",
    ),
    ForeignName(
        ("zero_stage", "zero", "zero_optimization_stage"), DEEPSPEED, "spec.parallelism.zeroStage"
    ),
    ForeignName(("stage",), DEEPSPEED, "spec.parallelism.zeroStage", under=("parallelism", "zero_optimization")),
    ForeignName(
        ("zero_optimization",), DEEPSPEED, "spec.parallelism.zeroStage",
        "other keys of it go below spec.parallelism.deepspeedConfig.zero_optimization", same=False,
    ),
    ForeignName(
        ("deepspeed_config",), HF, "spec.parallelism.strategy",
        "keys of DeepSpeed's own file go below spec.parallelism.deepspeedConfig", "deepspeed", under=("", "spec"),
    ),
    ForeignName(("fsdp", "fsdp_config", "fsdp_version", "fsdp2"), EVERYBODY, "spec.parallelism.strategy", value="fsdp"),
    ForeignName(
        ("fsdp_sharding_strategy", "sharding_strategy"), f"{HF}, {AXOLOTL}", "spec.parallelism.sharding"
    ),
    ForeignName(("fsdp_offload_params",), f"{HF}, {AXOLOTL}", "spec.parallelism.offload.parameters", value="cpu"),
    ForeignName(
        ("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch",
         "fsdp_use_orig_params", "fsdp_state_dict_type", "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states",
         "fsdp_limit_all_gathers"),
        f"{HF}, {AXOLOTL}", None, "leave it out: each of the model's repeated blocks is wrapped",
    ),
    ForeignName(
        ("compute_environment", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
         "downcast_bf16", "use_cpu", "rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo",
         "debug", "dynamo_config"),
        HF, None, "leave it out: the launcher starts and connects the processes", under=("", "spec"),
    ),
    ForeignName(("ddp", "data_parallel"), EVERYBODY, "spec.parallelism.strategy", value="ddp"),
    ForeignName(
        ("data", "dp", "dp_size", "data_parallel_size", "data_parallel_degree", "data_parallelism"), HF, None,
        "leave it out: all processes that tensor, pipeline and sequence leave are data-parallel ranks",
        under=("parallelism",),
    ),
    ForeignName(
        ("distributed", "distributed_type", "distributed_strategy", "distribution", "backend"), HF,
        "spec.parallelism.strategy",
    ),
    ForeignName(
        ("tensor_parallel_size", "tensor_parallel", "tp", "tp_size", "tensor_model_parallel_size"), HF,
        "spec.parallelism.tensor",
    ),
    ForeignName(
        ("pipeline_parallel_size", "pipeline_parallel", "pp", "pp_size", "pipeline_model_parallel_size"), HF,
        "spec.parallelism.pipeline.degree",
    ),
    ForeignName(
        ("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size", "cp_size", "sp_size"),
        f"{HF}, {AXOLOTL}", "spec.parallelism.sequence",
    ),
    ForeignName(
        ("sequence_parallel",), HF, None,
        "leave it out: spec.parallelism.tensor does not shard the other layers; spec.parallelism.sequence shards rows",
    ),
    ForeignName(
        ("offload_optimizer_device",), HF, "spec.parallelism.offload.optimizer"
    ),
    ForeignName(("offload_param_device",), HF, "spec.parallelism.offload.parameters"),
    ForeignName(
        ("offload_optimizer", "cpu_offload", "optimizer_offload"), f"{HF}, {DEEPSPEED}",
        "spec.parallelism.offload.optimizer", value="cpu",
    ),
    ForeignName(
        ("offload_param", "offload_params", "cpu_offload_param"), f"{HF}, {DEEPSPEED}",
        "spec.parallelism.offload.parameters", value="cpu",
    ),
    # ---- resources and Kubernetes
    ForeignName(
        ("num_gpus", "n_gpus", "n_gpu", "gpus", "gpu", "gpu_count", "num_gpus_per_node", "gpus_per_worker",
         "nvidia.com/gpu", "amd.com/gpu", "devices"),
        f"{HF}, {KUBERNETES}", "spec.resources.gpusPerNode",
    ),
    ForeignName(
        ("num_nodes", "nnodes", "num_machines", "replicas", "num_workers", "worker_replicas", "hosts"),
        f"{HF}, {KUBERNETES}", "spec.resources.nodes", under=("", "spec", "training", "parallelism", "resources"),
    ),
    ForeignName(
        ("workers", "worker_count", "num_replicas", "machines"), KUBERNETES, "spec.resources.nodes",
        under=("resources", "parallelism"),
    ),
    ForeignName(
        ("nproc_per_node", "num_proc_per_node", "slots_per_worker"), f"{HF}, {KUBERNETES}",
        "spec.resources.processesPerNode",
    ),
    ForeignName(
        ("num_processes", "world_size"), HF, "spec.resources.gpusPerNode",
        "one process per GPU of a node; accelerate counts the processes of all nodes", same=False,
    ),
    ForeignName(
        ("limits", "requests"), KUBERNETES, None,
        "write cpu and memory directly below spec.resources, and nvidia.com/gpu as spec.resources.gpusPerNode",
        under=("resources", "spec"),
    ),
    ForeignName(
        ("gpu_type", "gpu_product", "gpu_model", "gpu_name", "accelerator_type"),
        KUBERNETES, "spec.resources.accelerator.product", "H100, or as in the node label nvidia.com/gpu.product",
    ),
    ForeignName(
        ("type", "name", "model", "kind", "gpu"), KUBERNETES, "spec.resources.accelerator.product",
        "H100, or as in the node label nvidia.com/gpu.product", under=("accelerator",),
    ),
    ForeignName(
        ("count", "number", "num", "gpus"), KUBERNETES, _GPUS, under=("accelerator",),
    ),
    ForeignName(
        ("type", "model"), KUBERNETES, "spec.resources.accelerator.product",
        "H100, or as in the node label nvidia.com/gpu.product", under=("resources",),
    ),
    ForeignName(
        ("device", "device_type", "device_map"), HF, None, f"leave it out, and set {_GPUS}",
        under=("", "spec", "training", "resources", "model"), writes=_on_device,
    ),
    ForeignName(
        ("total_gpus", "gpus_total", "num_gpus_total", "gpu_total"), KUBERNETES, _GPUS,
        "GPUs of each of spec.resources.nodes", same=False, writes_beside=_gpus_in_total,
    ),
    ForeignName(
        ("tpu", "tpus", "tpu_cores", "tpu_type"), KUBERNETES, None, "leave it out: TPUs are not supported"
    ),
    ForeignName(
        ("capacity_type", "capacity", "provisioning_model", "purchase_option"), KUBERNETES, "spec.spot.enabled",
        "true for spot nodes", same=False, writes=_spot, under=("", "spec", "resources", "spot"),
    ),
    ForeignName(
        ("instance_type", "machine_type", "vm_size", "node_type", "node_type_id", "driver_node_type_id"), KUBERNETES,
        "spec.template.nodeSelector",
        f"as {{{_INSTANCE_TYPE}: TYPE}}", same=False, writes_beside=_on_instances,
    ),
    ForeignName(("gpu_memory", "vram", "gpu_mem"), KUBERNETES, "spec.resources.accelerator.memory"),
    ForeignName(("cpus", "num_cpus", "cores", "cpu_count"), KUBERNETES, "spec.resources.cpu"),
    ForeignName(("ram", "mem", "memory_limit"), KUBERNETES, "spec.resources.memory"),
    ForeignName(
        ("memory_gb", "memory_gib", "memory_mb"), KUBERNETES, "spec.resources.memory", "with its unit, e.g. 16Gi",
        same=False,
    ),
    ForeignName(
        ("node_name", "node_names", "hostname"), KUBERNETES, "spec.template.nodeSelector",
        "as {kubernetes.io/hostname: NAME}", same=False, under=("resources", "spec", "template"),
    ),
    ForeignName(
        ("instance_count", "num_instances", "node_count", "machine_count", "instances"), KUBERNETES,
        "spec.resources.nodes",
    ),
    ForeignName(("count",), KUBERNETES, "spec.resources.nodes", under=("resources", "resource")),
    ForeignName(
        ("min_nodes", "max_nodes", "min_workers", "max_workers", "min_num_nodes", "max_num_nodes", "elastic_nodes"),
        KUBERNETES, None,
        "leave it out, and write one number in spec.resources.nodes: it is fixed in this version",
        under=("", "spec", "training", "resources"),
    ),
    ForeignName(
        ("tuning",), KUBERNETES, None,
        "leave it out: its preset is spec.model.uri, its method spec.model.adapter.method, its input spec.dataset.uri",
        under=("spec", ""),
    ),
    ForeignName(
        ("hyperparameters",), HF, "spec.training.arguments", "for names of TrainingArguments", same=False,
        under=("spec", "training"),
    ),
    ForeignName(
        ("training_duration", "max_duration", "max_time"), HF, "spec.training.epochs",
        "3 for 3ep; a number of batches is spec.training.maxSteps, and seconds are "
        "spec.runPolicy.activeDeadlineSeconds", same=False, writes=_deadline,
    ),
    ForeignName(("train_data_path", "training_data_path"), HF, "spec.dataset.uri"),
    ForeignName(
        ("loss_type", "pref_loss", "rl"), f"{HF}, {FACTORY}, {AXOLOTL}", None,
        "leave it out: preference-tuning uses the sigmoid loss of DPO",
    ),
    ForeignName(("mlm_probability", "mlm_prob", "mask_probability"), HF, None,
        "leave it out: 15 % of the tokens are masked"),
    ForeignName(
        ("class_weights", "class_weight", "loss_weights"), HF, None,
        "leave it out: all rows have the same weight; run a loss of your own with spec.training.script",
    ),
    ForeignName(
        ("repo", "repository", "url", "git_url", "git_repo", "repo_url", "uri", "source"), EVERYBODY,
        "spec.training.script.git.url", under=("script",),
    ),
    ForeignName(
        ("branch", "ref", "tag", "commit", "revision", "git_ref"), EVERYBODY, "spec.training.script.git.ref",
        under=("script",),
    ),
    ForeignName(
        ("image", "docker_image", "container_image", "base_image", "container"), KUBERNETES, None,
        "leave it out: the program runs in the trainer image; for more libraries build an image on that one, and name "
        "it in spec.image",
        under=("script",),
    ),
    ForeignName(
        ("file", "main", "entry", "script", "program", "command", "filename", "script_file"), EVERYBODY,
        "spec.training.script.entryPoint", under=("script",),
    ),
    ForeignName(
        ("args", "arguments", "params", "parameters", "hparams", "flags"), EVERYBODY,
        "spec.training.script.hyperparameters", under=("script",),
    ),
    ForeignName(
        ("requirements", "requirements_file", "requirements_txt", "packages", "dependencies", "pip", "pip_packages",
         "conda", "install"),
        EVERYBODY, None, "leave it out: a program runs in the trainer image; packages that it lacks belong in an image "
        "of your own, spec.image", under=("script", "training", "", "spec", "git", "template"),
    ),
    ForeignName(
        ("branch", "revision", "tag", "commit", "version"), EVERYBODY, "spec.training.script.git.ref", under=("git",)
    ),
    ForeignName(("repo", "repository", "uri"), EVERYBODY, "spec.training.script.git.url", under=("git",)),
    ForeignName(("shm", "shm_size"), KUBERNETES, "spec.resources.sharedMemory"),
    ForeignName(
        ("container_image", "trainer_image", "docker_image", "image"), KUBERNETES, "spec.image"
    ),
    ForeignName(
        ("image", "command", "args"), KUBERNETES, None,
        "leave it out: the operator's image trains; an image built on it is spec.image, a program of your own "
        "spec.training.script",
        under=("containers", "trainer", "init_containers"),
    ),
    ForeignName(
        ("command", "args", "entrypoint", "script"), KUBERNETES, "spec.training.script",
        "a program in a git repository, with git.url, entryPoint and hyperparameters below it", same=False,
        under=("", "spec", "template"),
    ),
    ForeignName(
        ("containers", "init_containers", "pod_template", "pod_spec", "spec"), KUBERNETES, None,
        "leave it out: the operator writes the containers; nodeSelector, tolerations, env and volumes go below "
        "spec.template, GPUs and memory below spec.resources",
        under=("spec", "template", "training"),
    ),
    ForeignName(
        ("pytorch_replica_specs", "mpi_replica_specs", "tf_replica_specs", "trainer", "elastic_policy", "completions",
         "completion_mode", "replicated_jobs"),
        KUBERNETES, "spec.resources.nodes",
        "the number of pods; GPUs of each are spec.resources.gpusPerNode; nodeSelector and tolerations go below "
        "spec.template", same=False,
    ),
    ForeignName(
        ("runtime_ref", "run_policies"), KUBERNETES, None,
        "leave it out: spec.launcher selects the kind of job that runs the pods",
    ),
    ForeignName(
        ("initializer",), KUBERNETES, "spec.model.uri", "the address of the data is spec.dataset.uri", same=False
    ),
    ForeignName(("storage_uri",), KUBERNETES, "spec.model.uri", under=("model",)),
    ForeignName(("storage_uri",), KUBERNETES, "spec.dataset.uri", under=("dataset",)),
    ForeignName(
        ("host_network", "host_pid", "host_ipc", "runtime_class_name", "scheduler_name", "restart_policy", "dns_policy",
         "env_from", "termination_grace_period_seconds"),
        KUBERNETES, None, "leave it out: this setting of pods is not configurable",
        under=("", "spec", "template", "runPolicy", "resources"),
    ),
    ForeignName(
        ("backoff_limit", "max_retries", "retries", "backoff"), KUBERNETES, "spec.runPolicy.maxRestarts"
    ),
    ForeignName(("timeout", "timeout_seconds", "deadline"), KUBERNETES, "spec.runPolicy.activeDeadlineSeconds"),
    ForeignName(
        ("max_run", "max_run_seconds", "max_runtime_seconds", "max_runtime", "time_limit"), f"{HF}, {KUBERNETES}",
        "spec.runPolicy.activeDeadlineSeconds", under=("", "spec", "training", "resources", "runPolicy"),
    ),
    ForeignName(("max_wait",), HF, "spec.spot.maxWaitSeconds"),
    ForeignName(
        ("use_spot_instances", "spot_instances", "use_spot", "spot_instance", "preemptible", "enable_spot",
         "use_preemptible", "train_on_spot"),
        f"{HF}, {KUBERNETES}", "spec.spot.enabled",
    ),
    ForeignName(("ttl", "ttl_seconds"), KUBERNETES, "spec.runPolicy.ttlSecondsAfterFinished"),
    ForeignName(("priority", "priority_class"), KUBERNETES, "spec.runPolicy.priorityClassName"),
    ForeignName(
        ("queue", "queue_name"), KUBERNETES, None,
        "leave it out: queues are not supported in this version", under=("", "spec", "metadata", "resources"),
    ),
    ForeignName(
        ("pvc", "pvc_name", "claim", "claim_name", "persistent_volume_claim", "volume_claim"), KUBERNETES,
        "spec.storage.workspace", "pvc:// before the claim's name",
    ),
    *(
        ForeignName(
            ("pvc", "pvc_name", "claim", "claim_name", "persistent_volume_claim", "volume_claim"), KUBERNETES,
            f"spec.{block}.uri", "pvc:// before the claim's name", under=(block,), writes_beside=_claim(block),
        )
        for block in ("model", "dataset")
    ),
    *(
        ForeignName(
            ("sub_path", "subpath", "path_in_claim", "mount_path"), KUBERNETES, f"spec.{block}.uri",
            "pvc://claim/path", under=(block,), same=False,
        )
        for block in ("model", "dataset")
    ),
    ForeignName(("storage",), KUBERNETES, "spec.storage.size", under=("requests",)),
    ForeignName(
        ("resources", "requests"), KUBERNETES, "spec.storage.size", under=("storage",), same=False, writes=_claim_size
    ),
    ForeignName(("disk", "disk_size", "storage_size"), KUBERNETES, "spec.storage.size"),
    ForeignName(("pull_policy",), KUBERNETES, "spec.imagePullPolicy"),
    ForeignName(
        ("pull_secrets", "image_pull_secret", "image_pull_secrets", "pull_secret"), KUBERNETES,
        "spec.template.imagePullSecrets", same=False, under=("image", "", "spec", "resources", "training"),
        writes=_pull_secrets,
    ),
    ForeignName(("storage_class",), KUBERNETES, "spec.storage.storageClassName"),
    ForeignName(("service_account",), KUBERNETES, "spec.template.serviceAccountName"),
    ForeignName(
        ("secret", "secret_name", "secret_ref"), KUBERNETES, "spec.secrets.hubToken.name",
        "for a token of the Hub", same=False,
    ),
    ForeignName(
        ("secret_name", "secret"), KUBERNETES, "spec.secrets.hubToken.name", under=("hubToken",),
    ),
    ForeignName(
        ("secret_key", "key_name", "entry", "field"), KUBERNETES, "spec.secrets.hubToken.key", under=("hubToken",),
    ),
    ForeignName(
        ("huggingface", "hf", "hub", "hugging_face", "token", "hf_secret", "hub_secret", "name"), KUBERNETES,
        "spec.secrets.hubToken.name", under=("secrets",),
    ),
    *(
        ForeignName(
            names, KUBERNETES, "spec.template.env",
            f"a variable {variable}, with valueFrom.secretKeyRef", under=("secrets",), same=False,
            writes=_key_variable(variable),
        )
        for names, variable in (
            (("wandb", "wandb_api_key", "wandb_key", "wandb_token", "wandb_secret"), "WANDB_API_KEY"),
            (("mlflow_token", "mlflow_tracking_token"), "MLFLOW_TRACKING_TOKEN"),
            (("databricks", "databricks_token"), "DATABRICKS_TOKEN"),
            (("openai", "openai_api_key", "vllm_api_key"), "OPENAI_API_KEY"),
        )
    ),
    ForeignName(("key", "secret_key"), KUBERNETES, "spec.secrets.hubToken.key", under=("secrets",)),
    ForeignName(
        ("hf_token_secret", "hub_token_secret", "token_secret", "hf_token_secret_name",
         "huggingface_secret"),
        KUBERNETES, "spec.secrets.hubToken.name",
    ),
    ForeignName(
        ("max_tokens", "tokens", "length", "token_limit"), HF, "spec.preparation.maxLength", "in tokens",
        under=("preparation", "dataset", "model", "tokenizer", "preprocessing"),
    ),
    ForeignName(("max_length",), HF, "spec.generation.maxNewTokens", "in tokens", under=("generation",)),
    ForeignName(("min_length", "min_new_tokens"), HF, None,
        "leave it out: spec.generation.maxNewTokens limits the output", under=("generation",)),
    ForeignName(("name", "namespace"), KUBERNETES, None, "move it below metadata", under=("", "spec")),
    ForeignName(("labels", "annotations"), KUBERNETES, None, "move it below metadata", under=("",)),
    ForeignName(
        ("serve", "serving", "inference_service", "deploy", "deployment", "server", "inference_server"), KUBERNETES,
        "spec.endpoint", "{} takes the defaults", {},
    ),
    ForeignName(
        ("min_replicas", "min", "num_replicas", "initial_replicas"), KUBERNETES, "spec.endpoint.replicas",
        under=("endpoint", "autoscaling"),
    ),
    ForeignName(("max",), KUBERNETES, "spec.endpoint.maxReplicas", under=("endpoint", "autoscaling")),
    ForeignName(
        ("target_cpu_utilization", "target_cpu_utilization_percentage", "target_cpu", "autoscale", "autoscaling",
         "auto_scaling", "scaling", "hpa"),
        KUBERNETES, None,
        "leave it out: with maxReplicas above replicas, servers are added above 70 % of the CPU request",
        under=("endpoint", "autoscaling"),
    ),
    ForeignName(
        ("port", "ports", "service_port", "host", "service_type", "ingress", "engine", "server"), KUBERNETES, None,
        "leave it out: the operator writes the server and its Service; status.endpointUrl is the address",
        under=("endpoint",),
    ),
    ForeignName(
        ("max_lora_rank", "max_rank"), EVERYBODY, "spec.endpoint.maxAdapterRank", under=("endpoint",),
    ),
    ForeignName(
        ("gpu_memory_utilization", "max_model_len", "tensor_parallel_size", "max_loras"), EVERYBODY, None,
        "leave it out: the operator sets the options of vLLM's servers", under=("endpoint",),
    ),
    ForeignName(
        ("timeout", "latency", "max_latency", "max_batch_delay"), EVERYBODY, "spec.endpoint.maxLatencyMilliseconds",
        "in milliseconds", under=("endpoint",),
    ),
    ForeignName(
        ("schedule", "cron", "cron_schedule", "cron_job", "cron_expression", "start_at", "start_time", "repeat",
         "repeat_every", "recurrence", "recurring", "every", "run_every"),
        KUBERNETES, None,
        "leave it out: a job starts when it is created; a CronJob of Kubernetes that creates it can repeat it",
        under=("", "spec", "runPolicy"),
    ),
    ForeignName(
        ("concurrency_policy", "concurrent_policy", "allow_concurrent", "max_concurrent", "max_concurrent_runs",
         "max_active_runs"),
        KUBERNETES, None,
        _ONE_AT_A_TIME,
        under=("", "spec", "runPolicy"),
    ),
    ForeignName(
        ("starting_deadline_seconds", "successful_jobs_history_limit", "failed_jobs_history_limit", "time_zone",
         "timezone", "job_template", "catchup", "start_date", "end_date"),
        KUBERNETES, None, "leave it out: it belongs to the CronJob that creates the job",
        under=("", "spec", "runPolicy"),
    ),
    ForeignName(
        ("job_type", "kind_of_job", "trainer_type"), EVERYBODY, None, _NO_COUNTERPART,
    ),
)  # fmt: skip

_TASKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "text-generation",
        (
            "causal-lm", "clm", "lm", "language-modeling", "causal-language-modeling", "sft", "pt", "pretraining",
            "instruction-tuning", "instruct", "instruction", "instructions", "instruction-finetune", "chat",
            "conversational", "completion", "generation",
            "supervised-fine-tuning", "sft-trainer", "llm", "text-completion", "chat-completion",
        ),
    ),
    (
        "text-classification",
        (
            "sentiment", "sentiment-analysis", "classification", "sequence-classification", "seq-cls", "classify",
            "binary-classification", "multi-class-classification", "nli", "natural-language-inference",
            "text-classifier", "single-label-classification", "multi-label-classification",
        ),
    ),
    ("token-classification", ("ner", "token-cls", "pos", "tagging", "sequence-tagging", "named-entity-recognition")),
    ("question-answering", ("qa", "question-ans", "squad", "extractive-qa", "extractive-question-answering")),
    ("preference-tuning", ("dpo", "preference", "preferences", "preference-optimization", "rlhf")),
    ("masked-lm", ("mlm", "masked-language-modeling", "fill-mask", "masked-language-model")),
    ("summarization", ("summarisation", "summarize", "summary", "summaries")),
    ("translation", ("translate", "mt", "machine-translation")),
)  # fmt: skip
_ZERO = "spec.parallelism.zeroStage"
_STRATEGY = "spec.parallelism.strategy"
_PRECISION = "spec.training.precision"
_METHOD = "spec.model.adapter.method"

VALUES: tuple[ForeignValue, ...] = (
    *(ForeignValue("spec.task", names, EVERYBODY, {"spec.task": task}) for task, names in _TASKS),
    ForeignValue(
        "spec.task", ("seq2seq", "seq2seq-lm", "seq-2-seq-lm", "text2text-generation"), HF, {},
        "write summarization or translation, with spec.dataset.columns.source and target",
    ),
    ForeignValue(
        "spec.task", ("orpo", "kto", "ppo", "grpo", "rm", "reward-modeling", "reward"), f"{HF}, {FACTORY}, {AXOLOTL}",
        {}, "write preference-tuning, which trains on pairs of answers with DPO",
    ),
    ForeignValue(
        "spec.task", ("regression", "text-regression", "sts", "stsb", "score", "rating"), HF,
        {"spec.task": "text-classification"}, "fractions in the label column are numbers to learn",
    ),
    ForeignValue(
        "spec.task", ("embedding", "embeddings", "feature-extraction", "sentence-similarity", "reranking", "reranker",
                      "image-classification", "automatic-speech-recognition", "multiple-choice"),
        HF, {}, "there is no such task; run your own program with spec.training.script",
    ),
    *(
        ForeignValue(
            _STRATEGY,
            (
                f"zero{stage}", f"zero-stage-{stage}", f"deepspeed-zero{stage}", f"ds-zero{stage}", f"stage{stage}",
                f"deepspeed-stage-{stage}", f"deepspeed-{stage}", f"deepspeed-zero-stage-{stage}",
            ),
            f"{EVERYBODY}, {DEEPSPEED}", {_STRATEGY: "deepspeed", _ZERO: stage},
        )
        for stage in (0, 1, 2, 3)
    ),
    ForeignValue(_STRATEGY, ("zero",), DEEPSPEED, {_STRATEGY: "deepspeed"}),
    ForeignValue(
        _STRATEGY, ("fsdp2", "fully-sharded", "full-shard", "fsdp-full-shard", "full-shard-auto-wrap",
                    "fully-sharded-data-parallel", "fsdp-full-shard-auto-wrap"),
        HF, {_STRATEGY: "fsdp"},
    ),
    ForeignValue(
        _STRATEGY, ("shard-grad-op", "shard-grad-op-auto-wrap"), HF,
        {_STRATEGY: "fsdp", "spec.parallelism.sharding": "grad-op"},
    ),
    ForeignValue(
        _STRATEGY, ("hybrid-shard", "hybrid-shard-auto-wrap"), HF,
        {_STRATEGY: "fsdp", "spec.parallelism.sharding": "hybrid"},
    ),
    ForeignValue(
        _STRATEGY, ("dp", "data-parallel", "distributed", "multi-gpu", "distributed-data-parallel", "nccl"), HF,
        {_STRATEGY: "ddp"},
    ),
    ForeignValue(_STRATEGY, ("none", "no", "single-gpu", "single-process", False), HF, {_STRATEGY: "single"}),
    ForeignValue(_STRATEGY, ("tensor-parallel", "tp"), HF, {}, "leave it out, and set spec.parallelism.tensor"),
    ForeignValue(
        _STRATEGY, ("pipeline-parallel", "pp"), HF, {}, "leave it out, and set spec.parallelism.pipeline.degree"
    ),
    ForeignValue(
        _STRATEGY, ("horovod", "mpi", "megatron", "gloo"), HF, {},
        "write auto, ddp, fsdp or deepspeed; spec.launcher mpijob starts the processes by MPI",
    ),
    *(
        ForeignValue(_ZERO, (f"zero{stage}", f"zero-{stage}", f"stage{stage}", f"stage-{stage}"), DEEPSPEED,
            {_ZERO: stage})
        for stage in (0, 1, 2, 3)
    ),
    ForeignValue(
        _PRECISION,
        ("float16", "16-mixed", "fp16-mixed", "mixed-fp16", "mixed-float16", "16-true", "fp16-true"),
        EVERYBODY, {_PRECISION: "fp16"}, "auto is bf16 on GPUs that have it",
    ),
    ForeignValue(
        _PRECISION,
        ("mixed", "amp", "mixed-precision", "automatic", "automatic-mixed-precision", "autocast", "half",
         "half-precision", "16", "16bit", "low", "reduced", True),
        EVERYBODY, {_PRECISION: "auto"},
        "bf16 on GPUs that have it, such as L4 and A100, and fp16 on older ones; to fix one, write bf16 or fp16",
    ),
    ForeignValue(
        _PRECISION,
        ("bfloat16", "bf16-mixed", "bfloat", "mixed-bf16", "mixed-bfloat16", "bf16-true", "brain-float"), EVERYBODY,
        {_PRECISION: "bf16"},
    ),
    ForeignValue(_PRECISION, ("float32", "full", "32", "32-true", "tf32", "no", False), EVERYBODY,
        {_PRECISION: "fp32"}),
    ForeignValue(_PRECISION, ("float8", "8", "te"), EVERYBODY, {_PRECISION: "fp8"}),
    ForeignValue(
        _PRECISION, ("int4", "4bit", "nf4"), EVERYBODY, {},
        "leave it out, and set spec.model.adapter.method to qlora, which holds the weights in 4 bits",
    ),
    ForeignValue(
        _PRECISION, ("int8", "8bit"), EVERYBODY, {_PRECISION: "auto"}, "training has no 8-bit integers",
    ),
    ForeignValue(
        "spec.training.optimizer",
        ("adamw-torch", "adamw-torch-fused", "adamw-hf", "adam", "fused-adam", "adamw-apex-fused"),
        EVERYBODY, {"spec.training.optimizer": "adamw"},
    ),
    ForeignValue(
        "spec.training.optimizer",
        ("adamw-8bit", "adamw-bnb-8bit", "paged-adamw-8bit", "paged-adamw-32bit", "paged-adamw", "lion", "adamw-4bit"),
        EVERYBODY, {"spec.training.optimizer": "adamw"},
        "its state has 32 bits; spec.parallelism.offload.optimizer or an adapter saves memory",
    ),
    ForeignValue("spec.training.optimizer", ("momentum", "sgd-momentum"), HF, {"spec.training.optimizer": "sgd"}),
    ForeignValue(
        "spec.training.scheduler", ("cosine-annealing", "cosine-decay", "cosine-with-warmup", "cosine-with-min-lr"),
        EVERYBODY, {"spec.training.scheduler": "cosine"},
    ),
    ForeignValue(
        "spec.training.scheduler", ("linear-with-warmup", "linear-decay", "warmupdecaylr"),
        f"{HF}, {DEEPSPEED}",
        {"spec.training.scheduler": "linear"}, "set the warm-up in spec.training.warmupSteps",
    ),
    ForeignValue(
        "spec.training.scheduler", ("warmuplr",), DEEPSPEED, {"spec.training.scheduler": "constant_with_warmup"},
        "set the warm-up in spec.training.warmupSteps",
    ),
    ForeignValue("spec.training.scheduler", ("none", "no", False), HF, {"spec.training.scheduler": "constant"}),
    ForeignValue(
        "spec.training.scheduler", ("reduce-lr-on-plateau", "warmup-stable-decay", "wsd", "one-cycle"), HF, {},
        "write linear, cosine or constant_with_warmup",
    ),
    ForeignValue(
        _METHOD, ("full", "freeze", "full-finetuning", "full-fine-tuning", False), f"{FACTORY}, {AXOLOTL}",
        {_METHOD: "none"},
    ),
    ForeignValue(_METHOD, ("peft", "rslora", "lora-plus", True), HF, {_METHOD: "lora"}),
    ForeignValue(
        _METHOD, ("lora-4bit", "4bit-lora", "lora-int4", "qlora-4bit", "4bit", "int4", "nf4"), EVERYBODY,
        {_METHOD: "qlora"},
    ),
    ForeignValue(
        _METHOD, ("adalora", "ia3", "prefix-tuning", "prompt-tuning", "p-tuning", "llama-adapter", "oft", "loha"),
        HF, {}, "write lora, dora or qlora",
    ),
    ForeignValue("spec.model.adapter.targetModules", ("all", "all-linear"), f"{HF}, {FACTORY}",
                 {"spec.model.adapter.targetModules": "auto"}),
    ForeignValue("spec.parallelism.activationCheckpointing", (True, "true", "unsloth"), EVERYBODY,
                 {"spec.parallelism.activationCheckpointing": "full"}),
    ForeignValue("spec.parallelism.activationCheckpointing", (False, "false"), EVERYBODY,
                 {"spec.parallelism.activationCheckpointing": "none"}),
    ForeignValue("spec.parallelism.offload.optimizer", (True, "true"), EVERYBODY,
                 {"spec.parallelism.offload.optimizer": "cpu"}),
    ForeignValue("spec.parallelism.offload.parameters", (True, "true"), EVERYBODY,
                 {"spec.parallelism.offload.parameters": "cpu"}),
    ForeignValue("spec.preparation.packing", (True, "true"), EVERYBODY, {"spec.preparation.packing": "always"}),
    ForeignValue("spec.preparation.packing", (False, "false"), EVERYBODY, {"spec.preparation.packing": "never"}),
    ForeignValue("spec.checkpoints.every",
                 ("epoch", "steps", "every-epoch", "each-epoch", "per-epoch", "once-per-epoch", "end", "epoch-end",
                  "end-of-epoch"),
                 EVERYBODY, {"spec.checkpoints.every": "auto"},
                 "an interval that the plan chooses; {steps: 500} is every 500 steps"),
    ForeignValue(
        "spec.runPolicy", ("forbid", "replace", "allow"), KUBERNETES, {},
        _ONE_AT_A_TIME,
    ),
    ForeignValue(
        "spec.runPolicy", ("never", "always", "on-failure", "restart"), KUBERNETES, {},
        "leave it out: spec.runPolicy.maxRestarts is the number of restarts after a failure",
    ),
    ForeignValue("spec.evaluation", (False, "none", "no", "skip"), EVERYBODY, {}, ALWAYS_EVALUATED),
    ForeignValue("spec.checkpoints.keep", ("all", "unlimited"), EVERYBODY, {"spec.checkpoints.keep": 1000}),
    ForeignValue("spec.resources.network", ("infiniband", "ib", "roce", "gpudirect"), KUBERNETES,
                 {"spec.resources.network": "rdma"}),
    ForeignValue("spec.resources.network", ("nccl", "any"), KUBERNETES, {"spec.resources.network": "auto"}),
    ForeignValue("spec.predict.format", ("csv", "json", "ndjson", "jsonlines", "json-lines", "tsv"), HF,
                 {"spec.predict.format": "jsonl"}, "predictions are JSON Lines or Parquet"),
    ForeignValue("spec.endpoint.runtime", ("vllm",), KUBERNETES,
                 {"spec.endpoint.runtime": "auto", "spec.endpoint.optimization": "vllm"}),
    ForeignValue(
        "spec.endpoint.runtime",
        ("tgi", "triton", "torchserve", "sglang", "ollama", "text-generation-inference"),
        KUBERNETES, {"spec.endpoint.runtime": "auto"}, "the operator's own server answers requests",
    ),
    ForeignValue("spec.endpoint.runtime", ("kubernetes", "k8s", "pods"), KUBERNETES,
                 {"spec.endpoint.runtime": "deployment"}),
    ForeignValue("spec.endpoint.runtime", ("inferenceservice", "knative"), KUBERNETES,
                 {"spec.endpoint.runtime": "kserve"}),
    ForeignValue("spec.resources.network", ("ethernet", "eth", "eth0", "default"), KUBERNETES,
                 {"spec.resources.network": "tcp"}),
    ForeignValue("spec.parallelism.sharding", ("full-shard", "1", True), HF, {"spec.parallelism.sharding": "full"}),
    ForeignValue("spec.parallelism.sharding", ("shard-grad-op", "2"), HF, {"spec.parallelism.sharding": "grad-op"}),
    ForeignValue(
        "spec.parallelism.sharding", ("hybrid-shard", "4"), HF, {"spec.parallelism.sharding": "hybrid"}
    ),
    ForeignValue(
        "spec.parallelism.sharding", ("no-shard", "3"), HF, {}, "leave it out, and set spec.parallelism.strategy to ddp"
    ),
    ForeignValue("spec.checkpoints.resume", (True, "true", "always"), EVERYBODY, {"spec.checkpoints.resume": "auto"}),
    ForeignValue("spec.checkpoints.resume", (False, "false", "no"), EVERYBODY, {"spec.checkpoints.resume": "never"}),
    ForeignValue("spec.resources.gpusPerNode", ("all", "max"), HF, {"spec.resources.gpusPerNode": "auto"}),
    ForeignValue("spec.resources.gpusPerNode", (True, "true", "yes"), HF, {"spec.resources.gpusPerNode": 1}),
    ForeignValue("spec.resources.gpusPerNode", ("none", "cpu", False), HF, {"spec.resources.gpusPerNode": 0}),
    ForeignValue("spec.resources.processesPerNode", ("gpu", "all"), HF, {"spec.resources.processesPerNode": "auto"}),
    *(
        ForeignValue("spec.launcher", each.foreign_names, each.foreign_tools, {"spec.launcher": each.name})
        for each in SUPPORTED
        if each.foreign_names
    ),
    ForeignValue(
        "spec.launcher", ("torchrun", "accelerate", "deepspeed", "local", "none", "python", "kubernetes"),
        f"{HF}, {DEEPSPEED}", {"spec.launcher": "auto"},
    ),
    ForeignValue("spec.launcher", ("slurm", "ray", "rayjob", "sagemaker"), HF, {},
        "leave it out: Kubernetes runs the pods"),
)  # fmt: skip


@cache
def _names() -> Mapping[str, tuple[ForeignName, ...]]:
    found: dict[str, tuple[ForeignName, ...]] = {}
    for row in NAMES:
        for name in row.names:
            found[plain(name)] = (*found.get(plain(name), ()), row)
    return found


@cache
def _values() -> Mapping[tuple[str, str], ForeignValue]:
    return {(row.field, plain(str(name))): row for row in VALUES for name in row.names}


def written(
    row: ForeignName, given: JsonValue, *, hub: bool, beside: Mapping[str, JsonValue] = _NOTHING
) -> Mapping[str, JsonValue]:
    """Convert the value given under the name of a row into values by field.

    `hub`: the data are on the Hub, whose splits have slices. `beside`: the object that contains the name. Empty result:
    it cannot be converted.
    """
    if row.writes_beside is not None and (found := row.writes_beside(given, beside)):
        return found
    converted = row.writes(given) if row.writes is not None else {}
    sliced = any(field.startswith(_SPLITS) and "[" in str(value) for field, value in converted.items())
    return {} if sliced and not hub else converted


def find_name(name: str, parent: str) -> ForeignName | None:
    """Return the row of a name in the object `parent` (empty: the document); one with `under` takes precedence."""
    rows = _names().get(plain(name), ())
    fitting = [row for row in rows if not row.under or parent in row.under]
    return min(fitting, key=lambda row: not row.under, default=None)


def find_value(path: str, value: JsonValue) -> ForeignValue | None:
    """Return the row of a value that the field at the dotted `path` does not accept."""
    if not isinstance(value, str | bool | int):
        return None
    found = _values().get((path, plain(str(value))))
    if found is None and isinstance(value, str) and (switched := _SWITCHES.get(plain(value))) is not None:
        return _values().get((path, switched))
    return found


_SWITCHES: Mapping[str, str] = {
    **dict.fromkeys(("enabled", "enable", "on", "yes"), "true"),
    **dict.fromkeys(("disabled", "disable", "off", "no", "never"), "false"),
}
"""Word -> the boolean that it stands for, as `plain` writes it."""

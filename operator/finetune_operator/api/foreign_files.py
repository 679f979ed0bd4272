"""Complete configurations of other tools: reported once, with the names that correspond here, not name by name.

Only names and values at the top of a document or of its `spec` are read. A Kubernetes object that runs a program is
fine beside a FineTuneJob; in a file without one, somebody mistook it for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue

from finetune_contract.arguments import known_arguments
from finetune_operator.api.field_names import DOCUMENT, spec_fields
from finetune_operator.api.foreign_names import find_name, find_value, written
from finetune_operator.api.foreign_rows import AXOLOTL, DEEPSPEED, FACTORY, HF
from finetune_operator.api.hint_parts import rows_of_a_step, shown_value
from finetune_operator.api.hints import accepted_field_value, accepted_value, named_inside
from finetune_operator.api.meant_uris import as_uri, on_hub
from finetune_operator.api.name_index import place_of
from finetune_operator.api.problems import Problem
from finetune_operator.api.types import API_VERSION, KIND
from finetune_operator.launchers.launcher_rows import LAUNCHERS

ACCELERATE = "accelerate"
_LEAST = 3
"""Minimum names of another tool that make a document its configuration; fewer are reported one by one."""
_GLOBAL_BATCH = "spec.training.globalBatchSize"
_MOST = 32
"""Maximum number of names that a message translates."""
_MARKS: Mapping[str, frozenset[str]] = {
    AXOLOTL: frozenset({
        "base_model", "sequence_len", "micro_batch_size", "num_epochs", "datasets", "val_set_size", "lora_r",
        "lora_target_linear", "sample_packing", "pad_to_sequence_len", "train_on_inputs", "dataset_prepared_path",
        "evals_per_epoch", "saves_per_epoch", "flash_attention", "special_tokens", "wandb_project", "load_in_8bit",
    }),
    FACTORY: frozenset({
        "finetuning_type", "cutoff_len", "stage", "template", "lora_target", "lora_rank", "dataset_dir", "max_samples",
        "preprocessing_num_workers", "quantization_bit", "plot_loss", "overwrite_cache", "val_size", "pref_beta",
    }),
    DEEPSPEED: frozenset({
        "zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping",
        "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    }),
    HF: frozenset({
        "model_name_or_path", "dataset_name", "dataset_text_field", "max_seq_length", "output_dir", "lora_alpha",
        "evaluation_strategy", "use_peft", "per_device_train_batch_size", "num_train_epochs",
    }),
    ACCELERATE: frozenset({
        "compute_environment", "distributed_type", "machine_rank", "main_training_function", "downcast_bf16",
        "num_machines", "rdzv_backend", "same_network", "tpu_use_cluster", "fsdp_config",
    }),
}  # fmt: skip
"""Names that identify a tool's configuration."""
_WORKLOADS = frozenset({
    "CronJob", "Pod", "Deployment", "StatefulSet", "TFJob", "RayJob", "XGBoostJob", "PaddleJob", "JAXJob", "Workflow",
    *(each.kind for each in LAUNCHERS),
})  # fmt: skip


def recognise(value: Mapping[str, JsonValue]) -> Problem | None:
    """Return the one problem of a document that is, or whose spec is, another tool's configuration; else None."""
    spec = value.get("spec")
    for path, inner in (("", value), ("spec", spec if isinstance(spec, dict) else {})):
        if (workspace := _workspace(path, inner)) is not None:
            return workspace
    for path, inner, known in (
        ("", value, DOCUMENT),
        ("spec", spec if isinstance(spec, dict) else {}, tuple(spec_fields())),
    ):
        names = [name for name in inner if name not in known]
        tool = _tool(names)
        if tool is not None:
            return _configuration_problem(path, tool, {name: inner[name] for name in names}, inner)
    return None


def _tool(names: Sequence[str]) -> str | None:
    theirs = {tool: len(marks.intersection(names)) for tool, marks in _MARKS.items()}
    best = max(theirs, key=lambda tool: theirs[tool])
    all_known = [name for name in names if find_name(name, "") is not None or name in known_arguments()]
    if theirs[best] and len(all_known) >= _LEAST and (theirs[best] >= 2 or len(all_known) > _LEAST):
        return best
    return None


def _configuration_problem(
    path: str, tool: str, given: Mapping[str, JsonValue], spec: Mapping[str, JsonValue]
) -> Problem:
    fields: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    left_out, hub = [], _data_on_hub(spec)

    def translate(name: str, field: str, accepted: str = "") -> None:
        if not field:
            left_out.append(name)
            return
        fields.setdefault(field, []).append(name)
        values[field] = accepted if accepted.endswith(": qlora") else values.get(field) or accepted

    for name, value in spec.items():
        known = find_value(f"spec.{name}", value) if path else None
        for field, instead in known.instead.items() if known is not None else ():
            fields[field], values[field] = [name], f": {instead}"
        if path and name not in given and isinstance(value, str) and name in _TEXTS:
            translate(name, *_TEXTS[name](value))
        for inner, field, accepted in named_inside(name, name, value) if path and name not in given else ():
            if not field or not field.endswith(f".{inner}"):
                translate(inner, field, accepted)
    for name, value in given.items():
        row = find_name(name, path)
        if row is None:
            place = place_of(name, (path,) if path else ())
            if place is not None:
                translate(name, place, accepted_field_value(place, value))
            elif isinstance(value, dict):
                for inner, field, accepted in named_inside(name, name, value):
                    translate(inner, field, accepted)
            else:
                left_out.append(name)
        elif converted := written(row, value, hub=hub):
            for field, each in converted.items():
                translate(name, field, f": {shown_value(each, field)}")
        elif row.field is None:
            left_out.append(name)
        else:
            translate(name, row.field, accepted_value(row, _address(value)))
            for inner, field, accepted in named_inside(name, name, value):
                translate(inner, field, accepted)
    if _GLOBAL_BATCH in fields and not values[_GLOBAL_BATCH]:
        values[_GLOBAL_BATCH] = _rows_of_a_step(spec)
    for column, name in _alpaca_columns(spec):
        translate("type: alpaca", f"spec.dataset.columns.{column}", f": {name}")
    pairs = [
        f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {field}{values.get(field, '')}"
        for field, names in fields.items()
    ]
    begin = "" if path else f"begin with apiVersion: {API_VERSION}, kind: {KIND}, metadata.name and spec.task; "
    if path and "spec.task" not in fields and "task" not in spec:
        begin = "begin with spec.task, e.g. text-generation; "
    translated = f"here {', '.join(pairs[:_MOST])}" if pairs else ""
    rest = f"; leave out {', '.join(left_out[:_MOST])}" if left_out else ""
    return Problem(
        path, None, f"this is a configuration of {tool}, whose field names differ from those of a {KIND}",
        f"{begin}{translated}{rest}; docs/names.md lists all names", reason="Unknown",
    )  # fmt: skip


def _address_of(field: str) -> Callable[[str], tuple[str, str]]:
    """Return a function that gives the field of an address, and the URI if the address is a path or a repository."""

    def read(value: str) -> tuple[str, str]:
        uri = as_uri(value) if "/" in value else None
        return field, f": {uri}" if uri else ""

    return read


_TEXTS: Mapping[str, Callable[[str], tuple[str, str]]] = {
    "model": _address_of("spec.model.uri"),
    "dataset": _address_of("spec.dataset.uri"),
    "template": lambda _: ("", ""),
}
"""Objects of ours that are text in other tools -> the field that it belongs to (empty: none), and the value."""


def _data_on_hub(spec: Mapping[str, JsonValue]) -> bool:
    """Return True if the data set that another tool's configuration names is on the Hub."""
    for name, value in spec.items():
        row = find_name(name, "")
        if row is not None and row.field == "spec.dataset.uri":
            return on_hub(_address(value))
    dataset = spec.get("dataset")
    return on_hub(dataset.get("uri") if isinstance(dataset, dict) else dataset)


def _rows_of_a_step(spec: Mapping[str, JsonValue]) -> str:
    """Compute the global batch from micro-batch, accumulation and processes, as far as they are given."""
    inner = [value for value in spec.values() if isinstance(value, dict)]
    rows = rows_of_a_step({name: value for each in (*inner, spec) for name, value in each.items()}, None)[1]
    return f": {rows}" if rows else ""


def _alpaca_columns(spec: Mapping[str, JsonValue]) -> Sequence[tuple[str, str]]:
    """Return the columns of Alpaca-style data, from a list of data sets as axolotl writes it."""
    match spec.get("datasets"):
        case [{"type": str(form)}] if form.split(":")[0] == "alpaca":
            return ("source", "instruction"), ("target", "output")
    return ()


def _address(value: JsonValue) -> JsonValue:
    """Return the one address in a list of data sets, as axolotl writes it; anything else unchanged."""
    match value:
        case [{"path": str(path)}]:
            return path
    return value


def _workspace(path: str, value: Mapping[str, JsonValue]) -> Problem | None:
    """Return the problem of a KAITO Workspace, whose parts stand beside metadata or below `spec`; None for any other
    document.
    """
    if not {"tuning", "resource"} <= set(value) and not {"inference", "resource"} <= set(value):
        return None
    begin = "" if path else f"begin with apiVersion: {API_VERSION}, kind: {KIND}, metadata.name and "
    begin += "" if path and "task" in value else f"{'begin with ' * bool(path)}spec.task, e.g. text-generation; then "
    return Problem(
        path, None, f"this is a Workspace of KAITO, whose field names differ from those of a {KIND}",
        f"{begin}tuning.preset.name is spec.model.uri, with hf://organisation/ before it; tuning.method is "
        "spec.model.adapter.method; tuning.input is "
        f"{_workspace_data(value)}; "
        "`spec.training: {}` trains; resource.count is spec.resources.nodes, and each node has "
        "spec.resources.gpusPerNode GPUs; resource.labelSelector.matchLabels is spec.template.nodeSelector"
        f"{_instance_type(value)}; leave out tuning.output: the model is written to spec.storage.workspace",
        reason="Unknown",
    )  # fmt: skip


def _workspace_data(value: Mapping[str, JsonValue]) -> str:
    """Return where the data of a Workspace belong, with their URI if its first address is on the Hub."""
    match value.get("tuning"):
        case {"input": {"urls": [str(url), *_]}} if (uri := as_uri(url)) is not None:
            return f"spec.dataset.uri: {uri}"
    return "spec.dataset.uri, as hf://organisation/name or pvc://claim/path"


def _instance_type(value: Mapping[str, JsonValue]) -> str:
    """Return the node label of the machine that a Workspace requests."""
    resource = value.get("resource")
    named = resource.get("instanceType") if isinstance(resource, dict) else None
    row = find_name("instanceType", "")
    converted = written(row, named, hub=False) if row is not None else {}
    return "".join(
        f"; resource.instanceType is in {field}, too: {shown_value(each, field)}" for field, each in converted.items()
    )


def workload(value: JsonValue) -> Problem | None:
    """Return the problem of a Kubernetes object that runs a program, in a file without a FineTuneJob; else None."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _WORKLOADS:
        return None
    return Problem(
        "kind", f'"{kind}"', f"runs containers, and there is no {KIND} in the input",
        f"write a {KIND} (apiVersion: {API_VERSION}) with spec.task, spec.model.uri, spec.dataset.uri and "
        "spec.training; nvidia.com/gpu is spec.resources.gpusPerNode, replicas is spec.resources.nodes, backoffLimit "
        "is spec.runPolicy.maxRestarts, --lr is spec.training.learningRate, a program of your own is "
        "spec.training.script; leave image and command out; docs/names.md lists all names",
        reason="Unknown",
    )  # fmt: skip

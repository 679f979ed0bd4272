"""Harmless settings that people copy from other tools: mapped to a field of ours, or ignored, with a note.

They stand in `training.arguments` and `parallelism.deepspeedConfig`, where names of transformers and DeepSpeed are
expected. A setting is ignored if it changes nothing that is learnt or kept, and mapped to a field if it means the same
and that field has its default. A contradiction of a field is refused as before: `settle` leaves it there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import JsonValue
from pydantic.alias_generators import to_snake

from finetune_operator.spec.checks.deepspeed_overrides import OWNED_KEYS
from finetune_operator.spec.fields.shapes import accepts, find, spec_shape
from finetune_operator.spec.problems import describe_value
from finetune_operator.spec.types import FineTuneJobSpec

ARGUMENTS = "training.arguments"
DEEPSPEED_CONFIG = "parallelism.deepspeedConfig"


@dataclass(frozen=True)
class Copied:
    """A setting of another tool."""

    block: str
    """Field of the spec that contains it."""
    names: tuple[str, ...]
    """Equivalent names; dotted if they stand in a section."""
    becomes: str
    """Treatment of the setting, for the documentation and the note."""
    field: str | None = None
    """Field of the spec with the same meaning; None: it is ignored."""
    value: Callable[[JsonValue], JsonValue] = lambda given: given
    """Value written into the field; None: the given value is not accepted."""
    harmless: Callable[[JsonValue], bool] = lambda given: True
    """Test whether the value is ignored; any other is refused as before."""
    when: str = ""
    """Values that are ignored, as text; empty: any."""


@dataclass(frozen=True)
class Settled:
    """Spec whose copied settings are mapped to fields or ignored."""

    spec: FineTuneJobSpec
    notes: tuple[str, ...] = ()
    """Sentence, without its full stop, for each setting."""


def _positive_integer(given: JsonValue) -> JsonValue:
    return given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else None


def _is_off(given: JsonValue) -> bool:
    return given is False or given is None


def _is_minus_one(given: JsonValue) -> bool:
    return given == -1


_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw": "adamw",
    "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
_REPORTED = "every step is reported regardless"

COPIED: tuple[Copied, ...] = (
    Copied(
        ARGUMENTS,
        ("logging_steps", "logging_strategy", "logging_first_step", "logging_nan_inf_filter", "logging_dir",
         "disable_tqdm", "log_level", "log_level_replica", "log_on_each_node", "include_num_input_tokens_seen",
         "skip_memory_metrics"),
        _REPORTED,
    ),
    Copied(ARGUMENTS, ("overwrite_output_dir", "save_safetensors", "remove_unused_columns"),
           "the trainer handles this itself"),
    Copied(ARGUMENTS, ("output_dir",), "results are in runs/NAME, and in a cluster in spec.storage.workspace"),
    Copied(ARGUMENTS, ("dataloader_drop_last",), "an incomplete last batch is dropped",
           harmless=lambda given: given is True, when="true"),
    Copied(ARGUMENTS, ("do_train", "do_eval"), "spec.training always trains and validates",
           harmless=lambda given: given is True, when="true"),
    Copied(ARGUMENTS, ("eval_strategy", "evaluation_strategy"), "validation is measured after each epoch",
           harmless=lambda given: given == "epoch", when="epoch"),
    Copied(ARGUMENTS, ("push_to_hub", "auto_find_batch_size", "no_cuda"), "this is the default", harmless=_is_off,
           when="false"),
    Copied(ARGUMENTS, ("deepspeed", "fsdp", "resume_from_checkpoint"), "this is the default",
           harmless=lambda given: given in (None, "", False), when="empty"),
    Copied(ARGUMENTS, ("local_rank", "max_steps"), "this is the default", harmless=_is_minus_one, when="-1"),
    Copied(ARGUMENTS, ("save_total_limit",), "", "checkpoints.keep", _positive_integer),
    Copied(ARGUMENTS, ("save_steps",), "", "checkpoints.every",
           lambda given: None if _positive_integer(given) is None else {"steps": given}),
    Copied(ARGUMENTS, ("save_strategy",), "the interval is spec.checkpoints.every",
           harmless=lambda given: given in ("epoch", "steps"), when="epoch or steps"),
    Copied(ARGUMENTS, ("optim",), "", "training.optimizer",
           lambda given: _OPTIMIZERS.get(given) if isinstance(given, str) else None),
    Copied(DEEPSPEED_CONFIG, ("steps_per_print",), _REPORTED),
    Copied(DEEPSPEED_CONFIG, ("zero_optimization.stage",), "", "parallelism.zeroStage"),
)  # fmt: skip
"""In the order of the notes. A value `auto` in `deepspeedConfig` is also ignored: the plan decides it."""

SAME: Mapping[str, str] = {
    "learning_rate": "training.learningRate",
    "num_train_epochs": "training.epochs",
    "max_steps": "training.maxSteps",
    "weight_decay": "training.weightDecay",
    "max_grad_norm": "training.maxGradNorm",
    "lr_scheduler_type": "training.scheduler",
    "warmup_steps": "training.warmupSteps",
    "warmup_ratio": "training.warmupSteps",
    "seed": "training.seed",
    "label_smoothing_factor": "training.labelSmoothing",
    "per_device_train_batch_size": "training.microBatchSize",
}
"""TrainingArguments that are ignored if the field has the same value."""
_SAME_KEYS: Mapping[tuple[str, ...], str] = {
    ("train_batch_size",): "training.globalBatchSize",
    ("train_micro_batch_size_per_gpu",): "training.microBatchSize",
    ("gradient_clipping",): "training.maxGradNorm",
    ("zero_optimization", "stage"): "parallelism.zeroStage",
    ("zero_optimization", "offload_optimizer", "device"): "parallelism.offload.optimizer",
    ("zero_optimization", "offload_param", "device"): "parallelism.offload.parameters",
}
"""Keys of DeepSpeed that are ignored if the field has the same value."""


def settle(spec: FineTuneJobSpec) -> Settled:
    """Map copied settings to fields, or ignore them. All others stay where they are, for the checks to refuse."""
    settled = Settled(spec)
    if spec.training is not None and spec.training.arguments:
        settled = _settle_arguments(settled)
    if spec.parallelism.deepspeed_config:
        settled = _settle_deepspeed(settled)
    return settled


def _settle_arguments(settled: Settled) -> Settled:
    assert settled.spec.training is not None
    left: dict[str, JsonValue] = dict(settled.spec.training.arguments)
    for name, given in settled.spec.training.arguments.items():
        updated = _mapped_or_ignored(settled, ARGUMENTS, name, given, SAME.get(name))
        if updated is not None:
            settled = updated
            del left[name]
    return replace(settled, spec=_with_value(settled.spec, ARGUMENTS, left))


def _settle_deepspeed(settled: Settled) -> Settled:
    left: dict[str, JsonValue] = copy.deepcopy(settled.spec.parallelism.deepspeed_config)
    autos: list[str] = []
    for path, given in tuple(_leaves(left, ())):
        name = ".".join(path)
        if given == "auto" or (path[-1] == "type" and path[:-1] in OWNED_KEYS and _is_auto(left, path[:-1])):
            of_plan = any(path[:length] in OWNED_KEYS for length in range(len(path) + 1))
            reason = "the plan sets it" if of_plan else "DeepSpeed's default applies"
            autos.append(_note(f"{DEEPSPEED_CONFIG}.{name}", given, f"is ignored: {reason}"))
        else:
            updated = _mapped_or_ignored(settled, DEEPSPEED_CONFIG, name, given, _SAME_KEYS.get(path))
            if updated is None:
                continue
            settled = updated
        _remove(left, path)
    return Settled(_with_value(settled.spec, DEEPSPEED_CONFIG, left), (*settled.notes, *autos))


def _leaves(value: Mapping[str, JsonValue], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], JsonValue]]:
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, (*above, name))
        else:
            yield (*above, name), inner


def _is_auto(config: Mapping[str, JsonValue], section: tuple[str, ...]) -> bool:
    """Return True if everything beside the type of an optimizer or scheduler is auto."""
    inner = config.get(section[0])
    parts = inner.get("params", {}) if isinstance(inner, dict) else None
    return isinstance(parts, dict) and all(value == "auto" for value in parts.values())


def _remove(config: dict[str, JsonValue], path: tuple[str, ...]) -> None:
    """Remove a key, and the sections that become empty."""
    head, *rest = path
    inner = config.get(head)
    if rest and isinstance(inner, dict):
        _remove(inner, tuple(rest))
        if inner:
            return
    config.pop(head, None)


def _mapped_or_ignored(settled: Settled, block: str, name: str, given: JsonValue, same: str | None) -> Settled | None:
    """Return the settled spec with this setting mapped to a field or ignored; None: it is neither."""
    spec, path = settled.spec, f"{block}.{name}"
    if same is not None and given is not None and _field_value(spec, same) == given:
        return _with_note(settled, path, given, f"is ignored: spec.{same} has the same value")
    for row in COPIED:
        if row.block != block or name not in row.names:
            continue
        if row.field is None:
            return _with_note(settled, path, given, f"is ignored: {row.becomes}") if row.harmless(given) else None
        value, shape = row.value(given), find(spec_shape(), row.field.split("."))
        assert shape is not None, row.field
        if value is None or not (isinstance(value, dict) or accepts(shape, value)):
            return None
        current = _field_value(spec, row.field)
        if current not in (value, shape.default):
            return None
        return _with_note(
            replace(settled, spec=_with_value(spec, row.field, value)), path, given,
            f"is mapped to spec.{row.field}" + ("" if value == given else f": {_plain(value)}"),
        )  # fmt: skip
    return None


def _plain(value: JsonValue) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {inner}" for name, inner in value.items()) + "}"
    return str(value)


def _note(path: str, given: JsonValue, becomes: str) -> str:
    return f"spec.{path}: {describe_value(given, path.split('.'))} {becomes}"


def _with_note(settled: Settled, path: str, given: JsonValue, becomes: str) -> Settled:
    return replace(settled, notes=(*settled.notes, _note(path, given, becomes)))


def _field_value(spec: FineTuneJobSpec, path: str) -> JsonValue:
    value: JsonValue = spec.model_dump(mode="json", by_alias=True, include={to_snake(path.split(".")[0])})
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def with_same(spec: FineTuneJobSpec, argument: str, given: JsonValue) -> FineTuneJobSpec | None:
    """Return the spec with the field that has the meaning of a training argument set to the argument's value; None if
    no field has it, or if the field does not accept the value.
    """
    field = SAME.get(argument)
    shape = None if field is None else find(spec_shape(), field.split("."))
    return None if field is None or shape is None or not accepts(shape, given) else _with_value(spec, field, given)


def _with_value(spec: FineTuneJobSpec, path: str, value: JsonValue) -> FineTuneJobSpec:
    """Return the spec with another value at a path, parsed as its field requires."""
    head, *rest = path.split(".")
    block = getattr(spec, to_snake(head))
    written = block.model_dump(mode="json", by_alias=True, exclude_unset=True)
    target = written
    for part in rest[:-1]:
        target = target.setdefault(part, {})
    target[rest[-1]] = value
    changed = type(block).model_validate_json(json.dumps(written))
    return spec.model_copy(update={to_snake(head): changed})

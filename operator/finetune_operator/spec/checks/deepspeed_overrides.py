"""Checks of `parallelism.deepspeedConfig`: the keys that a user adds to the DeepSpeed configuration of a plan.

A key unknown to DeepSpeed is refused, because DeepSpeed itself would ignore it, and so is one that another field of the
spec decides: two places for one number end in two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from pydantic import JsonValue

from finetune_operator.spec.hint_values import Drop, Rename
from finetune_operator.spec.problems import Problem, describe_value, format_path
from finetune_operator.spec.tables.deepspeed_keys import known_keys, open_sections

OWNED_KEYS: Mapping[tuple[str, ...], str] = {
    ("train_batch_size",): "training.globalBatchSize",
    ("train_micro_batch_size_per_gpu",): "training.microBatchSize",
    ("gradient_accumulation_steps",): "training.globalBatchSize",
    ("gradient_clipping",): "training.maxGradNorm",
    ("bf16", "enabled"): "training.precision",
    ("bfloat16",): "training.precision",
    ("fp16", "enabled"): "training.precision",
    ("amp",): "training.precision",
    ("torch_autocast",): "training.precision",
    ("optimizer",): "training.optimizer",
    ("scheduler",): "training.scheduler",
    ("tensor_parallel",): "parallelism.tensor",
    ("pipeline",): "parallelism.pipeline",
    ("elasticity",): "resources.elastic",
    ("zero_optimization", "stage"): "parallelism.zeroStage",
    ("zero_optimization", "offload_optimizer", "device"): "parallelism.offload.optimizer",
    ("zero_optimization", "offload_param", "device"): "parallelism.offload.parameters",
    ("zero_optimization", "cpu_offload"): "parallelism.offload.optimizer",
    ("zero_optimization", "cpu_offload_param"): "parallelism.offload.parameters",
}
"""Key -> field of the spec that decides it."""

_SWITCHES = (("bf16", "enabled"), ("fp16", "enabled"))
"""Keys that switch the precision of their section on."""
_FIELD = ("spec", "parallelism", "deepspeedConfig")


def override_problems(overrides: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """Yield the problems of the user's keys: unknown, or decided elsewhere. `copied` has removed the harmless ones."""
    yield from _problems(overrides, ())


def _problems(values: Mapping[str, JsonValue], parents: tuple[str, ...]) -> Iterator[Problem]:
    for key, value in values.items():
        path = (*parents, key)
        full = (*_FIELD, *path)
        where, shown = format_path(full), describe_value(value, full)
        known = known_keys().get(parents)
        if path in OWNED_KEYS:
            from finetune_operator.spec.hints.unknown_names import owned

            field = OWNED_KEYS[path]
            hint = owned(field, value)
            if path in _SWITCHES and isinstance(value, bool):
                hint = owned(field, path[0]) if value else Drop("spec.training.precision auto decides it")
            yield Problem(where, shown, f"is set by spec.{field}", hint, reason="Forbidden")
        elif known is not None and key not in known:
            near = _nearest(key, known)
            yield Problem(
                where,
                shown,
                "is not a DeepSpeed key, so that DeepSpeed would ignore it",
                Rename(near) if near else Drop(),
                reason="Unknown",
            )
        elif isinstance(value, dict) and (path in known_keys() or path[0] in open_sections()):
            yield from _problems(value, path)
        elif path in known_keys():
            yield Problem(where, shown, "must be an object for DeepSpeed", "write its keys below it")


def _nearest(key: str, known_keys: frozenset[str]) -> str | None:
    matches = get_close_matches(key, sorted(known_keys), n=1)
    return matches[0] if matches else None

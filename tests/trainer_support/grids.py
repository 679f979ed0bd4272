"""Axes of distributed runs, for covering selections: see `suite_plugins.covering`."""

from __future__ import annotations

from collections.abc import Hashable

from finetune_contract.trainer_job import Strategy

PROCESS_SECONDS = {"single": 0.5, "ddp": 0.5, "fsdp": 1.0, "deepspeed": 1.0}
"""Processor time of one process of a tiny run, roughly."""


def engine(strategy: Strategy) -> str:
    """Return the strategy's name, with the ZeRO stage."""
    return strategy.name if strategy.zero_stage is None else f"{strategy.name}-{strategy.zero_stage}"


def state_in_host_memory(strategy: Strategy) -> str:
    """Return the offloaded parts of the state."""
    moved = {"parameters": strategy.offload_parameters, "optimizer": strategy.offload_optimizer}
    return "+".join(f"{part} {device}" for part, device in moved.items() if device != "none") or "none"


def layout(strategy: Strategy) -> str:
    """Return the division of the model: by tensors, by stages, by both, or not at all."""
    parts = {"tensor": strategy.tensor > 1, "pipeline": strategy.pipeline is not None}
    return " x ".join(part for part, used in parts.items() if used) or "whole"


def schedule(strategy: Strategy) -> str:
    """Return the pipeline's schedule and degree."""
    return "none" if strategy.pipeline is None else f"{strategy.pipeline.schedule}-{strategy.pipeline.degree}"


def activations(strategy: Strategy) -> dict[str, Hashable]:
    """Return the axes of activations: recomputed, offloaded."""
    return {"checkpointing": strategy.activation_checkpointing, "activations": strategy.offload_activations}


def seconds(strategy: Strategy, processes: int) -> float:
    """Return the approximate processor time of a tiny run, to prefer the cheaper of two."""
    dearer = strategy.zero_stage == 3 or strategy.offload_optimizer != "none"
    return processes * PROCESS_SECONDS[strategy.name] * (1.5 if dearer else 1.0)

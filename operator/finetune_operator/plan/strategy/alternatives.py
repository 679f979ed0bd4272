"""Other forms of a training than the planned one, each with memory, time, cost and why it was not chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import CheckpointingMode
from finetune_contract.contract_models import Message
from finetune_contract.trainer_job import Strategy
from finetune_operator.plan.strategy.batch import batch_of, micro_batches
from finetune_operator.plan.strategy.choice import SIMPLER_MARGIN, open_drafts
from finetune_operator.plan.strategy.compilation import choose_compilation
from finetune_operator.plan.strategy.ladder import Fit, fit_at, fits, free_margin, rungs
from finetune_operator.plan.time.asynchronous_saving import choose_saving
from finetune_operator.plan.time.cost import estimate_training, machine_of, step_time
from finetune_operator.plan.types.draft import Draft, decided


class Alternative(Message):
    """Form of the training at its best micro-batch."""

    strategy: str
    """Label, e.g. `fsdp+activation-checkpointing`."""
    micro_batch: int
    checkpointing: CheckpointingMode
    memory_bytes: int
    """Memory of one GPU, or of one process on a CPU."""
    capacity_bytes: int
    host_bytes: int
    """Memory of a node's host."""
    step_seconds: float | None = None
    """None if the speed of the GPU is not known, and on a CPU."""
    seconds: float | None = None
    """Time of the whole training."""
    cost: float | None = None
    currency: str | None = None
    chosen: bool
    why: str
    """Reason why it was chosen, or why not."""


def alternatives(draft: Draft) -> tuple[Alternative, ...]:
    """Return all forms that the job of `draft` leaves open: the chosen one, those that fit by time, then the others.

    The draft has the plan's strategy and batch, and the job's own degrees.
    """
    return tuple(sorted(_rows(draft), key=_order))


def _order(row: Alternative) -> tuple[bool, bool, float, int]:
    fit = row.memory_bytes <= row.capacity_bytes
    return not row.chosen, not fit, row.seconds or 0.0, row.memory_bytes


def _rows(draft: Draft) -> Iterator[Alternative]:
    strategy, micro = decided(draft.strategy), decided(draft.batch).micro_batch_size
    least = estimate_training(choose_compilation(draft)).seconds
    for open_draft in open_drafts(draft):
        for rung in rungs(open_draft, open_draft.spec.parallelism):
            same = rung.label == strategy.label
            fit = fit_at(open_draft, rung, micro) if same else _best(open_draft, rung)
            yield _row(open_draft, fit, same, least)


def _best(draft: Draft, rung: Strategy) -> Fit:
    """Return the rung at the micro-batch with the quickest step of those that fit; if none fits, at the smallest."""
    fitting = [fit for micro in micro_batches(draft) if _is_free(draft, fit := fit_at(draft, rung, micro))]
    if not fitting:
        return fit_at(draft, rung, micro_batches(draft)[-1])
    if machine_of(draft) is None:
        return fitting[0]
    return min(fitting, key=lambda fit: decided(step_time(draft, fit.strategy, batch_of(draft, fit.micro_batch))).total)


def _is_free(draft: Draft, fit: Fit) -> bool:
    return fits(draft, fit.memory, free_margin(draft))


def _row(draft: Draft, fit: Fit, chosen: bool, least: float | None) -> Alternative:
    batch, needed = batch_of(draft, fit.micro_batch), fit.memory
    waiting = decided(draft.checkpoints).model_copy(update={"asynchronous": False})
    formed = replace(draft, strategy=fit.strategy, batch=batch, memory=needed, checkpoints=waiting)
    made = choose_saving(choose_compilation(formed))
    needed = decided(made.memory)
    estimated, time = estimate_training(made), step_time(made, fit.strategy, batch)
    return Alternative(
        strategy=fit.strategy.label,
        micro_batch=fit.micro_batch,
        checkpointing=fit.strategy.activation_checkpointing,
        memory_bytes=needed.total_bytes,
        capacity_bytes=needed.capacity_bytes,
        host_bytes=needed.host_bytes,
        step_seconds=None if time is None else time.total,
        seconds=estimated.seconds,
        cost=estimated.cost,
        currency=estimated.currency,
        chosen=chosen,
        why="chosen" if chosen else _why_not(draft, fit, estimated.seconds, least),
    )


def _why_not(draft: Draft, fit: Fit, seconds: float | None, least: float | None) -> str:
    needed, margin = fit.memory, draft.settings.planning.memory_margin
    if needed.total_bytes > needed.capacity_bytes:
        return f"needs {human_bytes(needed.total_bytes)} of {human_bytes(needed.capacity_bytes)}"
    if needed.host_bytes > draft.hardware.memory_bytes:
        return f"needs {human_bytes(needed.host_bytes)} of host memory, of {human_bytes(draft.hardware.memory_bytes)}"
    if not _is_free(draft, fit):
        return f"leaves less than {margin:.0%} of the memory free"
    if seconds is None or least is None or machine_of(draft) is None:
        return "an earlier rung of the ladder fits"
    if seconds < least / (1 + SIMPLER_MARGIN):
        return f"{1 - seconds / least:.0%} quicker with torch.compile, which the choice of the form does not count"
    if seconds <= least * (1 + SIMPLER_MARGIN):
        return f"not quicker by more than {SIMPLER_MARGIN:.0%}, and less simple"
    return f"takes {seconds / least - 1:.0%} longer"

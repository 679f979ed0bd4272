"""Length of the run, and its checkpoint schedule.

Steps are counted as transformers' Trainer does: the incomplete last batch of an epoch is dropped, parts of an epoch and
shares of the run are rounded up.
"""

from __future__ import annotations

import math
from dataclasses import replace

from finetune_contract.trainer_job import MOST_SAVING, CheckpointSchedule
from finetune_operator.plan.types.draft import Draft, Steps, decided

DEFAULT_EPOCHS = 3.0
ASSUMED_ROWS = 10_000
FEW_STEPS = 10
"""Steps below which fine-tuning hardly changes the model: at usual rates AdamW moves a weight by about 2e-5 a step."""
MOST_CHECKPOINTS = 20
"""Most checkpoints of a run with `auto`: a run of many short epochs would spend its time saving."""
MOST_STEPS_BETWEEN = 1000
"""Most steps that a crash costs with `auto`."""
MINUTES_BETWEEN = 10.0
"""Most minutes of work that a crash costs with `auto`, and minutes between checkpoints on spot nodes. The notice of a
preemption is 30 s (GKE, AKS) to 2 minutes (EKS), which may be too short for a large model, or none at all.
"""


def _round_up(number: float) -> int:
    """Round up to a whole number; 3.0000000001 is 3, as it comes from a product of decimals."""
    return math.ceil(round(number, 6))


def choose_steps(draft: Draft) -> Draft:
    """Choose the optimizer steps per epoch, in total, and of the warm-up."""
    training, split = draft.training, draft.train_split
    total_rows, batch = ASSUMED_ROWS, training.global_batch_size
    if split is None:
        total_rows = max(total_rows, batch)
        fewer = f", and with fewer than the {batch:,} of one step it is refused" if batch > ASSUMED_ROWS else ""
        draft = draft.assuming(
            f"data: nothing is prepared yet; {total_rows:,} rows are taken, so steps and times are provisional{fewer}"
        )
    else:
        total_rows = split.rows
    unit, of_rows, unpacked = "rows", "", ""
    if split is not None and split.packs_of is not None:
        unit, of_rows = "packs", f" of its {split.windows_of or split.packs_of:,} rows"
        unpacked = ", or preparation.packing to never"
    elif split is not None and split.windows_of is not None:
        unit = "windows"
    if total_rows < batch:
        return draft.refusing(
            ("dataset",),
            None,
            f"the train split has {total_rows} {unit}{of_rows}, and one step takes training.globalBatchSize = {batch}",
            f"add rows, or set training.globalBatchSize to {max(total_rows, 1)} or less{unpacked}",
        )
    per_epoch, left = divmod(total_rows, batch)
    epochs = training.epochs if training.epochs is not None else DEFAULT_EPOCHS
    if training.max_steps is not None:
        total = training.max_steps
        reason = f"{total} steps: as asked, {total / per_epoch:.2f} epochs of {per_epoch}"
    else:
        total = max(1, _round_up(epochs * per_epoch))
        default = " (the default)" if training.epochs is None else ""
        reason = f"{total} steps: {epochs:g} epochs{default} of {per_epoch} = {total_rows:,} {unit} / {batch}"
    if split is not None and training.max_steps is None and total < FEW_STEPS and batch > 1:
        draft = draft.because(
            f"only {total} step{'s' * (total > 1)} of {batch:,} {unit}: so few hardly change the model; a smaller "
            "training.globalBatchSize makes more of them"
        )
    if left:
        reason += f"; the last {left} {unit} of an epoch's order make no whole batch and are dropped"
    return _with_warmup(draft.because(reason), per_epoch, total)


def _with_warmup(draft: Draft, per_epoch: int, total: int) -> Draft:
    warmup = draft.training.warmup_steps
    steps = int(warmup) if warmup >= 1 else _round_up(warmup * total)
    if 0 < warmup < 1:
        draft = draft.because(f"{steps} warm-up steps: {warmup:g} of {total}")
    if steps >= total and steps:
        draft = draft.because(
            f"the warm-up of {steps} steps is as long as the run: the learning rate does not reach its peak"
        )
    return replace(draft, steps=Steps(per_epoch, total, steps))


def choose_checkpoints(draft: Draft) -> Draft:
    """Choose the checkpoint schedule."""
    asked, steps = draft.spec.checkpoints, decided(draft.steps)
    minutes: float | None = None
    within: float | None = None
    if asked.every != "auto" and asked.every.steps is not None:
        every = asked.every.steps
        draft = draft.because(f"a checkpoint every {every} steps: as asked")
    else:
        least = math.ceil(steps.total / MOST_CHECKPOINTS)
        every = min(max(steps.per_epoch, least), MOST_STEPS_BETWEEN, steps.total)
        every = max(every, least)
        if asked.every != "auto" and asked.every.minutes is not None:
            minutes = asked.every.minutes
            draft = draft.because(f"a checkpoint every {minutes:g} minutes: as asked")
        elif draft.spec.spot.enabled and not draft.local:
            minutes = MINUTES_BETWEEN
            draft = draft.because(
                f"a checkpoint every {minutes:g} minutes: what is lost at most when a spot node goes without notice"
            )
        else:
            within = MINUTES_BETWEEN
            why = f"at most {MOST_STEPS_BETWEEN} steps apart and {MOST_CHECKPOINTS} in the run"
            if every == steps.per_epoch:
                why = "once an epoch"
            elif every == steps.total:
                why = "at the end"
            draft = draft.because(
                f"a checkpoint every {every} steps: {why}; and after each {within:g} minutes of work without one, or "
                f"later where saving would take more than {MOST_SAVING:.0%} of the time"
            )
    schedule = CheckpointSchedule(
        every_steps=every,
        every_minutes=minutes,
        within_minutes=within,
        keep=asked.keep,
        on_preemption=asked.on_preemption,
        resume=asked.resume == "auto",
        signed=asked.signing_key is not None,
    )
    return replace(draft, checkpoints=schedule)

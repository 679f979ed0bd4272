"""Model of a training: as it starts, and as it is written to `model/` and `adapter/` in the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.checkpoint.tensor_files import mapped_tensors
from finetune_trainer.core.files import share
from finetune_trainer.core.storage import storage_errors_named
from finetune_trainer.models.adapters import Adapted, write_adapter_and_merge
from finetune_trainer.models.float8 import InFloat8
from finetune_trainer.models.loading import load_tokenizer, position_limit
from finetune_trainer.strategies.strategy_protocol import Placed, tied_names
from finetune_trainer.tasks.task_protocol import Objective
from finetune_trainer.tasks.writing import adopt_ends
from finetune_trainer.training.run_inputs import TrainingRun
from finetune_trainer.training.stopping import EarlyStopper, NeverStop


@dataclass(frozen=True)
class StartedModel:
    """Model before its first step."""

    model: PreTrainedModel
    job: TrainerJob
    """Job with the model revision with which the training begins."""
    adapted: Adapted | None
    in_float8: InFloat8 | None
    objective: Objective
    digest: str | None
    """Digest of the weights, where the objective compares the model with them."""


@contextmanager
def trained_weights(run: TrainingRun, placed: Placed, stopper: EarlyStopper | NeverStop) -> Iterator[Path]:
    """Yield the path of a file that rank 0 has: the weights of the best evaluation, or the last ones, in a file that is
    deleted in the end. In host memory they would take as much as the model.
    """
    path = run.paths.model.with_name(f"{run.paths.model.name}.weights")
    if stopper.best_step is not None:
        # Rank 0 alone knows the hash.
        yield (stopper.best_weights() if run.world.is_main else None) or path
        return
    try:
        with storage_errors_named(path, "gathering the trained weights"):
            run.strategy.write_weights(placed, path)
        yield path
    finally:
        if run.world.is_main:
            path.unlink(missing_ok=True)


def publish_model(run: TrainingRun, start: StartedModel, trained: PreTrainedModel, weights: Path) -> None:
    """Write `model/`, and `adapter/` of an adapted model. `weights`: the file with the trained weights."""
    earlier = weights.suffix == ".pt"  # best weights that an earlier release kept
    state = torch.load(weights, weights_only=True, mmap=True) if earlier else mapped_tensors(weights)
    # Gathered from shards, a shared weight would appear under each of its names.
    tied = tied_names(trained)
    state = {name: weight for name, weight in state.items() if name not in tied}
    size = 0 if start.adapted else sum(weight.numel() * weight.element_size() for weight in state.values())
    tokenizer = _published_tokenizer(run.job, trained)
    with _published(run.paths, size) as (model_folder, adapter_folder):
        if start.adapted is None:
            adopt_ends(trained, tokenizer)
            trained.save_pretrained(str(model_folder), state_dict=state)
        else:
            unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]  # else transformers loads it in shards
            whole = run.task.head.build_model(start.job, run.prepared.facts)
            merged = write_adapter_and_merge(whole, start.adapted, start.job, state, adapter_folder)
            adopt_ends(merged, tokenizer)
            merged.save_pretrained(str(model_folder))
        tokenizer.save_pretrained(str(model_folder))
        for folder in (model_folder, adapter_folder):
            share(folder)


def _published_tokenizer(job: TrainerJob, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer to be saved with the model, which truncates at the model's limit when asked to: that of the
    base model may have no limit.
    """
    tokenizer = load_tokenizer(job)
    limit = position_limit(model.config)
    if limit is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, limit)
    return tokenizer


@contextmanager
def _published(paths: JobPaths, size: int) -> Iterator[tuple[Path, Path]]:
    """Yield temporary folders for the model and the adapter, which finally replace theirs. `size`: bytes of the
    weights, 0 where they are not known.
    """
    folders = (paths.model, paths.adapter)
    partial = {folder: folder.with_name(f"{folder.name}.partial") for folder in folders}
    for written in partial.values():
        shutil.rmtree(written, ignore_errors=True)
    try:
        with storage_errors_named(partial[paths.model], "the trained model", size):
            yield partial[paths.model], partial[paths.adapter]
    except BaseException:
        for written in partial.values():
            shutil.rmtree(written, ignore_errors=True)
        raise
    for folder, written in partial.items():
        former = folder.with_name(f"{folder.name}.former")
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            os.replace(folder, former)
        if written.exists():
            os.replace(written, folder)
        shutil.rmtree(former, ignore_errors=True)

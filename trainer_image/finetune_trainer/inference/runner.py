"""Answers for a whole split, in as few padded tokens as the memory budget allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from finetune_contract.choices import Device
from finetune_contract.job import TrainerJob
from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer.data.batches import inference_batches
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.distributed import refuse_missing_gpu
from finetune_trainer.failures import StageError
from finetune_trainer.models import resolve_model
from finetune_trainer.progress import ProgressSink
from finetune_trainer.tasks.base import Answer, labels_of, task_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_BATCH_TOKENS = 8192
"""Padded tokens of a batch when the job has no settings for the stage; some 100 MB of activations for a small encoder.
"""
DEFAULT_DEVICE: Device = "cpu"
"""Where a stage computes for which the job has no settings."""


def model_to_use(job: TrainerJob, paths: JobPaths, prepared: PreparedData) -> PreTrainedModel:
    """The model that the job trained, or `model.uri` when it trains nothing.

    StageError MODEL `ModelNotTrained` when training has not ended with a model, `LabelsChanged` when the model was
    trained for other labels than the prepared data have.
    """
    task = task_module(job.task)
    if job.training is None:
        name, arguments = resolve_model(job.model.uri, job.model.revision, job.model.trust_remote_code)
    else:
        if not (paths.state / "train.json").is_file() or not (paths.model / "config.json").is_file():
            raise StageError(
                FailureClass.MODEL,
                "ModelNotTrained",
                f"{paths.model} holds no trained model.",
                "Run the stage train first.",
            )
        name = str(paths.model)
        arguments = {"trust_remote_code": job.model.trust_remote_code, "local_files_only": True}
    model = task.load_model(job, name, arguments)
    labels = task.model_labels(model.config)
    if labels != labels_of(prepared.facts):
        raise StageError(
            FailureClass.MODEL,
            "LabelsChanged",
            f"{name} answers {', '.join(labels.names if labels else ())}, "
            f"but the prepared data have the labels {', '.join(prepared.facts.labels)}.",
            "Run the stages prepare and train again.",
        )
    return model


def answers_of(
    model: PreTrainedModel,
    prepared: PreparedData,
    role: str,
    *,
    device: Device,
    batch_tokens: int,
    progress: ProgressSink,
) -> list[Answer]:
    """One answer for each feature of the split and in its order; StageError STRATEGY_NOT_IN_EFFECT `DeviceMissing`
    without the GPU that `device` counts on.

    `batch_tokens` bounds the padded tokens of a batch. The model keeps its dtype; `progress` counts features.
    """
    import torch
    from torch import nn

    if device == "cuda":
        refuse_missing_gpu()
    task = task_module(prepared.task)
    was_training = model.training
    module = cast(nn.Module, model)  # transformers' own signatures of `to` and `eval` are untyped
    module.to(device)
    module.eval()
    lengths = prepared.lengths(role)
    result: list[Answer] = [{}] * len(lengths)
    done = 0
    try:
        with torch.inference_mode():
            for wanted in inference_batches(lengths, batch_tokens=batch_tokens):
                features = prepared.features(role, wanted)
                batch = task.collate(features, pad_token_id=prepared.pad_token_id)
                placed = {name: tensor.to(device) for name, tensor in batch.items()}
                for at, answer in zip(wanted, task.answer(module, placed, features), strict=True):
                    result[at] = answer
                done += len(wanted)
                progress.update(done, len(lengths))
    finally:
        model.train(was_training)
    return result

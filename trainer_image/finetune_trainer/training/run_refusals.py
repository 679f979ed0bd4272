"""Refusals of settings that this model, task or machine does not support, before the first step."""

from __future__ import annotations

from importlib import import_module

from transformers import PreTrainedModel

from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import Training
from finetune_trainer.core.failures import StageError
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.models.float8 import refuse_without_library, refuse_without_units
from finetune_trainer.tasks.task_protocol import Head


def refuse_fp8(training: Training, *, without_units: bool) -> None:
    if training.precision == "fp8":
        refuse_without_library()
        if not without_units:
            refuse_without_units(training.world.device)


def refuse_smoothing(training: Training, head: Head, prepared: PreparedData) -> None:
    """Raise StageError CONFIG for a setting that has no effect on the task's loss."""
    if training.label_smoothing and not head.smooths(prepared.facts.label_form):
        raise StageError(
            FailureClass.CONFIG,
            "LabelSmoothing",
            f"training.labelSmoothing is {training.label_smoothing:g}, which this task's loss does not support.",
            "Leave training.labelSmoothing out.",
        )


def refuse_recomputing(training: Training, model: PreTrainedModel) -> None:
    """Raise StageError CONFIG for activation checkpointing of a model that does not support it."""
    if training.strategy.activation_checkpointing != "none" and not model.supports_gradient_checkpointing:
        raise StageError(
            FailureClass.CONFIG,
            "ActivationCheckpointing",
            f"parallelism.activationCheckpointing is {training.strategy.activation_checkpointing}, and "
            f"{type(model).__name__} does not support it.",
            "Set parallelism.activationCheckpointing to none, and lower training.microBatchSize if memory is short.",
        )


def refuse_liger(training: Training, model: PreTrainedModel) -> None:
    """Raise StageError CONFIG where Liger's kernels would not be used: it skips unknown models."""
    if not training.arguments.get("use_liger_kernel"):
        return
    from transformers.utils.import_utils import is_liger_kernel_available

    reason = ""
    if not is_liger_kernel_available():
        reason = "this image has no liger-kernel"
    else:
        known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
        if model.config.model_type not in known:
            reason = f"it has none for models of type {model.config.model_type}"
    if reason:
        raise StageError(
            FailureClass.CONFIG,
            "LigerKernel",
            f"training.arguments.use_liger_kernel is true, and {reason}.",
            "Leave it out.",
        )

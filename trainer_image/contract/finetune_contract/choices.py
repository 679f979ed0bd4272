"""The closed sets of words that the API, the plan and the trainer share."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias

Task: TypeAlias = Literal[
    "text-classification",
    "token-classification",
    "question-answering",
    "text-generation",
    "preference-tuning",
    "summarization",
    "translation",
    "masked-lm",
]
LANGUAGE_TASKS: tuple[Task, ...] = (
    "text-generation",
    "preference-tuning",
    "summarization",
    "translation",
    "masked-lm",
)
"""Those whose model has the vocabulary for its outputs, and a head that was pre-trained with its body."""
WRITING_TASKS: tuple[Task, ...] = ("text-generation", "preference-tuning", "summarization", "translation")
"""Those whose predictions are text that the model writes."""
LENGTH_GROUPED_TASKS: tuple[Task, ...] = ("text-classification",)
"""Those where all rows of a step are of like length unless the job says otherwise, which saves padding. Not where each
token is learnt, or which: what short rows say is not what long ones say, and steps of nothing but short ones learn
worse.
"""
LabelForm: TypeAlias = Literal["single_label_classification", "multi_label_classification", "regression"]
"""As `problem_type` of a model's config has them."""
StrategyName: TypeAlias = Literal["single", "ddp", "fsdp", "deepspeed"]
FP8_STRATEGIES: tuple[StrategyName, ...] = ("single", "ddp", "fsdp")
"""Those with which layers were seen to multiply in fp8."""
WHOLE_STRATEGIES: tuple[StrategyName, ...] = ("single", "ddp")
"""Those that leave matrices whole. Adafactor keeps sums of a matrix's rows and columns: DeepSpeed makes one long vector
of all weights, and transformers' Adafactor has no form for torch's DTensor. Weights in 4 bits are packed layer by
layer.
"""
ZeroStage: TypeAlias = Literal[0, 1, 2, 3]
OffloadDevice: TypeAlias = Literal["none", "cpu", "nvme"]
ActivationOffload: TypeAlias = Literal["none", "cpu"]
Sharding: TypeAlias = Literal["full", "grad-op", "hybrid"]
"""What FSDP divides: all state over all processes; gradients and optimizer state, while the parameters stay gathered
between forward and backward; all state inside a node, with a copy on every node.
"""
PipelineSchedule: TypeAlias = Literal["1f1b", "interleaved", "gpipe"]
RankOrder: TypeAlias = Literal["DPT", "DTP", "PDT", "PTD", "TDP", "TPD"]
"""Dimensions of a mesh of processes, data, pipeline and tensor, the one in which neighbouring ranks differ last."""
CheckpointingMode: TypeAlias = Literal["none", "full", "selective"]
Precision: TypeAlias = Literal["fp32", "bf16", "fp16", "fp8"]
InferencePrecision: TypeAlias = Literal["fp32", "bf16"]
"""Of evaluation and prediction, which scale nothing as fp16 wants it."""
RungName: TypeAlias = Literal[
    "none", "bf16", "compile", "int8", "onnx", "onnx-int8", "onnx-int8-static", "openvino", "openvino-bf16",
    "openvino-int8",
]  # fmt: skip
"""A way to compute predictions; `none` is the plain model, `int8` the fastest of those with 8-bit products."""
Optimization: TypeAlias = RungName | Literal["measured"]
"""How predict computes; `measured`: in the way that is fastest on a sample of the rows."""
RUNG_TASKS: tuple[Task, ...] = ("text-classification", "token-classification", "question-answering")
"""Tasks whose predictions can be computed otherwise than by the plain model: they take one forward pass."""
Device: TypeAlias = Literal["cpu", "cuda"]
SchedulerName: TypeAlias = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
AdapterMethod: TypeAlias = Literal["lora", "qlora", "dora"]
OptimizerName: TypeAlias = Literal["adamw", "adafactor", "sgd"]


class Stage(StrEnum):
    """One step of a job, in the order in which they run."""

    PREPARE = "prepare"
    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    SERVE = "serve"

"""Closed sets of values that the API, the plan and the trainer share."""

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
"""Tasks whose model outputs the vocabulary, with a head that was pre-trained with its body."""
WRITING_TASKS: tuple[Task, ...] = ("text-generation", "preference-tuning", "summarization", "translation")
"""Tasks whose predictions are text that the model generates."""
DECODER_TASKS: tuple[Task, ...] = ("text-generation", "preference-tuning")
"""Tasks whose model is a decoder."""
LENGTH_GROUPED_TASKS: tuple[Task, ...] = ("text-classification",)
"""Tasks where all rows of a step have similar length by default, which saves padding. Not tasks that learn each token,
or a position: short and long rows differ in content there, and steps of only short rows learn worse.
"""
SMOOTHED_TASKS: tuple[Task, ...] = (
    "text-classification",
    "token-classification",
    "text-generation",
    "summarization",
    "translation",
    "masked-lm",
)
"""Tasks whose labels can be smoothed: each label is one class, or one token of the vocabulary."""
LabelForm: TypeAlias = Literal["single_label_classification", "multi_label_classification", "regression"]
"""Forms of labels, named as `problem_type` of a model's config."""
StrategyName: TypeAlias = Literal["single", "ddp", "fsdp", "deepspeed"]
FP8_STRATEGIES: tuple[StrategyName, ...] = ("single", "ddp", "fsdp")
"""Strategies with which layers were observed to multiply in fp8."""
WHOLE_STRATEGIES: tuple[StrategyName, ...] = ("single", "ddp")
"""Strategies that keep matrices whole. Adafactor keeps sums of a matrix's rows and columns: DeepSpeed flattens all
weights into one vector, and transformers' Adafactor does not support torch's DTensor.
"""
FOUR_BIT_STRATEGIES: tuple[StrategyName, ...] = ("single", "ddp", "fsdp")
"""Strategies that leave the bits of packed 4-bit weights alone. DeepSpeed converts all weights to the type that it
computes in.
"""
ZeroStage: TypeAlias = Literal[0, 1, 2, 3]
OffloadDevice: TypeAlias = Literal["none", "cpu", "nvme"]
ActivationOffload: TypeAlias = Literal["none", "cpu"]
Sharding: TypeAlias = Literal["full", "grad-op", "hybrid"]
"""State that FSDP shards: all state over all processes; gradients and optimizer state, while the parameters stay
gathered between forward and backward; all state inside a node, with a replica on every node.
"""
PipelineSchedule: TypeAlias = Literal["1f1b", "interleaved", "gpipe"]
RankOrder: TypeAlias = Literal["DPT", "DTP", "PDT", "PTD", "TDP", "TPD"]
"""Dimensions of a process mesh (data, pipeline, tensor), that of neighbouring ranks last."""
CheckpointingMode: TypeAlias = Literal["none", "full", "selective"]
Precision: TypeAlias = Literal["fp32", "bf16", "fp16", "fp8"]
InferencePrecision: TypeAlias = Literal["fp32", "bf16"]
"""Precision of evaluation and prediction; no fp16, since they do not scale values as it requires."""
BackendName: TypeAlias = Literal[
    "none", "bf16", "bnb-int8", "bnb-nf4", "compile", "fp8", "int8", "onnx", "onnx-int8", "onnx-int8-static",
    "openvino", "openvino-bf16", "openvino-int8",
]  # fmt: skip
"""Method of computing predictions; `none` is the plain model, `int8` the faster of `onnx-int8` and `openvino-int8`."""
GPU_BACKENDS: tuple[BackendName, ...] = ("none", "bf16", "bnb-int8", "bnb-nf4", "compile", "fp8")
"""Methods that a job on a GPU can request by name; all others are for CPUs."""
Optimization: TypeAlias = BackendName | Literal["measured"]
"""Method of serving; `measured`: the fastest on a sample of the rows."""
TextBackend: TypeAlias = Literal["continuous-batching", "vllm"]
PredictBackend: TypeAlias = BackendName | TextBackend
"""Method of predict by its name. Two generate texts: `continuous-batching` in slots that are refilled as texts end,
`vllm` by an OpenAI-compatible server that has the model.
"""
TEXT_BACKENDS: tuple[TextBackend, ...] = ("continuous-batching", "vllm")
EndpointBackend: TypeAlias = BackendName | Literal["vllm"]
"""Method of serving by its name; servers of `vllm` run its own image."""
PredictOptimization: TypeAlias = PredictBackend | Literal["measured"]
"""Method of predict; `measured`: the fastest on a sample of the rows."""
BACKEND_TASKS: tuple[Task, ...] = ("text-classification", "token-classification", "question-answering")
"""Tasks whose predictions have alternatives to the plain model: they take one forward pass."""
VLLM_TASKS: tuple[Task, ...] = ("text-generation", "preference-tuning")
"""Tasks whose texts a text backend can generate: those of decoders. vLLM has no encoder-decoders of these families."""
Device: TypeAlias = Literal["cpu", "cuda"]
Transport: TypeAlias = Literal["tcp", "rdma", "efa"]
"""Network between nodes: TCP sockets, RDMA by InfiniBand or RoCE, or AWS' Elastic Fabric Adapter."""
SchedulerName: TypeAlias = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
AdapterMethod: TypeAlias = Literal["lora", "qlora", "dora"]
OptimizerName: TypeAlias = Literal["adamw", "adafactor", "sgd"]


class Stage(StrEnum):
    """Step of a job, in the order in which they run."""

    PREPARE = "prepare"
    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    SERVE = "serve"


ADAPTER_NAME_PATTERN = r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$"
"""Names of adapters: they are part of paths of requests."""

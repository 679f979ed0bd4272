"""The FineTuneJob resource: spec and status, field by field.

This module is the one source of the API. From it come the CRD, the JSON schema for editors, the documentation tables
and the messages of `finetune validate`. It holds no behaviour: defaults that need a decision (a micro-batch, a number
of epochs) are taken by the plan, and are `auto` or absent here.

Descriptions are written for `kubectl explain`: meaning, unit, default, and what leaving the field out does.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StringConstraints
from pydantic.alias_generators import to_camel

from finetune_contract.choices import (
    OffloadDevice,
    OptimizerName,
    PipelineSchedule,
    SchedulerName,
    Sharding,
    Stage,
    Task,
)
from finetune_contract.pods import preparing_pods
from finetune_operator.launchers.rows import TrainingLauncher, to_come

GROUP = "finetune.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
KIND: Literal["FineTuneJob"] = "FineTuneJob"
PLURAL = "finetunejobs"
SINGULAR = "finetunejob"
SHORT_NAME = "ftj"
CATEGORY = "finetune"

MAX_INT = 2**31 - 1
"""Bound of counts. Far above any real one, and small enough for every JSON reader."""

Auto: TypeAlias = Literal["auto"]
Scheme: TypeAlias = Literal["hf", "s3", "gs", "az", "pvc", "file", "pkg"]
StrategyChoice: TypeAlias = Literal["auto", "single", "ddp", "fsdp", "deepspeed"]

# Kubernetes' own rules, from apimachinery's validation: RFC 1123 labels and subdomains, resource quantities.
DNS_SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
# The grammar of distribution/reference: perhaps a host, then a path in small letters, a tag and a digest.
IMAGE_PATTERN = (
    r"^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?(@sha256:[a-f0-9]{64})?$"
)
MANAGED_BY_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9/._~-]+$"
DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DATA_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
ENV_PATTERN = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
FOLDER_PATTERN = r"^/[^:]+$"
RELATIVE_PATTERN = r"^[^/:][^:]*$"
HTTPS_PATTERN = r"^https://[A-Za-z0-9.-]+(:[0-9]{1,5})?$"
CURRENCY_PATTERN = r"^[A-Z]{3}$"
URI_PATTERN = r"^(hf|s3|gs|az|pvc|file|pkg)://.+$"

# What git-check-ref-format leaves, as far as a pattern can say it, without what git takes for an option or a refspec.
GIT_REF_PATTERN = r"^[^-+/.\s~^:?*\[\\][^\s~^:?*\[\\]*$"
HYPERPARAMETER_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]*$"

PATTERN_WORDS = {
    DNS_SUBDOMAIN_PATTERN: "a name of small letters, digits, - and ., with a letter or digit at its ends",
    DNS_LABEL_PATTERN: "a name of small letters, digits and -, with a letter or digit at its ends",
    DATA_KEY_PATTERN: "a key of letters, digits, -, _ and .",
    IMAGE_PATTERN: "an image such as registry.example.com/team/trainer:1.0, its path in small letters",
    MANAGED_BY_PATTERN: "a name with a domain, such as kueue.x-k8s.io/multikueue",
    ENV_PATTERN: "a name of letters, digits, -, _ and . that does not begin with a digit",
    FOLDER_PATTERN: "a folder below /, such as /mnt/data, without :",
    HTTPS_PATTERN: "https://host or https://host:port, without a path",
    CURRENCY_PATTERN: "a currency's ISO 4217 code, such as USD",
    GIT_REF_PATTERN: "a branch, tag or commit, without spaces and ~ ^ : ? * [ \\",
    HYPERPARAMETER_PATTERN: "a name of letters, digits, -, _ and . that does not begin with a digit or -",
    RELATIVE_PATTERN: "a path without / in front and without :",
}
"""Patterns of the API in words, for messages and documentation."""

Text: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""A name that the user chose: any text."""
FreeObject: TypeAlias = Annotated[dict[str, JsonValue], Field(max_length=256)]
"""An object whose form another project defines."""
Uri: TypeAlias = Annotated[str, StringConstraints(pattern=URI_PATTERN, min_length=6, max_length=1024)]
QUANTITY_MARK = "x-kubernetes-int-or-string"
"""Marks quantities in the JSON schema: Kubernetes takes them as numbers too."""
MapText: TypeAlias = Annotated[str, StringConstraints(max_length=4096)]


def _quantity_text(value: object) -> object:
    """`cpu: 8` is a quantity for Kubernetes as much as `cpu: "8"`."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=32),
    BeforeValidator(_quantity_text),
    Field(json_schema_extra={QUANTITY_MARK: True}),
]
Image: TypeAlias = Annotated[str, StringConstraints(pattern=IMAGE_PATTERN, min_length=1, max_length=512)]
ObjectName: TypeAlias = Annotated[str, StringConstraints(pattern=DNS_SUBDOMAIN_PATTERN, min_length=1, max_length=253)]
DnsLabel: TypeAlias = Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=63)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_INT)]
NonNegative: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT)]


class SpecModel(BaseModel):
    """Base of everything that people write: unknown fields are errors, types are not coerced, names are
    camelCase only.

    A model's validator is built when it is first used: most commands use few of them.
    """

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=False,
        allow_inf_nan=False,
    )


class StatusModel(BaseModel):
    """Base of everything that the operator writes; fields of a newer version are ignored."""

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="ignore",
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
    )


# ---------------------------------------------------------------------------------------------------------------- model


class AdapterSpec(SpecModel):
    """Parameter-efficient fine-tuning."""

    method: Literal["none", "lora", "qlora", "dora"] = Field(
        default="none",
        description="How weights are adapted: lora, dora, or qlora, which is lora beside weights in 4 bits. Default "
        "none: all weights are trained.",
    )
    rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=16,
        description="Rank of the update matrices, a count. Default 16. Used only with a method other than none.",
    )
    alpha: Annotated[float, Field(gt=0, le=65536)] = Field(
        default=32.0, description="Scale of the update; the effective factor is alpha / rank. Default 32."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.05, description="Dropout on the adapter's input, a share from 0 to below 1. Default 0.05."
    )
    target_modules: Auto | Annotated[tuple[Text, ...], Field(min_length=1, max_length=64)] = Field(
        default="auto",
        description="Names of the layers to adapt, or auto (the default) for all linear layers of the blocks.",
    )


class ModelSpec(SpecModel):
    """The model to start from."""

    uri: Uri = Field(
        description="Where the model is: hf://org/name, or pvc://claim/path in a cluster; without one file:///path, "
        "file://path relative to the job file's folder, and pkg://python_package/folder. s3://, gs:// and az:// are "
        "not supported yet. Required."
    )
    revision: Text = Field(
        default="main",
        description="Branch, tag or commit of a Hub model. Default main; status pins it to a commit. "
        "Not used by other schemes.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python code that comes with the model. Default false. Refused unless the "
        "cluster's administrator "
        "allows the repository.",
    )
    adapter: AdapterSpec = Field(
        default=AdapterSpec(), description="Adapter training; left out: all weights are trained."
    )


# -------------------------------------------------------------------------------------------------------------- dataset


class SplitsSpec(SpecModel):
    """Names of the splits."""

    train: Text | None = Field(
        default=None,
        description="Split (or file stem) to train on, Hub slices such as train[:10%] included. Left "
        "out: the split named "
        "train, or the only file.",
    )
    validation: Text | None = Field(
        default=None,
        description="Split measured during training. Left out: the split named validation if there "
        "is one, else 5 % of train, "
        "set aside with the seed.",
    )
    test: Text | None = Field(
        default=None,
        description="Split that evaluate and predict use. Left out: the split named test if there is "
        "one, else validation.",
    )


class ColumnsSpec(SpecModel):
    """Names of the columns by role; which ones a task uses is in the task's description."""

    text: Text | None = Field(
        default=None,
        description="Input text. Left out: text. Used by text-classification, text-generation and masked-lm.",
    )
    text_pair: Text | None = Field(
        default=None, description="Second text of a pair. Left out: there is no pair. Used by text-classification."
    )
    label: Text | None = Field(
        default=None,
        description="Class as a word or a whole number, a list of classes, or a fraction. Left out: label. Used by "
        "text-classification.",
    )
    tokens: Text | None = Field(
        default=None, description="List of words. Left out: tokens. Used by token-classification."
    )
    tags: Text | None = Field(
        default=None, description="List of tags, one a word. Left out: tags. Used by token-classification."
    )
    question: Text | None = Field(default=None, description="Question. Left out: question. Used by question-answering.")
    context: Text | None = Field(default=None, description="Paragraph. Left out: context. Used by question-answering.")
    answers: Text | None = Field(default=None, description="Answers. Left out: answers. Used by question-answering.")
    source: Text | None = Field(
        default=None,
        description="Text to turn, or prompt. Left out: source; in text-generation no prompts. Used by "
        "text-generation, summarization and translation.",
    )
    target: Text | None = Field(
        default=None,
        description="Wanted text. Left out: target. Used by text-generation with source, by summarization and "
        "translation.",
    )
    messages: Text | None = Field(
        default=None,
        description="Conversation as a list of messages with role and content. Left out: none. Used by "
        "text-generation.",
    )
    prompt: Text | None = Field(
        default=None,
        description="Text to answer, or a conversation as in messages. Left out: prompt. Used by preference-tuning.",
    )
    chosen: Text | None = Field(
        default=None,
        description="The better answer, a text, or behind a conversation a list with one message. Left out: chosen. "
        "Used by preference-tuning.",
    )
    rejected: Text | None = Field(
        default=None, description="The worse answer, like chosen. Left out: rejected. Used by preference-tuning."
    )


class DatasetSpec(SpecModel):
    """Rows to train, evaluate or predict on."""

    uri: Uri = Field(
        description="Where the data are: hf://org/name, or a folder, file or glob of jsonl, json, csv, tsv, txt (a row "
        "a line), parquet or arrow behind any scheme, all but the last two also with .gz, .zst, .bz2 or .xz; "
        "file://path without a third slash is relative to the job file's folder. s3://, gs:// and az:// are not "
        "supported yet. Required."
    )
    config: Text | None = Field(
        default=None, description="Configuration of a Hub data set, as glue has mnli. Left out: its default one."
    )
    splits: SplitsSpec = Field(
        default=SplitsSpec(), description="Names of the splits; left out: train, validation, test."
    )
    columns: ColumnsSpec = Field(
        default=ColumnsSpec(), description="Names of the columns; left out: the task's own names."
    )
    labels: Annotated[dict[str, Text], Field(max_length=1024)] = Field(
        default={},
        description='Value in the label column -> name of the label, as in {"-1": negative, "1": positive}; several '
        "values may share a name. Each value of the data must be in it. Left out: the values are the names, or class "
        "ids where they count from 0 without gaps. Used by text-classification; not used in predict.dataset.",
    )


class PreparationSpec(SpecModel):
    """How rows become tokens."""

    engine: Literal["auto", "job", "spark"] = Field(
        default="auto",
        description="What prepares the data, with the same result. Default auto: processes of one machine; job: pods "
        "on many nodes, which share the workspace; spark: partitions of Spark.",
    )
    workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Processes that tokenise (pods with engine job, partitions with spark), a count. Default 1.",
    )
    max_length: Annotated[int, Field(ge=2, le=10_000_000)] | None = Field(
        default=None,
        description="Longest input in tokens; longer rows are cut. Left out: the model's limit, at most 512.",
    )
    packing: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether several rows share one sequence. Default auto: only for tasks that gain from it, and not "
        "with parallelism.sequence.",
    )
    stride: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Overlap of the windows of a long row in tokens, for tasks that cut rows into windows "
        "(token-classification, question-answering). Left out: 128, or a quarter of a window when that is less.",
    )

    @property
    def pods(self) -> int:
        """Pods that prepare in a cluster; Spark's driver is one of them."""
        return preparing_pods(self.engine, self.workers)


# ------------------------------------------------------------------------------------------------------------- training


class EarlyStoppingSpec(SpecModel):
    """Stop before the last step."""

    metric: Text = Field(
        default="loss",
        description="Validation metric to watch, named as Hugging Face does without eval_. Default loss.",
    )
    patience: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=3, description="Evaluations without an improvement after which training stops, a count. Default 3."
    )


class GitSpec(SpecModel):
    """A user's program in a git repository."""

    url: Annotated[str, StringConstraints(pattern=r"^https://.+$", max_length=1024)] = Field(
        description="HTTPS URL of the repository; its host has to be allowed by the administrator. It has to be "
        "readable without a password. Required."
    )
    ref: Annotated[str, StringConstraints(pattern=GIT_REF_PATTERN, max_length=256)] = Field(
        default="main",
        description="Branch, tag or commit (all 40 digits). Default main. Prepare pins it to a commit.",
    )
    path: Annotated[str, StringConstraints(pattern=RELATIVE_PATTERN, max_length=256)] | None = Field(
        default=None, description="Folder inside the repository that the program runs in. Left out: its root."
    )


class ScriptSpec(SpecModel):
    """A user's own training program in place of the built-in loop."""

    git: GitSpec = Field(description="Where the program is. Required.")
    entry_point: Annotated[str, StringConstraints(pattern=RELATIVE_PATTERN, max_length=256)] = Field(
        default="train.py", description="File that Python runs, relative to git.path. Default train.py."
    )
    hyperparameters: Annotated[dict[str, str | int | float | bool], Field(max_length=256)] = Field(
        default={},
        description="Passed as --key value in the order of the names, byte for byte; booleans as true and false. "
        "Left out: none.",
    )


class TrainingSpec(SpecModel):
    """How the model is trained. `training: {}` trains with the defaults; without training nothing is trained."""

    epochs: Annotated[float, Field(gt=0, le=100_000)] | None = Field(
        default=None,
        description="Passes over the training split; parts are allowed. Left out: 3, unless maxSteps is given.",
    )
    max_steps: Count | None = Field(
        default=None, description="Optimizer steps, a count, in place of epochs. Left out: epochs decide."
    )
    global_batch_size: Count = Field(
        default=32,
        description="Rows per optimizer step over all processes, kept exactly: micro-batch x "
        "accumulation x data-parallel ranks. "
        "Default 32.",
    )
    micro_batch_size: Auto | Count = Field(
        default="auto",
        description="Rows that one process computes at once. Default auto: the largest that fits and divides, or "
        "a smaller one where rows of a step differ in length and less padding saves more time than more passes take.",
    )
    learning_rate: Annotated[float, Field(gt=0, le=10)] = Field(
        default=2e-5, description="Peak learning rate. Default 2e-5."
    )
    scheduler: SchedulerName = Field(
        default="linear", description="How the learning rate changes. Default linear, down to 0."
    )
    warmup_steps: Annotated[float, Field(ge=0, le=MAX_INT)] = Field(
        default=0, description="Steps over which the learning rate rises; below 1 a share of all steps. Default 0."
    )
    weight_decay: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.0, description="Weight decay of the optimizer. Default 0."
    )
    max_grad_norm: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        default=1.0, description="Norm to which gradients are clipped; 0 clips nothing. Default 1."
    )
    optimizer: OptimizerName = Field(
        default="adamw",
        description="adamw; sgd, without momentum; or adafactor, with strategies single and ddp. Default adamw.",
    )
    seed: Annotated[int, Field(ge=0, le=MAX_INT)] = Field(
        default=42, description="Seed of weights, order and dropout. Default 42."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Share of the target spread over all classes, from 0 to below 1. Default 0."
    )
    early_stopping: EarlyStoppingSpec | None = Field(
        default=None, description="Left out: training runs to its last step."
    )
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = Field(
        default="auto",
        description="Arithmetic of the forward and backward pass. fp16, whose loss is scaled, needs a GPU and a "
        "strategy other than fsdp. fp8 is for linear layers of the blocks, with all else in bf16; it needs a GPU with "
        "units for it and strategies single, ddp or fsdp. Default auto: bf16 where the hardware has it, else fp32.",
    )
    arguments: Annotated[dict[str, JsonValue], Field(max_length=128)] = Field(
        default={},
        description="Any other field of transformers.TrainingArguments, checked by name and type. Left out: none.",
    )
    script: ScriptSpec | None = Field(
        default=None,
        description="A program of your own, to which other fields of training say nothing. Left out: the built-in "
        "loop.",
    )


# ---------------------------------------------------------------------------------------------------------- parallelism


class OffloadSpec(SpecModel):
    """What is kept outside of device memory."""

    optimizer: OffloadDevice = Field(
        default="none",
        description="Where optimizer state lies: none, on the device; cpu, in host memory, with deepspeed from ZeRO "
        "stage 1 on; nvme, in files on the node's disk, with ZeRO stage 3. With fsdp it goes where parameters go. "
        "Default none.",
    )
    parameters: OffloadDevice = Field(
        default="none",
        description="Where parameters lie: none, on the device; cpu, in host memory, with ZeRO stage 3 or fsdp; nvme, "
        "in files on the node's disk, with ZeRO stage 3. Default none.",
    )
    activations: Literal["none", "cpu"] = Field(
        default="none",
        description="Where saved activations lie until the backward pass: none, on the device; cpu, in host memory, "
        "with any strategy. Default none.",
    )


class PipelineSpec(SpecModel):
    """Pipeline parallelism: the layers in stages on several processes, cut so that the dearest stage is as cheap as can
    be.
    """

    degree: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Processes that the layers are spread over, a count. Default 1: none, unless auto has to.",
    )
    micro_batches: Auto | Count = Field(
        default="auto",
        description="Micro-batches of one pass of the schedule, a count; they divide those of a step. "
        "Default auto: all of a step. More of them leave less of the time idle, (degree - 1) / (microBatches + "
        "degree - 1).",
    )
    schedule: PipelineSchedule = Field(
        default="1f1b",
        description="Order of the micro-batches: gpipe (all forward, then all backward), 1f1b (as short, with the "
        "activations of fewer micro-batches), interleaved (two stages a process, idle half as long). Default 1f1b.",
    )


class ParallelismSpec(SpecModel):
    """How the model is spread over devices. What is asked for is in effect or an error, never replaced in silence."""

    strategy: StrategyChoice = Field(
        default="auto",
        description="single, ddp, fsdp or deepspeed. Default auto: the cheapest that fits the memory; where none does, "
        "ddp with the smallest tensor and pipeline degrees that fit, or rows of text in slices.",
    )
    zero_stage: Auto | Annotated[int, Field(ge=0, le=3)] = Field(
        default="auto",
        description="DeepSpeed ZeRO stage, 0 to 3. Default auto: the lowest that fits. Needs "
        "strategy deepspeed or auto.",
    )
    sharding: Sharding = Field(
        default="full",
        description="What fsdp divides: full, all state over all processes; grad-op, gradients and optimizer state, "
        "while parameters stay gathered between forward and backward pass; hybrid, all state inside a node, with a "
        "copy on each node. Default full. Needs strategy fsdp.",
    )
    offload: OffloadSpec = Field(
        default=OffloadSpec(),
        description="Of state needs strategy deepspeed or fsdp. Left out: nothing is offloaded unless auto has to.",
    )
    tensor: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Processes that each layer is split over, by the plan that transformers has for the model; a count "
        "that divides its attention and key-value heads and feed-forward width. Default 1: none, unless auto has to.",
    )
    pipeline: PipelineSpec = Field(default=PipelineSpec(), description="Left out: no pipeline.")
    sequence: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1,
        description="Processes that the tokens of a row are divided among, a count that divides the model's attention "
        "and key-value heads, which they exchange for tokens: for rows whose activations are too large for one "
        "process. Needs task text-generation. Default 1: none, unless auto has to.",
    )
    activation_checkpointing: Literal["auto", "none", "full", "selective"] = Field(
        default="auto",
        description="Recompute activations in the backward pass to save memory: full, all of each block; selective, "
        "all but the results of matrix products and fused attention; none. Default auto: none, or full when needed.",
    )
    placement: Annotated[str, StringConstraints(pattern=r"^(cluster|spread|[DPT]{1,3})$", max_length=7)] = Field(
        default="cluster",
        description="Which ranks are neighbours: cluster (DPT) keeps the tensor- and pipeline-parallel ranks of a "
        "replica together, on one node where they fit, spread (PTD) puts them apart, or the order of D, P and T in the "
        "device mesh, that of neighbouring ranks last. Default cluster.",
    )
    deepspeed_config: FreeObject = Field(
        default={},
        description="Merged last into the DeepSpeed configuration; needs strategy deepspeed, and unknown keys "
        "are an error. Left out: nothing.",
    )

    @property
    def model_ranks(self) -> int:
        """Processes that hold one replica of the model together by tensor and pipeline parallelism."""
        return self.tensor * self.pipeline.degree

    @property
    def replica_ranks(self) -> int:
        """Processes that read the same rows: those that hold a replica of the model, or slices of the rows."""
        return self.model_ranks * self.sequence


class AcceleratorSpec(SpecModel):
    """The GPU to ask for."""

    product: Text | None = Field(
        default=None, description="Product as the node label nvidia.com/gpu.product has it. Left out: any."
    )
    memory: Quantity | None = Field(
        default=None,
        description="Memory of one device, e.g. 80Gi, for plans made before a node is measured; it chooses no node. "
        "Left out: that of the product in the planner's table, or of a T4 for one that is not there.",
    )


class ElasticSpec(SpecModel):
    """Bounds between which the number of nodes may change."""

    min_nodes: Count = Field(description="Fewest nodes, a count. Required.")
    max_nodes: Count = Field(description="Most nodes, a count. Required.")


class ResourcesSpec(SpecModel):
    """What one job takes."""

    nodes: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=1, description="Nodes for training, a count. Default 1."
    )
    gpus_per_node: Auto | Annotated[int, Field(ge=0, le=64)] = Field(
        default=0,
        description="GPUs on each node. Default 0: CPU training. auto: those of the machine, or none "
        "when it has none; only "
        "without a cluster.",
    )
    processes_per_node: Auto | Annotated[int, Field(ge=1, le=1024)] = Field(
        default="auto",
        description="Processes on each node. Default auto: one a GPU; on CPU 2 when the strategy spreads, else 1.",
    )
    cpu: Quantity | None = Field(
        default=None, description="CPU cores of one node's pod, e.g. 8 or 500m. Left out: no request."
    )
    memory: Quantity | None = Field(
        default=None, description="Memory of one node's pod, e.g. 64Gi. Left out: from the plan."
    )
    shared_memory: Auto | Quantity = Field(
        default="auto", description="Size of /dev/shm, e.g. 8Gi. Default auto: from the plan."
    )
    accelerator: AcceleratorSpec = Field(default=AcceleratorSpec(), description="Left out: any GPU.")
    network: Literal["auto", "tcp", "rdma", "efa"] = Field(
        default="auto",
        description="Network between nodes. With rdma or efa, pods ask for its devices. Default auto: no devices, and "
        "NCCL looks for a network itself.",
    )
    elastic: ElasticSpec | None = Field(
        default=None, description="Not supported yet. Left out: the number of nodes is fixed."
    )


class StorageSpec(SpecModel):
    """Where results and caches lie in a cluster."""

    workspace: Uri | None = Field(
        default=None,
        description="Claim for results, pvc://claim; other schemes are not supported yet. Left out: a new claim.",
    )
    cache: Uri | None = Field(
        default=None,
        description="Claim for downloads and prepared data, pvc://claim; other schemes are not supported yet. "
        "Left out: the workspace.",
    )
    size: Quantity = Field(default="100Gi", description="Size of a claim that the operator makes. Default 100Gi.")
    storage_class_name: ObjectName | None = Field(
        default=None, description="Class of that claim. Left out: the cluster's default."
    )


class SecretKeySpec(SpecModel):
    """One key of a Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret. Required.")
    key: Annotated[str, StringConstraints(pattern=DATA_KEY_PATTERN, max_length=253)] = Field(
        default="token", description="Key in it. Default token."
    )


class CheckpointEverySpec(SpecModel):
    """Interval of checkpoints; exactly one of the two."""

    steps: Count | None = Field(default=None, description="Optimizer steps between two checkpoints, a count.")
    minutes: Annotated[float, Field(gt=0, le=100_000)] | None = Field(
        default=None, description="Minutes between two checkpoints."
    )


class CheckpointsSpec(SpecModel):
    """Saved states of the training."""

    every: Auto | CheckpointEverySpec = Field(
        default="auto",
        description="Interval. Default auto: once an epoch and after each 10 minutes of work without one; later where "
        "saving would take more than 3 % of the time.",
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=3, description="Checkpoints that stay, a count. Default 3."
    )
    uri: Uri | None = Field(
        default=None, description="Copy of the checkpoints. Not supported yet. Left out: the workspace only."
    )
    on_preemption: bool = Field(default=True, description="Save when the pod is told to stop. Default true.")
    resume: Literal["auto", "never"] = Field(
        default="auto", description="Whether a new attempt continues from the newest good checkpoint. Default auto."
    )
    after_success: Literal["auto", "keep"] = Field(
        default="auto",
        description="What becomes of the checkpoints once all stages have succeeded. Default auto: `finetune run` "
        "deletes them and says so, in a cluster they stay. keep: they stay.",
    )
    signing_key: SecretKeySpec | None = Field(
        default=None,
        description="Secret with a key of 16 bytes or more that checkpoints are signed with; only signed ones are "
        "continued from. Left out: whoever can write to the volume can replace a checkpoint unseen.",
    )


class SpotSpec(SpecModel):
    """Training on capacity that can be taken away. It concerns the train stage; the others are short."""

    enabled: bool = Field(
        default=False, description="Train on spot nodes, as the operator's settings name them. Default false."
    )
    max_run_seconds: Count | None = Field(
        default=None,
        description="Longest training time in seconds: the time in which all pods ran, over all attempts. Then the job "
        "is stopped with a checkpoint. Left out: no bound.",
    )
    max_wait_seconds: Count | None = Field(
        default=None,
        description="Longest time in seconds from the start of the training, waiting for nodes and restarts included. "
        "Left out: no bound.",
    )
    fallback_to_on_demand: bool = Field(
        default=False,
        description="Train on any nodes when no spot node is to be had for as long as the operator's settings say. "
        "Default false: wait.",
    )


class GateSpec(SpecModel):
    """The quality that counts as success."""

    metric: Text = Field(
        description="A metric of the task or loss, named as Hugging Face does without eval_. Required."
    )
    minimum: Annotated[float, Field(ge=-1e9, le=1e9)] | None = Field(
        default=None, description="Least value, of a metric that is better when higher. Set it or maximum."
    )
    maximum: Annotated[float, Field(ge=-1e9, le=1e9)] | None = Field(
        default=None,
        description="Greatest value, of a metric that is better when lower, as loss or perplexity. Set it or minimum.",
    )


class EvaluationSpec(SpecModel):
    """Quality on held-out rows."""

    metrics: Auto | Annotated[tuple[Text, ...], Field(min_length=1, max_length=32)] = Field(
        default="auto", description="Names of the metrics, or auto (the default) for the task's own."
    )
    gate: GateSpec | None = Field(default=None, description="Left out: any result is a success.")


class GenerationSpec(SpecModel):
    """How a model writes when it is evaluated or predicts."""

    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=128, description="Most tokens of an answer, a count. Default 128."
    )
    num_beams: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="Beams of the search, a count. Default 1: the likeliest token at each step."
    )
    temperature: Annotated[float, Field(ge=0, le=100)] = Field(
        default=0.0, description="Above 0 tokens are drawn, the more freely the higher. Default 0: none is drawn."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Draw from the likeliest tokens of this probability together. Default 1: from all."
    )


class PreferenceSpec(SpecModel):
    """How preferences are learnt, by direct preference optimisation."""

    beta: Annotated[float, Field(gt=0, le=100)] = Field(
        default=0.1,
        description="What the model pays for leaving the one that it was before training: the larger, the nearer it "
        "stays. Default 0.1.",
    )


class PredictSpec(SpecModel):
    """Batch inference."""

    dataset: DatasetSpec | None = Field(
        default=None,
        description="Rows to predict. Left out: the test split of dataset, or its validation split where there is "
        "no test split.",
    )
    output: Uri | None = Field(
        default=None,
        description="Where predictions go, .jsonl or .parquet; file://path is relative to the job file's folder. "
        "s3://, gs:// and az:// are not supported yet. Left out: the workspace.",
    )
    workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="Processes that predict, a count. Default 1; more are not supported yet."
    )
    optimization: Literal["auto", "none", "int8"] = Field(
        default="auto",
        description="Speed-ups that change results. Default auto: none, as with none; int8 is not supported yet.",
    )
    columns: Annotated[tuple[Text, ...], Field(max_length=64)] = Field(
        default=(), description="Input columns copied to the output. Left out: none."
    )


class EndpointSpec(SpecModel):
    """A server for the model."""

    replicas: Annotated[int, Field(ge=0, le=1000)] = Field(default=1, description="Servers, a count. Default 1.")
    max_replicas: Annotated[int, Field(ge=1, le=1000)] | None = Field(
        default=None, description="Most servers under load. Left out: replicas."
    )
    runtime: Literal["auto", "deployment", "kserve"] = Field(
        default="auto", description="What runs them. Default auto: kserve where it is installed."
    )
    resources: FreeObject = Field(
        default={}, description="Kubernetes ResourceRequirements of one server. Left out: from the plan."
    )


class SecretSpec(SpecModel):
    """A whole Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret. Required.")


class SecretsSpec(SpecModel):
    """References to Secrets. No field takes a token in plain text."""

    hub_token: SecretKeySpec | None = Field(
        default=None, description="Hub token. Left out: only public models and data."
    )
    storage: SecretSpec | None = Field(
        default=None,
        description="Secret whose keys become environment variables of the trainer, e.g. for a program of yours. The "
        "schemes s3://, gs:// and az:// are not supported yet. Left out: none.",
    )


class TemplateSpec(SpecModel):
    """Pod-level settings merged onto every pod of the job, in the form that Kubernetes has for them."""

    labels: Annotated[dict[str, MapText], Field(max_length=64)] = Field(
        default={}, description="Pod labels. Left out: none."
    )
    annotations: Annotated[dict[str, MapText], Field(max_length=64)] = Field(
        default={}, description="Pod annotations. Left out: none."
    )
    node_selector: Annotated[dict[str, MapText], Field(max_length=64)] = Field(
        default={}, description="Node labels a pod needs. Left out: none."
    )
    tolerations: Annotated[tuple[FreeObject, ...], Field(max_length=64)] = Field(
        default=(), description="Taints a pod bears. Left out: none."
    )
    affinity: FreeObject = Field(default={}, description="Kubernetes Affinity. Left out: none of yours.")
    service_account_name: ObjectName | None = Field(
        default=None, description="Service account. Left out: the namespace's default."
    )
    image_pull_secrets: Annotated[tuple[SecretSpec, ...], Field(max_length=16)] = Field(
        default=(), description="Secrets for pulling images. Left out: none."
    )
    env: Annotated[tuple[FreeObject, ...], Field(max_length=128)] = Field(
        default=(), description="Kubernetes EnvVars of the trainer. Left out: none of yours."
    )
    volumes: Annotated[tuple[FreeObject, ...], Field(max_length=64)] = Field(
        default=(), description="Kubernetes Volumes. Left out: none of yours."
    )
    volume_mounts: Annotated[tuple[FreeObject, ...], Field(max_length=64)] = Field(
        default=(), description="Where those volumes are mounted in the trainer. Left out: nowhere."
    )
    security_context: FreeObject = Field(
        default={}, description="Kubernetes PodSecurityContext. Left out: PodSecurity restricted."
    )


class RunPolicySpec(SpecModel):
    """The job's life."""

    suspend: bool = Field(
        default=False, description="Stop after a checkpoint, and go on when false again. Default false."
    )
    active_deadline_seconds: Count | None = Field(
        default=None, description="Longest life of the job in seconds. Left out: no bound."
    )
    progress_deadline_seconds: Count | None = Field(
        default=None,
        description="Longest time in seconds without progress, for an attempt that has reported any; then it is "
        "stopped and starts again from its last checkpoint. Left out: the operator's settings, limits.progressSeconds.",
    )
    ttl_seconds_after_finished: NonNegative | None = Field(
        default=None, description="Seconds after the end until the job is deleted. Left out: it stays."
    )
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=3, description="Restarts after failures that are not the infrastructure's, a count. Default 3."
    )
    on_out_of_memory: Literal["adapt", "fail"] = Field(
        default="adapt",
        description="adapt (the default) halves the micro-batch and keeps the global batch; fail ends the job.",
    )
    managed_by: Annotated[str, StringConstraints(pattern=MANAGED_BY_PATTERN, max_length=63)] | None = Field(
        default=None,
        description="Controller in charge of the job, domain/name, e.g. kueue.x-k8s.io/multikueue. Left out: this "
        "operator.",
    )
    queue: ObjectName | None = Field(
        default=None, description="Kueue's local queue. Not supported yet. Left out: no queue."
    )
    priority_class_name: ObjectName | None = Field(
        default=None, description="Priority class of the pods. Left out: the cluster's default."
    )


class FineTuneJobSpec(SpecModel):
    """What the user wants."""

    task: Task = Field(description="What the model learns. Required.")
    model: ModelSpec = Field(description="The model to start from. Required.")
    dataset: DatasetSpec | None = Field(
        default=None, description="Rows to train and evaluate on. Required when something trains."
    )
    preparation: PreparationSpec = Field(
        default=PreparationSpec(), description="How rows become tokens. Left out: the defaults."
    )
    training: TrainingSpec | None = Field(
        default=None, description="How to train; {} takes the defaults. Left out: nothing is trained."
    )
    parallelism: ParallelismSpec = Field(
        default=ParallelismSpec(), description="How the model is spread over devices. Left out: auto."
    )
    resources: ResourcesSpec = Field(
        default=ResourcesSpec(), description="What the job takes. Left out: one node, CPU only."
    )
    launcher: Literal["auto", TrainingLauncher] = Field(
        default="auto",
        description="What runs the training's pods. Default auto: what the cluster serves, else plain Jobs."
        + to_come("not supported yet"),
    )
    storage: StorageSpec = Field(
        default=StorageSpec(), description="Where results lie. Left out: a claim made for the job."
    )
    checkpoints: CheckpointsSpec = Field(
        default=CheckpointsSpec(), description="Saved states. Left out: once an epoch and every 10 minutes, 3 kept."
    )
    spot: SpotSpec = Field(default=SpotSpec(), description="Spot capacity. Left out: ordinary nodes.")
    evaluation: EvaluationSpec | None = Field(
        default=None,
        description="Quality on held-out rows; {} takes the defaults. Left out: evaluated when something trains.",
    )
    predict: PredictSpec | None = Field(
        default=None, description="Batch inference; {} takes the defaults. Left out: none."
    )
    generation: GenerationSpec = Field(
        default=GenerationSpec(),
        description="How the model writes, for text-generation, preference-tuning, summarization and translation. "
        "Left out: the defaults.",
    )
    preference: PreferenceSpec = Field(
        default=PreferenceSpec(),
        description="How preferences are learnt, for preference-tuning. Left out: the defaults.",
    )
    endpoint: EndpointSpec | None = Field(
        default=None, description="A server for the model. Not supported yet. Left out: none."
    )
    secrets: SecretsSpec = Field(default=SecretsSpec(), description="References to Secrets. Left out: none.")
    template: TemplateSpec = Field(default=TemplateSpec(), description="Pod-level settings. Left out: none of yours.")
    image: Image | None = Field(default=None, description="Trainer image. Left out: the operator's own.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled. Left out: Kubernetes' default."
    )
    run_policy: RunPolicySpec = Field(default=RunPolicySpec(), description="The job's life. Left out: the defaults.")

    @property
    def script(self) -> ScriptSpec | None:
        """The user's own program that trains, in place of the built-in loop."""
        return None if self.training is None else self.training.script


# --------------------------------------------------------------------------------------------------------------- status

Phase: TypeAlias = Literal[
    "Pending",
    "Queued",
    "Preparing",
    "Training",
    "Evaluating",
    "Predicting",
    "Serving",
    "Suspended",
    "Succeeded",
    "Failed",
]
ConditionType: TypeAlias = Literal[
    "Accepted", "Planned", "Admitted", "Running", "Ready", "Stalled", "Succeeded", "Failed"
]


class Condition(StatusModel):
    """One aspect of the job, in the form of metav1.Condition."""

    type: ConditionType = Field(description="Aspect.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)] = (
        Field(description="CamelCase word for the cause.")
    )
    message: Annotated[str, StringConstraints(max_length=32768)] = Field(
        default="", description="The cause in sentences."
    )
    last_transition_time: str = Field(description="When status changed last, RFC 3339.")
    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this speaks of."
    )


Capacity: TypeAlias = Literal["spot", "onDemand"]
"""Kinds of nodes: those that can be taken away, and any."""


class ChildReference(StatusModel):
    """The object that runs a stage."""

    api_version: str = Field(description="API group and version.")
    kind: str = Field(description="Kind.")
    name: str = Field(description="Name in the job's namespace.")


class StageStatus(StatusModel):
    """One stage."""

    name: Literal["prepare", "train", "evaluate", "predict", "serve"] = Field(description="Stage.")
    state: Literal["Pending", "Running", "Succeeded", "Failed", "Suspended"] = Field(description="State.")
    attempt: int = Field(ge=0, description="Number of the current try, from 1; 0 before the first.")
    start_time: str | None = Field(default=None, description="When the current attempt started, RFC 3339.")
    completion_time: str | None = Field(default=None, description="When the stage ended, RFC 3339.")
    child: ChildReference | None = Field(default=None, description="Object of the current attempt.")
    next_attempt_time: str | None = Field(
        default=None, description="When the next attempt starts after a failure, RFC 3339."
    )
    failures_in_row: int = Field(
        default=0, ge=0, description="Failed attempts since one ran for long; the delay before the next grows with it."
    )
    blocked_since: str | None = Field(
        default=None,
        description="Since when a container of the current attempt cannot start, for its image or for what it mounts, "
        "RFC 3339.",
    )
    furthest_step: int | None = Field(
        default=None, ge=0, description="The furthest step that a failed attempt of the stage had told."
    )
    free_restarts: int = Field(
        default=0, ge=0, description="Restarts free of charge since freeSince, a count; the settings bound them."
    )
    free_since: str | None = Field(default=None, description="When the first of those restarts was, RFC 3339.")
    avoided_nodes: tuple[str, ...] = Field(
        default=(), max_length=16, description="Nodes on which an attempt broke; later pods prefer others."
    )
    capacity: Capacity | None = Field(
        default=None,
        description="Nodes of the current attempt, or after a fallback those of the next. Left out: any, as the job "
        "does not ask for spot.",
    )
    nodes_since: str | None = Field(
        default=None, description="Since when pods of the current attempt have nodes, RFC 3339."
    )
    running_since: str | None = Field(
        default=None, description="Since when all pods of the current attempt run, RFC 3339."
    )


class EstimateStatus(StatusModel):
    """What the plan expects."""

    duration_seconds: float | None = Field(default=None, ge=0, description="Training time in seconds.")
    cost: float | None = Field(default=None, ge=0, description="Cost of the training in `currency`.")
    currency: str | None = Field(default=None, description="ISO 4217 code.")


class PlanStatus(StatusModel):
    """What will run; it holds no auto."""

    strategy: str = Field(description="Strategy in words, e.g. deepspeed-zero2.")
    launcher: str = Field(description="Launcher.")
    capacity: Capacity | None = Field(default=None, description="Nodes that it trains on first. Left out: any.")
    world_size: int = Field(ge=1, description="Processes over all nodes.")
    micro_batch_size: int | None = Field(
        default=None, ge=1, description="Rows that one process computes at once. Left out: a script decides."
    )
    gradient_accumulation: int | None = Field(
        default=None,
        ge=1,
        description="Micro-batches of one process in one optimizer step. Left out: a script decides.",
    )
    memory_per_device: dict[str, int] = Field(default_factory=dict, description="Bytes by term, and their total.")
    estimated: EstimateStatus = Field(default=EstimateStatus(), description="Expected time and cost.")
    data_parallel: int | None = Field(
        default=None,
        ge=1,
        description="Replicas of the model, when several processes hold one. Left out: each process holds one.",
    )
    reasons: tuple[str, ...] = Field(default=(), max_length=64, description="One sentence for each decision.")


class AdaptationStatus(StatusModel):
    """How the plan was changed after a failure."""

    micro_batch_limit: int | None = Field(
        default=None, ge=1, description="Largest micro-batch that is tried after memory ran out."
    )
    skipped_strategies: tuple[str, ...] = Field(
        default=(), max_length=128, description="Strategies that ran out of memory at their smallest micro-batch."
    )
    checkpoint_form: str | None = Field(
        default=None,
        description="What wrote the checkpoints when memory ran out, e.g. ddp or deepspeed-zero2: only strategies that "
        "go on from them are tried. Left out: there was none yet.",
    )
    reasons: tuple[str, ...] = Field(default=(), max_length=32, description="One sentence for each change.")


class MeasuredStatus(StatusModel):
    """What the prepare stage measured. The plan of the later stages rests on it."""

    model: dict[str, JsonValue] | None = Field(default=None, description="Shape of the model.")
    data: dict[str, JsonValue] | None = Field(default=None, description="Rows and lengths of the prepared data.")


class ProgressStatus(StatusModel):
    """Where the running stage is."""

    step: int | None = Field(default=None, ge=0, description="Optimizer step, or row.")
    total_steps: int | None = Field(default=None, ge=0, description="Steps, or rows, in all.")
    epoch: float | None = Field(default=None, ge=0, description="Passes over the training split so far.")
    percent: int | None = Field(default=None, ge=0, le=100, description="Share done in percent.")
    loss: float | None = Field(default=None, description="Training loss.")
    samples_per_second: float | None = Field(default=None, ge=0, description="Rows a second over all processes.")
    tokens_per_second: float | None = Field(default=None, ge=0, description="Tokens a second over all processes.")
    remaining_seconds: float | None = Field(default=None, ge=0, description="Expected time left in seconds.")
    last_update_time: str | None = Field(default=None, description="When this was reported, RFC 3339.")


class FailureStatus(StatusModel):
    """The first cause of a failure."""

    failure_class: str = Field(alias="class", description="Class of the failure, e.g. DataError or OutOfMemory.")
    reason: str = Field(description="CamelCase word for the exact case.")
    message: str = Field(description="What is wrong: path, value, rule.")
    hint: str | None = Field(default=None, description="The way out.")
    stage: str | None = Field(default=None, description="Stage that failed.")
    attempt: int | None = Field(default=None, ge=0, description="Its attempt.")
    pod: str | None = Field(default=None, description="Pod that failed first.")
    node: str | None = Field(default=None, description="Node it ran on.")
    rank: int | None = Field(default=None, ge=0, description="Rank of the process.")
    exit_code: int | None = Field(default=None, description="Its exit code.")
    log_tail: str | None = Field(default=None, max_length=4096, description="End of its log, at most 4 KiB.")


class CostStatus(StatusModel):
    """What the job has used."""

    node_seconds: float = Field(
        default=0, ge=0, description="Seconds in which all pods of an attempt ran, times its nodes."
    )
    billable_seconds: float = Field(
        default=0,
        ge=0,
        description="Seconds in which pods had nodes, times the nodes: those are paid, also while images are pulled. "
        "Waiting for a node is in neither.",
    )
    currency: str | None = Field(default=None, description="ISO 4217 code.")
    amount: float | None = Field(default=None, ge=0, description="Cost so far, at the prices of the settings.")
    saved: float | None = Field(
        default=None, ge=0, description="What the same node seconds would have cost more on demand than on spot nodes."
    )


class SpotStatus(StatusModel):
    """How the training on spot nodes goes."""

    since: str | None = Field(
        default=None,
        description="Since when spot.maxWaitSeconds counts, RFC 3339. Left out: it does not count now, as the job is "
        "suspended.",
    )
    waited_seconds: float = Field(
        default=0, ge=0, description="Seconds that had counted towards spot.maxWaitSeconds before that."
    )
    ran_seconds: float = Field(
        default=0, ge=0, description="Seconds in which all pods ran, over the attempts that are over."
    )
    preemptions: int = Field(default=0, ge=0, description="Attempts that ended as a spot node was taken away.")


class ArtifactsStatus(StatusModel):
    """What the job made."""

    model: str | None = Field(default=None, description="URI of the model.")
    report: str | None = Field(default=None, description="URI of report.html.")
    checkpoints: str | None = Field(
        default=None, description="URI of the checkpoints, which stay until somebody deletes them."
    )
    predictions: str | None = Field(default=None, description="URI of the predictions.")
    metrics: dict[str, float] = Field(default_factory=dict, description="Final metrics.")
    script: str | None = Field(
        default=None, description="Repository and commit of training.script, as https://host/path@commit."
    )
    endpoint_url: str | None = Field(default=None, description="URL of the server.")
    model_revision: str | None = Field(default=None, description="Commit of the model that was fetched.")
    dataset_fingerprint: str | None = Field(default=None, description="Fingerprint of the prepared data.")


class FineTuneJobStatus(StatusModel):
    """What the operator knows."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this status speaks of."
    )
    phase: Phase | None = Field(default=None, description="Where the job is, in one word.")
    stage: Stage | None = Field(default=None, description="Stage that runs or ran last.")
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16, description="Aspects of the job.")
    stages: tuple[StageStatus, ...] = Field(default=(), max_length=8, description="The stages in order.")
    plan: PlanStatus | None = Field(default=None, description="What will run.")
    progress: ProgressStatus | None = Field(default=None, description="Where the running stage is.")
    failure: FailureStatus | None = Field(default=None, description="Why the job failed.")
    restarts: int = Field(default=0, ge=0, description="Restarts so far.")
    counted_restarts: int = Field(
        default=0, ge=0, description="Those among them that count against runPolicy.maxRestarts."
    )
    start_time: str | None = Field(
        default=None, description="When the job began to run, anew after each suspension, RFC 3339."
    )
    completion_time: str | None = Field(default=None, description="When the job succeeded or failed, RFC 3339.")
    adaptation: AdaptationStatus | None = Field(default=None, description="How the plan was changed after failures.")
    measured: MeasuredStatus | None = Field(default=None, description="What the prepare stage measured.")
    spot: SpotStatus | None = Field(
        default=None, description="How the training on spot nodes goes. Left out: the job does not ask for them."
    )
    cost: CostStatus | None = Field(default=None, description="What the job has used.")
    artifacts: ArtifactsStatus | None = Field(default=None, description="What the job made.")


# --------------------------------------------------------------------------------------------------------------- object


class ObjectMeta(BaseModel):
    """The part of Kubernetes' object metadata that we look at; the rest is the API server's business."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, validate_by_alias=True)

    name: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    namespace: str | None = None
    generation: int | None = None
    uid: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class FineTuneJob(BaseModel):
    """One FineTuneJob as `kubectl` sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, validate_by_alias=True)

    api_version: Literal["finetune.dev/v1alpha1"]
    kind: Literal["FineTuneJob"]
    metadata: ObjectMeta
    spec: FineTuneJobSpec
    status: FineTuneJobStatus | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.metadata.name

"""Measured facts that a plan rests on: the model's shape, the data's lengths, the machine.

The trainer's image measures them (it has transformers and the data) and the planner reads them. All units are plain:
parameters are counts, lengths are tokens, memory is bytes.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from finetune_contract.choices import Device, LabelForm, Task
from finetune_contract.contract_models import Count, Message, Positive

# Bounds of a model's shape, each at least 10 times that of any known model: plans loop over layers and multiply widths.
MOST_PARAMETERS = 2**48
MOST_LAYERS = 2**14
MOST_WIDTH = 2**26
MOST_HEADS = 2**16
"""Heads of a layer, and experts."""
MOST_TOKENS = 2**31 - 1
"""Tokens of a vocabulary, and of a row."""


class LinearWidths(Message):
    """Linear layers that share a name, one or more in each block: sums over all of them."""

    inputs: Positive
    outputs: Positive
    weights: int = Field(default=0, ge=0, le=MOST_PARAMETERS)
    """Elements of their matrices; 0: not counted."""


class ModelFacts(Message):
    """Shape of a model, from its config on the meta device (no weights are read)."""

    model_type: str
    """`model_type` of the Hugging Face config, e.g. `bert`."""
    parameters: int = Field(gt=0, le=MOST_PARAMETERS)
    """All parameters, tied ones counted once, the task's head included."""
    embedding_parameters: int = Field(ge=0, le=MOST_PARAMETERS)
    """Parameters of the token and position embeddings (tied output embeddings counted here)."""
    block_parameters: int = Field(ge=0, le=MOST_PARAMETERS)
    """Parameters of the largest repeated block (one transformer layer): the unit that ZeRO-3 and FSDP gather."""
    layers: int = Field(gt=0, le=MOST_LAYERS)
    hidden_size: int = Field(gt=0, le=MOST_WIDTH)
    intermediate_size: int = Field(gt=0, le=MOST_WIDTH)
    """Width of the feed-forward layer; in a mixture of experts, of all experts that one token passes."""
    attention_heads: int = Field(gt=0, le=MOST_HEADS)
    key_value_heads: int | None = Field(default=None, gt=0, le=MOST_HEADS, exclude_if=lambda heads: heads is None)
    """Key and value heads under grouped-query attention; None: each query head has its own."""
    fused_attention: bool = Field(default=True, exclude_if=lambda fused: fused)
    """True if transformers computes attention without storing heads x length scores for each token, as far as is known.
    """
    vocabulary_size: int = Field(gt=0, le=MOST_TOKENS)
    max_positions: int | None = Field(default=None, gt=0, le=MOST_TOKENS)
    """Longest input in tokens; None when the model sets no limit."""
    tied_embeddings: bool = False
    parameter_bytes: Positive
    """Size of the weights as stored, in bytes."""
    idle_parameters: int = Field(default=0, ge=0, le=MOST_PARAMETERS, exclude_if=lambda idle: not idle)
    """Parameters that one token does not pass: the experts of a mixture that were not chosen for it."""
    experts: int = Field(default=0, ge=0, le=MOST_HEADS, exclude_if=lambda experts: not experts)
    """Experts of each block of a mixture; 0: there are none, or their number is not known."""
    head_parameters: int = Field(ge=0, le=MOST_PARAMETERS, default=0)
    """Parameters of the task's head, with the encoder's pooler: an adapter run trains them in full."""
    linear_layers: dict[str, LinearWidths] = Field(default_factory=dict)
    """Name in its block, numbers as `*` (`attention.self.query`, `experts.*.w1`) -> widths of the linear layers that
    adapters can adapt; empty: unknown.
    """

    saved_per_token: Count = Field(default=0, exclude_if=lambda saved: not saved)
    """Bytes that one block saves for one token's backward pass in fp32 on a CPU, without attention's scores, as traced
    on fake tensors; 0: not traced, as plans have a formula for the family, or its code cannot be traced.
    """
    saved_per_score: Count = Field(default=0, exclude_if=lambda saved: not saved)
    """Bytes that it saves besides for one token and each token of its row; 0 if attention is fused, or not traced."""

    @model_validator(mode="after")
    def _holds_its_parts(self) -> Self:
        parts = {
            "embedding_parameters": self.embedding_parameters,
            "block_parameters": self.block_parameters,
            "idle_parameters": self.idle_parameters,
            "head_parameters": self.head_parameters,
        }
        for name, part in parts.items():
            if part > self.parameters:
                raise ValueError(f"{name} ({part}) is more than parameters ({self.parameters})")
        return self

    @property
    def key_value_width(self) -> int:
        """Elements of one token's keys in a layer; its values have as many."""
        return self.hidden_size * (self.key_value_heads or self.attention_heads) // self.attention_heads


class SplitFacts(Message):
    """Facts of one prepared split."""

    rows: Count
    """Units that batches consist of: rows of the data, windows of them, or packed sequences of several."""
    windows_of: Count | None = None
    """Rows of the data before they were cut into windows; None: they were not cut."""
    packs_of: Count | None = None
    """Rows of the data (windows of them, if cut) before packing into shared sequences; None: not packed."""
    tokens: Count
    """Tokens over all rows after truncation, special tokens included."""
    truncated_rows: Count = 0
    length_histogram: dict[Annotated[int, Field(ge=0, le=MOST_TOKENS)], Count] = Field(default_factory=dict)
    """Upper edge of a length bucket in tokens -> rows in it (length <= edge, > the edge before)."""
    longest: int = Field(ge=0, le=MOST_TOKENS, default=0)
    """Tokens of the longest row after truncation."""

    def coarsened(self, buckets: int) -> SplitFacts:
        """Return the split with at most `buckets` (at least 1) buckets: neighbours merge under the upper edge, so no
        length is underestimated.
        """
        edges = sorted(self.length_histogram)
        if len(edges) <= buckets:
            return self
        joined = {
            edges[last - 1]: sum(self.length_histogram[edge] for edge in edges[first:last])
            for first, last in ((i * len(edges) // buckets, (i + 1) * len(edges) // buckets) for i in range(buckets))
        }
        return self.model_copy(update={"length_histogram": joined})


class DataFacts(Message):
    """Result of `prepare`. `fingerprint` names the prepared data: equal fingerprint, equal shards."""

    fingerprint: str
    splits: dict[str, SplitFacts]
    """Splits by role: train, validation, test, predict."""
    labels: tuple[str, ...] = ()
    """Label names in the order of their ids; empty for tasks without labels."""
    label_form: LabelForm | None = None
    """Form of the labels, in tasks that have several forms."""
    label_counts: dict[str, Count] = Field(default_factory=dict)
    """Label name -> rows of the train split (of the test split when nothing trains)."""
    validation_from_train: bool = False
    """True if there was no validation split and a seeded 5 % of train was set aside."""
    max_length: int = Field(gt=0, le=MOST_TOKENS)
    """Truncation length in effect, in tokens."""
    notes: tuple[str, ...] = Field(default=(), exclude_if=lambda notes: not notes)
    """Sentences for people: unusual properties of the data, and how prepare reads them."""
    shape: str | None = Field(default=None, exclude_if=lambda shape: shape is None)
    """Name of the shape by which the columns are known; None: they are those of the job."""
    columns: dict[str, str] = Field(default_factory=dict, exclude_if=lambda columns: not columns)
    """Role (a field of `Columns`) -> column of rows that have a shape, in place of the job's."""

    def for_planning(self, buckets: int) -> DataFacts:
        """Return the inputs of a plan: without labels and notes, at most `buckets` buckets in each histogram."""
        splits = {role: split.coarsened(buckets) for role, split in self.splits.items()}
        return self.model_copy(update={"labels": (), "label_counts": {}, "notes": (), "splits": splits})


BF16_FROM = (8, 0)
"""Compute capability of Ampere, the first chips with units for bf16."""
TF32_FROM = (8, 0)
"""Compute capability of Ampere, the first chips whose tensor cores multiply fp32 in TF32."""
FP8_FROM = (8, 9)
"""Compute capability of Ada, the first chips whose tensor cores multiply in fp8."""
FP8_MULTIPLE = 16
"""Divisor of both sides of a weight that is multiplied in fp8, which torch's scaled product requires."""


class DeviceFacts(Message):
    """One kind of accelerator."""

    product: str
    memory_bytes: Positive
    """Memory of one device in bytes."""
    bf16: bool = True
    """True if the device computes in bf16 natively."""
    capability: str | None = Field(default=None, exclude_if=lambda capability: capability is None)
    """CUDA compute capability, e.g. `8.0`; None: unknown, or not an NVIDIA GPU."""
    assumed: bool = Field(default=False, exclude_if=lambda assumed: not assumed)
    """True if its memory or its units are an assumption, as neither labels nor tables have them."""


class HardwareFacts(Message):
    """One node of the machine or cluster to plan for."""

    cpu_cores: Positive
    memory_bytes: Positive
    """Host memory in bytes that a job may use on one node."""
    gpus_per_node: Count = 0
    gpu: DeviceFacts | None = None
    cpu_bf16: bool = False
    """True if the CPU has bf16 units (AVX512-BF16 or AMX); emulated bf16 is slower than fp32."""
    assumed: bool = False
    """True if not measured: given on the command line, or a default."""
    network_gigabits: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, exclude_if=lambda network: network is None
    )
    """Network of the node in 10^9 bits a second and direction; None: unknown."""

    @property
    def device(self) -> Device:
        """Return `cuda` when the node has GPUs, else `cpu`."""
        return "cuda" if self.gpus_per_node else "cpu"


class TrainerFacts(Message):
    """Output of `python -m finetune_trainer facts`: everything known without reading the data."""

    task: Task
    model: ModelFacts
    hardware: HardwareFacts

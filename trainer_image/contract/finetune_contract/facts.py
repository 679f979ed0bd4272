"""Measured facts that a plan rests on: the model's shape, the data's lengths, the machine.

The trainer's image measures them (it has transformers and the data at hand) and the planner consumes them. Everything
is in plain units: parameters are counts, lengths are tokens, memory is bytes.
"""

from __future__ import annotations

from pydantic import Field

from finetune_contract.choices import Device, LabelForm, Task
from finetune_contract.contract_models import Message


class LinearWidths(Message):
    """The linear layers of one name, one or more in each block: sums over all of them."""

    inputs: int = Field(gt=0)
    outputs: int = Field(gt=0)
    weights: int = Field(default=0, ge=0)
    """Elements of their matrices; 0: nobody has counted."""


class ModelFacts(Message):
    """The shape of a model, from its config on the meta device (no weights are read)."""

    model_type: str
    """`model_type` of the Hugging Face config, e.g. `bert`."""
    parameters: int = Field(gt=0)
    """All parameters, tied ones counted once, the task's head included."""
    embedding_parameters: int = Field(ge=0)
    """Parameters of the token and position embeddings (tied output embeddings counted here)."""
    block_parameters: int = Field(ge=0)
    """Parameters of the largest repeated block (one transformer layer): the unit that ZeRO-3 and FSDP gather."""
    layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    attention_heads: int = Field(gt=0)
    key_value_heads: int | None = Field(default=None, gt=0, exclude_if=lambda heads: heads is None)
    """Heads of keys and values where several heads of queries share one; None: each has its own."""
    fused_attention: bool = Field(default=True, exclude_if=lambda fused: fused)
    """Whether transformers computes attention without keeping heads x length scores for each token, as far as somebody
    has looked.
    """
    vocabulary_size: int = Field(gt=0)
    max_positions: int | None = None
    """Longest input in tokens; None when the model sets no limit."""
    tied_embeddings: bool = False
    parameter_bytes: int = Field(gt=0)
    """Size of the weights as stored, in bytes."""
    head_parameters: int = Field(ge=0, default=0)
    """Of `parameters`, those of the task's head (with the encoder's pooler): an adapter run trains them whole."""
    linear_layers: dict[str, LinearWidths] = Field(default_factory=dict)
    """Name in its block, numbers as `*` (`attention.self.query`, `experts.*.w1`) -> widths of the linear layers that
    adapters can adapt; empty when nobody has looked.
    """

    @property
    def key_value_width(self) -> int:
        """Elements of the keys of one token in a layer, and of its values."""
        return self.hidden_size * (self.key_value_heads or self.attention_heads) // self.attention_heads


class SplitFacts(Message):
    """One prepared split."""

    rows: int = Field(ge=0)
    """What batches are made of: rows of the data, windows of them, or sequences that several of them share."""
    windows_of: int | None = None
    """Rows of the data where they were cut into windows; None: they were not."""
    packs_of: int | None = None
    """Rows of the data (windows of them, where they were cut) that share sequences; None: each has its own."""
    tokens: int = Field(ge=0)
    """Tokens over all rows after truncation, special tokens included."""
    truncated_rows: int = Field(ge=0, default=0)
    length_histogram: dict[int, int] = Field(default_factory=dict)
    """Upper edge of a length bucket in tokens -> rows in it (length <= edge, > the edge before)."""
    longest: int = Field(ge=0, default=0)
    """Tokens of the longest row after truncation."""

    def coarsened(self, buckets: int) -> SplitFacts:
        """With at most `buckets` (at least 1) buckets: neighbours are joined under the upper edge, so no length is
        taken for less than it is.
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
    """What `prepare` found. `fingerprint` names the prepared data: equal fingerprint, equal shards."""

    fingerprint: str
    splits: dict[str, SplitFacts]
    """Keyed by the roles train, validation, test, predict."""
    labels: tuple[str, ...] = ()
    """Label names in the order of their ids; empty for tasks without labels."""
    label_form: LabelForm | None = None
    """Of tasks whose labels have several."""
    label_counts: dict[str, int] = Field(default_factory=dict)
    """Label name -> rows of the train split (of the test split when nothing trains)."""
    validation_from_train: bool = False
    """True when no validation split was there and a seeded 5 % of train was set aside."""
    max_length: int = Field(gt=0)
    """The truncation length in effect, in tokens."""
    notes: tuple[str, ...] = Field(default=(), exclude_if=lambda notes: not notes)
    """Sentences for people: what in the data is unusual, and how prepare reads it."""

    def for_planning(self, buckets: int) -> DataFacts:
        """What a plan rests on: without labels and notes, and with at most `buckets` buckets in each histogram."""
        splits = {role: split.coarsened(buckets) for role, split in self.splits.items()}
        return self.model_copy(update={"labels": (), "label_counts": {}, "notes": (), "splits": splits})


class DeviceFacts(Message):
    """One kind of accelerator."""

    product: str
    memory_bytes: int = Field(gt=0)
    """Memory of one device in bytes."""
    bf16: bool = True
    """Whether the device computes in bf16 natively."""
    capability: str | None = Field(default=None, exclude_if=lambda capability: capability is None)
    """CUDA compute capability, e.g. `8.0`; None: nobody has said, or it is no GPU of NVIDIA's."""


class HardwareFacts(Message):
    """One node of the machine or cluster to plan for."""

    cpu_cores: int = Field(gt=0)
    memory_bytes: int = Field(gt=0)
    """Host memory that a job may use on one node, in bytes."""
    gpus_per_node: int = Field(ge=0, default=0)
    gpu: DeviceFacts | None = None
    cpu_bf16: bool = False
    """Whether the CPU has bf16 units (AVX512-BF16 or AMX); emulated bf16 is slower than fp32."""
    assumed: bool = False
    """True when nobody measured this: it was given on the command line or is a default."""

    @property
    def device(self) -> Device:
        """`cuda` when the node has GPUs."""
        return "cuda" if self.gpus_per_node else "cpu"


class TrainerFacts(Message):
    """What `python -m finetune_trainer facts` prints: everything known without touching the data."""

    task: Task
    model: ModelFacts
    hardware: HardwareFacts

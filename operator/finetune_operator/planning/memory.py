"""How much memory one process needs, term by term.

Each term has its formula and the formula's source beside it, and carries the numbers it was computed from, so that a
plan can be checked by hand. P is the number of parameters, N the number of data-parallel ranks. Sizes are bytes.

What is modelled: weights, gradients and optimizer state as each strategy divides them, saved activations, the blocks
that ZeRO-3 and FSDP gather, communication buffers, the fixed cost of a process and the allocator's losses. What is not:
memory that a task's own metrics take, and the page cache, which gives way.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_contract.choices import Device, OptimizerName, Precision, Task
from finetune_contract.facts import ModelFacts
from finetune_contract.job import Adapter, Strategy, World
from finetune_operator.planning.adapters import adapted_layers, trained_parameters
from finetune_operator.planning.architectures import activation_shape
from finetune_operator.planning.types import MemoryEstimate, MemoryTerm

MIB = 1 << 20

CPU_PROCESS_BYTES = 900 * MIB
"""Resident set of a process that imported torch 2.15, transformers 5.23, datasets and deepspeed 0.19: 880 MiB
measured.
"""
CUDA_CONTEXT_BYTES = 1024 * MIB
"""CUDA context and loaded kernels (about 500 MiB on current data-centre GPUs), cuBLAS workspace, NCCL's buffers."""
ALLOCATOR_SHARE = 0.10
"""On a GPU, of everything that torch allocates: rounding to blocks, fragments, temporaries of single operations."""
CPU_ALLOCATOR_SHARE = 1.2
"""The same on a CPU, where the C library keeps every fragment and gloo copies what it sends. Measured on a
22M-parameter BERT with micro-batches of 16 rows over 534 steps, as peak resident set beyond the process and the other
terms: 0.5 with DDP, 1.2 with ZeRO-2, 1.3 with FSDP; 0.3 with a single process over 15 steps. The upper end: too small
kills a run.
"""

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""DeepSpeed's default of 500 million takes 2 GB twice in fp32; a tenth still fills the links many times over."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of sub_group_size: ZeRO-3 steps, and makes fp32 gradients, for this much of a shard at a time."""
PREFETCH_BUCKET_ELEMENTS = 50_000_000
"""DeepSpeed's own default of stage3_prefetch_bucket_size."""


@dataclass(frozen=True)
class Workload:
    """Everything that the memory of one process depends on."""

    model: ModelFacts
    task: Task
    strategy: Strategy
    precision: Precision
    optimizer: OptimizerName
    world: World
    micro_batch: int
    length: int
    """Tokens of the longest row: length-grouped batches put such rows together."""
    adapter: Adapter | None = None

    @property
    def deepspeed(self) -> bool:
        return self.strategy.name == "deepspeed"

    @property
    def compute_bytes(self) -> int:
        """Bytes of one element of a matrix product."""
        return 4 if self.precision == "fp32" else 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight on the device: DeepSpeed converts the model, autocast leaves it in fp32."""
        return self.compute_bytes if self.deepspeed else 4

    @property
    def trained(self) -> int:
        """Parameters with gradients and optimizer state."""
        return trained_parameters(self.model, self.adapter).trained

    @property
    def held(self) -> int:
        """Parameters in all, those of an adapter among them."""
        return self.model.parameters + trained_parameters(self.model, self.adapter).added

    @property
    def offloaded(self) -> bool:
        return self.strategy.offload_optimizer != "none"


@dataclass(frozen=True)
class ModelStates:
    """Bytes of weights, gradients and optimizer state."""

    parameters: int
    gradients: int
    optimizer: int
    host: int
    """Offloaded state of all processes of one node, or what loading the weights takes there, whichever is more."""
    parameters_formula: str
    gradients_formula: str
    optimizer_formula: str


def _shards(count: int, per_parameter: float, ranks: int) -> int:
    return int(count * per_parameter / ranks)


def optimizer_state_bytes(optimizer: OptimizerName, hidden_size: int) -> float:
    """Bytes of optimizer state per parameter, without a master copy.

    AdamW keeps two fp32 moments; SGD as Hugging Face sets it up has no momentum; Adafactor keeps one row and one column
    of sums for each matrix (Shazeer and Stern, 2018), about 2 / h of its elements.
    """
    match optimizer:
        case "adamw":
            return 8.0
        case "sgd":
            return 0.0
        case "adafactor":
            return 8.0 / hidden_size


def model_states(work: Workload) -> ModelStates:
    """Weights, gradients and optimizer state of one process.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3: with
    bf16 or fp16 weights 2P + 2P + 12P, where 12 = fp32 master copy 4 + moments 8; stage 1 divides the optimizer state,
    stage 2 the gradients too, stage 3 the parameters too. DeepSpeed's own estimators
    (`estimate_zero2_model_states_mem_needs`) add the fp32 copy of a rank's gradients that its optimizer step makes:
    4P/N, at stage 3 for one sub-group at a time. Its fp32 mode keeps the master copy as well. Stage 0 sums gradients in
    fp32. Of frozen weights there are neither gradients nor optimizer state (Hu et al., "LoRA", 2021, section 4.2).
    """
    held, count, ranks = work.held, work.trained, work.world.size
    state = optimizer_state_bytes(work.optimizer, work.model.hidden_size)
    width = work.weight_bytes
    processes = work.world.processes_per_node
    loading = 4 * work.model.parameters * processes
    if not work.deepspeed:
        divided = ranks if work.strategy.name == "fsdp" else 1
        return ModelStates(
            parameters=_shards(held, 4, divided),
            gradients=_shards(count, 4, divided),
            optimizer=_shards(count, state, divided),
            host=loading,
            parameters_formula=_formula("4", held, divided),
            gradients_formula=_formula("4", count, divided),
            optimizer_formula=_formula(f"{state:.3g}", count, divided),
        )
    stage = work.strategy.zero_stage or 0
    by_parameters, by_gradients, by_optimizer = (ranks if stage >= least else 1 for least in (3, 2, 1))
    fp32_copy = 4
    offloaded_host = 0
    stepped = count // by_optimizer
    if stage == 3:
        stepped = min(stepped, SUB_GROUP_ELEMENTS)
    gradients = _shards(count, width, by_gradients) + fp32_copy * stepped
    gradients_formula = f"{_formula(str(width), count, by_gradients)} + fp32 copy {fp32_copy} x {stepped:,}"
    optimizer = _shards(count, 4 + state, by_optimizer)
    optimizer_formula = f"(master copy 4 + {state:.3g}) {_formula('', count, by_optimizer)}"
    if work.offloaded:
        # Gradients leave through the reduce buckets as they come; their fp32 copy, the master copy and the moments are
        # on the host.
        per_node = processes / ranks
        offloaded_host = int(count * (fp32_copy + 4 + state) * per_node)
        gradients, optimizer = 0, 0
        gradients_formula = optimizer_formula = "on the host"
    return ModelStates(
        parameters=_shards(held, width, by_parameters),
        gradients=gradients,
        optimizer=optimizer,
        # Stage 3 reads the weights shard by shard, and the processes of a node share the pages of the file.
        host=max(offloaded_host, _merging_bytes(work) if stage == 3 else loading),
        parameters_formula=_formula(str(width), held, by_parameters),
        gradients_formula=gradients_formula,
        optimizer_formula=optimizer_formula,
    )


def _merging_bytes(work: Workload) -> int:
    """The model in fp32 that rank 0 loads at the end to merge the adapter into."""
    return 0 if work.adapter is None else 4 * work.model.parameters


def _formula(per_parameter: str, count: int, ranks: int) -> str:
    factor = f"{per_parameter} x " if per_parameter else "x "
    return f"{factor}{count:,}" + (f" / {ranks} ranks" if ranks > 1 else "")


def _unfused_scores(work: Workload) -> float:
    """Elements kept for each token and head, per token of length; 0 when attention is fused.

    On CPU, PyTorch has a fused kernel only without dropout, so that models that drop out attention keep their scores
    there.
    """
    shape = activation_shape(work.model.model_type)
    on_cpu = work.world.device == "cpu" and shape.attention_dropout
    return 0.0 if shape.fused_attention and not on_cpu else shape.score_tensors


def activation_bytes_per_token(work: Workload) -> int:
    """Bytes that one layer keeps for the backward pass, for one token.

    Korthikanti et al. (2022), section 4.1, with element widths set apart: norms keep fp32 inputs under autocast,
    dropout masks are one byte on GPUs and a whole element on CPU, and unfused attention keeps its scores in fp32 on
    CPU.
    """
    shape, model = activation_shape(work.model.model_type), work.model
    wide = work.compute_bytes if work.deepspeed else 4
    mask = 1 if work.world.device == "cuda" else work.compute_bytes
    linear = (
        model.hidden_size * (shape.norm_inputs * wide + shape.hidden * work.compute_bytes + shape.dropout_masks * mask)
        + model.intermediate_size * shape.feed_forward * work.compute_bytes
    )
    score_width = 4 if work.world.device == "cpu" else work.compute_bytes
    scores = _unfused_scores(work)
    dropped = (4 if work.world.device == "cpu" else 1) if scores and shape.attention_dropout else 0
    selective = work.strategy.activation_checkpointing == "selective"
    attention = 0.0 if selective else model.attention_heads * work.length * (scores * score_width + dropped)
    return int(linear + attention + _adapter_bytes_per_token(work, mask))


def _adapter_bytes_per_token(work: Workload, mask: int) -> float:
    """Bytes that the adapters of one layer keep for one token, beside what the frozen layer is counted with.

    Between A and B `rank` elements; with dropout the input of A and its mask, which are the layer's own; with DoRA both
    products that are scaled by the magnitudes. As peft 0.21 computes them (`tuners/lora/variants.py`), compared with
    what torch saves in tests/unit/test_planning_adapters.py. The frozen layer keeps a little less than is counted.
    """
    if work.adapter is None:
        return 0.0
    layers, adapter = adapted_layers(work.model, work.adapter).values(), work.adapter
    inputs, outputs = sum(each.inputs for each in layers), sum(each.outputs for each in layers)
    kept = len(layers) * work.model.layers * adapter.rank * work.compute_bytes
    if adapter.dropout:
        kept += inputs * (work.compute_bytes + mask)
    if adapter.method == "dora":
        kept += 2 * outputs * work.compute_bytes
    return kept / work.model.layers


def _activations(work: Workload) -> MemoryTerm:
    model, tokens = work.model, work.micro_batch * work.length
    layer = activation_bytes_per_token(work)
    wide = work.compute_bytes if work.deepspeed else 4
    ends = 3 * model.hidden_size * wide  # embedding output, its norm and dropout; the final norm
    if work.task in ("text-generation", "masked-lm", "summarization", "translation"):
        ends += model.vocabulary_size * (work.compute_bytes + 8)  # logits, their fp32 form, its gradient
    if work.strategy.activation_checkpointing == "full":
        kept = model.layers * model.hidden_size * wide + layer
        words = f"({model.layers} layer inputs + 1 layer of {layer:,} + ends {ends:,})"
    else:
        kept = model.layers * layer
        words = f"({model.layers} layers x {layer:,} + ends {ends:,})"
    return MemoryTerm(
        name="activations",
        bytes=tokens * (kept + ends),
        formula=f"{work.micro_batch} rows x {work.length} tokens x {words}",
    )


def gathered_bytes(largest_layer_parameters: int, width: int) -> int:
    """Weights and gradient of the largest layer that ZeRO-3 gathers whole.

    As in `estimate_zero3_model_states_mem_needs`: 4 bytes a parameter with 16-bit weights.
    """
    return 2 * width * largest_layer_parameters


def largest_layer(model: ModelFacts) -> int:
    """Parameters of the largest unit that is gathered at once: the embeddings or one block."""
    return max(model.embedding_parameters, model.block_parameters)


def _gathered(work: Workload) -> MemoryTerm | None:
    model = work.model
    if work.strategy.name == "fsdp":
        root = max(0, model.parameters - model.layers * model.block_parameters)
        # fully_shard leaves the root (embeddings and head) gathered from forward to backward, and holds two blocks
        # when it prefetches. Gradients are whole until they are reduced, those of frozen weights never are.
        graded = root + model.block_parameters if work.adapter is None else work.trained
        size = 4 * root + 2 * 4 * model.block_parameters + 4 * graded
        words = (
            f"4 x ({root:,} of embeddings and head + 2 x {model.block_parameters:,} of a block + gradients {graded:,})"
        )
        return MemoryTerm(name="gathered blocks", bytes=size, formula=words)
    if work.deepspeed and work.strategy.zero_stage == 3:
        layer = largest_layer(model)
        words = f"{2 * work.weight_bytes} x {layer:,} of the largest layer"
        return MemoryTerm(name="gathered blocks", bytes=gathered_bytes(layer, work.weight_bytes), formula=words)
    return None


def _checkpoint_copy(work: Workload) -> MemoryTerm | None:
    """Rank 0 gathers the whole state in host memory to write it, which on a CPU is the device's."""
    if work.strategy.name != "fsdp" or work.world.device != "cpu":
        return None
    count = work.trained
    return MemoryTerm(name="checkpoint", bytes=12 * count, formula=f"(weights 4 + states 8) x {count:,}, on rank 0")


def reduce_bucket_elements(parameters: int) -> int:
    """Elements of DeepSpeed's reduce and all-gather buckets: never more than the model has."""
    return min(parameters, REDUCE_BUCKET_ELEMENTS)


def overlaps_communication(device: Device) -> bool:
    """Whether DeepSpeed reduces while it computes; on CPU there is no second stream to do it on."""
    return device == "cuda"


def _buffers(work: Workload) -> MemoryTerm | None:
    count = work.trained
    if work.strategy.name == "ddp":
        # DistributedDataParallel copies gradients into its buckets unless gradient_as_bucket_view is set, which
        # Trainer leaves off.
        return MemoryTerm(name="communication buffers", bytes=4 * count, formula=f"gradient buckets 4 x {count:,}")
    if not work.deepspeed or not work.strategy.zero_stage:
        return None
    bucket, copies = reduce_bucket_elements(count), 2 if overlaps_communication(work.world.device) else 1
    size = copies * bucket * work.weight_bytes
    words = f"{copies} x reduce bucket {work.weight_bytes} x {bucket:,}"
    if work.strategy.zero_stage == 3:
        prefetch = min(work.model.parameters, PREFETCH_BUCKET_ELEMENTS)
        size += prefetch * work.weight_bytes
        words += f" + prefetch {work.weight_bytes} x {prefetch:,}"
    return MemoryTerm(name="communication buffers", bytes=size, formula=words)


def _autocast_copies(work: Workload) -> MemoryTerm | None:
    """Autocast saves the 16-bit copies of the weights of linear layers for the backward pass."""
    if work.deepspeed or work.compute_bytes == 4:
        return None
    count = max(0, work.model.parameters - work.model.embedding_parameters)
    return MemoryTerm(name="autocast copies", bytes=2 * count, formula=f"2 x {count:,} weights of linear layers")


def estimate(work: Workload, capacity_bytes: int) -> MemoryEstimate:
    """The memory of one process of `work` on a device (a share of a node, on CPU) of `capacity_bytes`."""
    states = model_states(work)
    on_cpu = work.world.device == "cpu"
    terms: list[MemoryTerm] = [
        MemoryTerm(name="parameters", bytes=states.parameters, formula=states.parameters_formula),
        MemoryTerm(name="gradients", bytes=states.gradients, formula=states.gradients_formula),
        MemoryTerm(name="optimizer state", bytes=states.optimizer, formula=states.optimizer_formula),
    ]
    processes = work.world.processes_per_node
    if on_cpu and work.offloaded:
        # The host is the device here: what is offloaded stays in the same memory.
        terms[2] = MemoryTerm(
            name="optimizer state",
            bytes=states.host // processes,
            formula="offloaded to the memory it would have lain in anyway",
        )
    terms.append(_activations(work))
    extras = (_autocast_copies(work), _gathered(work), _buffers(work), _checkpoint_copy(work))
    terms.extend(term for term in extras if term is not None)
    share = CPU_ALLOCATOR_SHARE if on_cpu else ALLOCATOR_SHARE
    allocated = sum(term.bytes for term in terms)
    terms.append(MemoryTerm(name="allocator", bytes=int(allocated * share), formula=f"{share:.0%} of the terms above"))
    fixed = CPU_PROCESS_BYTES if on_cpu else CUDA_CONTEXT_BYTES
    words = "interpreter and libraries, measured" if on_cpu else "CUDA context, cuBLAS and NCCL"
    terms.append(MemoryTerm(name="process", bytes=fixed, formula=words))
    total = sum(term.bytes for term in terms)
    host = total * processes if on_cpu else CPU_PROCESS_BYTES * processes + states.host
    return MemoryEstimate(terms=tuple(terms), total_bytes=total, capacity_bytes=capacity_bytes, host_bytes=host)

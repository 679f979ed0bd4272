"""Memory of one process, term by term.

Each term has its formula and the formula's source beside it, and includes its numbers, so that a plan can be checked by
hand. P is the number of parameters, N the number of data-parallel ranks. Sizes are bytes.

Modelled: weights, gradients and optimizer state as each strategy shards them, saved activations, the blocks that ZeRO-3
and FSDP gather, communication buffers, the fixed cost of a process and the allocator's losses. Not modelled: memory of
a task's own metrics, and the page cache, which is reclaimable.

A step has several moments that may be the fullest: the loss, with all activations; the gradient of the head; a layer's
backward pass, with its recomputation; the last gradients; the optimizer's step. The estimate is that of the fullest.
`make trace-memory` compares it with traces of the trainer on fake GPUs (tests/tracing_support/memory_table.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from finetune_contract.byte_text import MIB
from finetune_contract.choices import LANGUAGE_TASKS, Device, InferencePrecision, OptimizerName, Precision, Task
from finetune_contract.facts import ModelFacts
from finetune_contract.plans import (
    AVERAGED_ELEMENTS,
    CHUNKED_LOSS_FAMILIES,
    CHUNKED_LOSS_TASKS,
    JUDGED_LOGITS,
    REQUESTED_LOGITS,
    SAVED_PIECE_BYTES,
    SLICED_NORM_FAMILIES,
    chunks_loss,
    loss_tokens,
)
from finetune_contract.trainer_job import Adapter, Strategy, World
from finetune_operator.planning.activation_shapes import RELATIVE_POSITIONS, ActivationShape, activation_shape
from finetune_operator.planning.adapter_sizes import (
    FOUR_BIT_BYTES,
    PACKED_BYTES,
    SCALE_BYTES,
    adapted_layers,
    four_bit_weights,
    largest_linear,
    narrow_weights,
    trained_parameters,
)
from finetune_operator.planning.model_parallel_plan import (
    PipelineEnd,
    in_flight,
    layers_of_a_process,
    parameters_of_a_process,
    stepped_parameters,
)
from finetune_operator.planning.plan_types import MemoryEstimate, MemoryTerm
from finetune_operator.planning.sequence_plan import slice_tokens

_BACKWARD = ("layers", "reduction")
"""Moments of the layers' backward pass."""
Moment: TypeAlias = Literal["load", "forward", "loss", "head", "layers", "reduction", "ends", "step"]
"""Moments of a training, in their order: the conversion of weights on the device, then those of a step: the end of the
forward pass, the loss's backward pass, the gradients of the head, the last layer's backward pass, with FSDP that of the
layer before while the last one's gradients are reduced, the embeddings' gradients, the optimizer's step.
"""

CPU_PROCESS_BYTES = 900 * MIB
"""Resident set of a process that imported torch 2.15, transformers 5.23, datasets and deepspeed 0.19: 880 MiB
measured.
"""
CUDA_CONTEXT_BYTES = 1024 * MIB
"""CUDA context and loaded kernels (about 500 MiB on current data-centre GPUs), cuBLAS workspace, NCCL's buffers."""
ALLOCATOR_SHARE = 0.10
"""Share on a GPU of memory that is allocated anew in each step: rounding to blocks, fragments, temporaries of single
operations. Weights and optimizer state are allocated once, in blocks of their size.
"""
FP32_LOSSES = ("modernbert",)
"""Families other than decoders that convert their logits to fp32 for the loss."""
BIASED_LOGITS = ("bart", "mbart", "marian", "pegasus")
"""Families with a bias of the logits that is a buffer, which FSDP leaves in fp32."""
LAYER_NORMS = 2
"""Inputs that a layer's two norms keep if each is one kernel; RMS norms are several, and keep more."""
RESIDENT = ("parameters", "optimizer state", "secondary shards")
"""Names of the terms that are allocated once."""
CPU_ALLOCATOR_SHARE = 0.3
"""Share on a CPU of the activations, whose memory the C library gives back in parts only. Two steps with rows of one
length take 0.2; 100 steps with rows of 4 to 128 tokens took 0.30 and 0.33 (BERT of 11 and of 1 million weights).
"""
CPU_TRAINING_BYTES = 100 * MIB
"""Batches, thread pools and buffers of operators of a process that trains on a CPU: with the share above, the constants
below and twice the gradients of ddp fitted to half of the runs in tests/tracing/cpu_memory_runs.json.
"""
CPU_DEEPSPEED_BYTES = 225 * MIB
"""Engine, buckets and compiled operators of DeepSpeed on a CPU, beside those that are counted."""
CPU_ZERO3_WEIGHTS = 4
"""Copies of the weights that ZeRO-3 has on a CPU at most, as it divides them and as it gathers them for a checkpoint.
"""

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Elements of a reduce bucket; DeepSpeed's 500 million take 2 GB twice in fp32, and a tenth is ample to fill links."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of sub_group_size: elements of a shard that ZeRO-3 steps, with fp32 gradients, at a time."""
PREFETCH_BUCKET_ELEMENTS = 50_000_000
"""DeepSpeed's own default of stage3_prefetch_bucket_size."""
NVME_SUB_GROUP_ELEMENTS = 50_000_000
"""Elements in memory at a time of a shard with its optimizer state in files; the default above would be all of it."""
NVME_OPTIMIZER_BUFFERS = 4
"""DeepSpeed's default of buffers: one for each of AdamW's states, with the master copy and the gradient."""
NVME_PARAMETER_BUFFERS = 5
"""DeepSpeed's default of buffers for parameters read from files."""


def compute_bytes(precision: Precision) -> int:
    """Return the bytes of one element of a matrix product."""
    return 4 if precision == "fp32" else 2


def weight_bytes(strategy: Strategy, precision: Precision) -> int:
    """Return the bytes of one weight on the device: DeepSpeed converts the model, autocast leaves it in fp32."""
    return compute_bytes(precision) if strategy.name == "deepspeed" else 4


@dataclass(frozen=True)
class Workload:
    """Inputs of the memory estimate of one process."""

    model: ModelFacts
    task: Task
    strategy: Strategy
    precision: Precision
    optimizer: OptimizerName
    world: World
    micro_batch: int
    length: int
    """Tokens of the longest sequence: length-grouped batches put such rows together."""
    sequences: int = 1
    """Sequences of one row."""
    packed: bool = False
    """True if a sequence holds several rows, which do not attend to each other."""
    rows_apart: bool = False
    """True if attention computes each row of a pack by itself, without a mask (`finetune_contract.packed_rows`)."""
    adapter: Adapter | None = None
    secondary_shards: int = 1
    """Processes of a node over which ZeRO++ shards the parameters a second time; 1 without it."""
    accumulates: bool = True
    """True if a step has several micro-batches, so that gradients are there during forward passes."""
    whole_logits: bool = False
    """True if training arguments keep a decoder from computing its loss some tokens at a time."""
    smooths: bool = False
    """True if labels are smoothed."""
    narrow_loss: bool = False
    """True if a decoder computes its loss in the type of its logits; False in this project's trainer."""
    casts: bool = True
    """False if weights are in the type that they compute in, as an inference process's are."""
    end: PipelineEnd | None = None
    """Stage of the process in a pipeline; None: no pipeline, or the larger one of both ends."""

    @cached_property
    def plain_loss(self) -> bool:
        """Return whether the loss is the mean over unsmoothed labels."""
        return self.task == "text-generation" and not self.smooths

    @cached_property
    def autocast(self) -> bool:
        """Return whether autocast casts weights and inputs; DeepSpeed and FSDP compute with 16-bit weights."""
        return self.casts and self.compute_bytes < 4 and self.strategy.name not in ("deepspeed", "fsdp")

    @cached_property
    def wide(self) -> int:
        """Return the bytes of an element of a norm's input: autocast leaves norms and sums in fp32."""
        return 4 if self.autocast else self.compute_bytes

    @cached_property
    def head(self) -> int:
        """Return the weights of a language model's head, a process's part of them; 0 for other tasks."""
        if self.task not in LANGUAGE_TASKS or self.end == "first":
            return 0
        return self.model.vocabulary_size * self.model.hidden_size // self.strategy.tensor

    @property
    def deepspeed(self) -> bool:
        return self.strategy.name == "deepspeed"

    @cached_property
    def compute_bytes(self) -> int:
        """Return the bytes of one element of a matrix product."""
        return compute_bytes(self.precision)

    @cached_property
    def weight_bytes(self) -> int:
        """Return the bytes of one weight on the device."""
        return weight_bytes(self.strategy, self.precision)

    @property
    def replicas(self) -> int:
        """Return the data-parallel ranks."""
        return self.world.size // self.strategy.model_ranks

    @cached_property
    def trained(self) -> int:
        """Return the parameters with gradients and optimizer state."""
        if self.strategy.model_ranks > 1:
            return self.held
        return trained_parameters(self.model, self.adapter).trained

    @cached_property
    def held(self) -> int:
        """Return all parameters, including an adapter's; with tensor or pipeline parallelism, those of one process."""
        if self.strategy.model_ranks > 1:
            head = self.model.vocabulary_size * self.model.hidden_size if self.task in LANGUAGE_TASKS else 0
            return parameters_of_a_process(self.model, self.strategy, end=self.end, head=head)
        return self.model.parameters + trained_parameters(self.model, self.adapter).added

    @cached_property
    def layers(self) -> int:
        """Return the layers of one process."""
        head = self.model.vocabulary_size * self.model.hidden_size if self.task in LANGUAGE_TASKS else 0
        return layers_of_a_process(self.model, self.strategy.pipeline, end=self.end, head=head)

    @cached_property
    def stepped(self) -> int:
        """Return the parameters of one process that has its part of the model whole whose optimizer state it has."""
        if self.strategy.model_ranks == 1 or self.strategy.name != "ddp":
            return self.trained
        return stepped_parameters(self.model, self.strategy, self.layers, self.held, self.replicas)

    @property
    def shards_stages(self) -> bool:
        """Return True for fsdp over the stages of a pipeline: weights and gradients are whole during a pass."""
        return self.strategy.name == "fsdp" and self.strategy.pipeline is not None

    @cached_property
    def four_bit(self) -> int:
        """Return the number of held weights that are in 4 bits."""
        return four_bit_weights(self.model, self.adapter)

    @cached_property
    def narrow(self) -> int:
        """Return the number of frozen weights that are in 16 bits beside trained ones in fp32."""
        narrow = self.autocast or (self.compute_bytes < 4 and self.strategy.name == "fsdp")
        return narrow_weights(self.model, self.adapter, self.head) if narrow else 0

    @cached_property
    def saved_per_token(self) -> int:
        """Return the bytes that one layer saves for the backward pass, for one token."""
        return activation_bytes_per_token(self)

    @property
    def shards(self) -> int:
        """Return the processes that share one copy of the sharded state."""
        return self.world.processes_per_node if self.strategy.fsdp_sharding == "hybrid" else self.replicas


@dataclass(frozen=True)
class ModelStates:
    """Bytes of weights, gradients and optimizer state of one process."""

    parameters: int
    gradients: int
    optimizer: int
    stepping: int
    """Bytes of `gradients` that only the optimizer's step takes."""
    offloaded: int
    """Bytes in host memory."""
    disk: int
    """Bytes in files."""
    host: int
    """Bytes of offloaded state of all processes of one node, or of reading the weights there; the larger of both."""
    parameters_formula: str
    gradients_formula: str
    optimizer_formula: str


def _shards(count: int, per_parameter: float, ranks: float) -> int:
    return int(count * per_parameter / ranks)


def optimizer_state_bytes(optimizer: OptimizerName, hidden_size: int) -> float:
    """Return the bytes of optimizer state per parameter, without a master copy.

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
    """Return weights, gradients and optimizer state of one process.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3: with
    bf16 or fp16 weights 2P + 2P + 12P, where 12 = fp32 master copy 4 + moments 8; stage 1 divides the optimizer state,
    stage 2 the gradients too, stage 3 the parameters too. DeepSpeed's own estimators
    (`estimate_zero2_model_states_mem_needs`) add the fp32 copy of a rank's gradients that its optimizer step creates:
    4P/N, at stage 3 for one sub-group at a time. Its fp32 mode keeps the master copy as well. Stage 0 sums gradients in
    fp32. Frozen weights have neither gradients nor optimizer state (Hu et al., "LoRA", 2021, section 4.2).
    """
    return _deepspeed_states(work) if work.deepspeed else _torch_states(work)


def _torch_states(work: Workload) -> ModelStates:
    held, count = work.held, work.trained
    state = optimizer_state_bytes(work.optimizer, work.model.hidden_size)
    loading = _loading_bytes(work)
    # Processes that have an expert have all of it.
    divided: float = work.shards / _padded(work) if work.strategy.name == "fsdp" else 1
    sizes = (_shards(held, 4, divided), _shards(count, 4, divided), _shards(work.stepped, state, divided))
    if work.strategy.offload_parameters == "cpu":
        # torch's CPUOffloadPolicy moves all three together, and the optimizer steps on the host; scales stay.
        scales, moved = int(SCALE_BYTES * work.four_bit), sum(sizes)
        if work.four_bit or work.narrow:
            moved = sum((_frozen_bytes(work, divided)[0] - scales, *sizes[1:]))
        host = max(moved * work.world.processes_per_node, loading)
        words = f"scales {SCALE_BYTES:.3f} x {work.four_bit:,}, the rest {_HOST}" if scales else _HOST
        return ModelStates(scales, 0, 0, 0, moved, 0, host, words, _HOST, _HOST)
    if work.four_bit or work.narrow:
        parameters, words = _frozen_bytes(work, divided)
        return ModelStates(
            parameters,
            *sizes[1:],
            stepping=0,
            offloaded=0,
            disk=0,
            host=loading,
            parameters_formula=words,
            gradients_formula=_formula("4", count, divided),
            optimizer_formula=_formula(f"{state:.3g}", count, divided),
        )
    part = " of the fullest process" if work.strategy.model_ranks > 1 else ""
    if work.strategy.tensor > 1 and work.strategy.name != "fsdp":
        # torch computes the gradient of embeddings that are split over the vocabulary whole, and sums it up so.
        count += work.model.embedding_parameters - work.model.embedding_parameters // work.strategy.tensor
        sizes = (sizes[0], 4 * count, sizes[2])
    return ModelStates(
        *sizes,
        stepping=0,
        offloaded=0,
        disk=0,
        host=loading,
        parameters_formula=_formula("4", held, divided) + part,
        gradients_formula=_formula("4", count, divided) + part,
        optimizer_formula=_formula(f"{state:.3g}", work.stepped, divided) + part,
    )


def _deepspeed_states(work: Workload) -> ModelStates:
    held, count, ranks, width = work.held, work.trained, work.shards, work.weight_bytes
    state = optimizer_state_bytes(work.optimizer, work.model.hidden_size)
    processes, stage = work.world.processes_per_node, work.strategy.zero_stage or 0
    by_parameters, by_gradients, by_optimizer = (ranks if stage >= least else 1 for least in (3, 2, 1))
    fp32_copy, offloaded, disk = 4, 0, 0
    stepped = count // by_optimizer
    if stage == 3:
        stepped = min(stepped, SUB_GROUP_ELEMENTS)
    parameters, parameters_formula = _shards(held, width, by_parameters), _formula(str(width), held, by_parameters)
    stepping = fp32_copy * stepped
    gradients = _shards(count, width, by_gradients) + stepping
    gradients_formula = f"{_formula(str(width), count, by_gradients)} + fp32 copy {fp32_copy} x {stepped:,}"
    optimizer = _shards(count, 4 + state, by_optimizer)
    optimizer_formula = f"(master copy 4 + {state:.3g}) {_formula('', count, by_optimizer)}"
    # Gradients leave through the reduce buckets as they are computed; their fp32 copy, the master copy and the moments
    # are with the optimizer, which steps on the host.
    match work.strategy.offload_optimizer:
        case "cpu":
            offloaded += _shards(count, fp32_copy + 4 + state, ranks)
            gradients, stepping, optimizer, gradients_formula, optimizer_formula = 0, 0, 0, _HOST, _HOST
        case "nvme":
            group = min(count // ranks, NVME_SUB_GROUP_ELEMENTS)
            offloaded += _shards(count, fp32_copy, ranks) + NVME_OPTIMIZER_BUFFERS * 4 * group
            disk += _shards(count, fp32_copy + 4 + state, ranks)
            gradients, stepping, optimizer, gradients_formula, optimizer_formula = 0, 0, 0, _HOST, _FILES
    match work.strategy.offload_parameters:
        case "cpu":
            offloaded += parameters
            parameters, parameters_formula = 0, _HOST
        case "nvme":
            offloaded += NVME_PARAMETER_BUFFERS * width * nvme_buffer_elements(work.model, ranks)
            disk += parameters
            parameters, parameters_formula = 0, _FILES
    return ModelStates(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        stepping=stepping,
        offloaded=offloaded,
        disk=disk,
        host=max(offloaded * processes, _loading_bytes(work)),
        parameters_formula=parameters_formula,
        gradients_formula=gradients_formula,
        optimizer_formula=optimizer_formula,
    )


_HOST, _FILES = "on the host", "in files"


def _frozen_bytes(work: Workload, divided: float) -> tuple[int, str]:
    """Return the bytes of one process's weights, some of them in 4 or in 16 bits, and the formula.

    FSDP divides packed weights among `divided` processes, and each has their scales whole. A GPU gets only these forms.
    On a CPU the whole model is in memory as well: before it is quantized or cast, and again when the adapter is merged.
    """
    packed, words = FOUR_BIT_BYTES * work.four_bit, f"{FOUR_BIT_BYTES:.3f} x {work.four_bit:,} in 4 bits"
    if divided > 1 and work.four_bit:
        packed = (PACKED_BYTES / divided + SCALE_BYTES) * work.four_bit
        words = f"({PACKED_BYTES} / {divided:.4g} + scales {SCALE_BYTES:.3f}) x {work.four_bit:,} in 4 bits"
    if work.world.device == "cpu":
        if not work.four_bit:
            return int(4 * work.held / divided), _formula("4", work.held, divided)
        return 4 * work.held + int(packed), f"4 x {work.held:,}, read and merged whole, + {words}"
    wide = work.held - work.four_bit - work.narrow
    terms = [f"4 x {wide:,}"]
    terms += [f"2 x {work.narrow:,} frozen"] if work.narrow else []
    whole = " + ".join(terms)
    if divided > 1:
        whole = f"({whole}) / {divided:.4g} ranks"
    size = int((4 * wide + 2 * work.narrow) / divided + packed)
    return size, f"{whole} + {words}" if work.four_bit else whole


def _unfolded(work: Workload) -> MemoryTerm | None:
    """Return the weight of one layer, dequantized from 4 bits for its matrix product."""
    if not work.four_bit:
        return None
    layer = largest_linear(work.model)
    words = f"{work.compute_bytes} x {layer:,} of the largest linear layer"
    return MemoryTerm(name="unfolded layer", bytes=work.compute_bytes * layer, formula=words)


def nvme_buffer_elements(model: ModelFacts, ranks: int) -> int:
    """Return the most elements in the shard of any weight; DeepSpeed reads a shard from its file in one piece."""
    return -(-largest_layer(model) // ranks)


def _loading_bytes(work: Workload) -> int:
    """Return the host memory of a node while its processes read the model that they train on GPUs.

    Weights stay in their files, as safetensors maps them, until each is converted on its device: the processes of a
    node share the pages, which are reclaimable (`finetune_trainer.stored_weights`; with transformers 5.23 and
    safetensors 0.8 the private memory of a process grows by less than 0.1 bytes a parameter). In memory are experts,
    which files hold one by one and models in one piece; weights in 4 bits, which are rounded there; those that DoRA
    takes norms of in fp32; and whole models that are split.
    """
    model, processes = work.model, work.world.processes_per_node
    if work.strategy.model_ranks > 1 or work.strategy.sequence > 1:
        return _spreading_bytes(work)
    merged = model.parameter_bytes if model.idle_parameters else 0
    packed = int(FOUR_BIT_BYTES * work.four_bit) + 4 * largest_linear(model) if work.four_bit else 0
    return (merged + packed + _normed_bytes(work)) * processes


def _normed_bytes(work: Workload) -> int:
    """Return the bytes of the weights that a process converts to fp32 for DoRA; all if the layers are not known."""
    if work.adapter is None or work.adapter.method != "dora" or _mapped_in_fp32(work.model):
        return 0
    weights = sum(each.weights for each in adapted_layers(work.model, work.adapter).values())
    return 4 * (weights or work.model.parameters)


def _mapped_in_fp32(model: ModelFacts) -> bool:
    return model.parameter_bytes > 3 * model.parameters


def _spreading_bytes(work: Workload) -> int:
    """Return the host memory of a node while it reads a model for tensor, pipeline or sequence parallelism, whose
    processes compare answers before and after: each has the model in fp32, which is not in memory only where the files
    are in fp32, too. Tensor ranks then copy their shards of the layers of their stages.
    """
    whole, processes, tensor = 4 * work.model.parameters, work.world.processes_per_node, work.strategy.tensor
    stages = 1 if work.strategy.pipeline is None else work.strategy.pipeline.degree
    shards = whole * processes // (tensor * stages) if tensor > 1 else 0
    return (whole if _mapped_in_fp32(work.model) else whole * processes) + shards


def _saving_bytes(work: Workload) -> int:
    """Return the host memory of a checkpoint, or of the trained model, on a node beside offloaded state.

    Each process writes its own part, in pieces (`finetune_trainer.tensor_files`). DeepSpeed's have theirs in flat
    buffers, of which torch.save copies a whole one from the device: the fp32 master copy. At the end the weights are
    gathered one at a time into a file, which is mapped. Experts are divided in one piece for the model's own form of
    files. An adapter is merged into the model in fp32, which is loaded again for that.
    """
    trained, processes = trained_parameters(work.model, work.adapter).trained, work.world.processes_per_node
    checkpoint = SAVED_PIECE_BYTES * processes
    if work.deepspeed and work.strategy.offload_optimizer == "none":
        writers, shards = (processes, work.world.size) if work.strategy.zero_stage else (1, 1)
        checkpoint += 4 * trained * writers // shards
    whole = work.adapter is not None or work.model.idle_parameters
    return max(checkpoint, 4 * (work.model.parameters if whole else largest_layer(work.model)))


def _formula(per_parameter: str, count: int, ranks: float) -> str:
    factor = f"{per_parameter} x " if per_parameter else "x "
    return f"{factor}{count:,}" + (f" / {ranks:.4g} ranks" if ranks > 1 else "")


def _shape(work: Workload) -> ActivationShape:
    return activation_shape(work.model.model_type, work.model.linear_layers)


def _unfused_scores(work: Workload) -> float:
    """Return the elements saved for each token and head, per token of length; 0 if attention is fused.

    On CPU, PyTorch has a fused kernel only without dropout, so that models with attention dropout save their scores
    there.
    """
    shape = _shape(work)
    on_cpu = work.world.device == "cpu" and shape.attention_dropout
    fused = shape.fused_attention and work.model.fused_attention
    return 0.0 if fused and not on_cpu else shape.score_tensors


def _mask_bytes_per_token(work: Workload) -> int:
    """Return the bytes of fused attention's mask for one token: an element for each token of the whole sequence.

    If rows are padded or packed, transformers creates one boolean mask for all layers, and torch's
    `scaled_dot_product_attention` saves one of the queries' type for each layer. A single row needs none, nor do packs
    whose rows are computed by themselves.
    """
    if _unfused_scores(work) or work.rows_apart or not (work.packed or work.micro_batch * work.sequences > 1):
        return 0
    # In attention a process has whole sequences of some heads, elsewhere slices with all of them.
    return work.length * work.compute_bytes * work.strategy.sequence


def activation_bytes_per_token(work: Workload) -> int:
    """Return the bytes that one layer saves for the backward pass, for one token.

    Korthikanti et al. (2022), section 4.1, with element widths set apart: norms keep fp32 inputs under autocast, and
    RMS norms in any case; autocast casts an input once for each layer that reads it; dropout masks are one byte on GPUs
    and a whole element on CPU, and unfused attention keeps its scores in fp32 on CPU.
    """
    shape, model = _shape(work), work.model
    mask = 1 if work.world.device == "cuda" else work.compute_bytes
    # Every tensor rank has the full inputs of queries, of the feed-forward layer and of norms, and the full masks;
    # other activations are split (Korthikanti et al., section 4.2).
    tensor = work.strategy.tensor
    hidden = min(shape.hidden, 2) + max(0, shape.hidden - 2) / tensor
    if model.key_value_heads is not None and work.world.device == "cuda" and not _mask_bytes_per_token(work):
        # Fused attention without a mask takes keys and values as they are, otherwise transformers repeats them for each
        # query head (`transformers.integrations.sdpa_attention.use_gqa_in_sdpa`).
        hidden -= 2 * (1 - model.key_value_width / model.hidden_size) / tensor
    if work.rows_apart and (
        work.world.device == "cpu" or work.precision in ("fp32", "fp16") or shape.attention_dropout
    ):
        # Attention is called for each row, and its outputs are joined: both stay. fp16 is for GPUs that have no flash
        # attention in one call.
        hidden += 1 / tensor
    # Queries, and the attention's output, may be wider than the hidden states.
    wider = _query_width(model) / model.hidden_size - 1
    hidden += 2 * wider / tensor
    norms = shape.norm_inputs * work.wide + shape.norm_casts * (4 - work.wide)
    norms += wider * shape.query_norms * (work.wide + (4 - work.wide) / 2)
    frozen = work.adapter is not None and work.adapter.method != "dora"  # DoRA keeps a little more than is counted
    if frozen and work.strategy.activation_checkpointing == "none" and shape.norm_inputs > LAYER_NORMS:
        # A norm of several operations keeps its normalised input for the gradient of its weight, which is frozen here.
        # A layer that is recomputed has it for a moment.
        norms -= shape.norm_inputs / 2 * work.wide
    norms /= _norm_slices(work)
    # With dropout before an adapter's matrices their inputs are counted there; a frozen layer keeps none.
    casts = shape.shared_inputs if work.autocast and not (work.adapter and work.adapter.dropout) else 0
    fp32 = shape.feed_forward_fp32 if work.autocast and work.world.device == "cuda" else 0
    feed_forward = shape.feed_forward * work.compute_bytes + fp32 * (4 - work.compute_bytes)
    routed = 0.0
    if model.idle_parameters and work.world.device == "cuda":
        # The experts' products are outside of autocast: in the type of their weights.
        width = 4 if work.autocast else work.compute_bytes
        feed_forward = shape.feed_forward * width
        # Inputs sorted by expert, which frozen experts do not need again, and outputs.
        routed = (1 if work.adapter else 2) * width * experts_of_a_token(model)
    linear = (
        model.hidden_size * (norms + routed + (hidden + casts) * work.compute_bytes + shape.dropout_masks * mask)
        + model.intermediate_size * feed_forward / tensor
    )
    attention = model.attention_heads / tensor * _score_bytes_per_token(work)
    return int(linear + attention + _mask_bytes_per_token(work) + _adapter_bytes_per_token(work, mask))


def _norm_slices(work: Workload) -> int:
    """Return the processes that share the tokens of a row in norms and between layers, under tensor parallelism
    (`finetune_trainer.strategies.sequence_norms`).
    """
    sliced = work.strategy.pipeline is None and work.model.model_type in SLICED_NORM_FAMILIES
    return work.strategy.tensor if sliced else 1


def experts_of_a_token(model: ModelFacts) -> float:
    """Return the number of experts of a layer that a token passes; 0 for a model without experts."""
    weights = model.layers * model.block_parameters - sum(each.weights for each in model.linear_layers.values())
    return model.experts * max(0.0, 1 - model.idle_parameters / weights) if model.experts and weights > 0 else 0.0


def _query_width(model: ModelFacts) -> int:
    """Return the elements of one token's queries in a layer; the hidden size if the layer is not known."""
    queries = model.linear_layers.get("self_attn.q_proj")
    return queries.outputs // model.layers if queries is not None else model.hidden_size


def _score_bytes_per_token(work: Workload) -> float:
    """Return the bytes of the scores that one head saves for one token; 0 if attention is fused."""
    shape, length = _shape(work), work.length
    if shape.gpu_score_bytes is not None and work.world.device == "cuda":
        # Autocast computes the softmax in fp32; 16-bit weights leave it in 16 bits.
        each = shape.gpu_score_bytes - (0 if work.autocast or work.compute_bytes == 4 else 2)
        return length * each + RELATIVE_POSITIONS * shape.gpu_relative_bytes
    score_width = 4 if work.world.device == "cpu" else work.compute_bytes
    scores = _unfused_scores(work)
    if shape.fused_attention and not work.model.fused_attention:
        # transformers' own attention computes the softmax in fp32, and saves it.
        scores += (4 - score_width) / score_width
    dropped = (4 if work.world.device == "cpu" else 1) if scores and shape.attention_dropout else 0
    return (shape.attention_window or length) * (scores * score_width + dropped)


def _adapter_bytes_per_token(work: Workload, mask: int) -> float:
    """Return the bytes that the adapters of one layer save for one token, beside those of the frozen layer.

    Between A and B `rank` elements; with dropout the input of A and its mask, one for each layer; with DoRA both
    products that the magnitudes scale. As in peft 0.21 (`tuners/lora/variants.py`), compared with torch's saved tensors
    in tests/unit/test_planning_adapters.py. The frozen layer saves a little less than is counted.
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


def _kept_bytes_per_token(work: Workload) -> tuple[int, str]:
    """Return the bytes that one layer keeps for one token between its forward and backward pass, and a description.

    Selective checkpointing keeps a layer's input and the results of its matrix products with weights and of fused
    attention (`finetune_trainer.training.activations`); a layer with unknown linear layers counts as four square ones
    and two of the feed-forward layer.
    """
    model, width, wide = work.model, work.compute_bytes, work.wide
    match work.strategy.activation_checkpointing:
        case "none":
            layer = work.saved_per_token
            return layer, f"{layer:,}"
        case "full":
            return model.hidden_size * wide // _norm_slices(work), "layer inputs"
        case "selective":
            outputs = sum(each.outputs for each in model.linear_layers.values()) // model.layers
            outputs = outputs or 5 * model.hidden_size + model.intermediate_size
            if work.adapter is not None:
                adapted = adapted_layers(model, work.adapter).values()
                outputs += sum(each.outputs for each in adapted) // model.layers + len(adapted) * work.adapter.rank
            fused = 0 if _unfused_scores(work) else model.hidden_size
            kept = model.hidden_size * wide // _norm_slices(work) + (outputs + fused) * width
            return kept, f"{kept:,} of inputs and products"


def _activations(work: Workload, moment: Moment) -> tuple[MemoryTerm, int]:
    """Return the activations on the device at `moment`, and the bytes of offloaded activations."""
    model, length = work.model, slice_tokens(work.length, work.strategy.sequence)
    tokens = work.micro_batch * work.sequences * length
    layer = work.saved_per_token
    ends = 3 * model.hidden_size * work.wide  # embedding output, its norm and dropout; the final norm
    judged = _chunk(work) or tokens
    judges = work.task in LANGUAGE_TASKS and work.end != "first"
    # A loss in chunks has the logits of a tensor rank's part of the vocabulary.
    vocabulary = model.vocabulary_size // (work.strategy.tensor if _chunk(work) else 1)
    logits = judged * vocabulary * _logit_bytes(work, moment) if judges else 0
    kept, what = _kept_bytes_per_token(work)
    pipeline = work.strategy.pipeline
    layers, kept_at_once = work.layers - (moment == "reduction"), _kept_at_once(work, moment)
    recomputes = work.strategy.activation_checkpointing != "none" and moment in _BACKWARD
    if moment in _BACKWARD and work.world.device == "cuda":
        ends += _passing_bytes_per_token(work)
    again = max(0, layer - kept) if work.strategy.activation_checkpointing == "selective" else layer
    words = f"{layers} {what}" if what == "layer inputs" else f"{layers} layers x {what}"
    words += f" + 1 layer of {again:,}" if recomputes else ""
    total, offloaded = layers * kept * kept_at_once + (again if recomputes else 0) + ends, 0
    if work.strategy.offload_activations != "none" and work.world.device == "cuda":
        # Only the layer that computes is on the device; none does while the loss is computed.
        computing = layer if moment in ("forward", *_BACKWARD) else 0
        words, total, offloaded = f"{1 if computing else 0} layers of {layer:,}", computing + ends, layers * kept
    if moment == "ends":
        total, logits = layers * kept * kept_at_once, 0
    passed = "" if pipeline is None else f", {kept_at_once:.3g} micro-batches at once"
    each = f" x {work.sequences} sequences" if work.sequences > 1 else ""
    part = "" if length == work.length else f" of {work.length}"
    words = f"{work.micro_batch} rows{each} x {length}{part} tokens x ({words} + ends {ends:,}){passed}"
    if logits:
        words += f" + {judged:,} x {vocabulary:,} logits x {_logit_bytes(work, moment)}"
    return MemoryTerm(name="activations", bytes=int(tokens * total) + logits, formula=words), int(tokens * offloaded)


def _kept_at_once(work: Workload, moment: Moment) -> float:
    """Return the micro-batches whose activations and 16-bit copies of weights a process has at once. Those of the one
    whose backward pass has ended are gone.
    """
    if work.strategy.pipeline is None:
        return 0 if moment == "ends" else 1
    return max(0, in_flight(work.strategy.pipeline, work.end or "first") - (moment == "ends"))


def _passing_bytes_per_token(work: Workload) -> int:
    """Return the bytes of gradients inside a layer, for one token of its backward pass on a GPU.

    Autocast: gradients of the feed-forward layer's two products, and of what it computes in fp32 between them. With
    16-bit weights one and a half, where several operations lie between both; others take the place of activations.
    Attention that is not fused has two gradients of its scores besides, in the type of the scores and in fp32.
    """
    model, shape, tensor = work.model, _shape(work), work.strategy.tensor
    if work.autocast:
        wide = int(2 * work.compute_bytes + 4 * shape.feed_forward_fp32)
    else:
        narrow = work.precision in ("bf16", "fp16") and shape.feed_forward > 3
        wide = 3 * work.compute_bytes // 2 if narrow else 0
    passing = model.intermediate_size * wide // tensor
    if _unfused_scores(work) and shape.gpu_score_bytes is None:
        attended = shape.attention_window or work.length
        passing += model.attention_heads * attended * (work.compute_bytes + 4) // tensor
    return passing


def _chunk(work: Workload) -> int:
    """Return the tokens for which logits are computed at a time (`finetune_trainer.training.chunked_loss`); 0: all."""
    if work.whole_logits or not chunks_loss(
        tensor=work.strategy.tensor, staged=work.strategy.pipeline is not None, plain=work.plain_loss
    ):
        return 0
    if work.task not in CHUNKED_LOSS_TASKS or work.model.model_type not in CHUNKED_LOSS_FAMILIES:
        return 0
    tokens = work.micro_batch * work.sequences * slice_tokens(work.length, work.strategy.sequence)
    chunk = loss_tokens(work.model.vocabulary_size)
    return chunk if chunk < tokens else 0


def loss_chunk_tokens(work: Workload) -> int:
    """Return the tokens for which the trainer computes logits and loss at a time; 0: for all at once."""
    return _chunk(work)


def _logit_bytes(work: Workload, moment: Moment) -> int:
    """Return the bytes of one logit: at the end of the forward pass itself, its fp32 form and the log-probability; for
    the loss's backward pass the log-probability and two gradients in fp32, those of torch's `nll_loss` and
    `log_softmax`; then its gradient.

    Decoders convert their logits to fp32, and autocast does so for all. Otherwise the loss computes in the type of the
    logits, and FSDP returns them in fp32; BART's have a bias in fp32 there. Gemma 2 keeps the tanh of its logits.
    """
    width, decoder = work.compute_bytes, work.task in ("text-generation", "preference-tuning")
    capped = width if work.model.model_type == "gemma2" else 0
    sharded = work.strategy.name == "fsdp"
    family = work.model.model_type
    wide = decoder or work.autocast or family in FP32_LOSSES or (sharded and family in BIASED_LOGITS)
    wide = wide and not work.narrow_loss
    loss = 4 if wide else width
    match moment:
        case "forward":
            returned = 4 if sharded and loss < 4 else 0
            return capped + width + (2 * loss if wide else loss) + returned
        case "loss":
            return capped + 3 * loss
        case "head":
            return width
    return 0


def gathered_bytes(largest_layer_parameters: int, width: int) -> int:
    """Return the bytes of weights and gradient of the largest layer that ZeRO-3 gathers in full.

    As in `estimate_zero3_model_states_mem_needs`: 4 bytes a parameter with 16-bit weights.
    """
    return 2 * width * largest_layer_parameters


def largest_layer(model: ModelFacts) -> int:
    """Return the parameters of the largest unit that is gathered at once: the embeddings or one block."""
    return max(model.embedding_parameters, model.block_parameters)


FP8_ROUNDING_BYTES = 12
"""Bytes for each element of a tensor that torchao 0.18 rounds: its scaled and clipped forms in fp32 and results in fp8.
Measured as the excess of one layer's pass over the same in bf16: 7 to 11 without torch.compile, which creates none of
them.
"""


def _rounded(work: Workload) -> MemoryTerm | None:
    """Return the temporary memory to round the largest factor of a product to fp8.

    torchao saves the same tensors as layers in bf16, inputs in 16 bits, and rounds them again in the backward pass.
    """
    if work.precision != "fp8":
        return None
    model = work.model
    layer = largest_linear(model) or model.hidden_size * model.intermediate_size
    # `inputs` and `outputs` are sums over the n layers of a name: n i o / n o = i.
    counted = [each for each in model.linear_layers.values() if each.weights]
    sides = [each.weights // side for each in counted for side in (each.inputs, each.outputs)]
    tokens = work.micro_batch * work.sequences * work.length
    elements = max(layer, tokens * max(sides, default=max(model.hidden_size, model.intermediate_size)))
    words = f"{FP8_ROUNDING_BYTES} x {elements:,} of the largest {'weight' if elements == layer else 'input or output'}"
    return MemoryTerm(name="rounding to fp8", bytes=FP8_ROUNDING_BYTES * elements, formula=words)


def _padded(work: Workload) -> float:
    """Return the size of a block that FSDP gathers, divided by that of its weights. FSDP divides a weight by its first
    dimension, experts by their number: with more shards than experts it pads them.
    """
    model, shards = work.model, work.shards
    if work.strategy.name != "fsdp" or not model.experts:
        return 1.0
    return -(-model.experts // shards) * shards / model.experts


def _root(model: ModelFacts) -> int:
    """Return the parameters outside of the blocks: embeddings and head."""
    return max(0, model.parameters - model.layers * model.block_parameters)


def _apart(work: Workload) -> bool:
    """Return whether FSDP gathers embeddings and head as groups of their own: those of a decoder that share no weight
    (`finetune_trainer.strategies.fsdp_groups`).
    """
    decoder = work.task in ("text-generation", "preference-tuning")
    return work.strategy.name == "fsdp" and decoder and not work.model.tied_embeddings


def reshards_head(work: Workload) -> bool:
    """Return whether FSDP releases the weights of a head between its forward and its backward pass."""
    return _apart(work) and work.strategy.fsdp_sharding != "grad-op" and not work.shards_stages


def _gathered(work: Workload, moment: Moment) -> MemoryTerm | None:
    """Return the weights that a process has whole: with fully_shard the root from forward to backward, or the head
    until its gradient is reduced, the block that computes and the prefetched one, or all of its stages during a pass;
    with ZeRO-3 the largest layers.
    """
    model, width = work.model, work.compute_bytes
    if work.shards_stages:
        if moment in ("load", "step"):
            return None
        return MemoryTerm(name="gathered blocks", bytes=width * work.held, formula=f"{width} x {work.held:,} of a pass")
    if work.strategy.name == "fsdp" and moment not in ("load", "ends", "step"):
        tensor = work.strategy.tensor
        root = _root(model) // tensor
        if _apart(work):
            kept = model.embedding_parameters // tensor if work.strategy.fsdp_sharding == "grad-op" else 0
            root = kept + (0 if moment in _BACKWARD else work.head)
        blocks = 2 if moment in ("forward", *_BACKWARD) else 1
        if work.strategy.fsdp_sharding == "grad-op":
            blocks = model.layers
        packed = work.four_bit // model.layers
        block = int(max(0, model.block_parameters - packed) * _padded(work)) // tensor
        size, words = width * (root + blocks * block), f"{width} x ({root:,} of embeddings and head + {blocks} x "
        words += f"{block:,} of a block)"
        if packed:
            size += int(PACKED_BYTES * blocks * packed)
            words += f" + {PACKED_BYTES} x {blocks} x {packed:,} in 4 bits"
        return MemoryTerm(name="gathered blocks", bytes=size, formula=words)
    if work.deepspeed and work.strategy.zero_stage == 3:
        layer = largest_layer(model)
        if model.idle_parameters:
            # Experts of a block are two weights, each gathered into a copy. Two blocks stay for their next use, as
            # `stage3_max_live_parameters` is set, unless a backward pass has gathered others.
            blocks = min(model.layers + 1, 5) if moment in ("forward", "loss", "head") else 3
            size, words = blocks * work.weight_bytes * layer, f"{blocks * work.weight_bytes} x {layer:,} of a block"
            return MemoryTerm(name="gathered blocks", bytes=size, formula=words)
        words = f"{2 * work.weight_bytes} x {layer:,} of the largest layer"
        return MemoryTerm(name="gathered blocks", bytes=gathered_bytes(layer, work.weight_bytes), formula=words)
    return None


def _whole_gradients(work: Workload, moment: Moment) -> MemoryTerm | None:
    """Return the gradients that are not yet added to those of earlier micro-batches, or not yet reduced.

    Autocast computes those of a weight in 16 bits and casts them to fp32. fully_shard keeps the root's until the end of
    the backward pass, and copies what it reduces, in fp32, into one buffer. Frozen weights have none. A loss in chunks
    adds up the head's: in place where autocast casts them, else into a third tensor.
    """
    if work.adapter is not None:
        return None
    model, width = work.model, work.compute_bytes
    if work.shards_stages:
        if moment in ("load", "step"):
            return None
        # Sums over the micro-batches of a pass, in the type in which they are reduced.
        return MemoryTerm(name="whole gradients", bytes=4 * work.held, formula=f"4 x {work.held:,} of a pass")
    if work.world.device == "cpu":
        # Those of one weight are small beside the shares that were measured; FSDP holds those of a block.
        if work.strategy.name != "fsdp":
            return None
        held = (_root(model) + model.block_parameters) // work.strategy.tensor
        words = f"{width} x {held:,} of embeddings, head and a block"
        return MemoryTerm(name="whole gradients", bytes=width * held, formula=words)
    # torch computes the gradient of embeddings that are split over the vocabulary whole.
    held = model.embedding_parameters if work.strategy.tensor > 1 else work.held
    embeddings, chunked = 0 if work.end == "last" else min(model.embedding_parameters, held), _chunk(work) > 0
    if moment == "loss" and chunked:
        return MemoryTerm(
            name="whole gradients", bytes=width * work.head, formula=f"{width} x {work.head:,} of the head"
        )
    sized = _fsdp_gradients(work, moment, chunked) if work.strategy.name == "fsdp" else None
    if work.strategy.name != "fsdp":
        each = (4 if chunked else width + 4) if work.autocast else (3 * width if chunked else width)
        match moment:
            case "head":
                sized = each * work.head, f"{each} x {work.head:,} of the head"
            case "layers" if model.idle_parameters and work.deepspeed and work.strategy.zero_stage in (0, 1, 2):
                sized = width * model.block_parameters, f"{width} x {model.block_parameters:,} of a block"
            case "layers" if model.idle_parameters and work.autocast and work.accumulates:
                experts = largest_weight(model)
                sized = 4 * experts, f"4 x {experts:,} of a block's experts"
            case "ends" if work.accumulates:
                # Tied embeddings have the head's gradient, their own, and the sum of both.
                each = work.weight_bytes * (3 if model.tied_embeddings and work.head and work.autocast else 1)
                sized = each * embeddings, f"{each} x {embeddings:,} of the embeddings"
    if sized is None or not sized[0]:
        return None
    return MemoryTerm(name="whole gradients", bytes=sized[0], formula=sized[1])


def _fsdp_gradients(work: Workload, moment: Moment, chunked: bool) -> tuple[int, str] | None:
    """Return the bytes of the gradients that FSDP holds whole at `moment`, and their formula; None: there are none."""
    model, width, tensor = work.model, work.compute_bytes, work.strategy.tensor
    match moment:
        case "head":
            each = 3 * width if chunked else width
            return each * work.head, f"{each} x {work.head:,} of the head"
        case "layers":
            block = model.block_parameters // tensor
            if _apart(work):
                return 4 * work.head + width * block, f"4 x {work.head:,} of the head + {width} x {block:,} of a block"
            return width * (work.head + block), f"{width} x {work.head + block:,} of the head and a block"
        case "reduction" if _apart(work):
            block = model.block_parameters // tensor
            padded = int(model.block_parameters * _padded(work)) // tensor
            return width * block + 4 * padded, f"{width} x {block:,} + 4 x {padded:,} of a block"
        case "reduction":
            block = model.block_parameters // tensor
            padded = int(model.block_parameters * _padded(work)) // tensor
            words = f"{width} x {work.head:,} of the head + {width} x {block:,} + 4 x {padded:,} of a block"
            return width * (work.head + block) + 4 * padded, words
        case "ends":
            root = _root(model) // tensor
            if _apart(work):
                root = max(0, root - work.head)
                return (width + 4) * root, f"{width + 4} x {root:,} of embeddings"
            return (width + 4) * root, f"{width + 4} x {root:,} of embeddings and head"
        case _:
            return None


def _undivided(work: Workload) -> MemoryTerm | None:
    """Return the gradient of the largest weight where ZeRO-2 keeps it whole: a process keeps its part of a gradient in
    the memory of the gradient that was reduced, and one above the bucket's size was reduced by itself.
    """
    if work.strategy.zero_stage != 2 or work.world.device == "cpu" or work.strategy.offload_optimizer != "none":
        return None
    weight = largest_weight(work.model)
    more = weight - work.trained // work.shards
    if work.adapter is not None or weight <= REDUCE_BUCKET_ELEMENTS or more <= 0 or not work.accumulates:
        return None
    words = f"{work.weight_bytes} x {more:,} that others keep of the largest weight"
    return MemoryTerm(name="undivided gradient", bytes=work.weight_bytes * more, formula=words)


def largest_weight(model: ModelFacts) -> int:
    """Return the elements of the largest weight: of the embeddings, of a linear layer, or of a block's experts, of
    which two thirds are one.
    """
    experts = 2 * model.block_parameters // 3 if model.idle_parameters else 0
    return max(model.vocabulary_size * model.hidden_size, largest_linear(model), experts)


def _secondary(work: Workload) -> MemoryTerm | None:
    """Return the secondary shards of ZeRO++, from which backward passes gather within the node (Wang et al., "ZeRO++",
    2023, section 3.2)."""
    if work.secondary_shards == 1 or work.strategy.zero_stage != 3:
        return None
    width = work.weight_bytes
    return MemoryTerm(
        name="secondary shards",
        bytes=_shards(work.held, width, work.secondary_shards),
        formula=_formula(str(width), work.held, work.secondary_shards),
    )


def reduce_bucket_elements(parameters: int) -> int:
    """Return the elements of DeepSpeed's reduce and all-gather buckets: at most those of the model."""
    return min(parameters, REDUCE_BUCKET_ELEMENTS)


def overlaps_communication(device: Device) -> bool:
    """Return whether DeepSpeed overlaps reduction with computation; a CPU has no second stream for it."""
    return device == "cuda"


def _buffers(work: Workload) -> MemoryTerm | None:
    count = work.trained
    if work.strategy.model_ranks > 1:
        if work.replicas == 1 or work.strategy.name == "fsdp":
            return None
        bucket = min(count, AVERAGED_ELEMENTS)
        return MemoryTerm(name="communication buffers", bytes=4 * bucket, formula=f"averaged gradients 4 x {bucket:,}")
    if work.strategy.name == "ddp":
        # Gradients are views of the buckets of DistributedDataParallel; those of earlier micro-batches are beside the
        # buckets until they are reduced.
        if work.world.device == "cpu":
            # gloo copies what it sends, so that buckets are there twice.
            copies = 2 if work.accumulates else 1
            words = f"{copies} x gradient buckets 4 x {count:,}"
            return MemoryTerm(name="communication buffers", bytes=copies * 4 * count, formula=words)
        if not work.accumulates:
            return None
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


def _autocast_copies(work: Workload, moment: Moment) -> MemoryTerm | None:
    """Return the 16-bit copies of linear layers' weights.

    Autocast keeps those of trained weights until the forward pass ends, and the backward pass needs all of layers that
    are not recomputed.
    """
    at_once = _kept_at_once(work, moment)
    if not work.autocast or moment in ("load", "step") or not at_once:
        return None
    tied = work.head if work.model.tied_embeddings else 0
    there = work.four_bit + work.narrow
    count = max(0, work.model.parameters - work.model.embedding_parameters - there) + tied
    if work.model.idle_parameters:  # experts are computed in the type of their weights
        count = max(0, sum(each.weights for each in work.model.linear_layers.values()) + work.head - there)
    head = 0 if work.narrow and not tied else work.head
    if work.strategy.pipeline is not None:
        count = (work.layers * work.model.block_parameters + head) // work.strategy.tensor
    elif work.strategy.model_ranks > 1:
        count = min(count, work.held)
    cached = moment == "forward" and work.adapter is None
    if work.strategy.activation_checkpointing != "none":
        at_once = 1
        if not cached:
            count = min(count, max(0, count - head) // work.layers if moment == "layers" else head)
    # Each micro-batch of a pipeline casts the weights again.
    words = f"2 x {count:,} weights of linear layers" + (f" x {at_once:.3g} micro-batches" if at_once != 1 else "")
    return MemoryTerm(name="autocast copies", bytes=int(2 * count * at_once), formula=words)


def _moments(work: Workload, states: ModelStates) -> Iterator[tuple[MemoryTerm, ...]]:
    """Yield the terms of each moment of a step."""
    moments: tuple[Moment, ...] = ("load", "forward", "loss", "head", "layers", "ends", "step")
    if work.strategy.name == "fsdp" and work.adapter is None and work.layers > 1:
        moments = (*moments, "reduction")
    for moment in moments:
        found = [
            MemoryTerm(name="parameters", bytes=states.parameters, formula=states.parameters_formula),
            _gradients(work, states, moment),
            MemoryTerm(name="optimizer state", bytes=states.optimizer, formula=states.optimizer_formula),
        ]
        if work.world.device == "cpu" and states.offloaded:
            words = "in the memory it would have lain in anyway, as the device is the host"
            found.append(MemoryTerm(name="offloaded state", bytes=states.offloaded, formula=words))
        if moment == "load":
            found = [found[0], *_converted(work)]
        passing = moment not in ("load", "ends", "step")
        if passing or (moment == "ends" and _kept_at_once(work, moment)):
            found.append(_activations(work, moment)[0])
        extras = (
            _autocast_copies(work, moment),
            _unfolded(work) if moment in _BACKWARD else None,
            _rounded(work) if moment in _BACKWARD else None,
            _gathered(work, moment),
            _whole_gradients(work, moment),
            _undivided(work) if moment not in ("load", "step") else None,
            _secondary(work),
            _buffers(work) if moment != "load" else None,
        )
        yield (*found, *(term for term in extras if term is not None))


def _converted(work: Workload) -> Iterator[MemoryTerm]:
    """Yield the weights beside those that stay while a process converts them on its device, one after the other in the
    type of its file, and before FSDP shards the last ones, embeddings and head, one after the other if it can.
    """
    if work.world.device == "cpu" or work.deepspeed:
        return
    model = work.model
    if work.strategy.model_ranks > 1:
        more = work.held - work.held // work.shards if work.strategy.name == "fsdp" else 0
        words = f"4 x {more:,} before they are sharded"
        if work.strategy.tensor > 1:
            # Each weight is whole on the device until its slice is cut.
            whole = max(model.vocabulary_size * model.hidden_size, largest_linear(model))
            more, words = more + whole, f"{words} + 4 x {whole:,} of the largest weight"
        if more:
            yield MemoryTerm(name="conversion", bytes=4 * more, formula=words)
        return
    largest = max(model.vocabulary_size * model.hidden_size, largest_linear(model))
    width = min(4, -(-model.parameter_bytes // model.parameters))
    size, words = width * largest, f"{width} x {largest:,} of the largest weight"
    if _apart(work):
        # Both in turn: in the type of the file, and converted if that is another one.
        trained = 4 + (width if width != 4 else 0)
        frozen_head = width + (2 if width != 2 else 0) if work.narrow else trained
        size = max(trained * model.embedding_parameters, frozen_head * work.head)
        words = f"the larger one of embeddings {trained} x {model.embedding_parameters:,} and head {frozen_head} x "
        words += f"{work.head:,}"
    elif work.strategy.name == "fsdp":
        frozen = work.head if work.narrow and not model.tied_embeddings else 0
        size += 4 * _root(model) - 2 * frozen
        words += f" + 4 x {_root(model):,} of embeddings and head"
    yield MemoryTerm(name="conversion", bytes=size, formula=words)


def _gradients(work: Workload, states: ModelStates, moment: Moment) -> MemoryTerm:
    """Return the gradients that stay until the optimizer's step: with one micro-batch, none before a backward pass."""
    size, words = states.gradients, states.gradients_formula
    if states.stepping and moment != "step":
        size, words = size - states.stepping, words.partition(" + fp32 copy")[0]
    reused = work.strategy.name in ("ddp", "deepspeed")
    if not work.accumulates and not reused and moment in ("forward", "loss", "head", *_BACKWARD):
        # The layers' gradients take the place of their activations; FSDP's are in `_whole_gradients`.
        first = work.head if moment == "layers" and work.strategy.name != "fsdp" and work.adapter is None else 0
        size, words = 4 * first, f"4 x {first:,}, the others after their activations"
    return MemoryTerm(name="gradients", bytes=size, formula=words)


def _fullest(work: Workload, states: ModelStates) -> list[MemoryTerm]:
    """Return the terms of the fullest moment. On a CPU the C library keeps the memory of each, so that every term
    counts as it is at most.
    """
    moments = list(_moments(work, states))
    if work.world.device == "cuda":
        return list(max(moments, key=lambda terms: sum(term.bytes for term in terms)))
    most: dict[str, MemoryTerm] = {}
    for term in (each for terms in moments for each in terms):
        if term.name not in most or term.bytes > most[term.name].bytes:
            most[term.name] = term
    return list(most.values())


def estimate(work: Workload, capacity_bytes: int) -> MemoryEstimate:
    """Estimate the memory of one process of `work` on a device (on CPU, a share of a node) of `capacity_bytes`: of a
    pipeline, that of the fuller one of its ends.
    """
    if work.strategy.pipeline is not None and work.end is None:
        ends: tuple[PipelineEnd, ...] = ("first", "last")
        both = [estimate(replace(work, end=end), capacity_bytes) for end in ends]
        return max(both, key=lambda made: made.total_bytes)
    states = model_states(work)
    on_cpu = work.world.device == "cpu"
    processes = work.world.processes_per_node
    terms = _fullest(work, states)
    if on_cpu:
        share, subject, words = (
            CPU_ALLOCATOR_SHARE,
            [each for each in terms if each.name == "activations"],
            "activations",
        )
    else:
        share, subject = ALLOCATOR_SHARE, [term for term in terms if term.name not in RESIDENT]
        words = "what a step allocates"
    lost = int(share * sum(term.bytes for term in subject))
    terms.append(MemoryTerm(name="allocator", bytes=lost, formula=f"{share:.0%} of {words}"))
    if on_cpu and work.strategy.zero_stage == 3:
        size = CPU_ZERO3_WEIGHTS * work.weight_bytes * work.held
        words = f"{CPU_ZERO3_WEIGHTS} x {work.weight_bytes} x {work.held:,}, divided and gathered for checkpoints"
        terms.append(MemoryTerm(name="whole weights", bytes=size, formula=words))
    fixed = CPU_PROCESS_BYTES + CPU_TRAINING_BYTES if on_cpu else CUDA_CONTEXT_BYTES
    if on_cpu and work.deepspeed:
        fixed += CPU_DEEPSPEED_BYTES
    words = "interpreter and libraries, measured" if on_cpu else "CUDA context, cuBLAS and NCCL"
    terms.append(MemoryTerm(name="process", bytes=fixed, formula=words))
    total = sum(term.bytes for term in terms)
    moved = _activations(work, "layers")[1]
    # The largest of three that do not overlap: reading the weights, activations, a checkpoint between steps.
    offloaded = max(
        states.host, (states.offloaded + moved) * processes, states.offloaded * processes + _saving_bytes(work)
    )
    host = total * processes if on_cpu else CPU_PROCESS_BYTES * processes + offloaded
    return MemoryEstimate(
        terms=tuple(terms),
        total_bytes=total,
        capacity_bytes=capacity_bytes,
        host_bytes=host,
        disk_bytes=states.disk * processes,
    )


def inference_bytes(
    model: ModelFacts,
    task: Task,
    precision: InferencePrecision,
    *,
    tokens: int,
    length: int,
    cached: int,
    devices: int = 1,
    tensor: bool = False,
) -> int:
    """Return the memory that one process with the whole model takes of each of its GPUs, on batches of `tokens` padded
    tokens, in rows of `length`; `cached`: tokens whose keys and values are in the cache while it generates. `tensor`:
    several processes with a GPU each, which split each layer.

    Over several `devices` each GPU has whole layers with their keys and values. transformers fills a GPU up to its
    share and 1.25 times the largest unit, a block or the embeddings (`get_balanced_memory` in its
    `integrations/accelerate.py`). With `tensor` each has a share of all layers and their heads; most plans of
    transformers keep the embeddings whole, and logits are gathered.

    Activations are those of one layer at a time, at most as many as training saves. Logits are there in full, and twice
    if the model computes a loss of its own, as text-to-text models do; a decoder computes `REQUESTED_LOGITS` at a time,
    and the next ones before the last are freed. `JUDGED_LOGITS` have a copy, its float32 form and the
    log-probabilities; scoring and generation do not overlap. Weights are allocated once, in blocks of their size: only
    temporary memory is subject to the allocator's losses.
    """
    alone = World(nodes=1, processes_per_node=1, device="cuda", threads_per_process=1)
    work = Workload(
        model=model,
        task=task,
        strategy=Strategy(name="single"),
        precision=precision,
        optimizer="sgd",
        world=alone,
        micro_batch=max(1, tokens // length),
        length=length,
        casts=False,
    )
    width, judged = work.compute_bytes, 0
    if task in LANGUAGE_TASKS:
        logits, copies = tokens * model.vocabulary_size, 2 if task in ("summarization", "translation") else 1
        there = (
            min(logits, 2 * REQUESTED_LOGITS) if task in ("text-generation", "preference-tuning") else copies * logits
        )
        judged = width * there + (width + 8) * min(logits, JUDGED_LOGITS)
    layers = -(-model.layers // devices)
    kept = cached * 2 * layers * model.key_value_width * width
    passing = tokens * activation_bytes_per_token(work) + max(judged, kept)
    held = model.parameters
    if tensor:
        held = min(held, -(-(held - model.embedding_parameters) // devices) + model.embedding_parameters)
    elif devices > 1:
        held = min(held, -(-held // devices) + 5 * largest_layer(model) // 4)
    return width * held + int((1 + ALLOCATOR_SHARE) * passing) + CUDA_CONTEXT_BYTES

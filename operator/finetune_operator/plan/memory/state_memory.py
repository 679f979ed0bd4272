"""Memory of weights, gradients and optimizer state, and of reading and saving them."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_contract.choices import OptimizerName
from finetune_contract.facts import ModelFacts
from finetune_contract.plans import SAVED_PIECE_BYTES
from finetune_operator.plan.memory.adapter_sizes import (
    FOUR_BIT_BYTES,
    PACKED_BYTES,
    SCALE_BYTES,
    adapted_layers,
    largest_linear,
    trained_parameters,
)
from finetune_operator.plan.memory.memory_workload import Workload, largest_layer, padding_factor, size_formula

SUB_GROUP_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of sub_group_size: elements of a shard that ZeRO-3 steps, with fp32 gradients, at a time."""
NVME_SUB_GROUP_ELEMENTS = 50_000_000
"""Elements in memory at a time of a shard with its optimizer state in files; the default above would be all of it."""
NVME_OPTIMIZER_BUFFERS = 4
"""DeepSpeed's default of buffers: one for each of AdamW's states, with the master copy and the gradient."""
NVME_PARAMETER_BUFFERS = 5
"""DeepSpeed's default of buffers for parameters read from files."""


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


def sharded_bytes(count: int, per_parameter: float, ranks: float) -> int:
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
    divided: float = work.shards / padding_factor(work) if work.strategy.name == "fsdp" else 1
    sizes = (
        sharded_bytes(held, 4, divided),
        sharded_bytes(count, 4, divided),
        sharded_bytes(work.stepped, state, divided),
    )
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
            gradients_formula=size_formula("4", count, divided),
            optimizer_formula=size_formula(f"{state:.3g}", count, divided),
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
        parameters_formula=size_formula("4", held, divided) + part,
        gradients_formula=size_formula("4", count, divided) + part,
        optimizer_formula=size_formula(f"{state:.3g}", work.stepped, divided) + part,
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
    parameters, parameters_formula = (
        sharded_bytes(held, width, by_parameters),
        size_formula(str(width), held, by_parameters),
    )
    stepping = fp32_copy * stepped
    gradients = sharded_bytes(count, width, by_gradients) + stepping
    gradients_formula = f"{size_formula(str(width), count, by_gradients)} + fp32 copy {fp32_copy} x {stepped:,}"
    optimizer = sharded_bytes(count, 4 + state, by_optimizer)
    optimizer_formula = f"(master copy 4 + {state:.3g}) {size_formula('', count, by_optimizer)}"
    # Gradients leave through the reduce buckets as they are computed; their fp32 copy, the master copy and the moments
    # are with the optimizer, which steps on the host.
    match work.strategy.offload_optimizer:
        case "cpu":
            offloaded += sharded_bytes(count, fp32_copy + 4 + state, ranks)
            gradients, stepping, optimizer, gradients_formula, optimizer_formula = 0, 0, 0, _HOST, _HOST
        case "nvme":
            group = min(count // ranks, NVME_SUB_GROUP_ELEMENTS)
            offloaded += sharded_bytes(count, fp32_copy, ranks) + NVME_OPTIMIZER_BUFFERS * 4 * group
            disk += sharded_bytes(count, fp32_copy + 4 + state, ranks)
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
            return int(4 * work.held / divided), size_formula("4", work.held, divided)
        return 4 * work.held + int(packed), f"4 x {work.held:,}, read and merged whole, + {words}"
    wide = work.held - work.four_bit - work.narrow
    terms = [f"4 x {wide:,}"]
    terms += [f"2 x {work.narrow:,} frozen"] if work.narrow else []
    whole = " + ".join(terms)
    if divided > 1:
        whole = f"({whole}) / {divided:.4g} ranks"
    size = int((4 * wide + 2 * work.narrow) / divided + packed)
    return size, f"{whole} + {words}" if work.four_bit else whole


def nvme_buffer_elements(model: ModelFacts, ranks: int) -> int:
    """Return the most elements in the shard of any weight; DeepSpeed reads a shard from its file in one piece."""
    return -(-largest_layer(model) // ranks)


def _loading_bytes(work: Workload) -> int:
    """Return the host memory of a node while its processes read the model that they train on GPUs.

    Weights stay in their files, as safetensors maps them, until each is converted on its device: the processes of a
    node share the pages, which are reclaimable (`finetune_trainer.models.stored_weights`; with transformers 5.23 and
    safetensors 0.8 the private memory of a process grows by less than 0.1 bytes a parameter). In memory are experts,
    which files hold one by one and models in one piece; weights in 4 bits, which are rounded there; those that DoRA
    takes norms of in fp32; and a part of a model that is split, while its answers are compared.
    """
    model, processes = work.model, work.world.processes_per_node
    merged = model.parameter_bytes if model.idle_parameters else 0
    packed = int(FOUR_BIT_BYTES * work.four_bit) + 4 * largest_linear(model) if work.four_bit else 0
    return (merged + packed + _normed_bytes(work)) * processes + _comparing_bytes(work)


def _normed_bytes(work: Workload) -> int:
    """Return the bytes of the weights that a process converts to fp32 for DoRA; all if the layers are not known."""
    if work.adapter is None or work.adapter.method != "dora" or _mapped_in_fp32(work.model):
        return 0
    weights = sum(layer.weights for layer in adapted_layers(work.model, work.adapter).values())
    return 4 * (weights or work.model.parameters)


def _mapped_in_fp32(model: ModelFacts) -> bool:
    return model.parameter_bytes > 3 * model.parameters


def _comparing_bytes(work: Workload) -> int:
    """Return the host memory of a node while the answers of a model are compared before and after tensor, pipeline or
    sequence parallelism: in fp32 are one block and the weights outside of blocks, except those of files in fp32.

    The answers of the whole model are computed on rank 0 alone, those of slices of rows on every process, which has all
    weights (`finetune_trainer.strategies.parallel.whole_answers`).
    """
    model, processes = work.model, work.world.processes_per_node
    spread = work.strategy.model_ranks > 1 or work.strategy.sequence > 1
    if not spread or _mapped_in_fp32(model):
        return 0
    outside = max(0, model.parameters - model.layers * model.block_parameters)
    return 4 * (outside + model.block_parameters) * (processes if work.strategy.sequence > 1 else 1)


def saving_bytes(work: Workload) -> int:
    """Return the host memory of a checkpoint, or of the trained model, on a node beside offloaded state.

    Each process writes its own part, in pieces (the trainer's `tensor_files.py`). DeepSpeed's have theirs in flat
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

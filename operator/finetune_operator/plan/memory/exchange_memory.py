"""Memory that a step takes beside states and activations: gathered weights, gradients, copies and buffers."""

from __future__ import annotations

from collections.abc import Iterator

from finetune_contract.choices import DECODER_TASKS, Device
from finetune_contract.facts import ModelFacts
from finetune_contract.plans import AVERAGED_ELEMENTS
from finetune_operator.plan.memory.activation_memory import BACKWARD, Moment, loss_chunk, micro_batches_at_once
from finetune_operator.plan.memory.adapter_sizes import PACKED_BYTES, largest_linear
from finetune_operator.plan.memory.memory_workload import Workload, largest_layer, padding_factor, size_formula
from finetune_operator.plan.memory.state_memory import ModelStates, sharded_bytes
from finetune_operator.plan.types.plan_types import MemoryTerm

REDUCE_BUCKET_ELEMENTS = 50_000_000
"""Elements of a reduce bucket; DeepSpeed's 500 million take 2 GB twice in fp32, and a tenth is ample to fill links."""
PREFETCH_BUCKET_ELEMENTS = 50_000_000
"""DeepSpeed's own default of stage3_prefetch_bucket_size."""


def dequantized_layer(work: Workload) -> MemoryTerm | None:
    """Return the weight of one layer, dequantized from 4 bits for its matrix product."""
    if not work.four_bit:
        return None
    layer = largest_linear(work.model)
    words = f"{work.compute_bytes} x {layer:,} of the largest linear layer"
    return MemoryTerm(name="unfolded layer", bytes=work.compute_bytes * layer, formula=words)


def gathered_bytes(largest_layer_parameters: int, width: int) -> int:
    """Return the bytes of weights and gradient of the largest layer that ZeRO-3 gathers in full.

    As in `estimate_zero3_model_states_mem_needs`: 4 bytes a parameter with 16-bit weights.
    """
    return 2 * width * largest_layer_parameters


FP8_ROUNDING_BYTES = 12
"""Bytes for each element of a tensor that torchao 0.18 rounds: its scaled and clipped forms in fp32 and results in fp8.
Measured as the excess of one layer's pass over the same in bf16: 7 to 11 without torch.compile, which creates none of
them.
"""


def rounding_memory(work: Workload) -> MemoryTerm | None:
    """Return the temporary memory to round the largest factor of a product to fp8.

    torchao saves the same tensors as layers in bf16, inputs in 16 bits, and rounds them again in the backward pass.
    """
    if work.precision != "fp8":
        return None
    model, tensor = work.model, work.strategy.tensor
    layer = (largest_linear(model) or model.hidden_size * model.intermediate_size) // tensor
    if work.rounded:
        layer //= work.shards  # each process rounds its shard before it is gathered
    # `inputs` and `outputs` are sums over the n layers of a name: n i o / n o = i.
    counted = [linear for linear in model.linear_layers.values() if linear.weights]
    sides = [linear.weights // side for linear in counted for side in (linear.inputs, linear.outputs)]
    tokens = work.micro_batch * work.sequences * work.length
    # Tensor ranks gather the hidden states, and have their part of what lies between two split layers.
    wide = max(sides, default=model.intermediate_size) // tensor
    elements = max(layer, tokens * max(model.hidden_size, wide))
    words = f"{FP8_ROUNDING_BYTES} x {elements:,} of the largest {'weight' if elements == layer else 'input or output'}"
    return MemoryTerm(name="rounding to fp8", bytes=FP8_ROUNDING_BYTES * elements, formula=words)


def _root(model: ModelFacts) -> int:
    """Return the parameters outside of the blocks: embeddings and head."""
    return max(0, model.parameters - model.layers * model.block_parameters)


def gathers_ends_apart(work: Workload) -> bool:
    """Return whether FSDP gathers embeddings and head as groups of their own: those of a decoder that share no weight
    (`finetune_trainer.strategies.fsdp_groups`).
    """
    decoder = work.task in DECODER_TASKS
    return work.strategy.name == "fsdp" and decoder and not work.model.tied_embeddings


def gathered_weights(work: Workload, moment: Moment) -> MemoryTerm | None:
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
        blocks = 2 if moment in ("forward", *BACKWARD) else 1
        if gathers_ends_apart(work):
            kept = model.embedding_parameters // tensor if work.strategy.fsdp_sharding == "grad-op" else 0
            # FSDP2 frees the buffer of a gather when the next one is done, and the head's is the last of the pass.
            heads = 0 if moment in BACKWARD else 2 if moment == "forward" else 1
            root, blocks = kept + heads * work.head, 0 if moment == "forward" else blocks
        if work.strategy.fsdp_sharding == "grad-op":
            blocks = model.layers
        packed, rounded = work.four_bit // model.layers, work.rounded // model.layers // tensor
        block = int(max(0, model.block_parameters - packed) * padding_factor(work)) // tensor - rounded
        size, words = width * (root + blocks * block), f"{width} x ({root:,} of embeddings and head"
        words += f" + {blocks} x {block:,} of a block)" if blocks else ")"
        if rounded and blocks:
            size += blocks * rounded
            words += f" + {blocks} x {rounded:,} in fp8"
        if packed and blocks:
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


def whole_gradients(work: Workload, moment: Moment) -> MemoryTerm | None:
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
    embeddings, chunked = 0 if work.end == "last" else min(model.embedding_parameters, held), loss_chunk(work) > 0
    if moment == "loss" and chunked:
        return MemoryTerm(
            name="whole gradients", bytes=width * work.head, formula=f"{width} x {work.head:,} of the head"
        )
    sized = _fsdp_gradients(work, moment, chunked) if work.strategy.name == "fsdp" else None
    if work.strategy.name != "fsdp":
        element_bytes = (4 if chunked else width + 4) if work.autocast else (3 * width if chunked else width)
        match moment:
            case "head":
                sized = element_bytes * work.head, f"{element_bytes} x {work.head:,} of the head"
            case "layers" if model.idle_parameters and work.deepspeed and work.strategy.zero_stage in (0, 1, 2):
                sized = width * model.block_parameters, f"{width} x {model.block_parameters:,} of a block"
            case "layers" if model.idle_parameters and work.autocast and work.accumulates:
                experts = largest_weight(model)
                sized = 4 * experts, f"4 x {experts:,} of a block's experts"
            case "ends" if work.accumulates:
                # Tied embeddings have the head's gradient, their own, and the sum of both.
                element_bytes = work.weight_bytes * (3 if model.tied_embeddings and work.head and work.autocast else 1)
                sized = element_bytes * embeddings, f"{element_bytes} x {embeddings:,} of the embeddings"
    if sized is None or not sized[0]:
        return None
    return MemoryTerm(name="whole gradients", bytes=sized[0], formula=sized[1])


def _fsdp_gradients(work: Workload, moment: Moment, chunked: bool) -> tuple[int, str] | None:
    """Return the bytes of the gradients that FSDP holds whole at `moment`, and their formula; None: there are none."""
    model, width, tensor = work.model, work.compute_bytes, work.strategy.tensor
    match moment:
        case "head":
            element_bytes = 3 * width if chunked else width
            return element_bytes * work.head, f"{element_bytes} x {work.head:,} of the head"
        case "layers":
            block = model.block_parameters // tensor
            if gathers_ends_apart(work):
                return 4 * work.head + width * block, f"4 x {work.head:,} of the head + {width} x {block:,} of a block"
            return width * (work.head + block), f"{width} x {work.head + block:,} of the head and a block"
        case "reduction" if gathers_ends_apart(work):
            block = model.block_parameters // tensor
            padded = int(model.block_parameters * padding_factor(work)) // tensor
            return width * block + 4 * padded, f"{width} x {block:,} + 4 x {padded:,} of a block"
        case "reduction":
            block = model.block_parameters // tensor
            padded = int(model.block_parameters * padding_factor(work)) // tensor
            words = f"{width} x {work.head:,} of the head + {width} x {block:,} + 4 x {padded:,} of a block"
            return width * (work.head + block) + 4 * padded, words
        case "ends":
            root = _root(model) // tensor
            if gathers_ends_apart(work):
                root = max(0, root - work.head)
                return (width + 4) * root, f"{width + 4} x {root:,} of embeddings"
            return (width + 4) * root, f"{width + 4} x {root:,} of embeddings and head"
        case _:
            return None


def undivided_gradient(work: Workload) -> MemoryTerm | None:
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


def secondary_weights(work: Workload) -> MemoryTerm | None:
    """Return the secondary shards of ZeRO++, from which backward passes gather within the node (Wang et al., "ZeRO++",
    2023, section 3.2)."""
    if work.secondary_shards == 1 or work.strategy.zero_stage != 3:
        return None
    width = work.weight_bytes
    return MemoryTerm(
        name="secondary shards",
        bytes=sharded_bytes(work.held, width, work.secondary_shards),
        formula=size_formula(str(width), work.held, work.secondary_shards),
    )


def reduce_bucket_elements(parameters: int) -> int:
    """Return the elements of DeepSpeed's reduce and all-gather buckets: at most those of the model."""
    return min(parameters, REDUCE_BUCKET_ELEMENTS)


def overlaps_communication(device: Device) -> bool:
    """Return whether DeepSpeed overlaps reduction with computation; a CPU has no second stream for it."""
    return device == "cuda"


def communication_buffers(work: Workload) -> MemoryTerm | None:
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


def autocast_copies(work: Workload, moment: Moment) -> MemoryTerm | None:
    """Return the 16-bit copies of linear layers' weights.

    Autocast keeps those of trained weights until the forward pass ends, and the backward pass needs all of layers that
    are not recomputed.
    """
    at_once = micro_batches_at_once(work, moment)
    if not work.autocast or moment in ("load", "step") or not at_once:
        return None
    tied = work.head if work.model.tied_embeddings else 0
    there = work.four_bit + work.narrow
    count = max(0, work.model.parameters - work.model.embedding_parameters - there) + tied
    if work.model.idle_parameters:  # experts are computed in the type of their weights
        count = max(0, sum(layer.weights for layer in work.model.linear_layers.values()) + work.head - there)
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


def converted_weights(work: Workload) -> Iterator[MemoryTerm]:
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
    if gathers_ends_apart(work):
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


def kept_gradients(work: Workload, states: ModelStates, moment: Moment) -> MemoryTerm:
    """Return the gradients that stay until the optimizer's step: with one micro-batch, none before a backward pass."""
    size, words = states.gradients, states.gradients_formula
    if states.stepping and moment != "step":
        size, words = size - states.stepping, words.partition(" + fp32 copy")[0]
    reused = work.strategy.name in ("ddp", "deepspeed")
    if not work.accumulates and not reused and moment in ("forward", "loss", "head", *BACKWARD):
        # The layers' gradients take the place of their activations; FSDP's are in `whole_gradients`.
        first = work.head if moment == "layers" and work.strategy.name != "fsdp" and work.adapter is None else 0
        size, words = 4 * first, f"4 x {first:,}, the others after their activations"
    return MemoryTerm(name="gradients", bytes=size, formula=words)

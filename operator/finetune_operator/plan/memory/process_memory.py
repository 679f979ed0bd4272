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
from dataclasses import replace

from finetune_contract.byte_text import MIB
from finetune_contract.choices import DECODER_TASKS, LANGUAGE_TASKS, InferencePrecision, Task
from finetune_contract.facts import ModelFacts
from finetune_contract.plans import JUDGED_LOGITS, REQUESTED_LOGITS
from finetune_contract.trainer_job import Strategy, World
from finetune_operator.plan.memory.activation_memory import (
    BACKWARD,
    Moment,
    activation_term,
    loss_chunk,
    micro_batches_at_once,
)
from finetune_operator.plan.memory.exchange_memory import (
    autocast_copies,
    communication_buffers,
    converted_weights,
    dequantized_layer,
    gathered_weights,
    gathers_ends_apart,
    kept_gradients,
    rounding_memory,
    secondary_weights,
    undivided_gradient,
    whole_gradients,
)
from finetune_operator.plan.memory.memory_workload import Workload, activation_bytes_per_token, largest_layer
from finetune_operator.plan.memory.model_parallel_plan import PipelineEnd
from finetune_operator.plan.memory.state_memory import ModelStates, model_states, saving_bytes
from finetune_operator.plan.types.plan_types import MemoryEstimate, MemoryTerm

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


def loss_chunk_tokens(work: Workload) -> int:
    """Return the tokens for which the trainer computes logits and loss at a time; 0: for all at once."""
    return loss_chunk(work)


def reshards_head(work: Workload) -> bool:
    """Return whether FSDP releases the weights of a head between its forward and its backward pass."""
    return gathers_ends_apart(work) and work.strategy.fsdp_sharding != "grad-op" and not work.shards_stages


def _moments(work: Workload, states: ModelStates) -> Iterator[tuple[MemoryTerm, ...]]:
    """Yield the terms of each moment of a step."""
    moments: tuple[Moment, ...] = ("load", "forward", "loss", "head", "layers", "ends", "step")
    if work.strategy.name == "fsdp" and work.adapter is None and work.layers > 1:
        moments = (*moments, "reduction")
    for moment in moments:
        terms = [
            MemoryTerm(name="parameters", bytes=states.parameters, formula=states.parameters_formula),
            kept_gradients(work, states, moment),
            MemoryTerm(name="optimizer state", bytes=states.optimizer, formula=states.optimizer_formula),
        ]
        if work.world.device == "cpu" and states.offloaded:
            words = "in the memory it would have lain in anyway, as the device is the host"
            terms.append(MemoryTerm(name="offloaded state", bytes=states.offloaded, formula=words))
        if moment == "load":
            terms = [terms[0], *converted_weights(work)]
        passing = moment not in ("load", "ends", "step")
        if passing or (moment == "ends" and micro_batches_at_once(work, moment)):
            terms.append(activation_term(work, moment)[0])
        extras = (
            autocast_copies(work, moment),
            dequantized_layer(work) if moment in BACKWARD else None,
            rounding_memory(work) if moment in BACKWARD else None,
            gathered_weights(work, moment),
            whole_gradients(work, moment),
            undivided_gradient(work) if moment not in ("load", "step") else None,
            secondary_weights(work),
            communication_buffers(work) if moment != "load" else None,
        )
        yield (*terms, *(term for term in extras if term is not None))


def _fullest(work: Workload, states: ModelStates) -> list[MemoryTerm]:
    """Return the terms of the fullest moment. On a CPU the C library keeps the memory of each, so that every term
    counts as it is at most.
    """
    moments = list(_moments(work, states))
    if work.world.device == "cuda":
        return list(max(moments, key=lambda terms: sum(term.bytes for term in terms)))
    most: dict[str, MemoryTerm] = {}
    for term in (term for terms in moments for term in terms):
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
            [term for term in terms if term.name == "activations"],
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
    moved = activation_term(work, "layers")[1]
    # The largest of three that do not overlap: reading the weights, activations, a checkpoint between steps.
    offloaded = max(
        states.host, (states.offloaded + moved) * processes, states.offloaded * processes + saving_bytes(work)
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
        there = min(logits, 2 * REQUESTED_LOGITS) if task in DECODER_TASKS else copies * logits
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

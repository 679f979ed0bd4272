"""Time and cost of the training, from arithmetic alone.

An estimate to compare plans by, not a promise. On GPUs it is the time of a step by `step_time`; on CPUs computation at
a measured share of the peak. The estimate includes its basis; it has no number if the device's speed or the node's
price is not known.
"""

from __future__ import annotations

from finetune_contract.arguments import allows_tf32, compiles, needs_whole_logits
from finetune_contract.choices import DECODER_TASKS, Precision
from finetune_contract.facts import ModelFacts
from finetune_contract.plans import (
    CHUNKED_LOSS_FAMILIES,
    CHUNKED_LOSS_TASKS,
    SLICED_NORM_FAMILIES,
    chunks_loss,
    loss_tokens,
)
from finetune_contract.trainer_job import Adapter, Batch, Strategy
from finetune_operator.plan.hardware.assumed_hardware import UNKNOWN_GPU
from finetune_operator.plan.hardware.devices import GpuModel, find_gpu, link_bytes
from finetune_operator.plan.hardware.gpu_table import CARD_HOST
from finetune_operator.plan.memory.adapter_sizes import adapted_sizes, four_bit_weights, trained_parameters
from finetune_operator.plan.time.learned import time_factor
from finetune_operator.plan.time.pass_time import host_seconds, matrix_parameters
from finetune_operator.plan.time.pauses import pauses
from finetune_operator.plan.time.step_time import StepTime, time_of_step
from finetune_operator.plan.time.step_work import Machine, StepWork, kernel_shares
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import Estimate
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.rules.parallelism_rules import secondary_shards
from finetune_operator.spec.settings.settings import Price, Settings

GPU_UTILISATION = 0.35
"""Share of the dense 16-bit peak in the forward passes of inference; published trainings reach 23 to 45 %."""
TCP_BYTES = 12.5e9
"""Bytes a second of a node's TCP, in one direction: a pod has one interface, of 100 Gbit/s on usual nodes with 8 GPUs;
those for RDMA and EFA are beside it.
"""
CPU_FLOPS_PER_CORE = 80e9
"""fp32 peak of one server core with AVX-512, measured on 2 cores (160 to 180 GFLOP/s together)."""
CPU_UTILISATION = 0.5
"""Share of the peak, measured: a 22M-parameter BERT, length-grouped, trains 50 rows/s of 27 tokens on those 2 cores."""
CPU_STEP_SECONDS = 5e-3
"""Least time of a step on a CPU beside its passes, whatever the model's size: batch, loop and update. Measured there:
8 ms with 2 layers of width 32 and 32 rows of 6 tokens, of which each layer takes 1.4 ms.
"""


def training_flops(
    model: ModelFacts, tokens: float, length: float, recompute: bool, adapter: Adapter | None = None, tied: int = 0
) -> float:
    """Return the operations of forward and backward pass over `tokens` tokens of rows of `length`; `tied`: parameters
    of embeddings that the head multiplies with, too.

    6 x parameters a token (2 forward, 4 backward), without embeddings, which are looked up, and without the experts
    that it does not pass; 12 x layers x hidden x
    length for the attention scores (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters",
    2021, appendix; Kaplan et al., 2020). Recomputation repeats the forward pass: a third more. Frozen weights have no
    gradient, which is 2 of the 4.
    """
    matrix = matrix_parameters(model, tied)
    parts = trained_parameters(model, adapter)
    per_token = (
        4 * (matrix + parts.added) + 2 * min(matrix, parts.trained) + 12 * model.layers * model.hidden_size * length
    )
    return tokens * per_token * (4 / 3 if recompute else 1)


def forward_flops(model: ModelFacts, tokens: float, length: float, tied: int = 0) -> float:
    """Return the operations of a forward pass alone: a third of `training_flops`."""
    return training_flops(model, tokens, length, recompute=False, tied=tied) / 3


def tied_head(draft: Draft) -> int:
    """Return the embeddings that score every token of the vocabulary in a task that predicts one for each token."""
    model = draft.model
    scores = draft.spec.task in (*DECODER_TASKS, "masked-lm")
    return model.vocabulary_size * model.hidden_size if scores and model.tied_embeddings else 0


def cpu_flops(threads: int) -> float:
    """Return the operations a second of a process with `threads` threads on a CPU."""
    return threads * CPU_FLOPS_PER_CORE * CPU_UTILISATION


def table_gpu(draft: Draft) -> GpuModel | None:
    """Return the entry of the draft's GPU; None on a CPU, and for a GPU whose speed is not known."""
    precision: Precision = decided(draft.precision)
    if decided(draft.world).device == "cpu":
        return None
    gpu = find_gpu(decided(draft.hardware.gpu).product, draft.settings.hardware)
    return gpu if gpu is not None and gpu.peak_flops(precision) else None


def machine_of(draft: Draft) -> Machine | None:
    """Return the speeds of the draft's nodes; None if that of its GPU is not known, and on a CPU."""
    gpu, world, hardware = table_gpu(draft), decided(draft.world), draft.hardware
    if gpu is None:
        return None
    # Products in fp8 have their own rate, twice that of bf16; attention and head are in bf16.
    half: Precision = "bf16" if draft.precision == "fp8" else decided(draft.precision)
    link = link_bytes(decided(hardware.gpu).product, draft.settings.hardware)
    network = gpu.network * 1e9
    if draft.network is not None and draft.network.transport == "tcp":
        network = min(network, TCP_BYTES / max(1, hardware.gpus_per_node))
    if hardware.network_gigabits is not None:
        network = hardware.network_gigabits / 8 * 1e9 / max(1, hardware.gpus_per_node)
    return Machine(
        nodes=world.nodes,
        gpus_per_node=world.processes_per_node,
        half_flops=gpu.peak_flops(half),
        fp32_flops=gpu.fp32_tflops * 1e12,
        memory=gpu.bandwidth * 1e9,
        link=link or CARD_HOST * 1e9,
        network=network,
        host=gpu.host * 1e9,
        cores_per_node=hardware.cpu_cores,
        tf32_flops=gpu.tf32_flops,
        units=gpu.units,
        **kernel_shares(gpu.capability),
    )


def step_work(draft: Draft, strategy: Strategy, micro: int, accumulation: int) -> StepWork:
    """Return what a step of `accumulation` micro-batches of `micro` rows computes and sends."""
    task, lengths, parts = draft.spec.task, draft.lengths, trained_parameters(draft.model, draft.adapter)
    adapted = adapted_sizes(draft.model, draft.adapter)
    texts = task in DECODER_TASKS
    # A padded batch has a mask, with which attention computes every score, and packs have one unless each row is
    # computed by itself.
    apart = draft.packing and not draft.why_packs_have_masks(strategy)
    alone = apart or (micro * lengths.sequences == 1 and not draft.packing)
    return StepWork(
        model=draft.model,
        strategy=strategy,
        precision=decided(draft.precision),
        optimizer=draft.training.optimizer,
        micro_rows=micro,
        accumulation=accumulation,
        row_tokens=lengths.row,
        length=_row_in_pack(draft) if apart else lengths.typical,
        world=decided(draft.world).size,
        tied_head=tied_head(draft),
        scores_vocabulary=texts or task == "masked-lm",
        trained=parts.trained,
        added=parts.added,
        adapted=adapted.number,
        adapted_width=adapted.width,
        four_bit=four_bit_weights(draft.model, draft.adapter),
        chunked_loss=_chunks_loss(draft, strategy, micro),
        compiled=compiles(draft.training.arguments),
        split_norms=strategy.pipeline is None and draft.model.model_type in SLICED_NORM_FAMILIES,
        loader_workers=_loader_workers(draft),
        causal=texts and alone,
        secondary_shards=secondary_shards(draft.spec.parallelism),
        tf32=allows_tf32(decided(draft.precision), draft.training.arguments),
    )


def _loader_workers(draft: Draft) -> int:
    """Return the processes that read batches, which `training.arguments` may set."""
    asked = draft.training.arguments.get("dataloader_num_workers", 0)
    return asked if isinstance(asked, int) else 0


def _row_in_pack(draft: Draft) -> float:
    """Return the mean tokens of a row in a pack; before prepare, when rows are not known, those of the pack."""
    split = draft.train_split
    return split.tokens / split.packs_of if split is not None and split.packs_of else draft.lengths.typical


def _chunks_loss(draft: Draft, strategy: Strategy, micro: int) -> bool:
    """Return whether the trainer computes the loss in chunks (`finetune_trainer.training.passes.chunked_loss`)."""
    others = needs_whole_logits(draft.training.arguments)
    known = draft.spec.task in CHUNKED_LOSS_TASKS and draft.model.model_type in CHUNKED_LOSS_FAMILIES
    several = micro * draft.lengths.row > loss_tokens(draft.model.vocabulary_size)
    plain = draft.spec.task == "text-generation" and draft.training.label_smoothing == 0
    chunks = chunks_loss(tensor=strategy.tensor, staged=strategy.pipeline is not None, plain=plain)
    return known and not others and chunks and several


def step_time(draft: Draft, strategy: Strategy, batch: Batch) -> StepTime | None:
    """Return the time of a step on GPUs; None if their speed is not known, and on a CPU."""
    machine = machine_of(draft)
    if machine is None:
        return None
    return time_of_step(step_work(draft, strategy, batch.micro_batch_size, batch.gradient_accumulation), machine)


# ------------------------------------------------------------------------------------------------------------- estimate


def estimate_training(draft: Draft) -> Estimate:
    """Return time and cost of the whole training of a finished draft."""
    world, batch, steps = decided(draft.world), decided(draft.batch), decided(draft.steps)
    strategy = decided(draft.strategy)
    if world.device != "cpu" and table_gpu(draft) is None:
        product = decided(draft.hardware.gpu).product
        if product == UNKNOWN_GPU:
            return Estimate(
                basis="no estimate: which GPU it runs on is not known; resources.accelerator.product names it"
            )
        return Estimate(basis=f"no estimate: the speed of {product} is not in the table of GPUs")
    tokens = batch.global_batch_size * steps.total * draft.lengths.row
    # Selective checkpointing repeats no matrix product.
    recompute = strategy.activation_checkpointing == "full"
    trained = training_flops(draft.model, tokens, draft.lengths.typical, recompute, draft.adapter, tied_head(draft))
    flops = trained
    if draft.compares:
        # The untrained model's answers are computed once for each row that is read.
        once = tokens * min(1.0, steps.per_epoch / steps.total)
        flops += forward_flops(draft.model, once, draft.lengths.typical, tied_head(draft))
    basis = f"{flops:.3g} operations for {tokens:,.0f} tokens on {world.size} process{'es' if world.size > 1 else ''} "
    time = step_time(draft, strategy, batch)
    step_tokens = batch.global_batch_size * draft.lengths.row
    if time is None:
        rate = cpu_flops(world.threads_per_process) * world.size
        step = trained / rate / steps.total
        work = step_work(draft, strategy, batch.micro_batch_size, batch.gradient_accumulation)
        least = CPU_STEP_SECONDS + batch.gradient_accumulation * host_seconds(work)
        seconds, step = flops / rate + steps.total * max(0.0, least - step), max(step, least)
        passing = forward_flops(draft.model, step_tokens, draft.lengths.typical, tied_head(draft)) / rate
        at = f"{CPU_UTILISATION:.0%} of {world.threads_per_process} x {CPU_FLOPS_PER_CORE / 1e9:.0f} GFLOP/s"
        at += f"; a step takes {step_duration(step)}, mostly for calls of Python" if step == least else ""
    else:
        step, passing = time.total, time.computing / (4 if recompute else 3)
        seconds = steps.total * (time.total + time.computing * (flops / trained - 1))
        at = _gpu_basis(draft, time, trained / steps.total)
    factor = time_factor(draft, strategy)
    learned = "" if factor is None else f"; times {factor:.2f}, from finished jobs"
    seconds, step = seconds * (factor or 1), step * (factor or 1)
    paused = pauses(draft, step, passing / step_tokens)
    estimate = _with_cost(draft, seconds + sum(paused.parts.values()), f"{basis}at {at}{learned}; {paused.words}")
    step_parts = {} if time is None else {name: part * (factor or 1) for name, part in time.parts() if part}
    update = {"step_seconds": step, "step_parts": step_parts, "pauses": dict(paused.parts), "time_factor": factor}
    return estimate.model_copy(update=update)


def step_duration(seconds: float) -> str:
    """Format the time of a step: `14 ms`, `1.25 s`, `2 min`."""
    if seconds < 1:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 90 else human_seconds(seconds)


def _gpu_basis(draft: Draft, time: StepTime, flops: float) -> str:
    """Describe a step of `flops` operations: the share of the peak while it computes, and the parts of its time."""
    gpu = table_gpu(draft)
    precision: Precision = decided(draft.precision)
    assert gpu is not None
    in_tf32 = allows_tf32(precision, draft.training.arguments) and gpu.tf32_flops
    peak, form = (gpu.tf32_flops, "TF32") if in_tf32 else (gpu.peak_flops(precision), precision)
    share = flops / (time.computing * peak * decided(draft.world).size)
    parts = [f"{name} {time.share(seconds)}" for name, seconds in time.parts() if seconds]
    return (
        f"{share:.0%} of {gpu.name}'s {peak / 1e12:g} TFLOP/s in {form}; a step takes "
        f"{step_duration(time.total)}: {', '.join(parts)}"
    )


def cost_problems(draft: Draft, estimate: Estimate) -> tuple[Problem, ...]:
    """Return the problem of a finished draft that costs more than the settings' `allow.maxCost`, or has no price."""
    most, world = draft.settings.allow.max_cost, draft.world
    if most is None or draft.local or world is None:
        return ()
    price, product, gpus = _node_price(draft)
    spot = draft.spec.spot.enabled
    problem: Problem | None = None
    if price is None or (spot and price.spot_per_hour is None):
        node = f"{product} with {gpus} GPUs" if gpus else "nodes without GPUs"
        named = "set resources.accelerator.product, " * (product == UNKNOWN_GPU)
        problem = Problem(
            "spec.spot.enabled" if price is not None else "spec.resources", None,
            f"asks for {'spot ' * spot}nodes without a price ({node}), and the settings bound what a job may cost",
            f"{named}ask for other nodes, or ask the administrator to add their price to the settings",
            reason="Forbidden",
        )  # fmt: skip
    elif estimate.cost is not None and estimate.cost > most:
        problem = Problem(
            "spec", None,
            f"costs {estimate.cost:,.2f} {estimate.currency} by the estimate, and the settings allow {most:g}",
            "train for fewer epochs or steps, or on other nodes, or ask the administrator for a higher allow.maxCost",
            reason="Forbidden",
        )  # fmt: skip
    return () if problem is None else (problem,)


def _node_price(draft: Draft) -> tuple[Price | None, str, int]:
    """Return the price of one node of a finished draft, or None, with its product and its number of GPUs."""
    gpus = draft.hardware.gpus_per_node if decided(draft.world).device == "cuda" else 0
    product = decided(draft.hardware.gpu).product if gpus else "cpu"
    return find_price(draft.settings, product, gpus), product, gpus


def _with_cost(draft: Draft, seconds: float, basis: str) -> Estimate:
    world, settings = decided(draft.world), draft.settings
    (price, _, _), spot = _node_price(draft), draft.spec.spot.enabled
    if draft.local or price is None:
        return Estimate(seconds=seconds, basis=basis)
    per_hour = price.spot_per_hour if spot else price.per_hour
    if per_hour is None:
        return Estimate(seconds=seconds, basis=f"{basis}; no spot price for {price.product}")
    kind, nodes = "spot " if spot else "", f"{world.nodes} node{'s' if world.nodes > 1 else ''}"
    instead = f" instead of {price.per_hour:g} on demand" if spot else ""
    return Estimate(
        seconds=seconds,
        cost=seconds / 3600 * world.nodes * per_hour,
        currency=settings.currency,
        basis=f"{basis}; {nodes} at {per_hour:g} {settings.currency} {kind}an hour{instead}",
    )


def find_price(settings: Settings, product: str, gpus: int) -> Price | None:
    """Return the price of a node with `gpus` GPUs of `product` (`cpu` without GPUs); None if it is not in the table."""
    known = find_gpu(product, settings.hardware)
    for price in settings.prices:
        same = price.product.casefold() == product.casefold()
        if price.gpus == gpus and (same or (known is not None and known == find_gpu(price.product, settings.hardware))):
            return price
    if known is None or known.gpu_hour is None or not gpus:
        return None
    spot = None if known.spot_gpu_hour is None else gpus * known.spot_gpu_hour
    given = {"product": product, "gpus": gpus, "perHour": gpus * known.gpu_hour, "spotPerHour": spot}
    return Price.model_validate(given)

"""Time and cost of the training, from arithmetic alone.

An estimate to compare plans by, not a promise: the share of the peak that a run reaches differs by a factor of two
between models. The estimate includes its basis; it has no number if the device's speed or the node's price is not
known.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_contract.arguments import compiles
from finetune_contract.choices import Precision
from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Adapter, Batch, Strategy
from finetune_operator.api.problems import Problem
from finetune_operator.api.settings import Price, Settings
from finetune_operator.planning.adapter_sizes import trained_parameters
from finetune_operator.planning.assumed_facts import UNKNOWN_GPU
from finetune_operator.planning.devices import find_gpu, link_bytes
from finetune_operator.planning.draft import Draft, decided
from finetune_operator.planning.memory import compute_bytes, weight_bytes
from finetune_operator.planning.model_parallel_plan import bubble
from finetune_operator.planning.plan_types import Estimate

GPU_UTILISATION = 0.35
"""Share of the dense peak in fine-tuning at 16 bits. Published: 23 % (GPT-3 175B over 960 A100) to 45 % (GPT-2 30B, 141
TFLOP/s an A100).
"""
GPU_UTILISATION_FP8 = 0.19
"""Share of the fp8 peak (twice that of bf16) with torch.compile: 1.1 times as fast as bf16. torchao measured 1.25 times
with 8 billion parameters on 8 GPUs, and smaller layers gain less; attention, head and optimizer are not in fp8.
"""
GPU_UTILISATION_FP8_EAGER = 0.12
"""Share without torch.compile: 0.7 of the speed in bf16. Each tensor is read and written several times to be rounded;
on an H100 two layers took 1.4 times as long as in bf16 (pytorch/ao, issue 2262).
"""
GPU_UTILISATION_FP32 = 0.6
"""Share of the fp32 peak; it is higher, as plain fp32 has no matrix units that wait for data."""
CPU_FLOPS_PER_CORE = 80e9
"""fp32 peak of one server core with AVX-512, measured on 2 cores (160 to 180 GFLOP/s together)."""
CPU_UTILISATION = 0.5
"""Share of the peak, measured: a 22M-parameter BERT, length-grouped, trains 50 rows/s of 27 tokens on those 2 cores."""
LINK_UTILISATION = 0.5
"""Share of a link's bandwidth that messages reach; an assumption, as is NETWORK_BYTES. It is the same for all compared
plans, and communication is assumed not to overlap with computation.
"""
NETWORK_BYTES = 12.5e9
"""Bytes a second that a GPU sends to other nodes: 100 Gbit/s a GPU, as with 8 GPUs and 8 adapters of that speed; no
fact describes the network.
"""


@dataclass(frozen=True)
class Speed:
    """Throughput of one process."""

    flops: float
    """Achieved operations a second."""
    words: str


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
    matrix = model.parameters - model.embedding_parameters - model.idle_parameters + tied
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
    scores = draft.spec.task in ("text-generation", "preference-tuning", "masked-lm")
    return model.vocabulary_size * model.hidden_size if scores and model.tied_embeddings else 0


def process_speed(draft: Draft) -> Speed | None:
    """Return the speed of one process, of a draft with a decided precision; None for a GPU that is not in the table."""
    world = decided(draft.world)
    precision: Precision = decided(draft.precision)
    if world.device == "cpu":
        threads = world.threads_per_process
        peak = threads * CPU_FLOPS_PER_CORE
        return Speed(
            peak * CPU_UTILISATION,
            f"{CPU_UTILISATION:.0%} of {threads} x {CPU_FLOPS_PER_CORE / 1e9:.0f} GFLOP/s",
        )
    gpu = find_gpu(decided(draft.hardware.gpu).product, draft.settings.hardware)
    peak = 0.0 if gpu is None else gpu.peak_flops(precision)
    if gpu is None or not peak:
        return None
    match precision:
        case "fp32":
            share = GPU_UTILISATION_FP32
        case "fp8":
            compiled = compiles(draft.training.arguments)
            share = GPU_UTILISATION_FP8 if compiled else GPU_UTILISATION_FP8_EAGER
        case _:
            share = GPU_UTILISATION
    return Speed(peak * share, f"{share:.0%} of {gpu.name}'s {peak / 1e12:g} TFLOP/s in {precision}")


# ------------------------------------------------------------------------------------------------------------ messages


def exchanged_bytes(model: ModelFacts, strategy: Strategy, tokens: float, width: int) -> float:
    """Return the bytes that one process sends in attention while its group reads `tokens` tokens, forward and backward.

    Each layer exchanges queries, keys, values and attention outputs, N h elements each for N tokens of width h, of
    which a P-th belongs to one process: 4 N h / P (Jacobs et al., "DeepSpeed Ulysses", 2023, section on the analysis of
    communication). Shared (grouped-query) keys and values are narrower, and a process keeps a P-th of its part.
    Gradients are exchanged likewise; recomputation repeats the forward pass.
    """
    degree = strategy.sequence
    elements = tokens * 2 * (model.hidden_size + model.key_value_width) / degree * (degree - 1) / degree
    passes = 3 if strategy.activation_checkpointing == "full" else 2
    return elements * width * model.layers * passes


def state_bytes(strategy: Strategy, held: int, trained: int, width: int, batch: Batch, ranks: int) -> float:
    """Return the bytes of weights (`width` bytes each) and gradients that one of `ranks` processes sends in a step.

    Rajbhandari et al., "ZeRO" (2020), section 7: an all-reduce of gradients sends 2 a parameter, and so do stages 1 and
    2: a reduce-scatter of gradients, and an all-gather of weights after the step. Stage 3, and fsdp, gathers the
    weights once for each pass instead. From stage 2 on gradients are sent with every micro-batch.
    """
    micros, share = batch.gradient_accumulation, width * (ranks - 1) / ranks
    if strategy.name == "fsdp" or strategy.zero_stage == 3:
        return share * micros * (2 * held + trained)
    return share * trained * (1 + (micros if strategy.zero_stage == 2 else 1))


@dataclass(frozen=True)
class StepTime:
    """Time of an optimizer step whose rows are in slices."""

    computing: float
    """Seconds of computation."""
    exchanging: float
    """Seconds of the exchange of heads for tokens."""
    sending: float
    """Seconds of sending weights and gradients."""
    exchanged_bytes: float
    """Bytes that one process sends to exchange heads for tokens."""

    @property
    def total(self) -> float:
        """Return the seconds of the step, without any overlap."""
        return self.computing + self.exchanging + self.sending

    @property
    def exchanging_share(self) -> str:
        """Return the exchange's share of the total as text."""
        share = self.exchanging / self.total
        return "less than 1%" if share < 0.01 else f"{share:.0%}"


def step_time(draft: Draft, strategy: Strategy, batch: Batch) -> StepTime | None:
    """Return the time of a step; None if the speed of the device or of its links is not known, as on a CPU."""
    world, speed = decided(draft.world), process_speed(draft)
    precision: Precision = decided(draft.precision)
    link = link_bytes(decided(draft.hardware.gpu).product, draft.settings.hardware) if world.device == "cuda" else None
    if speed is None or link is None:
        return None
    tokens, parts = batch.global_batch_size * draft.lengths.row, trained_parameters(draft.model, draft.adapter)
    recompute = strategy.activation_checkpointing == "full"
    flops = training_flops(draft.model, tokens, draft.lengths.typical, recompute, draft.adapter, tied_head(draft))
    width = weight_bytes(strategy, precision)
    sent = state_bytes(strategy, draft.model.parameters + parts.added, parts.trained, width, batch, world.size)
    inside = world.processes_per_node % strategy.sequence == 0
    exchanged = exchanged_bytes(draft.model, strategy, tokens / batch.data_parallel, compute_bytes(precision))
    between = link if world.nodes == 1 else NETWORK_BYTES
    return StepTime(
        computing=flops / (speed.flops * world.size),
        exchanging=exchanged / ((link if inside else NETWORK_BYTES) * LINK_UTILISATION),
        sending=sent / (between * LINK_UTILISATION),
        exchanged_bytes=exchanged,
    )


# ------------------------------------------------------------------------------------------------------------- estimate


def estimate_training(draft: Draft) -> Estimate:
    """Return time and cost of the whole training of a finished draft."""
    world, batch, steps = decided(draft.world), decided(draft.batch), decided(draft.steps)
    speed = process_speed(draft)
    if speed is None:
        product = decided(draft.hardware.gpu).product
        if product == UNKNOWN_GPU:
            return Estimate(
                basis="no estimate: which GPU it runs on is not known; resources.accelerator.product names it"
            )
        return Estimate(basis=f"no estimate: the speed of {product} is not in the table of GPUs")
    tokens = batch.global_batch_size * steps.total * draft.lengths.row
    # Selective checkpointing repeats no matrix product.
    recompute = decided(draft.strategy).activation_checkpointing == "full"
    flops = training_flops(draft.model, tokens, draft.lengths.typical, recompute, draft.adapter, tied_head(draft))
    if draft.compares:
        # The untrained model's answers are computed once for each row that is read.
        once = tokens * min(1.0, steps.per_epoch / steps.total)
        flops += forward_flops(draft.model, once, draft.lengths.typical, tied_head(draft))
    pipeline = decided(draft.strategy).pipeline
    idle = 0.0 if pipeline is None else bubble(pipeline)
    seconds = flops / (speed.flops * world.size * (1 - idle))
    waiting = f", {idle:.0%} of the time idle in the pipeline" if idle else ""
    basis = (
        f"{flops:.3g} operations for {tokens:,.0f} tokens on {world.size} process{'es' if world.size > 1 else ''} "
        f"at {speed.words}{waiting}; loading, saving and evaluation not counted"
    )
    return _with_cost(draft, seconds, basis)


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

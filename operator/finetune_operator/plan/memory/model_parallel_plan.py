"""Tensor and pipeline parallelism: supported models, order of the processes, and cost.

T is the tensor-parallel degree, p the pipeline's, v the stages of one process, m the micro-batches of one pass of the
schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, TypeAlias

from finetune_contract.choices import RankOrder
from finetune_contract.facts import ModelFacts
from finetune_contract.plans import owners_of, tensor_families
from finetune_contract.trainer_job import Pipeline, Strategy
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.rules.training_rules import keeps_full
from finetune_operator.spec.types import ParallelismSpec, PipelineSpec

PipelineEnd: TypeAlias = Literal["first", "last"]
"""Stage of a pipeline with the embeddings, or with the head."""
PASSES_TO_FILL = 4
"""Least m / p to fill a pipeline: with m = 4 p the bubble is at most a fifth; more micro-batches are slower each."""
MOST_EMBEDDINGS = 1024
"""Weights in which parameters outside of blocks are counted at most: a shape that fits no model would have billions."""
_NAMED: dict[str, RankOrder] = {"cluster": "DPT", "spread": "PTD"}


# ----------------------------------------------------------------------------------------------------------- arithmetic


def bubble(pipeline: Pipeline) -> float:
    """Return the idle share of a pass, (p - 1) / (v m + p - 1) for stages of equal duration.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), section 2.2, who give it
    in relation to the time without a bubble.
    """
    others = pipeline.degree - 1
    return others / (pipeline.stages_per_process * pipeline.micro_batches + others)


def in_flight(pipeline: Pipeline, end: PipelineEnd = "first") -> float:
    """Return the micro-batches whose activations the first process keeps at once, over all of its layers, or the last.

    The last keeps all m with GPipe, otherwise the one that it computes (a v-th of its layers has up to p more).
    All m of a pass with GPipe; p with 1F1B, as many as are in flight when the first returns; with the interleaved
    schedule those of torch's warm-up, 2 (p - 1) + (v - 1) p, and the current one, each a v-th of the layers.
    """
    p, v, m = pipeline.degree, pipeline.stages_per_process, pipeline.micro_batches
    if end == "last" and pipeline.schedule != "gpipe":
        return min(m, (1 + (v - 1) * p) / v)
    match pipeline.schedule:
        case "gpipe":
            return m
        case "1f1b":
            return min(m, p)
        case "interleaved":
            return min(m, (2 * (p - 1) + (v - 1) * p + 1) / v)


def layers_of_a_process(
    model: ModelFacts, pipeline: Pipeline | None, *, end: PipelineEnd | None = None, head: int = 0
) -> int:
    """Return the layers of the process that has most of them, or of the one with the last stage.

    The trainer cuts where the costliest stage costs least (its `model_layout.py`); `head`: weights of a head that
    computes for each token, in the last stage.
    """
    if pipeline is None:
        return model.layers
    others, block = pipeline.stages - 1, max(1, model.block_parameters)
    counts = range(-(-model.layers // pipeline.stages), max(2, model.layers))

    def last(count: int) -> int:
        return max(1, model.layers - others * count)

    count = min(counts, key=lambda count: (max(count * block, last(count) * block + head), count))
    match end:
        case "last":
            return (pipeline.stages_per_process - 1) * count + last(count)
        case "first":  # of equally costly cuts the trainer takes even ones, whose first stages are the smaller ones
            return pipeline.stages_per_process * ((model.layers - last(count)) // others)
        case None:
            return pipeline.stages_per_process * count


def parameters_of_a_process(
    model: ModelFacts, strategy: Strategy, *, end: PipelineEnd | None = None, head: int = 0
) -> int:
    """Return the parameters of a process at one end of the pipeline: of the first stage with the embeddings, or of the
    last with all others (and a copy of tied embeddings), split over T; None: the larger of both. Parts that a plan does
    not split, norms and heads, are small.
    """
    pipeline = strategy.pipeline
    if pipeline is None:
        return model.parameters // strategy.tensor
    rest = max(0, model.parameters - model.embedding_parameters - model.layers * model.block_parameters)
    ends = {"first": model.embedding_parameters, "last": rest + model.embedding_parameters * model.tied_embeddings}
    layers = layers_of_a_process(model, pipeline, end=end, head=head)
    there = max(ends.values()) if end is None else ends[end]
    return min(model.parameters, layers * model.block_parameters + there) // strategy.tensor


def weights_of_a_process(model: ModelFacts, strategy: Strategy, layers: int, held: int) -> list[int]:
    """Return the elements of each weight of a process with `layers` layers and `held` parameters: those of blocks, and
    the rest as the embeddings or the head, whose vectors are small. Blocks of unknown layers count as four square ones
    and two of the feed-forward layer.
    """
    block = [layer.weights // model.layers for layer in model.linear_layers.values()]
    if not block:
        wide = model.hidden_size * model.intermediate_size
        block = [model.hidden_size**2] * 4 + [wide] * 2
    if experts := model.block_parameters - sum(block) if model.idle_parameters else 0:
        block += [2 * experts // 3, experts // 3]  # gate and up are one weight, down is another
    weights = [elements // strategy.tensor for elements in block] * layers
    rest = max(0, held - sum(weights))
    vocabulary = max(1, model.vocabulary_size * model.hidden_size // strategy.tensor, rest // MOST_EMBEDDINGS)
    whole, left = divmod(rest, vocabulary)
    return [*weights, *[vocabulary] * whole, left]


def stepped_parameters(model: ModelFacts, strategy: Strategy, layers: int, held: int, replicas: int) -> int:
    """Return the parameters whose optimizer state the fullest data rank has: `held` ones, or its weights among them
    with ZeRO-1.
    """
    if strategy.zero_stage is None or replicas == 1:
        return held
    weights = weights_of_a_process(model, strategy, layers, held)
    loads = [0] * replicas
    for size, owner in zip(weights, owners_of(weights, replicas), strict=True):
        loads[owner] += size
    return min(held, max(loads))


def rank_order(placement: str) -> RankOrder:
    """Return the order of the dimensions, that of neighbouring ranks last. Dimensions that `placement` omits have one
    rank each, and come first.
    """
    if placement in _NAMED:
        return _NAMED[placement]
    missing = "".join(letter for letter in "DPT" if letter not in placement)
    order: RankOrder = missing + placement  # type: ignore[assignment]
    return order


# ------------------------------------------------------------------------------------------------------------ decisions


def spread(asked: ParallelismSpec, base: Strategy) -> Strategy:
    """Return `base` with the requested degrees; `filled` sets the micro-batches of a pass, by the micro-batch size."""
    if asked.model_ranks == 1:
        return base.model_copy(update={"sequence": asked.sequence})
    pipeline = None
    if asked.pipeline.degree > 1:
        pipeline = Pipeline(degree=asked.pipeline.degree, micro_batches=1, schedule=asked.pipeline.schedule)
    order = rank_order(asked.placement)
    return base.model_copy(update={"tensor": asked.tensor, "pipeline": pipeline, "rank_order": order})


def filled(strategy: Strategy, asked: PipelineSpec, accumulation: int) -> Strategy:
    """Return `strategy` with the micro-batches of a pass: the requested number, or all of a step."""
    if strategy.pipeline is None:
        return strategy
    passed = accumulation if asked.micro_batches == "auto" else asked.micro_batches
    return strategy.model_copy(update={"pipeline": strategy.pipeline.model_copy(update={"micro_batches": passed})})


def fills(asked: PipelineSpec, sizes: tuple[int, ...], share: int) -> tuple[int, ...]:
    """Filter micro-batch sizes (best first) to those that keep a pipeline busy: they divide `share` rows into whole
    passes, of at least 4 p micro-batches if possible.
    """
    if asked.degree == 1:
        return sizes
    whole = tuple(size for size in sizes if keeps_full(asked, share // size))
    busy = tuple(size for size in whole if share // size >= PASSES_TO_FILL * asked.degree)
    return busy or whole[-1:]


def check_model_parallel(draft: Draft) -> Draft:
    """Refuse degrees of tensor and pipeline parallelism that the model does not allow."""
    asked = draft.spec.parallelism
    if draft.model_ranks == 1 or draft.world is None:
        return draft
    if asked.tensor > 1:
        draft = _check_tensor(draft)
    if asked.pipeline.degree > 1:
        draft = _check_pipeline(draft)
    world, ranks = decided(draft.world), draft.model_ranks
    if draft.problems or world.size % ranks:
        return draft
    replicas, order = draft.data_ranks, rank_order(asked.placement)
    here = "on one node" if _stays_on_a_node(draft, order) else "over several nodes"
    return draft.because(
        f"{replicas} replica{'s' * (replicas > 1)} of the model, each over {ranks} processes {here} "
        f"(tensor {asked.tensor} x pipeline {asked.pipeline.degree}); ranks ordered {order}, that of neighbours last"
    )


def _stays_on_a_node(draft: Draft, order: RankOrder) -> bool:
    world, pipeline = decided(draft.world), draft.spec.parallelism.pipeline
    sizes = {"D": draft.data_ranks, "P": pipeline.degree, "T": draft.spec.parallelism.tensor}
    # Span: ranks from the first to the last of one replica, including other replicas' ranks between them.
    stride, span = 1, 1
    for letter in reversed(order):
        if letter != "D":
            span += (sizes[letter] - 1) * stride
        stride *= sizes[letter]
    return world.nodes == 1 or (span <= world.processes_per_node and world.processes_per_node % span == 0)


def _check_tensor(draft: Draft) -> Draft:
    path, degree, model = ("parallelism", "tensor"), draft.spec.parallelism.tensor, draft.model
    families = tensor_families()
    if draft.model_known and model.model_type not in families:
        return draft.refusing(
            path,
            degree,
            f"there is no tensor-parallel plan for models of type {model.model_type}; there is one for "
            f"{', '.join(families)}",
            "set it to 1, and spread the model by parallelism.pipeline or strategy fsdp or deepspeed",
            "NotSupported",
        )
    uneven = [(count, what) for count, what in shared_counts(model) if count % degree]
    if draft.model_known and uneven:
        count, what = uneven[0]
        return draft.refusing(
            path,
            degree,
            f"it has to divide the model's {count} {what}",
            divisor_hint(degree, count, shared_counts(model)),
        )
    return draft


def divisor_hint(degree: int, blamed: int, counts: Iterable[tuple[int, str]]) -> str:
    """Suggest the greatest degree that divides all `counts` and `degree`; so it divides the processes, too."""
    return f"set it to {math.gcd(degree, *(count for count, _ in counts))}, or to another divisor of {blamed}"


def shared_counts(model: ModelFacts) -> tuple[tuple[int, str], ...]:
    """Return the counts that tensor ranks share equally, each with its name."""
    return (*heads(model), (model.intermediate_size, "columns of feed-forward layers"))


def heads(model: ModelFacts) -> tuple[tuple[int, str], ...]:
    """Return the number of heads of each kind."""
    return (
        (model.attention_heads, "attention heads"),
        (model.key_value_heads or model.attention_heads, "key-value heads"),
    )


def _check_pipeline(draft: Draft) -> Draft:
    asked, model = draft.spec.parallelism.pipeline, draft.model
    stages = spread(draft.spec.parallelism, Strategy(name="ddp")).pipeline
    assert stages is not None
    if draft.model_known and model.layers < stages.stages:
        twice = ", two for each process" if stages.stages_per_process > 1 else ""
        return draft.refusing(
            ("parallelism", "pipeline", "degree"),
            asked.degree,
            f"the model has {model.layers} layers for {stages.stages} stages{twice}",
            f"set it to {max(1, model.layers // stages.stages_per_process)} or less",
        )
    return draft


def explain_pipeline(draft: Draft) -> Draft:
    """Add the cost of the pipeline's schedule to the reasons."""
    pipeline = decided(draft.strategy).pipeline
    if pipeline is None:
        return draft
    v, p, m = pipeline.stages_per_process, pipeline.degree, pipeline.micro_batches
    chunks = f"{v} x " if v > 1 else ""
    return draft.because(
        f"pipeline {pipeline.schedule}: {m} micro-batches a pass leave {bubble(pipeline):.0%} of it idle, "
        f"{p - 1} / ({chunks}{m} + {p - 1}); {in_flight(pipeline):.3g} of them are kept at once"
    )

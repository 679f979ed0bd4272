"""Inputs of the memory estimate of one process, and the activations that its layers save for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from finetune_contract.choices import LANGUAGE_TASKS, OptimizerName, Precision, Task
from finetune_contract.facts import FP8_MULTIPLE, LinearWidths, ModelFacts
from finetune_contract.plans import COUNTED_FAMILIES, SLICED_NORM_FAMILIES
from finetune_contract.trainer_job import Adapter, Strategy, World
from finetune_operator.plan.memory.activation_shapes import RELATIVE_POSITIONS, ActivationShape, activation_shape
from finetune_operator.plan.memory.adapter_sizes import (
    adapted_layers,
    four_bit_weights,
    narrow_weights,
    trained_parameters,
)
from finetune_operator.plan.memory.model_parallel_plan import (
    PipelineEnd,
    layers_of_a_process,
    parameters_of_a_process,
    stepped_parameters,
)

LAYER_NORMS = 2
"""Inputs that a layer's two norms keep if each is one kernel; RMS norms are several, and keep more."""


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
    divided_logits: bool = False
    """True if each tensor rank has all logits of its part of the vocabulary; False in this project's trainer, where
    only a loss in chunks divides them.
    """
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
    def rounded(self) -> int:
        """Return the number of weights of the whole model that FSDP gathers in fp8."""
        return rounded_weights(self.model, self.strategy, self.precision, self.shards)

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


def size_formula(per_parameter: str, count: int, ranks: float) -> str:
    factor = f"{per_parameter} x " if per_parameter else "x "
    return f"{factor}{count:,}" + (f" / {ranks:.4g} ranks" if ranks > 1 else "")


def shape_of(work: Workload) -> ActivationShape:
    return activation_shape(work.model.model_type, work.model.linear_layers)


def unfused_scores(work: Workload) -> float:
    """Return the elements saved for each token and head, per token of length; 0 if attention is fused.

    On CPU, PyTorch has a fused kernel only without dropout, so that models with attention dropout save their scores
    there.
    """
    shape, traced = shape_of(work), has_traced_block(work.model)
    on_cpu = work.world.device == "cpu" and (work.model.saved_per_score > 0 if traced else shape.attention_dropout)
    fused = shape.fused_attention and work.model.fused_attention
    return 0.0 if fused and not on_cpu else shape.score_tensors


def _mask_bytes_per_token(work: Workload) -> int:
    """Return the bytes of fused attention's mask for one token: an element for each token of the whole sequence.

    If rows are padded or packed, transformers creates one boolean mask for all layers, and torch's
    `scaled_dot_product_attention` saves one of the queries' type for each layer. A single row needs none, nor do packs
    whose rows are computed by themselves.
    """
    if unfused_scores(work) or work.rows_apart or not (work.packed or work.micro_batch * work.sequences > 1):
        return 0
    # In attention a process has whole sequences of some heads, elsewhere slices with all of them.
    return work.length * work.compute_bytes * work.strategy.sequence


def activation_bytes_per_token(work: Workload) -> int:
    """Return the bytes that one layer saves for the backward pass, for one token.

    Of a family without a formula (`COUNTED_FAMILIES`) the formula of BERT's layer gives the part of each precision and
    strategy, and a traced block the size.
    """
    mask = 1 if work.world.device == "cuda" else work.compute_bytes
    linear = _bytes_without_scores(work, mask)
    if has_traced_block(work.model):
        linear *= work.model.saved_per_token / _bytes_without_scores(_as_traced(work), 4)
    attention = work.model.attention_heads / work.strategy.tensor * _score_bytes_per_token(work)
    return int(linear + attention + _mask_bytes_per_token(work) + _adapter_bytes_per_token(work, mask))


def has_traced_block(model: ModelFacts) -> bool:
    """Return whether a traced block, and no formula, gives the size of the activations."""
    return model.saved_per_token > 0 and model.model_type not in COUNTED_FAMILIES


def _as_traced(work: Workload) -> Workload:
    """Return the workload of the traced block: rows of one length in fp32 on a CPU."""
    world = World(nodes=1, processes_per_node=1, device="cpu", threads_per_process=1)
    return Workload(work.model, work.task, Strategy(name="single"), "fp32", work.optimizer, world, 1, work.length)


def _bytes_without_scores(work: Workload, mask: int) -> float:
    """Return the bytes that one layer saves for one token, without attention's scores and masks. `mask`: bytes of an
    element of a dropout mask.

    Korthikanti et al. (2022), section 4.1, with element widths set apart: norms keep fp32 inputs under autocast, and
    RMS norms in any case; autocast casts an input once for each layer that reads it; dropout masks are one byte on GPUs
    and a whole element on CPU, and unfused attention keeps its scores in fp32 on CPU.
    """
    shape, model = shape_of(work), work.model
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
    norms /= norm_slices(work)
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
    return (
        model.hidden_size * (norms + routed + (hidden + casts) * work.compute_bytes + shape.dropout_masks * mask)
        + model.intermediate_size * feed_forward / tensor
    )


def norm_slices(work: Workload) -> int:
    """Return the processes that share the tokens of a row in norms and between layers, under tensor parallelism
    (`finetune_trainer.strategies.parallel.sequence_norms`).
    """
    sliced = work.strategy.pipeline is None and work.model.model_type in SLICED_NORM_FAMILIES
    return work.strategy.tensor if sliced else 1


def experts_of_a_token(model: ModelFacts) -> float:
    """Return the number of experts of a layer that a token passes; 0 for a model without experts."""
    weights = model.layers * model.block_parameters - sum(layer.weights for layer in model.linear_layers.values())
    return model.experts * max(0.0, 1 - model.idle_parameters / weights) if model.experts and weights > 0 else 0.0


def _query_width(model: ModelFacts) -> int:
    """Return the elements of one token's queries in a layer; the hidden size if the layer is not known."""
    queries = model.linear_layers.get("self_attn.q_proj")
    return queries.outputs // model.layers if queries is not None else model.hidden_size


def _score_bytes_per_token(work: Workload) -> float:
    """Return the bytes of the scores that one head saves for one token; 0 if attention is fused."""
    shape, length = shape_of(work), work.length
    if shape.gpu_score_bytes is not None and work.world.device == "cuda":
        # Autocast computes the softmax in fp32; 16-bit weights leave it in 16 bits.
        score_bytes = shape.gpu_score_bytes - (0 if work.autocast or work.compute_bytes == 4 else 2)
        return length * score_bytes + RELATIVE_POSITIONS * shape.gpu_relative_bytes
    score_width = 4 if work.world.device == "cpu" else work.compute_bytes
    scores = unfused_scores(work)
    if shape.fused_attention and not work.model.fused_attention:
        # transformers' own attention computes the softmax in fp32, and saves it.
        scores += (4 - score_width) / score_width
    dropped = (4 if work.world.device == "cpu" else 1) if scores and shape.attention_dropout else 0
    return (shape.attention_window or length) * (scores * score_width + dropped)


def _adapter_bytes_per_token(work: Workload, mask: int) -> float:
    """Return the bytes that the adapters of one layer save for one token, beside those of the frozen layer.

    Between A and B `rank` elements; with dropout the input of A and its mask, one for each layer; with DoRA both
    products that the magnitudes scale. As in peft 0.21 (`tuners/lora/variants.py`), compared with torch's saved tensors
    in tests/unit/test_plan_adapters.py. The frozen layer saves a little less than is counted.
    """
    if work.adapter is None:
        return 0.0
    layers, adapter = adapted_layers(work.model, work.adapter).values(), work.adapter
    inputs, outputs = sum(layer.inputs for layer in layers), sum(layer.outputs for layer in layers)
    kept = len(layers) * work.model.layers * adapter.rank * work.compute_bytes
    if adapter.dropout:
        kept += inputs * (work.compute_bytes + mask)
    if adapter.method == "dora":
        kept += 2 * outputs * work.compute_bytes
    return kept / work.model.layers


def largest_layer(model: ModelFacts) -> int:
    """Return the parameters of the largest unit that is gathered at once: the embeddings or one block."""
    return max(model.embedding_parameters, model.block_parameters)


def padding_factor(work: Workload) -> float:
    """Return the size of a block that FSDP gathers, divided by that of its weights. FSDP divides a weight by its first
    dimension, experts by their number: with more shards than experts it pads them.
    """
    model, shards = work.model, work.shards
    if work.strategy.name != "fsdp" or not model.experts:
        return 1.0
    return -(-model.experts // shards) * shards / model.experts


# ------------------------------------------------------------------------------------------------------ rounded weights


def rounded_weights(model: ModelFacts, strategy: Strategy, precision: Precision, ranks: int) -> int:
    """Return the number of weights that `ranks` processes of FSDP gather in fp8, of all blocks; 0 in another precision,
    and if the layers are not known.
    """
    if precision != "fp8" or strategy.name != "fsdp":
        return 0
    return sum(layer.weights for layer in model.linear_layers.values() if layer.weights and _divides(layer, ranks))


def _divides(layers: LinearWidths, ranks: int) -> bool:
    """Return whether the rows of these layers' weights divide among `ranks`, as torchao requires."""
    # The n layers of a name have one shape: n i o / n i = o.
    outputs, inputs = layers.weights // layers.inputs, layers.weights // layers.outputs
    return outputs % FP8_MULTIPLE == inputs % FP8_MULTIPLE == 0 and outputs % ranks == 0

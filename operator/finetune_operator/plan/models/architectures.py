"""Model facts from a `config.json` alone: parameter counts by formula.

So `finetune plan` needs neither torch nor the weights. The counts equal those of transformers' own modules (the tests
build each architecture on the meta device and compare). An architecture without a formula is refused, not guessed: the
trainer's `facts` command measures any model that transformers can build.

Symbols: h hidden size, f width of the feed-forward layer, V vocabulary, P positions, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from pydantic import JsonValue

from finetune_contract.choices import LANGUAGE_TASKS, Task
from finetune_contract.facts import LinearWidths, ModelFacts


class UnknownArchitectureError(ValueError):
    """Error of a config whose `model_type` has no formula here, or that lacks a number that the formula needs."""


@dataclass(frozen=True)
class _Config:
    """Typed access to a config by its architecture's own field names."""

    values: Mapping[str, JsonValue]

    def number(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            raise UnknownArchitectureError(
                f"config.json of type {self.values.get('model_type')!r} has no number {' or '.join(names)}"
            )
        return default

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        return value if isinstance(value, bool) else default


@dataclass(frozen=True)
class _Counts:
    """Parameter counts by part of the model."""

    embeddings: int
    """Token and position embeddings."""
    block: int
    """The largest repeated block."""
    layers: int
    rest: int
    """All other parameters without the head: other embeddings, norms, position tables."""
    head: int
    hidden: int
    feed_forward: int
    heads: int
    vocabulary: int
    positions: int | None
    tied: bool
    linears: Mapping[str, LinearWidths]
    """Linear layers of the blocks, as in ModelFacts."""
    key_value_heads: int | None = None
    """As in ModelFacts."""
    smaller_blocks: int = 0
    """Parameters of the smaller kind of blocks (T5's encoder), which `layers` leaves out."""
    smaller_layers: int = 0
    idle: int = 0
    """As in ModelFacts."""
    experts: int = 0
    """As in ModelFacts."""


def _widths(layers: int, shapes: Mapping[str, tuple[int, int]]) -> dict[str, LinearWidths]:
    """Return the linear layers of equal blocks; `shapes`: name in the block -> inputs and outputs."""
    return {
        name: LinearWidths(inputs=layers * i, outputs=layers * o, weights=layers * i * o)
        for name, (i, o) in shapes.items()
    }


def _encoder_linears(h: int, f: int, attention: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return the shapes of linear layers in a block of BERT and its kin."""
    projections = {f"attention.self.{name}": (h, h) for name in attention}
    return {**projections, "attention.output.dense": (h, h), "intermediate.dense": (h, f), "output.dense": (f, h)}


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _encoder_block(h: int, f: int) -> int:
    """Count a block: self-attention (4 linear layers), feed-forward (2) and two LayerNorms, all with bias."""
    return 4 * _linear(h, h) + _linear(h, f) + _linear(f, h) + 2 * 2 * h


def _encoder_head(task: Task, h: int, labels: int, vocabulary: int, embedding: int) -> int:
    """Count an encoder's head: a dense layer (BERT's pooler) and the classifier; masked-lm is tied to the embeddings,
    without its bias.
    """
    match task:
        case "text-classification":
            return _linear(h, h) + _linear(h, labels)
        case "masked-lm":
            return _linear(h, embedding) + 2 * embedding + vocabulary
        case _:
            return _linear(h, labels)


def _bert(config: _Config, task: Task, labels: int) -> _Counts:
    h, f = config.number("hidden_size"), config.number("intermediate_size")
    vocabulary, positions = config.number("vocab_size"), config.number("max_position_embeddings")
    embedding = config.number("embedding_size", default=h)  # ELECTRA's may be narrower than its layers
    types = config.number("type_vocab_size", default=2) * embedding
    projection = _linear(embedding, h) if embedding != h else 0
    offset = _position_offset(config)
    block, layers = _encoder_block(h, f), config.number("num_hidden_layers")
    attention = ["query", "key", "value"]
    if config.values.get("model_type") == "longformer":
        block += 3 * _linear(h, h)
        attention += [f"{name}_global" for name in attention]
    return _Counts(
        embeddings=(vocabulary + positions) * embedding,
        block=block,
        layers=layers,
        rest=types + 2 * embedding + projection,
        head=_encoder_head(task, h, labels, vocabulary, embedding),
        hidden=h,
        feed_forward=f,
        heads=config.number("num_attention_heads"),
        vocabulary=vocabulary,
        positions=positions - offset,
        tied=True,
        linears=_widths(layers, _encoder_linears(h, f, attention)),
    )


def _position_offset(config: _Config) -> int:
    """Return the unusable positions: RoBERTa and its kin count positions from the padding index + 1."""
    if config.values.get("model_type") not in ("roberta", "xlm-roberta", "camembert", "longformer"):
        return 0
    return config.number("pad_token_id", default=1) + 1


def _distilbert(config: _Config, task: Task, labels: int) -> _Counts:
    h, f = config.number("dim", default=768), config.number("hidden_dim", default=3072)
    vocabulary = config.number("vocab_size", default=30522)
    positions, layers = config.number("max_position_embeddings", default=512), config.number("n_layers", default=6)
    attention = {f"attention.{name}_lin": (h, h) for name in ("q", "k", "v", "out")}
    return _Counts(
        embeddings=(vocabulary + positions) * h,
        block=_encoder_block(h, f),
        layers=layers,
        rest=2 * h,
        head=_encoder_head(task, h, labels, vocabulary, embedding=h),
        hidden=h,
        feed_forward=f,
        heads=config.number("n_heads", default=12),
        vocabulary=vocabulary,
        positions=positions,
        tied=True,
        linears=_widths(layers, {**attention, "ffn.lin1": (h, f), "ffn.lin2": (f, h)}),
    )


def _deberta_v2(config: _Config, task: Task, labels: int) -> _Counts:
    h, f = config.number("hidden_size"), config.number("intermediate_size")
    vocabulary, positions = config.number("vocab_size"), config.number("max_position_embeddings", default=512)
    absolute = positions * h if config.flag("position_biased_input", True) else 0
    types = config.number("type_vocab_size", default=0) * h
    block, tables = _encoder_block(h, f), 0
    layers, attention = config.number("num_hidden_layers"), ["query_proj", "key_proj", "value_proj"]
    if config.flag("relative_attention", False):
        kinds = config.values.get("pos_att_type") or ()
        names = kinds.split("|") if isinstance(kinds, str) else cast("list[str]", kinds)
        if not config.flag("share_att_key", False):
            extra = [layer for name, layer in (("c2p", "pos_key_proj"), ("p2c", "pos_query_proj")) if name in names]
            block += len(extra) * _linear(h, h)
            attention += extra
        reach = config.number("max_relative_positions", default=-1)
        span = reach if reach > 0 else positions
        buckets = config.number("position_buckets", default=-1)
        tables += 2 * (buckets if buckets > 0 else span) * h
        if "layer_norm" in str(config.values.get("norm_rel_ebd", "none")):
            tables += 2 * h
    kernel = config.number("conv_kernel_size", default=0)
    convolution = kernel * h * h + h + 2 * h if kernel > 0 else 0
    return _Counts(
        embeddings=vocabulary * h + absolute,
        block=block,
        layers=layers,
        rest=types + 2 * h + tables + convolution,
        head=_encoder_head(task, h, labels, vocabulary, embedding=h),
        hidden=h,
        feed_forward=f,
        heads=config.number("num_attention_heads"),
        vocabulary=vocabulary,
        positions=positions,
        tied=True,
        linears=_widths(layers, _encoder_linears(h, f, attention)),
    )


def _modernbert(config: _Config, task: Task, labels: int) -> _Counts:
    h, f = config.number("hidden_size"), config.number("intermediate_size")
    vocabulary, layers = config.number("vocab_size"), config.number("num_hidden_layers")
    shapes = {"attn.Wqkv": (h, 3 * h), "attn.Wo": (h, h), "mlp.Wi": (h, 2 * f), "mlp.Wo": (f, h)}
    dense = h * h + h  # with a norm, and tied to the embeddings for masked-lm
    return _Counts(
        embeddings=vocabulary * h,
        block=sum(inputs * outputs for inputs, outputs in shapes.values()) + 2 * h,
        layers=layers,
        rest=h,  # norms of embeddings and outputs, and the first block lacks one
        head=dense + (vocabulary if task == "masked-lm" else _linear(h, labels)),
        hidden=h,
        feed_forward=f,
        heads=config.number("num_attention_heads"),
        vocabulary=vocabulary,
        positions=config.number("max_position_embeddings", default=8192),
        tied=True,
        linears=_widths(layers, shapes),
    )


def _gpt2(config: _Config, task: Task, labels: int) -> _Counts:
    h = config.number("n_embd", default=768)
    f = config.number("n_inner", default=4 * h)
    vocabulary, positions = config.number("vocab_size", default=50257), config.number("n_positions", default=1024)
    layers = config.number("n_layer", default=12)
    attention = {"attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h)}
    return _Counts(
        embeddings=(vocabulary + positions) * h,
        block=_linear(h, 3 * h) + _linear(h, h) + _linear(h, f) + _linear(f, h) + 2 * 2 * h,
        layers=layers,
        rest=2 * h,
        head=_decoder_head(task, h, labels, vocabulary, tied=True),
        hidden=h,
        feed_forward=f,
        heads=config.number("n_head", default=12),
        vocabulary=vocabulary,
        positions=positions,
        tied=True,
        linears=_widths(layers, {**attention, "mlp.c_fc": (h, f), "mlp.c_proj": (f, h)}),
    )


def _decoder_head(task: Task, h: int, labels: int, vocabulary: int, tied: bool) -> int:
    match task:
        case "text-generation" | "preference-tuning":
            return 0 if tied else _linear(h, vocabulary, bias=False)
        case "text-classification":
            return _linear(h, labels, bias=False)
        case _:
            return _linear(h, labels)


def _llama(config: _Config, task: Task, labels: int) -> _Counts:
    h, f = config.number("hidden_size"), config.number("intermediate_size")
    vocabulary, heads = config.number("vocab_size"), config.number("num_attention_heads")
    head_size = config.number("head_dim", default=h // heads)
    key_value_heads = config.number("num_key_value_heads", default=heads)
    key_value = key_value_heads * head_size
    model_type = config.values.get("model_type")
    tied = config.flag("tie_word_embeddings", model_type == "gemma")
    qwen = model_type == "qwen2"
    attention_bias = qwen or config.flag("attention_bias", False)
    output_bias = not qwen and config.flag("attention_bias", False)
    attention = _linear(h, heads * head_size, attention_bias) + 2 * _linear(h, key_value, attention_bias)
    attention += _linear(heads * head_size, h, output_bias)
    if model_type in ("qwen3", "qwen3_moe"):
        attention += 2 * head_size  # norms of queries and keys
    gated = 2 * _linear(h, f, config.flag("mlp_bias", False)) + _linear(f, h, config.flag("mlp_bias", False))
    mixture = _mixture(config, h, f)
    layers, widths = config.number("num_hidden_layers"), {"q": heads * head_size, "k": key_value, "v": key_value}
    if model_type == "phi3":
        shapes = {"self_attn.qkv_proj": (h, sum(widths.values())), "mlp.gate_up_proj": (h, 2 * f)}
    else:
        shapes = {f"self_attn.{name}_proj": (h, width) for name, width in widths.items()}
        shapes |= {} if mixture else {f"mlp.{name}_proj": (h, f) for name in ("gate", "up")}
    shapes["self_attn.o_proj"] = (heads * head_size, h)
    if mixture is None:
        shapes["mlp.down_proj"] = (f, h)
    return _Counts(
        embeddings=vocabulary * h,
        block=attention + (gated if mixture is None else mixture.parameters) + 2 * h,
        layers=layers,
        rest=h,
        head=_decoder_head(task, h, labels, vocabulary, tied),
        hidden=h,
        feed_forward=f if mixture is None else mixture.width,
        heads=heads,
        vocabulary=vocabulary,
        positions=config.number("max_position_embeddings", default=2048),
        tied=tied,
        linears=_widths(layers, shapes),
        key_value_heads=key_value_heads if key_value_heads < heads else None,
        idle=0 if mixture is None else layers * mixture.idle,
        experts=0 if mixture is None else mixture.experts,
    )


@dataclass(frozen=True)
class _Mixture:
    """Feed-forward part of a block that is a mixture of experts."""

    parameters: int
    idle: int
    """Parameters of the experts that one token does not pass."""
    width: int
    """Width of all experts that it passes."""
    experts: int
    """Number of experts of a block."""


def _mixture(config: _Config, h: int, f: int) -> _Mixture | None:
    """Return the experts and the router of a block; None for a model without experts."""
    if config.values.get("model_type") not in ("mixtral", "qwen3_moe"):
        return None
    if config.values.get("mlp_only_layers") or config.number("decoder_sparse_step", default=1) != 1:
        raise UnknownArchitectureError("a mixture of experts with other blocks between has no formula")
    experts, passed = config.number("num_local_experts", "num_experts"), config.number("num_experts_per_tok")
    width = config.number("moe_intermediate_size", default=f)
    expert = 3 * h * width
    return _Mixture(experts * (expert + h), (experts - passed) * expert, passed * width, experts)


def _t5(config: _Config, task: Task, labels: int) -> _Counts:
    h, f = config.number("d_model"), config.number("d_ff")
    heads, width = config.number("num_heads"), config.number("num_heads") * config.number("d_kv")
    vocabulary, layers = config.number("vocab_size"), config.number("num_layers")
    gated = "gated" in str(config.values.get("feed_forward_proj", "relu"))
    attention = 4 * h * width + h
    feed_forward = (3 if gated else 2) * h * f + h
    encoder, decoder = attention + feed_forward, 2 * attention + feed_forward
    buckets = config.number("relative_attention_num_buckets", default=32) * heads
    decoders = config.number("num_decoder_layers", default=layers)
    shapes = {**dict.fromkeys("qkv", (h, width)), "o": (width, h)}
    crossed = {f"layer.*.EncDecAttention.{name}": shape for name, shape in shapes.items()}
    shared = {f"layer.*.SelfAttention.{name}": shape for name, shape in shapes.items()}
    shared |= {f"layer.*.DenseReluDense.{name}": (h, f) for name in (("wi_0", "wi_1") if gated else ("wi",))}
    shared["layer.*.DenseReluDense.wo"] = (f, h)
    tied = config.flag("tie_word_embeddings", True)
    match task:
        case "text-classification":
            head = _linear(h, h) + _linear(h, labels)
        case "summarization" | "translation":
            head = 0 if tied else vocabulary * h
        case "question-answering":
            head = _linear(h, labels)
        case _:
            raise UnknownArchitectureError(f"model_type 't5' has no formula for {task}")
    return _Counts(
        embeddings=vocabulary * h,
        block=decoder,
        layers=decoders,
        rest=2 * h + 2 * buckets,
        head=head,
        hidden=h,
        feed_forward=f,
        heads=heads,
        vocabulary=vocabulary,
        positions=None,
        tied=tied,
        linears=_widths(layers + decoders, shared) | _widths(decoders, crossed),
        smaller_blocks=layers * encoder,
        smaller_layers=layers,
    )


_Formula: TypeAlias = Callable[[_Config, Task, int], _Counts]
_FORMULAS: dict[str, _Formula] = {
    "bert": _bert,
    "electra": _bert,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "camembert": _bert,
    "longformer": _bert,
    "distilbert": _distilbert,
    "deberta-v2": _deberta_v2,
    "gpt2": _gpt2,
    "gemma": _llama,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "modernbert": _modernbert,
    "phi3": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _llama,
    "t5": _t5,
}
ARCHITECTURES = tuple(sorted(_FORMULAS))
"""Values of `model_type` that `model_facts` supports."""

_BYTES_BY_TYPE = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


def model_facts(config: Mapping[str, JsonValue], task: Task = "text-classification", labels: int = 2) -> ModelFacts:
    """Return the facts of the model of `config` (the content of a config.json), with `task`'s head for `labels` labels.

    Raise UnknownArchitectureError if `model_type` has no formula here or a needed number is missing.
    """
    model_type = config.get("model_type")
    formula = _FORMULAS.get(model_type) if isinstance(model_type, str) else None
    if formula is None or not isinstance(model_type, str):
        raise UnknownArchitectureError(f"model_type {model_type!r} has no formula; known: {', '.join(ARCHITECTURES)}")
    counts = formula(_Config(config), task, labels)
    parameters = counts.embeddings + counts.layers * counts.block + counts.smaller_blocks + counts.rest + counts.head
    stored_type = config.get("dtype") or config.get("torch_dtype")
    return ModelFacts(
        model_type=model_type,
        parameters=parameters,
        embedding_parameters=counts.embeddings,
        block_parameters=counts.block,
        layers=counts.layers + counts.smaller_layers,
        hidden_size=counts.hidden,
        intermediate_size=counts.feed_forward,
        attention_heads=counts.heads,
        key_value_heads=counts.key_value_heads,
        vocabulary_size=counts.vocabulary,
        max_positions=counts.positions,
        tied_embeddings=counts.tied,
        parameter_bytes=parameters * _BYTES_BY_TYPE.get(str(stored_type), 4),
        idle_parameters=counts.idle,
        experts=counts.experts,
        head_parameters=0 if task in LANGUAGE_TASKS else counts.head,
        linear_layers=dict(counts.linears),
    )

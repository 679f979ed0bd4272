"""Constants that planner and trainer share: the trainer's buffer sizes, which the planner counts with, and the models
that can be split, found by inspecting the installed transformers and our own plans (`make generate`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from heapq import heapreplace
from importlib import resources

from finetune_contract.choices import Task

AVERAGED_ELEMENTS = 25_000_000
"""Gradient elements that replicas of a sharded model average in one message: few messages, and 100 MB of fp32 beside
the gradients.
"""

JUDGED_LOGITS = 1 << 25
"""Logits that evaluation converts to float32 at a time, 128 MiB: some hundred tokens of a large vocabulary, which keep
a GPU busy.
"""

REQUESTED_LOGITS = 1 << 28
"""Logits that an evaluation requests of a decoder at a time, 512 MiB in bf16: those of a batch, or of some thousand
tokens of a row that has more.
"""

LOSS_LOGITS = 1 << 26
"""Logits that the loss of a decoder's training has at a time, 256 MiB in float32: those of some hundred tokens of a
large vocabulary. All of a micro-batch would be the largest part of a training's memory: 12 bytes for each, 12 GiB for
8,192 tokens of a vocabulary of 128,000.
"""

SAVED_PIECE_BYTES = 64 << 20
"""Most bytes of a tensor that a process copies from its device at a time to write them: large enough for the full speed
of a disk and of PCIe.
"""


def loss_tokens(vocabulary_size: int) -> int:
    """Return the most tokens whose logits the loss of a decoder's training has at a time."""
    return max(1, LOSS_LOGITS // vocabulary_size)


def chunks_loss(*, tensor: int, staged: bool, plain: bool) -> bool:
    """Return whether a decoder's training may compute its loss for some tokens after the others: not over the stages of
    a pipeline, and over `tensor` processes that divide the vocabulary only if `plain`, the mean over unsmoothed labels.
    """
    return not staged and (tensor == 1 or plain)


CHUNKED_LOSS_TASKS: tuple[Task, ...] = ("text-generation", "preference-tuning")
"""Tasks whose loss is computed from the log-likelihoods of tokens, for some tokens after the others."""

CHUNKED_LOSS_FAMILIES = (
    "bloom",
    "falcon",
    "gemma",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
)
"""Values of a config's `model_type` whose decoders pass the output of their head to the loss as it is, so that it can
be computed for some tokens after the others. Gemma 2 for one bends its logits before.
"""

COUNTED_FAMILIES = (
    "albert",
    "bart",
    "bert",
    "bloom",
    "camembert",
    "codegen",
    "cohere",
    "cohere2",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "granite",
    "llama",
    "longformer",
    "mistral",
    "mixtral",
    "modernbert",
    "mpnet",
    "mpt",
    "mt5",
    "olmo",
    "olmo2",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "roberta",
    "smollm3",
    "stablelm",
    "starcoder2",
    "t5",
    "xlm-roberta",
)
"""Values of a config's `model_type` whose blocks plans count by formula; `prepare` traces a block of others."""

PIPELINE_FAMILIES = ("bert", "gemma", "gpt2", "llama", "mistral", "qwen2", "roberta", "xlm-roberta")
"""Values of a config's `model_type` known to split into pipeline stages, whatever the task's head: `auto` uses a
pipeline for these alone. Others are inspected when they are to be split.
"""


SEQUENCE_FAMILIES = ("gemma", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Values of a config's `model_type` whose rows are known to split into slices of tokens. Others are inspected when
theirs are to be split.
"""

SLICED_NORM_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of a config's `model_type` of decoders whose norms, under tensor parallelism without a pipeline, compute a
slice of the tokens on each process.
"""


def owners_of(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the rank in `range(ranks)` that owns each weight, of these numbers of elements: the largest weights first,
    each to the rank that has the fewest elements so far.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda weight: -sizes[weight]):
        elements, rank = loads[0]
        owners[index] = rank
        heapreplace(loads, (elements + sizes[index], rank))
    return tuple(owners)


@cache
def tensor_families() -> tuple[str, ...]:
    """Return the `model_type` values of models with a tensor-parallel plan and a class for one of the tasks."""
    text = (resources.files("finetune_contract") / "tensor_families.json").read_text(encoding="utf-8")
    return tuple(json.loads(text))

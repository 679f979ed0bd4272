"""Models that a plan assumes without reading them: known by their names, or by a size in them.

Pure: no network access. Each assumption comes with a sentence that the plan lists under its assumptions, so that an
estimate is never mistaken for a measurement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import JsonValue

from finetune_contract.choices import Task
from finetune_contract.facts import ModelFacts
from finetune_operator.plan.models.architectures import UnknownArchitectureError, model_facts
from finetune_operator.plan.models.known_models import Config, known_config, known_name
from finetune_operator.spec.quantities import human_count

FALLBACK_NAME = "bert-base-uncased"
ASSUMED_LABELS = 2
"""Classes of a model that could not be read."""
LLAMA_VOCABULARY = 32_000
"""Vocabulary size of Llama 2."""
_LLAMAS = ("llama-2-7b", "llama-2-13b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")
"""Published shapes that stand for unread models of about their size."""
NEAR_SIZE = 0.08
"""Most difference of a published size, divided by the named one: names round, as 7B for 6.7 billion."""
LEAST_SIZE_IN_NAME = 5_000_000
"""Least number in a name that counts as parameters: below it, `1m` is a context length or a number of rows."""
_SIZE_UNITS = {"b": 1e9, "m": 1e6}
# Not after x: in the name of a mixture of experts, `8x7b`, 7b is the size of one expert.
_SIZE_IN_NAME = re.compile(r"(?<![a-z0-9.])([0-9]+(?:\.[0-9]+)?)([bm])(?![a-z0-9])")


def is_well_known(uri: str) -> bool:
    """Return whether the model's name gives its published shape."""
    return known_name(uri) is not None


def assumed_model(uri: str, task: Task = "text-classification") -> tuple[ModelFacts, str]:
    """Return facts for a model that could not be read, and a sentence with the assumption.

    A well-known name gives that checkpoint's published shape, a name with a size (`-70B`) a Llama of that size, and
    any other name the shape of BERT base, which may be far off.
    """
    words = [part.lower() for part in uri.partition("://")[2].split("/") if part]
    name = known_name(uri)
    try:
        facts = model_facts(known_config(name or FALLBACK_NAME), task, ASSUMED_LABELS)
    except UnknownArchitectureError:
        name = None
        facts = model_facts(known_config(FALLBACK_NAME), "text-classification", ASSUMED_LABELS)
    size = f"{human_count(facts.parameters)} parameters"
    if name is None and (named_size := _size_in_name(words[-1:])) is not None:
        facts = model_facts(_published_of(named_size) or _decoder_of(named_size), task, ASSUMED_LABELS)
        return facts, (
            f"model: {uri} was not read; by its name it has {human_count(named_size)} parameters, and a Llama-like "
            f"model of about that size is taken: {facts.layers} layers, {facts.hidden_size:,} wide"
        )
    if name is None:
        return facts, (
            f"model: nothing is known about {uri}; the shape of {FALLBACK_NAME} ({size}) is taken, so sizes and "
            "times are right only for a model like it"
        )
    return facts, f"model: {uri} was not read; the published shape of {name} ({size}) is taken"


def _size_in_name(words: Sequence[str]) -> int | None:
    """Return the parameters by a model's name, `llama-3.1-70b` or `opt-350m`; the largest number if it has several."""
    sizes = [round(float(number) * _SIZE_UNITS[unit]) for word in words for number, unit in _SIZE_IN_NAME.findall(word)]
    return max((size for size in sizes if size >= LEAST_SIZE_IN_NAME), default=None)


def _published_of(parameters: int) -> Config | None:
    """Return the config of the published Llama that is closest to that size; None if none is near it."""
    sizes = {name: model_facts(known_config(name), "text-generation").parameters for name in _LLAMAS}
    name = min(sizes, key=lambda llama: abs(sizes[llama] - parameters))
    return known_config(name) if abs(sizes[name] / parameters - 1) <= NEAR_SIZE else None


def _decoder_of(parameters: int) -> dict[str, JsonValue]:
    """Return a Llama config of about that size: 12 h^2 a layer (attention 4, gated feed-forward 8) and a layer for each
    128 of the width h, as in Llama 2 7B (32 layers, 4,096 wide).
    """
    h = max(1, round((parameters * 128 / 12) ** (1 / 3) / 128)) * 128
    return {
        "model_type": "llama",
        "hidden_size": h,
        "intermediate_size": 8 * h // 3,
        "num_hidden_layers": max(1, round((parameters - LLAMA_VOCABULARY * h) / (12 * h * h))),
        "num_attention_heads": h // 128,
        "vocab_size": LLAMA_VOCABULARY,
        "max_position_embeddings": 4096,
    }

"""Rows of the table of other tools' names, and hints and fields that many rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from types import MappingProxyType

from pydantic import JsonValue

HF, AXOLOTL, FACTORY, DEEPSPEED, KUBERNETES = "Hugging Face", "axolotl", "LLaMA-Factory", "DeepSpeed", "Kubernetes"
EVERYBODY = f"{HF}, {AXOLOTL}, {FACTORY}"

NOTHING: Mapping[str, JsonValue] = MappingProxyType({})


@dataclass(frozen=True)
class ForeignName:
    """Names for one setting, and the field with its meaning."""

    names: tuple[str, ...]
    tools: str
    field: str | None
    """Dotted path from the document; None: there is no counterpart, and `hint` is the instruction."""
    hint: str = ""
    """Further information, or the instruction, without a full stop."""
    value: JsonValue = None
    """Value to write there, if the name itself implies it; None: the given value, if the field accepts it."""
    under: tuple[str, ...] = ()
    """Names of the object that must contain it; empty: any."""
    same: bool = True
    """True if the given value can be written there unchanged."""
    writes: Callable[[JsonValue], Mapping[str, JsonValue]] | None = None
    """Function that converts the given value into values by field path, if one field does not accept it unchanged;
    empty result: no conversion, and `field` and `hint` are the answer.
    """
    writes_beside: Callable[[JsonValue, Mapping[str, JsonValue]], Mapping[str, JsonValue]] | None = None
    """Function like `writes` that also gets the object with the name, if the meaning depends on its other fields."""


@dataclass(frozen=True)
class ForeignValue:
    """Values that a field does not accept, and their equivalents."""

    field: str
    """Dotted path of the field from the document."""
    names: tuple[str | bool, ...]
    tools: str
    instead: Mapping[str, JsonValue] = dataclass_field(default_factory=dict)
    """Dotted path of the accepting field -> value; empty: there is no counterpart."""
    hint: str = ""
    """Hint, as in `ForeignName`."""


DEFAULT_EVALUATION = "leave it out: validation is measured after each epoch"
ONE_AT_A_TIME = (
    "leave it out: concurrencyPolicy belongs to a CronJob that creates the job and runs `finetune wait` until it ends"
)
ALWAYS_EVALUATED = (
    "leave it out: the built-in training always evaluates its model, and without a gate any result is a success"
)
"""Hint for every way to ask for a training without evaluation."""
STEPS_REPORTED = "leave it out: every step is reported"
RESULTS_PLACE = (
    "leave it out: results are in runs/NAME (finetune run --workspace DIR), in a cluster in spec.storage.workspace"
)
TOKENIZER_WITH_MODEL = "leave it out: the tokenizer comes with the model"
NO_COUNTERPART = "leave it out: there is no counterpart"

ARGUMENTS = "spec.training.arguments"
SPLITS = "spec.dataset.splits."

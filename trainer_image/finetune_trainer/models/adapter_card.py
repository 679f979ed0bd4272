"""Facts about an adapter that peft does not store: its task, its labels, and the weights that it was trained beside.

They are a file beside those of peft, which leaves it alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue, ValidationError

from finetune_contract.choices import Task
from finetune_contract.contract_models import Message
from finetune_contract.layout import ADAPTER_CARD

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_HEAD = ("id2label", "label2id", "problem_type", "answers_may_be_missing")
"""Settings of a config that describe the head."""


class AdapterCard(Message):
    """Content of the file."""

    task: Task
    base: str
    """Digest of the frozen weights, as `models.weights_digest` computes it."""
    rounded: bool = False
    """True if the frozen weights were rounded to 4 bits in training."""
    head: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the trained model's config that describe its head."""

    @classmethod
    def of(cls, task: Task, model: PreTrainedModel, base: str, *, rounded: bool) -> AdapterCard:
        """Return the facts about the adapter of `model`."""
        config = model.config.to_dict()
        head = {name: _with_text_keys(config[name]) for name in _HEAD if config.get(name) is not None}
        return cls(task=task, base=base, rounded=rounded, head=head)

    @classmethod
    def read(cls, folder: Path) -> AdapterCard | None:
        """Read the file in an adapter's folder; None if there is none, as in folders of other programs."""
        file = folder / ADAPTER_CARD
        if not file.is_file():
            return None
        try:
            return cls.model_validate_json(file.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{file.name} has {error.error_count()} faults: {error.errors()[0]['msg']}") from error

    def write(self, folder: Path) -> None:
        """Write the file into an adapter's folder."""
        (folder / ADAPTER_CARD).write_text(self.to_json(), encoding="utf-8")


def head_config(head: Mapping[str, JsonValue], base: PretrainedConfig, architecture: str) -> PretrainedConfig:
    """Return the base model's config with the settings of a head, as of a checkpoint of that architecture."""
    config = copy.deepcopy(base)
    config.architectures = [architecture]
    for name in _HEAD:
        if name in head:
            setattr(config, name, _with_numbers(head[name]) if name == "id2label" else head[name])
    return config


def _with_text_keys(value: Any) -> Any:
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


def _with_numbers(value: Any) -> Any:
    return {int(key): item for key, item in value.items()} if isinstance(value, dict) else value

"""Generation in which each text reaches its longest length, for passes that take the most memory that they can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_trainer.tasks.task_protocol import Answer
from finetune_trainer.tasks.writing import watch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WholeTexts:
    """Observer of generation that has each text reach its longest length, as the longest text of a batch may."""

    max_new_tokens: int

    def arguments(self) -> Mapping[str, Any]:
        """Return the least number of tokens."""
        return {"min_new_tokens": self.max_new_tokens}

    def fields_of(self, tokens: torch.Tensor) -> Answer:
        """Return no fields."""
        return {}


@contextmanager
def whole_texts(max_new_tokens: int) -> Iterator[None]:
    """Generate texts of the longest length within the context."""
    token = watch.set(WholeTexts(max_new_tokens))
    try:
        yield
    finally:
        watch.reset(token)

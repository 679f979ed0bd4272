"""Conversations as tokens, by the chat template of the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Turns:
    """A conversation as the template writes it."""

    text: str
    replies: tuple[tuple[int, int], ...]
    """First and last character (exclusive) of what an assistant has to write, the end of its turn included."""


def with_replies(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Turns:
    """The whole conversation. ValueError when the template writes earlier turns in another way once later ones follow:
    where replies begin and end could not be told.
    """
    text, replies = _render(tokenizer, messages), []
    for at, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = _render(tokenizer, messages[:at], reply=True)
        until = _render(tokenizer, messages[: at + 1])
        if not (text.startswith(before) and text.startswith(until) and len(before) < len(until)):
            raise ValueError(f"the chat template writes message {at + 1} in another way when messages follow it")
        replies.append((len(before), len(until)))
    return Turns(text, tuple(replies))


def asking(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Turns:
    """What comes before the reply that is to be written; replies that end the conversation are left out."""
    asked = len(messages)
    while asked and messages[asked - 1]["role"] == ASSISTANT:
        asked -= 1
    return Turns(_render(tokenizer, messages[:asked], reply=True), ())


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, reply: bool = False) -> str:
    if not messages:
        return ""
    # Arrow gives every message the fields of all messages; those that it does not have are null.
    own = [{name: value for name, value in each.items() if value is not None} for each in messages]
    return str(tokenizer.apply_chat_template(own, tokenize=False, add_generation_prompt=reply))


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """StageError MODEL for a tokenizer that does not know how conversations are written."""
    if not tokenizer.chat_template:
        raise StageError(
            FailureClass.MODEL,
            "NoChatTemplate",
            "dataset.columns.messages is set, and the model's tokenizer has no chat template.",
            "Use a model that was made for conversations, or the columns source and target instead of messages.",
        )

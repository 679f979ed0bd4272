"""Conversations as tokens, by the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A conversation as tokens."""

    ids: list[int]
    replied: list[bool]
    """True for each token of a reply."""
    prompt: int
    """Tokens before the last reply; all tokens where it is still to be written."""


def conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, learnt: bool) -> Conversation:
    """Encode the whole conversation for training (`learnt`), else the part before the reply that is to be written.
    Raise StageError DATA for one that the template does not accept.
    """
    try:
        turns = (with_replies if learnt else prompt_turns)(tokenizer, messages)
    except (ValueError, TypeError, jinja2.TemplateError) as error:
        raise StageError(
            FailureClass.DATA,
            "ConversationRefused",
            f"A conversation that begins with {str(messages[0])[:80]!r} does not fit the model's chat template: "
            f"{error}.",
            "Correct its messages (roles, their order), or use a model with another template.",
        ) from error
    encoded = tokenizer(
        turns.text,
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    inside = [any(first <= start < last for first, last in turns.replies) for start, _ in offsets]
    prompt = len(ids)
    if turns.replies:
        prompt = next((at for at, (start, _) in enumerate(offsets) if start >= turns.replies[-1][0]), len(ids))
    return Conversation(ids, inside, prompt)


@dataclass(frozen=True)
class Turns:
    """A conversation rendered by the template."""

    text: str
    replies: tuple[tuple[int, int], ...]
    """First and last character (exclusive) of each assistant reply, the end of its turn included."""


def with_replies(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Turns:
    """Render the whole conversation. Raise ValueError when the template renders earlier turns differently once later
    ones follow: the limits of replies would be unknown.
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


def prompt_turns(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> Turns:
    """Render the part before the reply that is to be written; replies that end the conversation are left out."""
    end = len(messages)
    while end and messages[end - 1]["role"] == ASSISTANT:
        end -= 1
    return Turns(_render(tokenizer, messages[:end], reply=True), ())


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, reply: bool = False) -> str:
    if not messages:
        return ""
    # Arrow gives every message the fields of all messages; missing ones are null.
    without_nulls = [{name: value for name, value in message.items() if value is not None} for message in messages]
    return str(tokenizer.apply_chat_template(without_nulls, tokenize=False, add_generation_prompt=reply))


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise StageError MODEL for a tokenizer without a chat template."""
    if not tokenizer.chat_template:
        raise StageError(
            FailureClass.MODEL,
            "NoChatTemplate",
            "The rows are conversations, and the model's tokenizer has no chat template.",
            "Use a model that was trained for conversations, or rows of plain text.",
        )

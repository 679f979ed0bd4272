"""Overlapping windows of long rows: the shared part of tasks that cut them."""

from __future__ import annotations

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.tasks.task_protocol import Coding


def made_ready(coding: Coding, *, pair: bool) -> int:
    """Make the tokenizer cut windows from the left, and return the tokens of a window that are not special ones.

    Raise StageError MODEL for a tokenizer without offsets of tokens in a row, CONFIG for windows that would not
    advance.
    """
    tokenizer = coding.tokenizer
    if not tokenizer.is_fast:
        raise StageError(
            FailureClass.MODEL,
            "SlowTokenizer",
            f"The tokenizer {type(tokenizer).__name__} does not report the positions of its tokens in a row.",
            "Use a model with a fast tokenizer (tokenizer.json).",
        )
    room = coding.max_length - tokenizer.num_special_tokens_to_add(pair=pair)
    if room <= coding.stride + int(pair):
        raise StageError(
            FailureClass.CONFIG,
            "MaxLengthTooShort",
            f"Windows of {coding.max_length} tokens hold {max(0, room)} of a row, and share {coding.stride}.",
            "Raise preparation.maxLength, or lower preparation.stride.",
        )
    # Windows keep all of a row, so the side decides only the order.
    tokenizer.truncation_side = "right"
    return room

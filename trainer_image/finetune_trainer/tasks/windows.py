"""Long rows as windows that overlap: what tasks that cut them have in common."""

from __future__ import annotations

from finetune_contract.layout import FailureClass
from finetune_trainer.failures import StageError
from finetune_trainer.tasks.task_protocol import Coding


def made_ready(coding: Coding, *, pair: bool) -> int:
    """Has the tokenizer count windows from the left, and gives the tokens of a window that are not special ones.

    StageError MODEL for a tokenizer that does not tell where in a row its tokens are, CONFIG for windows that would not
    move on.
    """
    tokenizer = coding.tokenizer
    if not tokenizer.is_fast:
        raise StageError(
            FailureClass.MODEL,
            "SlowTokenizer",
            f"The tokenizer {type(tokenizer).__name__} does not tell where in a row its tokens are.",
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
    # Nothing of a row is cut off, so that the side has no meaning but this.
    tokenizer.truncation_side = "right"
    return room

"""Limits of tokenizers, whose files come with a model: they may neither multiply a text nor take hours for one.

A tokenizer.json of 3 KB can replace each letter by two, 40 times: 2^40 letters. The Rust library has no limit of its
own and ends the process when no memory is left. So the steps of a loaded tokenizer are read, and the longest text that
they can make of one letter is computed; no text has to be tried.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_GROWTH = 1_000
"""Limit of letters for one letter. Unicode's longest replacement has 18, bytes as letters make 4 of one, and rules that
join spaces count as 2 each.
"""
MOST_ADDED = 1_000
"""Limit of letters or tokens that are put around a text; templates have some 10."""
LONGEST_WORD = 1_000
"""Limit of letters in a word that WordPiece divides, which takes time by their third power: 0.3 s for these, 129 s for
10,000. BERT's is 100.
"""


def refuse_bomb(tokenizer: Tokenizer) -> None:
    """Raise ValueError for a tokenizer beyond the limits."""
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        step = getattr(tokenizer, name)
        grown = 1.0 if step is None else _growth(json.loads(step.__getstate__()))
        if grown > MOST_GROWTH:
            raise ValueError(f"its {name} can make a text more than {MOST_GROWTH:,} times as long")
    letters = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if letters > LONGEST_WORD:
        raise ValueError(f"its max_input_chars_per_word is {letters:,}, and at most {LONGEST_WORD:,} is supported")


def _growth(step: Mapping[str, Any]) -> float:
    """Return by how much a step, as in tokenizer.json, can multiply a text; infinity for too many additions."""
    match step:
        case {"type": "Sequence"}:
            return math.prod(_growth(part) for parts in step.values() if isinstance(parts, list) for part in parts)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if pattern:
            return max(1.0, len(content) / len(pattern))
        case {"type": "Replace", "content": content}:
            return 1.0 + len(content)  # an expression may match the empty text before each letter
        case {"type": "Prepend", "prepend": text} if len(text) > MOST_ADDED:
            return math.inf
        case {"type": "Precompiled", "precompiled_charsmap": encoded}:
            table = base64.b64decode(encoded)
            # The size of a tree, the tree, and texts that end with a zero each.
            texts = table[4 + int.from_bytes(table[:4], "little") :].decode(errors="replace")
            return max(1.0, max(map(len, texts.split("\0"))))
        case {"type": "ByteLevel"}:
            return 4.0  # bytes of a letter
        case {"type": "TemplateProcessing"}:
            return max(_template_growth(step[kind], step["special_tokens"]) for kind in ("single", "pair"))
        case _:
            return 1.0


def _template_growth(template: list[dict[str, Any]], special: Mapping[str, Any]) -> float:
    added = sum(len(special[part["SpecialToken"]["id"]]["ids"]) for part in template if "SpecialToken" in part)
    repeated = Counter(part["Sequence"]["id"] for part in template if "Sequence" in part)
    return math.inf if added > MOST_ADDED else float(max(repeated.values(), default=1))


@contextmanager
def tokenizer_panics_named() -> Iterator[None]:
    """Raise StageError MODEL `TokenizerFailed` for a panic of the Rust library, which is no `Exception`: it would pass
    by whatever keeps a server or a worker alive.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise StageError(
            FailureClass.MODEL,
            "TokenizerFailed",
            f"The tokenizer of the model failed on a text: {str(error).partition(chr(10))[0][:200]}",
            "Use the tokenizer.json that the model was published with, or shorten the text.",
        ) from error


def is_panic(error: BaseException) -> bool:
    """Return True for a panic of a library in Rust, whose class no module exports."""
    return type(error).__name__ == "PanicException"

"""Metrics of generated texts, by which a backend is compared with the plain model.

The reference of a prompt is the text that follows it in a labelled row: the target, the last reply of a conversation,
or the chosen answer of a pair. A text without a prompt has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.tasks.text_to_text import rouge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedSplit


def reference_texts(split: PreparedSplit, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the reference of each row, without special tokens. StageError DATA `NoReferences` if no row has one."""
    last = np.array([features[-1] for features in split.features_by_row])
    texts = []
    for feature in split.data.features(split.role, last):
        answer = slice(int(feature["prompt"]), int(feature.get("chosen", len(feature["input_ids"]))))
        texts.append(str(tokenizer.decode(feature["input_ids"][answer], skip_special_tokens=True)))
    if not any(texts):
        raise StageError(
            FailureClass.DATA,
            "NoReferences",
            f"predict.metricTolerance compares generated texts with references, and the {split.role} split has none.",
            "Name dataset.columns.source and target, or messages, or leave predict.metricTolerance out.",
        )
    return texts


def text_metrics(written: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return ROUGE as for summaries, and the share of texts that equal their reference but for outer spaces."""
    pairs = zip(written, references, strict=True)
    equal = float(np.mean([one.strip() == other.strip() for one, other in pairs]))
    return {**rouge(written, references), "exact_match": equal}

"""Features of different lengths as one rectangle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from finetune_trainer.tasks.task_protocol import Feature

if TYPE_CHECKING:
    import torch


def padded(features: Sequence[Feature], fills: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Pad each column of `fills` that features have on the right, shape (features, longest); and add the
    `attention_mask` of `input_ids`.
    """
    import torch

    longest = max(len(feature["input_ids"]) for feature in features)
    batch = {}
    for name, fill in {**fills, "attention_mask": 0}.items():
        if name != "attention_mask" and name not in features[0]:
            continue
        values = np.full((len(features), longest), fill, np.int64)
        for row, feature in enumerate(features):
            length = len(feature["input_ids"])
            values[row, :length] = 1 if name == "attention_mask" else feature[name]
        batch[name] = torch.from_numpy(values)
    return batch

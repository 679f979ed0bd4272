"""Logits of long rows are judged a piece at a time, in memory that the plan counts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune_contract.plans import JUDGED_LOGITS
from finetune_trainer.tasks.writing import judged, surprises

NOT_LEARNT = -100


def long_row(vocabulary: int, pieces: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a row that takes so many pieces, and labels, of which every seventh is not learnt."""
    tokens = int(pieces * (JUDGED_LOGITS // vocabulary) * 7 / 6)
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, vocabulary, generator=drawn).to(dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=drawn)
    labels[::7] = NOT_LEARNT
    return logits, labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_row_is_judged_in_pieces_as_it_would_be_at_once(dtype: torch.dtype):
    logits, labels = long_row(32_768, 1.3, dtype)
    nothing = torch.full_like(labels, NOT_LEARNT)
    one, none = surprises(torch.stack([logits, logits]), torch.stack([labels, nothing]))
    learnt = labels != NOT_LEARNT
    whole = torch.nn.functional.cross_entropy(logits[learnt].float(), labels[learnt], reduction="none")
    assert len(whole) * 32_768 > JUDGED_LOGITS
    np.testing.assert_array_equal(one["surprise"], whole.numpy())
    np.testing.assert_array_equal(one["hit"], (logits[learnt].argmax(-1) == labels[learnt]).numpy())
    assert [none[name].shape for name in ("surprise", "hit")] == [(0,), (0,)]
    assert (none["surprise"].dtype, none["hit"].dtype) == (np.float32, np.bool_)


def test_pieces_are_of_bounded_size_but_where_gradients_keep_all_of_them():
    logits, labels = long_row(65_536, 2.5, torch.bfloat16)
    sizes = [chosen.numel() for chosen, _ in judged(logits, labels)]
    assert len(sizes) == 3
    assert max(sizes) <= JUDGED_LOGITS
    assert sum(sizes) == int((labels != NOT_LEARNT).sum()) * 65_536
    few, some = long_row(16, 0.0001, torch.float32)
    assert len(list(judged(few.requires_grad_(), some))) == 1
    ((wide, _),) = judged(torch.zeros(1, JUDGED_LOGITS + 1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64))
    assert wide.shape == (1, JUDGED_LOGITS + 1)


def test_judging_takes_no_more_memory_than_the_plan_counts_however_long_the_row(tmp_path: Path):
    """As torch's own allocator tells it. The plan counts a copy in the model's dtype, and twice float32."""
    logits, labels = long_row(65_536, 3.2, torch.bfloat16)
    batch = logits[None], labels[None]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        surprises(*batch)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    totals = [each["args"]["Total Allocated"] for each in events if each["name"] == "[memory]"]
    assert len(totals) > 10
    assert sum(later > before for before, later in pairwise(totals)) >= 8, "two tensors or more for each of four pieces"
    peak, counted = max(totals) - min(totals), (2 + 8) * JUDGED_LOGITS
    assert 0.5 * counted < peak < 1.02 * counted
    assert counted < 0.4 * (2 + 8) * logits.numel(), "a row that is long enough to tell"

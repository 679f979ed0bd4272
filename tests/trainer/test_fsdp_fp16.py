"""FSDP in fp16: 16-bit weights in shards, with a loss that is scaled alike on all ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from process_support.sharded_training import STEPS, ShardedRank
from suite_plugins.patience import patient

RANKS = 2
TOO_LARGE = 1e9
"""Factor of the loss with which gradients exceed the range of fp16."""


def trained(precision: str, folder: Path, **settings: Any) -> list[list[dict[str, float]]]:
    """Return the figures of each rank's steps."""
    ranks = [ShardedRank(rank, RANKS, precision, folder, **settings) for rank in range(RANKS)]
    processes = [one.start() for one in ranks]
    for process in processes:
        process.join(patient(120))
    assert [process.exitcode for process in processes] == [0] * RANKS
    return [json.loads(one.figures.read_text()) for one in ranks]


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_fsdp_trains_in_fp16_as_in_fp32(optimizer: str, tmp_path: Path):
    wide = trained("fp32", tmp_path, optimizer=optimizer)
    half = trained("fp16", tmp_path, optimizer=optimizer)
    for of_wide, of_half in zip(wide, half, strict=True):
        assert len(of_half) == STEPS
        for one, other in zip(of_wide, of_half, strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=2e-3)
            assert other["norm"] == pytest.approx(one["norm"], rel=5e-2), "gradients are unscaled before clipping"
    assert [[each["loss"] for each in steps] for steps in half] != [[each["loss"] for each in steps] for steps in wide]


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused"])
def test_step_with_overflowing_gradients_is_skipped_by_all_ranks(optimizer: str, tmp_path: Path):
    first, second = trained("fp16", tmp_path, optimizer=optimizer, scale=TOO_LARGE)
    assert [each["scale"] for each in first] == [each["scale"] for each in second]
    assert [each["scale"] for each in first] == [TOO_LARGE / 2**step for step in range(1, STEPS + 1)]
    assert not any(math.isfinite(each["norm"]) for each in first)
    assert len({each["weight"] for each in first}) == 1, "no step changes weights"

"""Weights of layers in fp8 that FSDP gathers in fp8, on two processes with gloo."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.core.failures import StageError
from process_support import sharded_training
from suite_plugins.patience import patient

pytest.importorskip("torchao", reason="torchao is not installed (finetune-trainer[fp8])")


def trained(folder: Path, **settings: Any) -> list[list[dict[str, float]]]:
    """Return the figures of each rank's steps."""
    ranks = [sharded_training.ShardedRank(rank, 2, "fp8", folder, **settings) for rank in range(2)]
    processes = [one.start() for one in ranks]
    for process in processes:
        process.join(patient(120))
    assert [process.exitcode for process in processes] == [0, 0]
    return [json.loads(one.figures.read_text()) for one in ranks]


def losses(ranks: list[list[dict[str, float]]]) -> list[float]:
    """Return the mean over both ranks of each step."""
    return [(one["loss"] + other["loss"]) / 2 for one, other in zip(*ranks, strict=True)]


def test_gathers_in_fp8_send_half_and_train_alike(tmp_path: Path):
    rounded, plain = trained(tmp_path), trained(tmp_path, rounds_gathered=False)
    compiled = trained(tmp_path, backend="aot_eager")
    assert losses(rounded) == pytest.approx(losses(plain), abs=0.01)
    assert losses(compiled) == pytest.approx(losses(plain), abs=0.01)
    assert all(later < earlier for earlier, later in pairwise(losses(rounded)))
    # A layer has four matrices of 32 x 32 and three of 32 x 64; both passes gather them. One process has a half.
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    saved = 2 * (2 - 1) * matrices / 2
    for one, other in zip(rounded[0], plain[0], strict=True):
        assert other["gathered"] - one["gathered"] == saved


def test_uneven_weights_are_gathered_in_bf16_and_shared_ones_stay_shared():
    import torch

    from finetune_trainer.models.float8 import convert, gather_in_float8, gathered_in_float8

    shared = torch.nn.Linear(32, 96, bias=False)
    blocks = [torch.nn.ModuleDict({"up": shared, "down": torch.nn.Linear(96, 32)}) for _ in range(2)]
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(blocks)})
    converted = convert(model)
    names = list(model.state_dict())
    gather_in_float8(model, 3)
    layers: Any = [model.get_submodule(name) for name in converted.layers]
    assert {name: gathered_in_float8(each.weight) for name, each in zip(converted.layers, layers, strict=True)} == {
        "blocks.0.down": False, "blocks.0.up": True, "blocks.1.down": False, "blocks.1.up": True,
    }  # fmt: skip
    assert layers[1].weight is layers[3].weight
    assert list(model.state_dict()) == names
    converted.assert_in_effect(model)
    layers[1].weight = torch.nn.Parameter(torch.zeros(96, 32))
    with pytest.raises(StageError, match=r"the weight of blocks\.0\.up is not gathered in fp8"):
        converted.assert_in_effect(model)

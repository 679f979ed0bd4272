"""ZeRO-3 shards a model that no device could hold: no process ever has more than its shard and one whole weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer_support.forking import fork_server
from trainer_support.tasks import write_decoder

PROCESSES = 4
CONFIG: dict[str, Any] = {
    "train_batch_size": PROCESSES,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}
# Buffers that are small beside a model of a few thousand weights.
ZERO: dict[str, Any] = {
    "stage": 3,
    "reduce_bucket_size": 1,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}
OFFLOAD = {"device": "cpu", "pin_memory": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "sections"),
    [
        pytest.param({}, {}, id="shares on the device"),
        pytest.param({"offload_parameters": "cpu"}, {"offload_param": OFFLOAD}, id="shares in host memory"),
    ],
)
def test_a_process_has_its_share_and_one_whole_weight_at_a_time(
    settings: dict[str, Any], sections: dict[str, Any], tmp_path: Path
):
    import torch
    from safetensors.torch import load_file

    model = write_decoder(tmp_path / "gpt2", "gpt2")  # input and output embeddings are one weight
    case = {
        "processes": PROCESSES,
        "call": "process_support.divided:divide",
        "arguments": {
            "model": str(model),
            "settings": settings,
            "config": {**CONFIG, "zero_optimization": {**ZERO, **sections}},
            "out": str(tmp_path),
        },
        "environment": {},
        "log": str(tmp_path / "log"),
    }
    codes, output = fork_server().run(case)
    assert codes == [0] * PROCESSES, output
    for rank in range(PROCESSES):
        sizes = json.loads((tmp_path / f"bytes-{rank}.json").read_text())
        assert sizes["starting"] < sizes["whole"]
        # gloo may keep a weight for a moment while the next one is already there.
        assert sizes["share"] <= sizes["dividing"] <= sizes["share"] + 2 * sizes["largest"]

    # All ranks continue with rank 0's weights, and tied weights stay tied.
    mine = load_file(tmp_path / "weights.safetensors")
    theirs = load_file(model / "model.safetensors")
    assert {name for name in mine if name != "lm_head.weight"} == set(theirs)
    assert all(torch.equal(mine[name], theirs[name].bfloat16()) for name in theirs)

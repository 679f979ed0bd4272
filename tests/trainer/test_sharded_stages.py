"""FSDP over the stages of a pipeline: replicas whose micro-batches differ in shape run the same collectives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finetune_contract.trainer_job import Pipeline, Strategy
from finetune_trainer.checkpoint.tensor_files import mapped_tensors
from process_support import uneven_replicas
from trainer_support.forking import fork_server


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Strategy(name="fsdp", pipeline=Pipeline(degree=2, micro_batches=2, schedule="1f1b")), id="1f1b"),
        pytest.param(
            Strategy(name="fsdp", pipeline=Pipeline(degree=2, micro_batches=2, schedule="interleaved")),
            id="interleaved",
        ),
    ],
)
def test_replicas_with_other_lengths_train_as_one_process(bench, tmp_path: Path, strategy: Strategy):
    training = bench.in_replicas(strategy, uneven_replicas.REPLICAS, 2).job.training
    case = {
        "processes": uneven_replicas.REPLICAS * strategy.model_ranks,
        "call": "process_support.uneven_replicas:in_replicas",
        "arguments": {
            "family": "llama",
            "training": training.model_dump(mode="json", by_alias=True),
            "out": str(tmp_path),
        },
        "environment": {},
        "log": str(tmp_path / "log"),
    }
    codes, output = fork_server().run(case, seconds=60)
    assert codes == [0] * case["processes"], output
    norms, losses, weights = uneven_replicas.in_one_process("llama")
    mine_norms, mine_losses = torch.load(tmp_path / "result.pt", weights_only=True)
    assert mine_norms == pytest.approx(norms, rel=1e-4)
    assert mine_losses == pytest.approx(losses, rel=1e-5)
    mine = mapped_tensors(tmp_path / "weights.safetensors")
    assert max((mine[each] - weights[each]).abs().max().item() for each in mine) <= 1e-5

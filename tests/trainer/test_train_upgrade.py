"""A run begun by an earlier release continues with today's trainer and ends with the same weights, to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from earlier_release import unpack
from finetune_contract.trainer_job import CheckpointSchedule
from trainer_support.forking import ForkServer

STEPS, SAVED = 14, 8
"""An epoch has 12 steps, so the resumed part crosses into another one."""


@pytest.fixture(scope="module")
def earlier_trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Yield a server that starts ranks of the earlier release's trainer."""
    place = tmp_path_factory.mktemp("earlier")
    folder = unpack(place, "trainer_image") / "trainer_image"
    server = ForkServer(folder, folder / "contract")
    packages = {"packages": ["finetune_trainer", "finetune_trainer.__main__", "finetune_contract"]}
    case = {"processes": 1, "environment": {}, "log": str(place / "log")}
    call = {"call": "earlier_release:assert_imported", "arguments": {**packages, "folder": str(folder)}}
    codes, output = server.run({**case, **call})
    assert codes == [0], output
    yield server
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "processes", "settings"),
    [
        pytest.param("single", 1, {}, id="single"),
        pytest.param("ddp", 2, {}, id="ddp"),
        pytest.param("fsdp", 2, {}, id="fsdp"),
        pytest.param("deepspeed", 2, {"zero_stage": 2}, id="ZeRO-2"),
        pytest.param("deepspeed", 2, {"zero_stage": 3}, id="ZeRO-3"),
    ],
)
def test_trainer_resumes_a_checkpoint_of_an_earlier_release(
    strategy: str, processes: int, settings: dict[str, Any], dropout_bench, earlier_trainer: ForkServer, tmp_path: Path
):
    run = dropout_bench.at(tmp_path / "w").with_training(
        max_steps=STEPS, checkpoints=CheckpointSchedule(every_steps=4, keep=9)
    )
    run = run.spread(strategy, processes, micro=4, **settings)
    config = run.deepspeed_config() if strategy == "deepspeed" else None
    codes, output = earlier_trainer.run(run.case(processes=processes, deepspeed=config))
    assert codes == [0] * processes, output
    losses, weights = run.losses(), run.weights()
    assert len(losses) == STEPS
    for path in run.paths.checkpoints.glob("step-*"):
        if path.name != f"step-{SAVED}":
            shutil.rmtree(path)
    (run.paths.checkpoints / "latest").write_text(f"step-{SAVED}\n", encoding="utf-8")
    shutil.rmtree(run.paths.model)
    (run.paths.state / "train.json").unlink()

    resumed = run.run(processes=processes, deepspeed=config)
    assert resumed.exit_code == 0, resumed.output
    assert f"(step {SAVED})" in resumed.output
    assert run.losses() == losses
    ended = run.weights()
    assert [name for name, value in weights.items() if not value.equal(ended[name])] == []

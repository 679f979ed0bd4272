"""A run that an earlier release began goes on with today's trainer and ends with the same weights, to the last bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from earlier_release import python_path, unpack
from finetune_contract.trainer_job import CheckpointSchedule

STEPS, SAVED = 14, 8
"""An epoch has 12 steps, so the resumed part crosses into another one."""


@pytest.fixture(scope="module")
def earlier_trainer(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Environment in which Python imports the trainer of the earlier release."""
    folder = unpack(tmp_path_factory.mktemp("earlier"), "trainer_image")
    return python_path(folder / "trainer_image", folder / "trainer_image" / "contract")


@pytest.mark.parametrize(
    ("strategy", "processes", "settings"),
    [
        pytest.param("single", 1, {}, id="single"),
        pytest.param("ddp", 2, {}, id="ddp", marks=pytest.mark.slow),
        pytest.param("fsdp", 2, {}, id="fsdp", marks=pytest.mark.slow),
        pytest.param("deepspeed", 2, {"zero_stage": 2}, id="ZeRO-2", marks=pytest.mark.slow),
        pytest.param("deepspeed", 2, {"zero_stage": 3}, id="ZeRO-3", marks=pytest.mark.slow),
    ],
)
def test_trainer_resumes_a_checkpoint_of_an_earlier_release(
    strategy: str, processes: int, settings: dict[str, Any], dropout_bench, earlier_trainer, tmp_path: Path
):
    run = dropout_bench.at(tmp_path / "w").with_training(
        max_steps=STEPS, checkpoints=CheckpointSchedule(every_steps=4, keep=9)
    )
    run = run.spread(strategy, processes, micro=4, **settings)
    config = run.deepspeed_config() if strategy == "deepspeed" else None
    environment = {**earlier_trainer, "DS_ACCELERATOR": "cpu"}
    began = run.end(run.start(processes=processes, deepspeed=config, environment=environment))
    assert began.exit_code == 0, began.output
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

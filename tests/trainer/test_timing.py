"""Time of a training: parts that add up to the whole, under every strategy, and tokens with padding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from finetune_contract.plan_check import MeasuredTraining
from finetune_contract.report import TimeSplit, TrainerReport
from finetune_contract.trainer_job import Batch, CheckpointSchedule, Strategy
from finetune_trainer.training import timing
from finetune_trainer.training.order import EpochOrder
from finetune_trainer.training.timing import PartClock, rounded
from suite_plugins.patience import patient

EVERY_STEP = {"start", "data", "optimizer", "rest", "finish", "evaluation", "checkpoint"}
PASSES = {"forward", "backward"}


@dataclass
class Played:
    """A clock with given moments, as of a device that lags behind the host."""

    moments: list[float]
    name: Any = "cuda-events"

    def now(self) -> float:
        return self.moments.pop(0)

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier


def metrics(run) -> dict[str, Any]:
    return json.loads(run.paths.metrics.read_text(encoding="utf-8"))["train"]


def split_of(run) -> TimeSplit:
    return TimeSplit.model_validate(metrics(run)["time"])


def test_time_goes_to_the_part_in_which_the_device_spent_it(monkeypatch):
    host = iter([10.0, 13.5])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(host))
    clock = PartClock(Played([0.0, 0.5, 1.0, 1.25, 3.0, 3.25]))
    for part in ("data", "forward", "data", "forward"):
        clock.enter(part)
    # The host's clock ran for 0.25 s more than the device's.
    assert clock.lap() == {"start": 0.5, "data": 0.5 + 1.75, "forward": 0.25 + 0.25, "rest": 0.25}


def test_a_lap_begins_where_the_one_before_ended():
    clock = PartClock(Played([0.0, 1.0, 2.0, 4.0, 8.0]))
    clock.enter("data")
    first = clock.lap()
    clock.enter("forward")
    second = clock.lap()
    assert (first["start"], first["data"]) == (1.0, 1.0)
    assert (second["data"], second["forward"]) == (2.0, 4.0)
    assert "start" not in second


def test_laps_that_are_read_late_add_up_to_the_hosts_time(monkeypatch):
    # The host reads the first lap when it has queued the second, and the second at once.
    host = iter([0.0, 5.0, 6.0, 9.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(host))
    clock = PartClock(Played([0.0, 1.0, 4.0, 7.0, 8.0]))
    clock.enter("forward")
    first = clock.end_lap()
    second = clock.end_lap()
    read = [clock.seconds(first), clock.seconds(second), clock.lap()]
    assert read == [
        {"start": 1.0, "forward": 3.0, "rest": 1.0},
        {"forward": 3.0, "rest": 0.0},
        {"forward": 1.0, "rest": 0.0},
    ]
    assert sum(sum(parts.values()) for parts in read) == 9.0


def test_parts_without_time_are_not_written():
    assert rounded({"data": 1.23456789, "rest": 1e-9}) == {"data": 1.234568}


@pytest.mark.parametrize(
    ("lengths", "batch", "computed"),
    [
        pytest.param([4, 4, 4, 4], (2, 2, 1), 16, id="rows of one length need no padding"),
        pytest.param([1, 1, 1, 5], (4, 1, 1), 20, id="one micro-batch is as long as its longest row"),
        pytest.param([1, 1, 1, 5], (1, 4, 1), 8, id="rows by themselves are not padded"),
        pytest.param([1, 1, 1, 5], (2, 1, 2), 12, id="each rank pads by itself"),
    ],
)
def test_padding_is_counted_by_micro_batch(lengths, batch, computed):
    micro, accumulation, ranks = batch
    sizes = {"micro_batch_size": micro, "gradient_accumulation": accumulation, "data_parallel": ranks}
    order = EpochOrder(np.array(lengths), Batch(global_batch_size=4, **sizes), rank=0, seed=1, grouped=True)
    assert (order.step_tokens(0), order.step_computed_tokens(0)) == (sum(lengths), computed)


def test_the_parts_of_a_training_add_up_to_its_time(bench, tmp_path):
    run = bench.at(tmp_path / "w").with_training(checkpoints=CheckpointSchedule(every_steps=5, keep=1))
    run.train_here()
    found, split = metrics(run), split_of(run)
    assert set(split.parts) == EVERY_STEP | PASSES
    assert split.total_seconds == pytest.approx(sum(split.parts.values()))
    assert split.total_seconds == pytest.approx(found["seconds"], rel=0.01, abs=patient(0.1))
    assert split.with_communication == ()
    assert split.clock == "host"


def test_padding_and_rates_are_those_of_the_computed_tokens(bench, tmp_path):
    run = bench.at(tmp_path / "w")
    run.train_here()
    found = metrics(run)
    lines = [line for line in map(json.loads, run.paths.history.read_text().splitlines()) if "loss" in line]
    assert found["tokens"] == sum(line["tokens"] for line in lines)
    assert found["padding_share"] == pytest.approx(1 - found["tokens"] / sum(line["computed_tokens"] for line in lines))
    assert 0 < found["padding_share"] < 0.5
    seconds = sum(line["tokens"] / line["tokens_per_second"] for line in lines)
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / seconds)
    assert found["peak_memory_bytes_by_rank"] == [found["peak_memory_bytes"]]


SPREAD = {
    "ddp": ("ddp", None, {}, PASSES, PASSES),
    "fsdp": ("fsdp", None, {}, PASSES, {*PASSES, "optimizer"}),
    "ZeRO-0": ("deepspeed", None, {"zero_stage": 0}, PASSES, {"backward"}),
    "ZeRO-2": ("deepspeed", None, {"zero_stage": 2}, PASSES, {"backward", "optimizer"}),
    "ZeRO-3 with accumulation": ("deepspeed", 4, {"zero_stage": 3}, PASSES, {*PASSES, "optimizer"}),
}


def assert_divided(run, ended, parts: set[str], mixed: set[str]) -> None:
    assert ended.exit_code == 0, ended.output
    found, split = metrics(run), split_of(run)
    assert set(split.parts) == {*EVERY_STEP, "communication", *parts} - {"checkpoint"}
    assert set(split.with_communication) == mixed
    assert sum(split.parts.values()) == pytest.approx(found["seconds"], rel=0.02, abs=patient(0.02))
    assert split.parts["optimizer"] > 0
    assert len(found["peak_memory_bytes_by_rank"]) == found["world_size"] == 2
    assert max(found["peak_memory_bytes_by_rank"]) == found["peak_memory_bytes"]
    # The operator's part of the report stays small and flat.
    train_metrics = ended.reports[0].metrics["train"]
    assert found.keys() - train_metrics.keys() == {"time", "peak_memory_bytes_by_rank"}
    assert_measured(run, ended)


def assert_measured(run, ended) -> None:
    """Check the median step and the memory of the fullest process, which the report carries to the operator."""
    report, found = ended.reports[0], metrics(run)
    measured = MeasuredTraining.model_validate(report.metrics["train"]["measured"])
    assert len(report.to_termination_message()) < 2500
    assert TrainerReport.model_validate_json(report.to_termination_message()).metrics == report.metrics
    lines = [line for line in map(json.loads, run.paths.history.read_text().splitlines()) if "loss" in line]
    assert measured.steps == len(lines)
    between = {"start", "evaluation", "checkpoint", "finish"}
    steps = [sum(seconds for part, seconds in line["seconds"].items() if part not in between) for line in lines]
    assert measured.step_seconds == pytest.approx(median(steps), abs=1e-5)
    assert 0 < measured.step_parts["optimizer"] < measured.step_seconds
    assert measured.memory_bytes == found["peak_memory_bytes"]
    terms = measured.memory_terms
    assert terms["process"] + terms["training"] == measured.memory_bytes
    weights = sum(tensor.numel() for tensor in load_file(run.paths.model / "model.safetensors").values())
    strategy = run.job.training.strategy
    copies = 12 if strategy.name == "deepspeed" and strategy.zero_stage else 8  # a master copy, and two moments
    divided = {"fsdp": (2, 2), "deepspeed": (1 + (strategy.zero_stage == 3), 1 + bool(strategy.zero_stage))}
    of_weights, of_states = divided.get(strategy.name, (1, 1))
    of_weights *= strategy.model_ranks
    of_states *= strategy.model_ranks
    # Vectors are not split, and shards are padded to a multiple of the ranks.
    near = 0.35 if strategy.model_ranks > 1 else 0.02
    assert terms["parameters"] == pytest.approx(4 * weights / of_weights, rel=near)
    assert terms["optimizer state"] == pytest.approx(copies * weights / of_states, rel=near)


@pytest.mark.slow
@pytest.mark.parametrize("case", SPREAD)
def test_every_strategy_reports_its_time_by_part(case, whole_run, spread_of):
    strategy, micro, settings, parts, mixed = SPREAD[case]
    run, ended = whole_run(spread_of(strategy, 2, micro, tuple(settings.items())))
    assert_divided(run, ended, parts, mixed)


MODEL_PARALLEL = {
    "tensor": ({"tensor": 2}, 16, PASSES, {*PASSES, "optimizer"}),
    "pipeline": (
        {"pipeline": {"degree": 2, "micro_batches": 4, "schedule": "1f1b"}},
        4,
        {"forward_backward"},
        {"forward_backward", "optimizer"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODEL_PARALLEL)
def test_model_over_several_processes_reports_its_time_by_part(case, tiny_family, bench_of, tiny_data, tmp_path):
    settings, micro, parts, mixed = MODEL_PARALLEL[case]
    bench = bench_of(tmp_path / "w", tiny_family(tmp_path / "model", "llama"), tiny_data)
    training = bench.job.training
    sizes = {"micro_batch_size": micro, "gradient_accumulation": 16 // micro, "data_parallel": 1}
    run = bench.with_training(
        strategy=Strategy.model_validate({"name": "ddp", **settings}),
        world=training.world.model_copy(update={"processes_per_node": 2}),
        batch=training.batch.model_copy(update=sizes),
        max_steps=6,
    )
    assert_divided(run, run.run(processes=2), parts, mixed)

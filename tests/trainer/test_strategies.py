"""Every strategy trains the same model: at equal global batch the losses and weights are those of one process."""

from __future__ import annotations

import json

import pytest

CASES = {
    "one process with accumulation": ("single", 1, 4, {}),
    "ddp": ("ddp", 2, None, {}),
    "fsdp with accumulation and checkpointed activations": ("fsdp", 2, 4, {"activation_checkpointing": "full"}),
    "fsdp": ("fsdp", 2, None, {}),
    "ZeRO-0": ("deepspeed", 2, None, {"zero_stage": 0}),
    "ZeRO-1": ("deepspeed", 2, None, {"zero_stage": 1}),
    "ZeRO-2": ("deepspeed", 2, None, {"zero_stage": 2}),
    "ZeRO-3 with accumulation": ("deepspeed", 2, 4, {"zero_stage": 3}),
    "ZeRO-2 with the optimizer in host memory": ("deepspeed", 2, None, {"zero_stage": 2, "offload_optimizer": "cpu"}),
}


LABELS = {
    "fsdp with accumulation and checkpointed activations": "fsdp+activation-checkpointing",
    "ZeRO-0": "deepspeed-zero0",
    "ZeRO-1": "deepspeed-zero1",
    "ZeRO-2": "deepspeed-zero2",
    "ZeRO-3 with accumulation": "deepspeed-zero3",
    "ZeRO-2 with the optimizer in host memory": "deepspeed-zero2+optimizer-offload",
}
"""Case -> how metrics.json calls the strategy, where that is not its bare name."""


def lines(run) -> list[dict[str, float]]:
    """The steps in the history."""
    return [line for line in map(json.loads, run.paths.history.read_text().splitlines()) if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_weights_agree_with_one_process(case: str, whole_run, spread_of):
    strategy, processes, micro, settings = CASES[case]
    alone, _ = whole_run(spread_of("single", processes=1))
    run, ended = whole_run(spread_of(strategy, processes, micro, tuple(settings.items())))
    assert ended.exit_code == 0, ended.output

    expected, found = lines(alone), lines(run)
    assert [line["step"] for line in found] == list(range(1, 21))
    for name in ("loss", "grad_norm", "learning_rate"):
        # The norm too: Adam hides a gradient that is wrong by a factor.
        if case == "ZeRO-0" and name == "grad_norm":
            continue  # DeepSpeed clips there without keeping the norm.
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-3), name
    theirs, mine = alone.weights(), run.weights()
    assert mine.keys() == theirs.keys()
    assert max((mine[name] - theirs[name]).abs().max().item() for name in theirs) <= 1e-4

    # What was left behind is an ordinary Hub folder, and the report says what ran.
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert AutoModelForSequenceClassification.from_pretrained(run.paths.model).config.num_labels == 2
    assert AutoTokenizer.from_pretrained(run.paths.model)("lovely phone")["input_ids"]
    assert (run.paths.model / "README.md").exists()
    train = json.loads(run.paths.metrics.read_text())["train"]
    assert {name: train[name] for name in ("strategy", "world_size", "steps")} == {
        "strategy": LABELS.get(case, strategy),
        "world_size": processes,
        "steps": 20,
    }
    assert train["loss_first"] == pytest.approx(found[0]["loss"])
    assert train["loss_last"] == pytest.approx(found[-1]["loss"])
    assert train["peak_memory_bytes"] > 1e8
    assert train["samples_per_second"] > 0
    assert ended.progress[-1].step == ended.progress[-1].total_steps == 20
    assert ended.reports.keys() == set(range(processes))
    assert {report.outcome for report in ended.reports.values()} == {"succeeded"}


def test_training_learns_and_keeps_what_the_validation_says(whole_run, spread_of):
    run, ended = whole_run(spread_of("single", processes=1))
    assert ended.exit_code == 0, ended.output
    history = [json.loads(line) for line in run.paths.history.read_text().splitlines()]
    evaluations = [line for line in history if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [12, 20]
    assert evaluations[-1]["eval_accuracy"] == json.loads(run.paths.metrics.read_text())["train"]["eval_accuracy"]
    assert run.losses()[-1] < run.losses()[0]


@pytest.mark.slow
def test_fsdp_in_bf16_on_two_processes_follows_fp32_and_leaves_fp32_weights(whole_run, spread_of, bench, tmp_path):
    import torch

    alone, _ = whole_run(spread_of("single", processes=1))
    run = bench.at(tmp_path / "w").spread("fsdp", 2).with_training(precision="bf16")
    ended = run.run(processes=2)
    assert ended.exit_code == 0, ended.output
    # bf16 has 8 bits of precision: close, and not the same, for then it would not be in effect.
    assert run.losses() == pytest.approx(alone.losses(), rel=5e-2)
    assert run.losses() != pytest.approx(alone.losses(), rel=1e-5)
    assert {tensor.dtype for tensor in run.weights().values()} == {torch.float32}

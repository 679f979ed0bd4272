"""A model spread over several processes by tensor and pipeline parallelism trains as in one process, is refused by name
where it cannot, and leaves an ordinary Hub folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.trainer_job import CheckpointSchedule, EarlyStopping, Strategy
from finetune_trainer.checkpoint.tensor_files import mapped_tensors
from finetune_trainer.strategies.shard_files import StateIndex
from process_support import tied_stages
from suite_plugins.selection import covering
from trainer_support import grids
from trainer_support.forking import fork_server
from trainer_support.tasks import lines_with

WEIGHTS_TOLERANCE = 1e-5
STEPS, EPOCH = 8, 6
"""An epoch and a little more: two evaluations. Each length of a batch costs a tensor's processes half a second."""


def pipeline(schedule: str, micro_batches: int, degree: int = 2) -> dict[str, Any]:
    return {"pipeline": {"degree": degree, "micro_batches": micro_batches, "schedule": schedule}}


@dataclass(frozen=True)
class Case:
    """One model spread in one way over `replicas` x (tensor x pipeline) processes."""

    family: str
    settings: Mapping[str, Any]
    label: str
    micro: int = 4
    replicas: int = 1
    training: Mapping[str, Any] = field(default_factory=dict)
    config: tuple[tuple[str, Any], ...] = ()
    """Config fields of the model, beside the family's."""

    @property
    def strategy(self) -> Strategy:
        return Strategy.model_validate({"name": "ddp", **self.settings})

    @property
    def processes(self) -> int:
        return self.replicas * self.strategy.model_ranks

    @property
    def alone(self) -> tuple[Any, ...]:
        """Key of the run in one process: everything that it depends on."""
        return (self.family, self.config, json.dumps(dict(self.training), default=str))


CASES = {
    "llama, tensor": Case("llama", {"tensor": 2}, "ddp+tensor2", micro=16),
    # Each process applies the norms of queries and keys to its own heads: gradients are summed, once a step.
    "qwen3, tensor with accumulation": Case("qwen3", {"tensor": 2}, "ddp+tensor2"),
    "llama, tensor with recomputed activations": Case(
        "llama",
        {"tensor": 2, "activation_checkpointing": "full"},
        "ddp+tensor2+activation-checkpointing",
        micro=8,
    ),
    # One process and both draw the same masks: attention, of which each process has its own heads, has no dropout.
    "gpt2, tensor with dropout and recomputed activations": Case(
        "gpt2",
        {"tensor": 2, "activation_checkpointing": "full"},
        "ddp+tensor2+activation-checkpointing",
        micro=16,
        config=(("resid_pdrop", 0.1), ("embd_pdrop", 0.1)),
    ),
    "gpt2, tensor x pipeline x data with recomputed activations, as of 30 billion parameters": Case(
        "gpt2",
        {"tensor": 2, **pipeline("1f1b", 4), "activation_checkpointing": "full"},
        "ddp+tensor2+pipeline2-1f1b+activation-checkpointing",
        micro=2,
        replicas=2,
    ),
    "llama, fsdp over split layers": Case("llama", {"name": "fsdp", "tensor": 2}, "fsdp+tensor2", replicas=2),
    "qwen3, fsdp over split layers, gathered for both passes": Case(
        "qwen3",
        {"name": "fsdp", "tensor": 2, "fsdp_sharding": "grad-op", "activation_checkpointing": "full"},
        "fsdp-grad-op+tensor2+activation-checkpointing",
        micro=8,
        replicas=2,
    ),
    "bert, fsdp over stages in two passes": Case(
        "bert", {"name": "fsdp", **pipeline("1f1b", 2)}, "fsdp+pipeline2-1f1b", micro=2, replicas=2
    ),
    "gpt2, fsdp over split layers in stages": Case(
        "gpt2",
        {"name": "fsdp", "tensor": 2, **pipeline("interleaved", 4), "activation_checkpointing": "full"},
        "fsdp+tensor2+pipeline2-interleaved+activation-checkpointing",
        micro=2,
        replicas=2,
    ),
    "llama, tensor x data with divided optimizer state": Case(
        "llama", {"tensor": 2, "zero_stage": 1}, "ddp-zero1+tensor2", replicas=2
    ),
    "gpt2, pipeline x data with divided optimizer state": Case(
        "gpt2", {**pipeline("1f1b", 2), "zero_stage": 1}, "ddp-zero1+pipeline2-1f1b", replicas=2
    ),
    "llama, GPipe": Case("llama", pipeline("gpipe", 4), "ddp+pipeline2-gpipe"),
    "bert, 1F1B": Case("bert", pipeline("1f1b", 4), "ddp+pipeline2-1f1b"),
    "roberta, 1F1B in two passes": Case("roberta", pipeline("1f1b", 2), "ddp+pipeline2-1f1b"),
    "gpt2, interleaved": Case("gpt2", pipeline("interleaved", 8), "ddp+pipeline2-interleaved", micro=2),
    "gpt2, 1F1B with recomputed activations": Case(
        "gpt2",
        {**pipeline("1f1b", 4), "activation_checkpointing": "full"},
        "ddp+pipeline2-1f1b+activation-checkpointing",
    ),
    "bert with 5 layers in 3 stages, without clipping and with smoothed labels": Case(
        "bert",
        pipeline("1f1b", 4, degree=3),
        "ddp+pipeline3-1f1b",
        training={"max_grad_norm": 0.0, "label_smoothing": 0.1},
        config=(("num_hidden_layers", 5),),
    ),
    "llama, tensor x data": Case("llama", {"tensor": 2}, "ddp+tensor2", replicas=2),
    "bert, pipeline x data, the replicas neighbours": Case(
        "bert", {**pipeline("gpipe", 2), "rank_order": "PTD"}, "ddp+pipeline2-gpipe", replicas=2
    ),
    "llama, tensor x pipeline": Case("llama", {"tensor": 2, **pipeline("1f1b", 4)}, "ddp+tensor2+pipeline2-1f1b"),
    "llama, tensor x pipeline in another order": Case(
        "llama",
        {"tensor": 2, **pipeline("interleaved", 4), "rank_order": "TDP"},
        "ddp+tensor2+pipeline2-interleaved",
    ),
}


def axes(case: Case) -> dict[str, Any]:
    """Neighbours: each family with its kind of division, that with its schedule, this with replicas."""
    return {
        "settings": (*case.training, *dict(case.config)),
        "family": case.family,
        "layout": grids.layout(case.strategy),
        "schedule": grids.schedule(case.strategy),
        "engine": grids.engine(case.strategy),
        "sharding": case.strategy.fsdp_sharding,
        "accumulation": case.strategy.pipeline is None and case.micro * case.replicas < 16,
        "replicas": case.replicas,
        "rank order": case.strategy.rank_order,
        **grids.activations(case.strategy),
    }


def spread(bench: Any, case: Case) -> Any:
    """Return the bench's training, spread as in the case."""
    return bench.in_replicas(case.strategy, case.replicas, case.micro, **case.training)


@pytest.fixture(scope="module")
def short_bench(tmp_path_factory: pytest.TempPathFactory, family_bench, tiny_data: Path) -> Callable[..., Any]:
    """Return a function: family and config -> a bench with its tiny model and half of the tiny data."""
    half = tmp_path_factory.mktemp("half")
    for file in tiny_data.glob("*.jsonl"):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        (half / file.name).write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")

    def of(family: str, config: tuple[tuple[str, Any], ...] = ()) -> Any:
        return family_bench(family, config, half).with_training(max_steps=STEPS, steps_per_epoch=EPOCH)

    return of


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory, short_bench) -> Callable[[Case], Any]:
    """Return a function: case -> the run in one process, shared by equal cases, the case's run, and its end."""
    folder = tmp_path_factory.mktemp("model-parallel")
    alone: dict[Any, Any] = {}

    def run(case: Case) -> tuple[Any, Any, Any]:
        bench = short_bench(case.family, case.config)
        if case.alone not in alone:
            one = bench.at(folder / f"alone-{len(alone)}").with_training(**case.training)
            ended = one.run()
            assert ended.exit_code == 0, ended.output
            alone[case.alone] = one
        whole = spread(bench.at(tmp_path_factory.mktemp("case") / "w"), case)
        return alone[case.alone], whole, whole.run(processes=case.processes)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", covering("model parallel", CASES, axes, lambda case: case.processes))
def test_losses_gradients_and_weights_are_those_of_one_process(name: str, run_of, compared):
    case = CASES[name]
    alone, run, ended = run_of(case)
    assert ended.exit_code == 0, ended.output
    expected, found = lines_with(alone.paths, "loss"), lines_with(run.paths, "loss")
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for figure in ("loss", "grad_norm", "learning_rate"):
        # The norm too: Adam hides a gradient that is wrong by a factor.
        assert [line[figure] for line in found] == pytest.approx([line[figure] for line in expected], rel=1e-4), figure
    for figure in ("eval_loss", "eval_accuracy"):
        assert [line[figure] for line in lines_with(run.paths, "eval_loss")] == pytest.approx(
            [line[figure] for line in lines_with(alone.paths, "eval_loss")], rel=1e-4
        )
    assert max(compared(run, alone)) <= WEIGHTS_TOLERANCE

    # The result is an ordinary Hub folder, and the report names the real strategy.
    from transformers import AutoModelForSequenceClassification

    loaded, info = AutoModelForSequenceClassification.from_pretrained(run.paths.model, output_loading_info=True)
    assert loaded.config.model_type == case.family
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    train = json.loads(run.paths.metrics.read_text())["train"]
    assert (train["strategy"], train["world_size"], train["steps"]) == (case.label, case.processes, STEPS)


TIED = {
    "llama, pipeline": ("llama", pipeline("1f1b", 4), 1),
    "gpt2, interleaved": ("gpt2", pipeline("interleaved", 4), 1),
    "llama, tensor": ("llama", {"tensor": 2}, 1),
    "gpt2, tensor": ("gpt2", {"tensor": 2}, 1),
    "llama, pipeline x data": ("llama", pipeline("1f1b", 4), 2),
    "gpt2, tensor x pipeline x data": ("gpt2", {"tensor": 2, **pipeline("1f1b", 4)}, 2),
    "llama, tensor x pipeline": ("llama", {"tensor": 2, **pipeline("gpipe", 4)}, 1),
    "gpt2, tensor x pipeline x data with divided optimizer state": (
        "gpt2", {"tensor": 2, "zero_stage": 1, **pipeline("1f1b", 4)}, 2,
    ),
    "llama, tensor with divided optimizer state": ("llama", {"tensor": 2, "zero_stage": 1}, 2),
    "llama, fsdp over split layers": ("llama", {"name": "fsdp", "tensor": 2}, 2),
    "gpt2, fsdp over split layers, the replicas neighbours": (
        "gpt2", {"name": "fsdp", "tensor": 2, "rank_order": "PTD", "fsdp_sharding": "grad-op"}, 3,
    ),
    "llama, fsdp over stages": ("llama", {"name": "fsdp", **pipeline("1f1b", 4)}, 2),
    "gpt2, fsdp over split layers in stages": ("gpt2", {"name": "fsdp", "tensor": 2, **pipeline("interleaved", 4)}, 2),
}  # fmt: skip


@pytest.mark.slow
def test_weight_shared_by_stages_stays_tied_and_unused_weight_unchanged(bench, tmp_path: Path):
    cases = {}
    for index, (name, (family, settings, replicas)) in enumerate(TIED.items()):
        case = Case(family, settings, "", micro=4 // replicas, replicas=replicas)
        folder = tmp_path / str(index)
        folder.mkdir()
        training = spread(bench, case).job.training.model_dump(mode="json", by_alias=True)
        arguments = {"family": family, "training": training, "clip": 0.5, "out": str(folder)}
        cases[name] = {
            "processes": case.processes,
            "call": "process_support.tied_stages:in_stages",
            "arguments": arguments,
            "environment": {},
            "log": str(folder / "log"),
        }
    for name, case in cases.items():
        codes, output = fork_server().run(case)
        assert codes == [0] * case["processes"], f"{name}: {output}"
        weights, losses, norms = tied_stages.alone(case["arguments"]["family"], 0.5)
        out = Path(case["arguments"]["out"])
        mine_losses, mine_norms = torch_load(out / "result.pt")
        theirs = mapped_tensors(out / "weights.safetensors")
        assert mine_losses == pytest.approx(losses, rel=1e-5), name
        assert mine_norms == pytest.approx(norms, rel=1e-4), name
        assert theirs.keys() == weights.keys() - {"lm_head.weight"}, "which is that of the embedding"
        assert max((theirs[each] - weights[each]).abs().max().item() for each in theirs) <= WEIGHTS_TOLERANCE, name
        content = (out / "checkpoint" / "index.json").read_text(encoding="utf-8")
        index = StateIndex.model_validate_json(content)
        named = [each for group in index.rest["groups"] for each in group["params"]]
        assert sorted(named) == sorted(set(weights) - {"lm_head.weight"})
        stored = {each.removeprefix("optimizer/exp_avg/") for each in index.tensors if "/exp_avg/" in each}
        assert stored == {each for each in named if not each.startswith("spare.")}


def torch_load(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=True)


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_however_the_model_is_spread(short_bench, tmp_path: Path):
    schedule = {"checkpoints": CheckpointSchedule(every_steps=3, keep=9)}
    bench = short_bench("llama")
    alone = bench.at(tmp_path / "alone").with_training(**schedule)
    run = bench.at(tmp_path / "run")
    ways = [
        Case("llama", {"tensor": 2}, "", training=schedule),
        Case("llama", pipeline("1f1b", 4), "", training=schedule),
        Case("llama", {"tensor": 2, "zero_stage": 1}, "", replicas=2, training=schedule),
        Case("llama", {"name": "fsdp", "tensor": 2}, "", replicas=2, training=schedule),
        Case("llama", {**pipeline("1f1b", 2), "zero_stage": 1}, "", replicas=2, training=schedule),
        Case("llama", {"name": "fsdp", **pipeline("1f1b", 2)}, "", replicas=2, training=schedule),
        Case("llama", {}, "", training={**schedule, "strategy": Strategy(name="single")}),
    ]
    left = []
    for index, way in enumerate(ways):
        spread_run = spread(run, way) if way.settings else run.with_training(**way.training)
        ended = spread_run.run(processes=way.processes)
        assert ended.exit_code == 0, ended.output
        left.append(spread_run.weights())
        # The next way resumes the run as it was after 3 steps of this one.
        newest = 3 * (index + 1)
        for folder in run.paths.checkpoints.glob("step-*"):
            if int(folder.name.removeprefix("step-")) > newest:
                shutil.rmtree(folder)
        assert "Resuming from" in ended.output or index == 0
    assert alone.run().exit_code == 0
    expected = alone.weights()
    for weights in left:
        assert max((weights[each] - expected[each]).abs().max().item() for each in expected) <= WEIGHTS_TOLERANCE
    assert run.losses() == pytest.approx(alone.losses(), rel=1e-4)


@pytest.mark.slow
def test_bf16_follows_fp32_and_leaves_fp32_weights(short_bench, tmp_path: Path):
    import torch

    bench = short_bench("llama")
    alone = bench.at(tmp_path / "alone")
    ways = {
        "tensor": Case("llama", {"tensor": 2}, "", training={"precision": "bf16"}),
        "pipeline": Case("llama", pipeline("1f1b", 4), "", training={"precision": "bf16"}),
        "fsdp over split layers": Case(
            "llama", {"name": "fsdp", "tensor": 2}, "", replicas=2, training={"precision": "bf16"}
        ),
        "fsdp over stages": Case(
            "llama", {"name": "fsdp", **pipeline("1f1b", 4)}, "", micro=2, replicas=2, training={"precision": "bf16"}
        ),
    }
    assert alone.run().exit_code == 0
    for name, case in ways.items():
        run = spread(bench.at(tmp_path / name), case)
        ended = run.run(processes=case.processes)
        assert ended.exit_code == 0, ended.output
        # bf16 has 8 bits of precision: losses are close, but not equal, which would mean that it is not in effect.
        assert run.losses() == pytest.approx(alone.losses(), rel=5e-2)
        assert run.losses() != pytest.approx(alone.losses(), rel=1e-5)
        assert {tensor.dtype for tensor in run.weights().values()} == {torch.float32}


@pytest.mark.slow
def test_the_best_weights_of_an_early_stop_are_those_of_all_stages(short_bench, tmp_path: Path):
    # So low a rate that nothing improves after the first evaluation.
    stopping = {"early_stopping": EarlyStopping(metric="accuracy", patience=1), "learning_rate": 1e-9, "max_steps": 60}
    bench = short_bench("bert")
    alone = bench.at(tmp_path / "alone").with_training(**stopping)
    run = spread(bench.at(tmp_path / "run"), Case("bert", pipeline("1f1b", 4), "", training=stopping))
    assert alone.run().exit_code == 0
    ended = run.run(processes=2)
    assert ended.exit_code == 0, ended.output
    assert len(run.losses()) == len(alone.losses()) == 2 * EPOCH
    theirs, mine = alone.weights(), run.weights()
    assert max((mine[each] - theirs[each]).abs().max().item() for each in theirs) <= WEIGHTS_TOLERANCE

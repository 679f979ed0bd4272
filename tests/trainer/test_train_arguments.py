"""Every field of TrainingArguments that a job may set takes effect in the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from finetune_contract.arguments import FREE, check_arguments, groups_by_length, known_arguments
from finetune_contract.trainer_job import Training
from finetune_trainer.training.loop import TrainingLoop
from finetune_trainer.training.training_arguments import tf32_setting
from trainer_support.no_checkpoints import to_the_last_step
from trainer_support.tasks import training_of


@dataclass(frozen=True)
class Case:
    """An argument's value, and the place where its effect shows."""

    value: Any
    seen: Callable[[TrainingLoop], Any]
    expected: Any
    beside: Mapping[str, Any]
    """Other arguments that it needs."""
    training: Mapping[str, Any]
    """Fields of `training` that it needs."""


def case(
    value: Any,
    seen: Callable[[TrainingLoop], Any],
    expected: Any,
    training: Mapping[str, Any] | None = None,
    **beside: Any,
) -> Case:
    return Case(value, seen, expected, beside, training or {})


def group(loop: TrainingLoop) -> dict[str, Any]:
    return loop.placed.optimizer.param_groups[0]


def loader(loop: TrainingLoop) -> Any:
    return loop._loader()


def ddp(loop: TrainingLoop) -> dict[str, Any]:
    return loop.engine.accelerator.ddp_handler.to_kwargs()


def compiled(loop: TrainingLoop) -> Mapping[str, Any]:
    return loop.engine.compiled.settings


def learning_rate_at(step: int, loop: TrainingLoop) -> float:
    return loop.engine.schedule.lr_lambdas[0](step)


def is_deterministic(loop: TrainingLoop) -> bool:
    import torch

    return torch.are_deterministic_algorithms_enabled()


WORKERS = {"dataloader_num_workers": 1}
CASES = {
    "adam_beta1": case(0.5, lambda loop: group(loop)["betas"][0], 0.5),
    "adam_beta2": case(0.75, lambda loop: group(loop)["betas"][1], 0.75),
    "adam_epsilon": case(1e-3, lambda loop: group(loop)["eps"], 1e-3),
    "dataloader_num_workers": case(1, lambda loop: loader(loop).num_workers, 1),
    "dataloader_persistent_workers": case(True, lambda loop: loader(loop).persistent_workers, True, **WORKERS),
    "dataloader_prefetch_factor": case(3, lambda loop: loader(loop).prefetch_factor, 3, **WORKERS),
    "ddp_broadcast_buffers": case(False, lambda loop: ddp(loop)["broadcast_buffers"], False),
    "ddp_bucket_cap_mb": case(7, lambda loop: ddp(loop)["bucket_cap_mb"], 7),
    "ddp_find_unused_parameters": case(True, lambda loop: ddp(loop).get("find_unused_parameters", False), True),
    "ddp_static_graph": case(True, lambda loop: ddp(loop)["static_graph"], True),
    "full_determinism": case(True, is_deterministic, True),
    "lr_scheduler_kwargs": case(
        {"num_cycles": 1.0}, lambda loop: learning_rate_at(4 + 8, loop), pytest.approx(0.0), {"scheduler": "cosine"}
    ),
    "neftune_noise_alpha": case(5.0, lambda loop: loop.engine.model.get_input_embeddings().neftune_noise_alpha, 5.0),
    "optim_args": case("momentum=0.5", lambda loop: group(loop)["momentum"], 0.5, {"optimizer": "sgd"}),
    "torch_compile": case(True, lambda loop: len(loop.engine.compiled.blocks), 3),
    "torch_compile_backend": case("eager", lambda loop: compiled(loop)["backend"], "eager"),
    "torch_compile_mode": case("reduce-overhead", lambda loop: compiled(loop)["mode"], "reduce-overhead"),
}
"""Name -> its case; the loop is set up and makes no step."""
ELSEWHERE = {
    "dataloader_pin_memory": "test_memory_is_pinned_as_set_in_the_arguments",
    "liger_kernel_config": "test_liger_kernels_are_applied_with_their_settings",
    "report_to": "tests/trainer/test_tracking.py",
    "tf32": "test_tf32_is_refused_where_no_gpu_has_it",
    "torch_empty_cache_steps": "test_freed_device_memory_is_released_at_the_configured_steps",
    "train_sampling_strategy": "test_sampling_strategy_decides_the_order_of_rows",
    "use_liger_kernel": "test_liger_kernels_are_applied_with_their_settings",
}
"""Name -> the test that shows its effect."""


def test_every_argument_is_in_effect_owned_by_a_field_or_refused():
    assert set(CASES) | set(ELSEWHERE) == FREE
    here = Path(__file__).read_text(encoding="utf-8")
    assert all(
        f"def {test}(" in here or Path(__file__).parents[2].joinpath(test).is_file() for test in ELSEWHERE.values()
    )
    accepted = {name for name in known_arguments() if not check_arguments({name: None}) or name in FREE}
    assert accepted == FREE


@pytest.fixture
def loop_of(bench, tmp_path: Path) -> Callable[..., TrainingLoop]:
    """Return a function that sets up a loop with these training fields on the tiny model, in this process."""

    def made(**training: Any) -> TrainingLoop:
        from finetune_trainer.core.progress import NoProgress
        from finetune_trainer.data.prepared import PreparedData
        from finetune_trainer.strategies.single import Single
        from finetune_trainer.tasks.task_registry import task_of
        from finetune_trainer.training.loop_parts import LoopData, LoopHooks, LoopModel
        from finetune_trainer.training.order import Collate, EpochOrder, TrainRows
        from finetune_trainer.training.run_observers import SilentObserver
        from finetune_trainer.training.training_arguments import training_arguments

        job = bench.with_training(**training).job
        prepared, task, settings = PreparedData.open(bench.paths), task_of(job), job.training
        assert settings is not None
        strategy = Single("fp32")
        model = LoopModel(task.head.build_model(job, prepared.facts), strategy, settings.optimizer)
        data = LoopData(
            EpochOrder(prepared.lengths("train"), settings.batch, 0, settings.seed, grouped=True),
            rows=TrainRows(prepared),
            collate=Collate(task.encoding, prepared.pad_token_id),
            validation=None,
        )
        hooks = LoopHooks(SilentObserver(NoProgress(), settings.max_steps))
        arguments = training_arguments(settings, tmp_path, strategy.arguments())
        return TrainingLoop(arguments, model, data, to_the_last_step(), hooks)

    return made


@pytest.mark.parametrize("name", sorted(CASES))
@patch.dict(os.environ)  # full_determinism sets variables
def test_argument_is_in_effect(name: str, loop_of):
    import torch

    case = CASES[name]
    try:
        loop = loop_of(arguments={name: case.value, **case.beside}, **case.training)
        loop.engine.start(loop._first_loss)
        assert case.seen(loop) == case.expected
    finally:
        torch.use_deterministic_algorithms(False)
    plain = loop_of(arguments=dict(case.beside), **case.training)
    plain.engine.start(plain._first_loss)
    try:
        found = case.seen(plain)
    except (AttributeError, KeyError):
        return
    assert found != case.expected, "the value is what it would be without the argument"


@pytest.mark.parametrize(
    ("optimizer", "name", "value"),
    [("adamw", "optim_args", "momentum=0.5"), ("sgd", "adam_beta2", 0.9), ("adafactor", "adam_epsilon", 1e-6)],
)
def test_argument_of_another_optimizer_is_refused(optimizer: str, name: str, value: Any, loop_of):
    from finetune_trainer.core.failures import StageError

    with pytest.raises(StageError, match=f"{name} has no effect with training.optimizer {optimizer}"):
        loop_of(optimizer=optimizer, arguments={name: value})


@pytest.mark.parametrize("pinned", [True, False])
def test_memory_is_pinned_as_set_in_the_arguments(pinned: bool, loop_of):
    loop = loop_of()
    loop.args.dataloader_pin_memory = pinned  # transformers itself switches it off on a CPU
    assert loader(loop).pin_memory is pinned


def test_freed_device_memory_is_released_at_the_configured_steps(loop_of, monkeypatch):
    steps: list[int] = []
    loop = loop_of(max_steps=5, arguments={"torch_empty_cache_steps": 2})
    monkeypatch.setattr(
        "finetune_trainer.training.step.clear_device_cache", lambda: steps.append(loop.state.global_step)
    )
    loop.train()
    assert steps == [0, 2, 4]


def test_liger_kernels_are_applied_with_their_settings(loop_of, monkeypatch):
    applied: list[Any] = []
    monkeypatch.setattr(
        "finetune_trainer.training.engine.apply_liger_kernel", lambda model, config: applied.append((model, config))
    )
    loop = loop_of(arguments={"use_liger_kernel": True, "liger_kernel_config": {"rope": False}})
    loop.engine.start(loop._first_loss)
    assert applied == [(loop.engine.model, {"rope": False})]


def test_tf32_is_refused_where_no_gpu_has_it(loop_of):
    from finetune_trainer.core.failures import StageError

    with pytest.raises(StageError, match="tf32 requires Ampere or a newer GPU"):
        loop_of(arguments={"tf32": True})


@pytest.mark.parametrize(
    ("capability", "precision", "arguments", "device", "expected"),
    [
        ((8, 0), "fp32", {}, "cuda", {"tf32": True}),
        ((9, 0), "fp32", {"tf32": None}, "cuda", {"tf32": True}),
        ((7, 5), "fp32", {}, "cuda", {}),
        ((8, 0), "fp32", {"tf32": False}, "cuda", {}),
        ((8, 0), "bf16", {}, "cuda", {}),
        ((8, 0), "fp32", {}, "cpu", {}),
    ],
)
def test_fp32_multiplies_in_tf32_where_the_gpu_does(
    capability, precision: str, arguments, device: str, expected, monkeypatch
):
    import torch

    major, minor = capability
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major, minor=minor))
    world = {"nodes": 1, "processes_per_node": 1, "device": device, "threads_per_process": 1}
    training = Training.model_validate(training_of(steps=1, precision=precision, arguments=arguments, world=world))
    assert tf32_setting(training) == expected


@pytest.mark.parametrize(("strategy", "grouped"), [("random", False), ("group_by_length", True)])
def test_sampling_strategy_decides_the_order_of_rows(strategy: str, grouped: bool):
    assert groups_by_length("text-classification", {"train_sampling_strategy": strategy}) is grouped
    assert groups_by_length("text-generation", {"train_sampling_strategy": strategy}) is grouped

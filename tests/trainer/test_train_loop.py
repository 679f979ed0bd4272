"""Effects of a job's settings on the loop, in one process: each is obeyed, or refused before the first step."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from finetune_contract.choices import Stage
from finetune_contract.facts import DeviceFacts
from finetune_contract.layout import FailureClass
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.trainer_job import MOST_SAVING, CheckpointSchedule, EarlyStopping, Strategy
from finetune_trainer.checkpoint.checkpoints import identity
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.interruption import Interruption
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.report.reporting import merge_metrics
from finetune_trainer.strategies.shard_files import StagedState
from finetune_trainer.tasks.task_registry import task_parts
from finetune_trainer.training.engine import Engine, StepFigures
from finetune_trainer.training.rank_shards import RankShards
from finetune_trainer.training.reference_answers import ReferenceAnswers
from finetune_trainer.training.saving import BackgroundWork, RunSaver
from finetune_trainer.training.step import OptimizerStep
from finetune_trainer.training.validation_rounds import Validation
from suite_plugins.patience import patient
from trainer_support.forking import fork_server
from trainer_support.tasks import read_lines, train_here


@pytest.fixture
def here(bench, tmp_path: Path):
    """Return the tiny job in a workspace of its own, for training in this process."""
    return bench.at(tmp_path / "w")


def checkpoints(run) -> list[str]:
    return sorted(path.name for path in run.paths.checkpoints.glob("step-*"))


def refusal(run) -> StageError:
    with pytest.raises(StageError) as caught:
        run.train_here()
    assert not run.paths.history.exists(), "a step was made before the refusal"
    assert not run.paths.model.exists()
    return caught.value


# ------------------------------------------------------------------------------------------------ obeyed: checkpoints


def test_a_schedule_in_minutes_saves_by_the_clock_and_never_by_steps(here):
    often = here.with_training(
        max_steps=3, checkpoints=CheckpointSchedule(every_steps=1000, every_minutes=1e-6, keep=2, resume=False)
    )
    often.train_here()
    assert checkpoints(often) == ["step-2", "step-3"]
    seldom = here.with_training(
        name="seldom", max_steps=3, checkpoints=CheckpointSchedule(every_steps=1, every_minutes=60, keep=2)
    )
    seldom.paths.root.mkdir()
    seldom.paths.prepared.symlink_to(here.paths.prepared)
    seldom.train_here()
    assert checkpoints(seldom) == []


def test_unsaved_work_is_bounded_by_the_clock_beside_the_steps(here):
    often = CheckpointSchedule(every_steps=1000, within_minutes=1e-6, keep=3, resume=False)
    run = here.with_training(name="often", max_steps=4, checkpoints=often)
    run.paths.root.mkdir()
    run.paths.prepared.symlink_to(here.paths.prepared)
    run.train_here()
    # The clock begins with the first step. The time of the first checkpoint delays the next.
    assert checkpoints(run)[0] == "step-2"


def test_a_checkpoint_that_takes_long_puts_off_the_next(monkeypatch):
    now = 0.0
    monkeypatch.setattr("finetune_trainer.training.saving.time.monotonic", lambda: now)
    saver = RunSaver(
        cast(Any, None), CheckpointSchedule(every_steps=50, within_minutes=10, keep=1),
        hashing=cast(Any, None), strategy=cast(Any, None), label="", world=cast(Any, None), data_rank=0, job={},
        stopper=cast(Any, None), seed=0,
    )  # fmt: skip
    now = 3600.0  # the weights were loaded
    assert not saver.wants()
    now += 599
    assert not saver.wants()
    now += 1
    assert saver.wants()
    saver.saved(60.0)
    now += 60 / MOST_SAVING - 1
    assert not saver.wants()
    now += 1
    assert saver.wants()
    assert saver.due(1, by_clock=True)
    assert saver.due(50, by_clock=False)
    assert not saver.due(51, by_clock=False)


def test_a_checkpoint_by_the_clock_does_not_wait_for_the_one_before(monkeypatch):
    now = 0.0
    monkeypatch.setattr("finetune_trainer.training.saving.time.monotonic", lambda: now)
    saver = RunSaver(
        cast(Any, None), CheckpointSchedule(every_steps=50, within_minutes=10, keep=1, asynchronous=True),
        hashing=cast(Any, None), strategy=cast(Any, None), label="", world=cast(Any, None), data_rank=0, job={},
        stopper=cast(Any, None), seed=0,
    )  # fmt: skip
    written, failing = threading.Event(), BackgroundWork("failing", lambda: [][0])
    assert not saver.wants()
    now = 600.0
    assert saver.wants()
    saver._writing = BackgroundWork("checkpoint", lambda: written.wait() and None)
    assert not saver.wants()
    written.set()
    saver.finish()
    assert saver.wants()
    # All ranks learn of an error of writing by the checkpoint that rank 0 wants next.
    often = saver._schedule.model_copy(update={"within_minutes": None})
    monkeypatch.setattr(saver, "_schedule", often)
    saver._writing = failing
    failing._thread.join()
    assert saver.wants()
    with pytest.raises(IndexError):
        saver.finish()
    assert not saver.wants()


def state_files(run, step: int) -> dict[str, Any]:
    manifest = json.loads((run.paths.checkpoints / f"step-{step}" / "manifest.json").read_text())
    # Of the trainer's state the settings differ, and nothing of it is read.
    return {name: entry for name, entry in manifest["files"].items() if name != "trainer_state.json"}


def test_a_checkpoint_beside_the_training_has_the_state_of_its_step(here, monkeypatch):
    saving = CheckpointSchedule(every_steps=2, keep=9)
    run = here.with_training(max_steps=7, checkpoints=saving)
    run.train_here()
    expected = {step: state_files(run, step) for step in (2, 4, 6)}
    weights = run.weights()
    shutil.rmtree(run.paths.checkpoints)

    # Nothing is written before the training waits for it: the steps until then change the model's own tensors.
    waited, order = threading.Event(), []
    write, finish = StagedState.write, RunSaver.finish

    def written_late(staged: StagedState, folder: Path) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert waited.wait(patient(30))
        order.append(folder.parent.name)
        return write(staged, folder)

    def waits(saver: RunSaver) -> None:
        waited.set()
        finish(saver)
        waited.clear()

    monkeypatch.setattr(StagedState, "write", written_late)
    monkeypatch.setattr(RunSaver, "finish", waits)
    beside = run.with_training(checkpoints=saving.model_copy(update={"asynchronous": True}))
    beside.train_here()
    assert order == [f"step-{step}.partial" for step in (2, 4, 6)], "the end of the training waits for the last one"
    assert {step: state_files(beside, step) for step in (2, 4, 6)} == expected

    for step in (4, 6):
        shutil.rmtree(beside.paths.checkpoints / f"step-{step}")
    beside.train_here()
    assert all(weights[name].equal(tensor) for name, tensor in beside.weights().items())


def test_run_with_saved_last_step_publishes_its_model_without_more_steps(here):
    # 10 steps end within an epoch of 12, and the rate stays: an eleventh step would change the weights.
    schedule = CheckpointSchedule(every_steps=5, keep=1)
    run = here.with_training(max_steps=10, scheduler="constant", warmup_steps=0, checkpoints=schedule)
    run.train_here()
    weights, losses = run.weights(), run.losses()
    metrics = json.loads(run.paths.metrics.read_text())["train"]
    assert (len(losses), checkpoints(run)) == (10, ["step-10"])
    assert {oct(each.stat().st_mode & 0o777) for each in run.paths.model.iterdir()} == {"0o644"}, "others may read it"
    (run.paths.model / "model.safetensors").unlink()

    run.train_here()
    assert run.losses() == losses
    assert all((weights[name] - tensor).abs().max().item() == 0 for name, tensor in run.weights().items())
    again = json.loads(run.paths.metrics.read_text())["train"]
    # Time adds up: the second attempt has started and written the model, too.
    assert again["time"]["parts"]["start"] > metrics["time"]["parts"]["start"]
    varying = dict.fromkeys(("seconds", "time", "peak_memory_bytes", "peak_memory_bytes_by_rank", "measured"))
    assert {**again, **varying} == {**metrics, **varying}
    # Its steps are those of the first attempt.
    assert metrics["measured"]["steps"] == metrics["steps"]
    assert (again["measured"]["steps"], again["measured"]["step_seconds"]) == (0, None)
    assert again["eval_accuracy"] > 0


def test_a_resumed_training_goes_on_with_the_loss_scale(here, monkeypatch):
    import torch

    from finetune_trainer.strategies.full_state import FullState

    scaler = partial(torch.amp.GradScaler, init_scale=1024.0, growth_interval=3)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    monkeypatch.setattr(FullState, "scales_loss", True)  # fp32 on a CPU, with the scaling of fp16
    run = here.with_training(max_steps=4, checkpoints=CheckpointSchedule(every_steps=2, keep=2))
    run.train_here()
    assert [scaling(run, step) for step in (2, 4)] == [(1024.0, 2), (2048.0, 1)]
    shutil.rmtree(run.paths.checkpoints / "step-4")
    run.train_here()
    assert scaling(run, 4) == (2048.0, 1)


def scaling(run, step: int) -> tuple[float, int]:
    """Return the scale of a checkpoint, and its steps since the last change."""
    state = json.loads((run.paths.checkpoints / f"step-{step}" / "scaling.json").read_text())
    return state["scale"], state["_growth_tracker"]


def test_metrics_have_the_measured_gpus(here):
    gpu = DeviceFacts(product="NVIDIA L40S", memory_bytes=47_676_653_568, capability="8.9")
    run = here.with_training(max_steps=1)
    train_here(run.job, run.paths, devices=MeasuredDevices(device=gpu, processes=8, per_node=8, nvlink=False))
    devices = json.loads(run.paths.metrics.read_text())["train"]["devices"]
    assert devices["text"] == "NVIDIA L40S 44.4 GiB, capability 8.9 x 8"
    assert (devices["device"]["memory_bytes"], devices["nvlink"]) == (47_676_653_568, False)


def test_checkpoint_of_other_settings_is_refused_and_kept_without_resume(here):
    run = here.with_training(max_steps=4, checkpoints=CheckpointSchedule(every_steps=2, keep=2))
    run.train_here()
    changed = run.with_training(learning_rate=1e-3)
    with pytest.raises(StageError) as refused:
        changed.train_here()
    assert (refused.value.failure_class, refused.value.reason) == (FailureClass.CHECKPOINT, "CheckpointOfAnotherJob")
    assert "learning_rate was 0.002, is 0.001" in refused.value.message
    assert checkpoints(run) == ["step-2", "step-4"]

    restarted = changed.with_training(checkpoints=CheckpointSchedule(every_steps=3, keep=2, resume=False))
    restarted.train_here()
    assert len(restarted.losses()) == 4
    assert checkpoints(run) == ["step-3"]


# --------------------------------------------------------------------------------------------- obeyed: early stopping


def test_early_stopping_keeps_best_weights_and_stays_stopped_on_resume(here, caplog):
    # The rate is too low for accuracy to improve after the first evaluation, at step 12: one more, and it stops.
    stopping = EarlyStopping(metric="accuracy", patience=1)
    schedule = CheckpointSchedule(every_steps=12, keep=2)
    run = here.with_training(early_stopping=stopping, max_steps=120, learning_rate=1e-9, checkpoints=schedule)
    best = run.paths.checkpoints / "best"
    run.train_here()
    assert (len(run.losses()), checkpoints(run)) == (24, ["step-12", "step-24"])
    metrics = json.loads(run.paths.metrics.read_text())["train"]
    evaluated = {line["step"]: line for line in read_lines(run.paths.history) if "eval_loss" in line}
    assert (metrics["steps"], metrics["best_step"]) == (24, 12)
    assert {name: metrics[name] for name in evaluated[12] if name != "step"} == {
        name: value for name, value in evaluated[12].items() if name != "step"
    }, "the model's figures are those of its weights"
    card = (run.paths.model / "README.md").read_text()
    assert "| Optimizer steps | 24 (2.00 epochs) of 120 planned: stopped early; weights of step 12" in card
    assert [path.name for path in best.iterdir()] == ["step-12.safetensors"]

    run.train_here()
    assert len(run.losses()) == 24

    # As after a kill between a better evaluation and its checkpoint: the best weights are missing.
    (best / "step-12.safetensors").rename(best / "step-36.safetensors")
    run.train_here()
    assert "The best weights, of step 12, are missing" in caplog.text
    assert len(run.losses()) == 48
    assert [path.name for path in best.iterdir()] == ["step-36.safetensors"]


def test_early_stopping_by_an_unmeasured_metric_is_refused_at_start(here):
    error = refusal(here.with_training(early_stopping=EarlyStopping(metric="bleu", patience=1)))
    assert (error.failure_class, error.reason) == (FailureClass.CONFIG, "UnknownMetric")
    assert "'bleu'; text-classification with these labels has accuracy, f1, precision, recall, loss." in error.message


# ----------------------------------------------------------------------------------------------------- order of reports


def history(run) -> list[dict[str, Any]]:
    return read_lines(run.paths.history)


def recorded(events: list[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        events.append(name)
        return method(*arguments, **named)

    return call


def test_figures_of_a_step_are_read_when_the_next_one_is_queued(here, monkeypatch):
    run = here.with_training(max_steps=7, checkpoints=CheckpointSchedule(every_steps=3, keep=9))
    run.train_here()
    expected = history(run)
    shutil.rmtree(run.paths.checkpoints)

    events: list[str] = []
    monkeypatch.setattr(Engine, "runs_ahead", True)
    monkeypatch.setattr(OptimizerStep, "take", recorded(events, "step", OptimizerStep.take))
    monkeypatch.setattr(StepFigures, "read", recorded(events, "read", StepFigures.read))
    monkeypatch.setattr(RunSaver, "save", recorded(events, "save", RunSaver.save))
    monkeypatch.setattr(Validation, "metrics", recorded(events, "validate", Validation.metrics))
    run.train_here()
    third = ["step", "step", "read", "step", "read", "read", "save"]
    assert events == [*third, *third, "step", "read", "validate"]
    timed = {"seconds", "samples_per_second", "tokens_per_second"}
    reports = [
        [{key: line[key] for key in line.keys() - timed} for line in lines] for lines in (history(run), expected)
    ]
    assert reports[0] == reports[1]


def test_halved_validation_has_the_metrics_of_whole_batches(here):
    import torch

    prepared, task = PreparedData.open(here.paths), task_parts(here.job.task)
    model = task.head.build_model(here.job, prepared.facts)
    validation = Validation(RankShards(prepared, task, 500, 0, 1, halves=True), ReferenceAnswers())
    cpu, batches = torch.device("cpu"), []
    expected = validation.metrics(model, cpu, batches.append)
    whole = len(batches)

    def fail(_module: Any, _given: Any, named: dict[str, Any]) -> None:
        if named["input_ids"].numel() > 200:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    assert validation.metrics(model, cpu, batches.append) == pytest.approx(expected, rel=1e-5)
    assert len(batches) > 2 * whole


def test_preemption_reports_the_last_step(here, monkeypatch):
    steps = iter([False, False, True])

    class InThirdStep(Interruption):
        requested = property(lambda _: next(steps), lambda *_: None)  # type: ignore[assignment]

    monkeypatch.setattr(Engine, "runs_ahead", True)
    monkeypatch.setattr("finetune_trainer.core.interruption.Interruption", InThirdStep)
    run = here.with_training(max_steps=7, checkpoints=CheckpointSchedule(every_steps=99, keep=1, on_preemption=False))
    with pytest.raises(StageError) as caught:
        run.train_here()
    assert caught.value.failure_class == FailureClass.PREEMPTED
    assert [line["step"] for line in history(run)] == [1, 2, 3]


# -------------------------------------------------------------------------------------------- obeyed: loss, arguments


def test_label_smoothing_is_in_the_loss_of_the_whole_global_batch(here, bench):
    import torch

    from finetune_trainer.training.order import EpochOrder

    run = here.spread("single", 1, micro=4).with_training(max_steps=1, label_smoothing=0.3)
    run.train_here()

    prepared, task, training = PreparedData.open(run.paths), task_parts(run.job.task), run.job.training
    order = EpochOrder(prepared.lengths("train"), training.batch, 0, training.seed, grouped=True)
    rows = [pick.row for micro, _ in zip(order, range(4), strict=False) for pick in micro]
    batch = task.encoding.collate(prepared.features("train", rows), pad_token_id=prepared.pad_token_id)
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = task.head.build_model(run.job, prepared.facts).eval()(**batch).logits
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.3).item()
    plain = torch.nn.functional.cross_entropy(logits, labels).item()
    assert run.losses() == [pytest.approx(expected, rel=1e-5)]
    assert abs(expected - plain) > 1e-4


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ({"optimizer": "adamw"}, {"optim": "adamw_torch_fused"}),
        ({"optimizer": "adafactor"}, {"optim": "adafactor"}),
        ({"optimizer": "sgd"}, {"optim": "sgd"}),
        ({"scheduler": "cosine_with_restarts"}, {"lr_scheduler_type": "cosine_with_restarts"}),
        ({"warmup_steps": 3}, {"warmup_steps": 3}),
        ({"weight_decay": 0.25}, {"weight_decay": 0.25}),
        ({"max_grad_norm": 0.0}, {"max_grad_norm": 0.0}),
        ({"learning_rate": 0.5}, {"learning_rate": 0.5}),
        ({"seed": 99}, {"seed": 99}),
        ({"max_steps": 7}, {"max_steps": 7}),
        ({"label_smoothing": 0.5}, {"label_smoothing_factor": 0.5}),
        ({"arguments": {"adam_beta1": 0.5}}, {"adam_beta1": 0.5}),
        ({"strategy": Strategy(name="single", activation_checkpointing="full")}, {"activation_checkpointing": True}),
    ],
    ids=str,
)
def test_a_setting_reaches_the_arguments_of_the_trainer(
    setting: dict[str, Any], found: dict[str, Any], bench, tmp_path: Path
):
    from finetune_trainer.training.training_arguments import training_arguments

    made = training_arguments(bench.with_training(**setting).job.training, tmp_path, {})
    assert {name: getattr(made, name) for name in found} == found


def test_compiled_blocks_train_the_same_and_are_reported(here):
    # This backend compiles nothing, so the test waits for no compiler.
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    schedule = CheckpointSchedule(every_steps=1, keep=1)
    run = here.with_training(max_steps=2, arguments=compiled, checkpoints=schedule)
    run.train_here()
    losses = run.losses()
    metrics = json.loads(run.paths.metrics.read_text(encoding="utf-8"))["train"]
    assert metrics["compilations"] >= 1
    assert metrics["recompilations"] < metrics["compilations"]
    plain = here.with_training(max_steps=2, checkpoints=schedule.model_copy(update={"resume": False}))
    plain.train_here()
    assert losses == pytest.approx(plain.losses(), rel=1e-5)


def test_compilation_by_plan_needs_a_compiler_that_works(here, tmp_path: Path):
    compiled = {"torch_compile": True}
    without = {"CXX": "/nonexistent/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    schedule = CheckpointSchedule(every_steps=1, keep=1, resume=False)
    run = here.with_training(max_steps=2, arguments=compiled, checkpoints=schedule, compiles_by_plan=True)
    ended = run.end(run.start(Stage.TRAIN, processes=1, environment=without))
    assert ended.exit_code == 0, ended.output
    assert "torch.compile is off, as it fails in 1 of 1 processes: InductorError: InvalidCxxCompiler" in ended.output
    assert "compilations" not in json.loads(run.paths.metrics.read_text(encoding="utf-8"))["train"]
    losses = run.losses()
    here.with_training(max_steps=2, checkpoints=schedule).train_here()
    assert losses == pytest.approx(here.losses(), rel=1e-5)


def test_no_process_compiles_where_one_of_them_cannot(bench, tmp_path: Path):
    arguments = {"torch_compile": True, "torch_compile_backend": "eager"}
    run = bench.at(tmp_path / "w").with_training(max_steps=2, arguments=arguments, compiles_by_plan=True)
    run = run.spread("ddp", 2)
    case = run.case(processes=2)
    call = {"call": "process_support.one_without_compiler:train", "arguments": {"arguments": case["arguments"]}}
    codes, output = fork_server().run({**case, **call})
    assert codes == [0, 0], output
    assert "torch.compile is off, as it fails in 1 of 2 processes: InvalidCxxCompiler: no compiler is here" in output
    assert "compilations" not in json.loads(run.paths.metrics.read_text(encoding="utf-8"))["train"]


def test_compilation_by_plan_compiles_and_resumes_without(here):
    import torch

    torch._dynamo.reset()  # compiled by an earlier test
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    schedule = CheckpointSchedule(every_steps=1, keep=1)
    run = here.with_training(max_steps=2, arguments=compiled, checkpoints=schedule, compiles_by_plan=True)
    run.train_here()
    assert json.loads(run.paths.metrics.read_text(encoding="utf-8"))["train"]["compilations"] >= 1
    further = here.with_training(max_steps=3, checkpoints=schedule)
    fingerprint = "f"
    assert identity(run.job, fingerprint, {}) | {"max_steps": 3} == identity(further.job, fingerprint, {})
    requested = run.with_training(compiles_by_plan=False)
    assert identity(requested.job, fingerprint, {}) != identity(run.job, fingerprint, {})


def test_a_setting_that_a_library_passes_over_in_silence_fails_the_stage(here, monkeypatch):
    import torch
    from accelerate import Accelerator

    import finetune_trainer.training.training_arguments as made

    with monkeypatch.context() as patched:
        patched.setitem(made._OPTIMIZERS, "sgd", "adamw_torch")
        with pytest.raises(StageError) as caught:
            here.with_training(max_steps=1, optimizer="sgd").train_here()
        assert (caught.value.failure_class, caught.value.reason) == (
            FailureClass.STRATEGY_NOT_IN_EFFECT,
            "WrongOptimizer",
        )
    with monkeypatch.context() as patched:
        patched.setattr("torch.nn.Module.compile", lambda module, **how: None)
        with pytest.raises(StageError) as caught:
            here.with_training(max_steps=1, arguments={"torch_compile": True}).train_here()
        assert caught.value.reason == "WrongCompilation"
    with monkeypatch.context() as patched:
        # A scaler, which fp32 does not use, stands for the one that fp16 would lack.
        scaler = torch.amp.GradScaler("cpu")
        patched.setattr(Accelerator, "scaler", property(lambda self: scaler, lambda self, value: None), raising=False)
        with pytest.raises(StageError) as caught:
            here.with_training(max_steps=1).train_here()
        assert caught.value.reason == "WrongLossScaling"


# ------------------------------------------------------------------------------------------------------------ results


def test_metrics_of_an_earlier_model_are_not_reported_for_a_new_one(here):
    run = here.with_training(max_steps=1)
    figures = {"accuracy": 0.8125, "loss": 0.5, "rows": 40, "split": "test"}
    merge_metrics(run.paths, {"evaluate": figures, "majority": {"accuracy": 0.5}, "train": {"steps": 7}})
    run.train_here()
    metrics = json.loads(run.paths.metrics.read_text())
    assert (set(metrics), metrics["train"]["steps"]) == ({"train"}, 1)
    assert "0.8125" not in (run.paths.model / "README.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------ refused


def batch_of(run, **changes: Any) -> Any:
    return run.job.training.batch.model_copy(update=changes)


REFUSED = {
    "sizes that do not multiply to the global batch": (
        lambda run: {"batch": batch_of(run, micro_batch_size=4)},
        "BatchArithmetic",
        "micro-batch 4 x accumulation 1 x 1 ranks are 4 rows",
    ),
    "DeepSpeed without a ZeRO stage": (
        lambda run: {"strategy": Strategy(name="deepspeed")},
        "ZeroStage",
        "parallelism.strategy is deepspeed, and parallelism.zeroStage is not set",
    ),
    "persistent data loader workers where there are none": (
        lambda run: {"arguments": {"dataloader_persistent_workers": True}},
        "ArgumentsRefused",
        "dataloader_persistent_workers needs dataloader_num_workers above 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_setting_is_refused(case: str, here):
    changes, reason, message = REFUSED[case]
    error = refusal(here.with_training(**changes(here)))
    assert (error.failure_class, error.reason) == (FailureClass.CONFIG, reason)
    assert message in error.message


def test_activation_checkpointing_without_effect_is_an_error(here, monkeypatch):
    from transformers import BertForSequenceClassification

    run = here.with_training(strategy=Strategy(name="single", activation_checkpointing="full"), max_steps=1)
    with monkeypatch.context() as patched:
        patched.setattr(BertForSequenceClassification, "supports_gradient_checkpointing", False)
        error = refusal(run)
        assert (error.failure_class, error.reason) == (FailureClass.CONFIG, "ActivationCheckpointing")
    with monkeypatch.context() as patched:
        # Stands for a library that accepts the argument and does nothing.
        patched.setattr(BertForSequenceClassification, "activation_checkpointing_enable", lambda self, **how: None)
        with pytest.raises(StageError) as caught:
            run.train_here()
        assert caught.value.failure_class is FailureClass.STRATEGY_NOT_IN_EFFECT
        assert caught.value.reason == "WrongActivationCheckpointing"
    run.train_here()
    assert len(run.losses()) == 1


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_deepspeed_section_that_replaces_a_field_is_refused(section: str, bench):
    from finetune_trainer.strategies.select import strategy_for

    run = bench.spread("deepspeed", 1, zero_stage=2)
    with pytest.raises(StageError, match=f"deepspeed.json.{section} is set, and training.{section} decides it"):
        strategy_for(run.job.training, {**run.deepspeed_config(), section: {"type": "SGD"}}, run.paths.offload)


@pytest.mark.parametrize("uri", ["hf:///etc/passwd", "hf://../../etc", "hf://our/../evil/x", "hf://a/b/c", "hf://a--b"])
def test_a_name_that_could_lead_elsewhere_is_no_model_of_the_hub(uri: str):
    from finetune_trainer.models.loading import resolve_model

    with pytest.raises(StageError, match="not a name of a repository on the Hub"):
        resolve_model(uri)


def test_a_folder_never_takes_the_place_of_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from finetune_trainer.models.loading import resolve_model

    monkeypatch.chdir(tmp_path)
    assert resolve_model("hf://our-organisation/model")[0] == "our-organisation/model"
    (tmp_path / "our-organisation" / "model").mkdir(parents=True)
    with pytest.raises(StageError, match=r"our-organisation/model exists, which would be used in its place"):
        resolve_model("hf://our-organisation/model")


def test_a_revision_of_a_model_that_is_not_on_the_hub_is_refused(tiny_model: Path):
    from finetune_trainer.models.loading import resolve_model

    assert resolve_model(f"file://{tiny_model}")[0] == str(tiny_model)
    with pytest.raises(StageError, match=r"model.revision is 'v2', but file://.* is not on the Hub"):
        resolve_model(f"file://{tiny_model}", "v2")

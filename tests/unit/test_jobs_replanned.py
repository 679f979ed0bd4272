"""Trainings on nodes whose GPU nobody knew: an attempt that ends with measured GPUs, and the plan made with them."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console

from finetune_contract.facts import DeviceFacts
from finetune_contract.layout import EXIT_CODES, FailureClass
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.report import MeasuredFacts
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.cli.cluster.cluster_jobs import ClusterJob
from finetune_operator.cli.cluster.jobview import Page, device_text, print_page
from finetune_operator.spec.types import FineTuneJobStatus
from planning_support.cases import encoder
from reconcile_world import MEASURED, NOON, SPEC, World

GIB = 1 << 30
L40S = DeviceFacts(product="NVIDIA L40S", memory_bytes=round(44.4 * GIB), bf16=True, capability="8.9")
T4 = DeviceFacts(product="Tesla T4", memory_bytes=round(14.6 * GIB), bf16=False, capability="7.5")
TINY = DeviceFacts(product="NVIDIA Tiny", memory_bytes=GIB // 2, bf16=True, capability="8.0")


def found(device: DeviceFacts) -> MeasuredDevices:
    return MeasuredDevices(device=device, processes=1, per_node=1)


def training(measured: MeasuredFacts = MEASURED, **blocks: Any) -> World:
    """Return a job on one GPU of an unknown kind, running its first attempt at train after prepare has measured."""
    world = World(spec={**SPEC, "resources": {"gpusPerNode": 1}, **blocks})
    world.settle()
    world.succeed(measured=measured)
    world.settle()
    world.start()
    world.settle()
    assert world.stage("train") == ("Running", 1)
    return world


def ends(world: World, device: DeviceFacts | None) -> FineTuneJobStatus:
    """Let the attempt end for another plan, and start the next one if there is one."""
    world.fail(FailureClass.REPLANNED, **({} if device is None else {"devices": found(device)}))
    world.settle()
    if world.phase != "Failed":
        world.wait(300)
        world.start()
        world.settle()
    return world.job().status


def ordered(world: World, attempt: int, stage: str = "train") -> TrainerJob:
    return TrainerJob.model_validate_json(world.configuration(f"reviews-{stage}-{attempt}"))


def precisions(world: World, attempt: int) -> tuple[str, str]:
    """Return the precision of an attempt, and the GPU that it is planned for."""
    job = ordered(world, attempt)
    assert job.training is not None
    return job.training.precision, "" if job.device is None else f"{job.device.product}, {job.device.source}"


def test_attempt_on_another_gpu_is_replanned_free_of_charge():
    world = training()
    assert precisions(world, 1) == ("bf16", "unknown GPU, assumed")
    status = ends(world, T4)
    assert precisions(world, 2) == ("fp16", "Tesla T4, measured")
    assert (world.stage("train"), status.counted_restarts, status.restarts) == (("Running", 2), 0, 1)
    event = next(event for event in world.events if event.reason == "Replanned")
    assert event.message == (
        "Tesla T4 has no units for bf16, and the plan uses them: single in bf16, batch 32 = 32 micro x 1 accumulation "
        "x 1 rank -> single in fp16, batch 32 = 32 micro x 1 accumulation x 1 rank."
    )
    assert status.plan is not None
    assert status.plan.device == "Tesla T4 with 14.6 GiB, without bf16, measured"
    assert "hardware: Tesla T4 with 14.6 GiB, without bf16: measured by an earlier attempt" in status.plan.reasons
    assert world.job_condition("Planned")[2].endswith("for Tesla T4 with 14.6 GiB, without bf16, measured.")


def test_unknown_gpu_is_shown_as_assumed_until_an_attempt_measures_it():
    world = training()
    status = world.job().status
    assert status.plan is not None
    assert status.plan.device == "unknown GPU with 15.0 GiB and bf16, assumed"
    assert world.job_condition("Planned")[2].endswith("for unknown GPU with 15.0 GiB and bf16, assumed.")


def test_second_end_on_the_same_gpu_counts_and_hints_at_the_product():
    world = training()
    ends(world, T4)
    status = ends(world, T4)
    assert (world.stage("train"), status.counted_restarts, status.restarts) == (("Running", 3), 1, 2)
    assert status.failure is not None
    assert "resources.accelerator.product" in (status.failure.hint or "")
    assert any("the job was planned for Tesla T4 already" in event.message for event in world.events)
    while world.phase != "Failed":
        ends(world, T4)
    failure = world.job().status.failure
    assert failure is not None
    assert (world.phase, failure.failure_class, world.job().status.counted_restarts) == ("Failed", "Replanned", 3)
    assert "runPolicy.maxRestarts (3) is reached" in (failure.hint or "")


def test_another_kind_of_node_is_replanned_once_more():
    world = training()
    ends(world, T4)
    less = T4.model_copy(update={"product": "Tesla P4", "memory_bytes": round(7.4 * GIB)})
    status = ends(world, less)
    assert (precisions(world, 3)[1], status.counted_restarts) == ("Tesla P4, measured", 0)
    status = ends(world, T4)
    assert status.counted_restarts == 1


def test_report_that_needs_no_other_plan_counts():
    world = training()
    # The batch is small: all of it fits the least GPU, with more memory too.
    status = ends(world, L40S)
    assert (status.counted_restarts, precisions(world, 2)[1]) == (1, "unknown GPU, assumed")
    assert any("the plan suits the reported NVIDIA L40S 44.4 GiB" in event.message for event in world.events)
    assert ends(world, None).counted_restarts == 2


def test_job_that_does_not_fit_the_measured_gpu_fails_with_the_arithmetic():
    world = training(parallelism={"strategy": "single"}, model={"uri": "hf://org/encoder"})
    status = ends(world, TINY.model_copy(update={"memory_bytes": 32 << 20}))
    assert status.failure is not None
    assert (world.phase, status.failure.failure_class, status.failure.reason) == ("Failed", "PlanRefused", "DoesNotFit")
    assert "Planning with the measured GPUs failed: " in status.failure.message
    assert "does not fit" in status.failure.message


def test_later_stages_use_the_measured_gpu():
    spec = {"model": {"uri": "hf://org/encoder", "adapter": {"method": "lora"}}}
    wide = MEASURED.model_copy(update={"model": encoder(4096, 24)})
    assumed, replanned = training(wide, **spec), training(wide, **spec)
    ends(replanned, L40S)
    found_precisions = []
    for world in (assumed, replanned):
        world.succeed(devices=found(L40S))
        world.settle()
        evaluation = ordered(world, 1, "evaluate").evaluation
        assert evaluation is not None
        found_precisions.append(evaluation.precision)
    # In fp32 it takes more than an unknown GPU is assumed to have.
    assert found_precisions == ["bf16", "fp32"]
    assert any("measured by an earlier attempt" in reason for reason in replanned.status["plan"]["reasons"])


def test_new_plan_finds_room_for_an_evaluation_or_none_any_more():
    model = {"uri": "hf://meta-llama/Llama-3.1-8B", "adapter": {"method": "qlora"}}
    llama = {"task": "text-generation", "model": model, "predict": None}
    rows = MEASURED.model_copy(update={"model": None})
    world = World(spec={**SPEC, **llama, "resources": {"gpusPerNode": 1, "memory": "1Ti"}})
    world.spec = {name: value for name, value in world.spec.items() if value is not None}
    world.settle()
    world.succeed(measured=rows)
    world.settle()
    # One process with the whole model takes more than an unknown GPU is assumed to have.
    assert [stage.name for stage in world.job().status.stages] == ["prepare", "train"]
    ends(world, L40S)
    assert [stage.name for stage in world.job().status.stages] == ["prepare", "train", "evaluate"]
    ends(world, L40S.model_copy(update={"product": "NVIDIA Less", "memory_bytes": 14 * GIB}))
    assert [stage.name for stage in world.job().status.stages] == ["prepare", "train"]
    ends(world, L40S.model_copy(update={"product": "NVIDIA More", "memory_bytes": 80 * GIB}))
    world.succeed()
    world.settle()
    assert world.phase == "Succeeded"


def test_measured_gpus_are_in_the_status_when_nothing_is_replanned():
    world = training()
    world.succeed(devices=found(L40S))
    world.settle()
    measured = world.job().status.measured
    assert measured is not None
    assert measured.device is not None
    assert MeasuredDevices.model_validate(measured.device).text == "NVIDIA L40S 44.4 GiB, capability 8.9 x 1"
    assert (measured.replanned_for, measured.model is None) == ((), False)
    assert "Replanned" not in world.event_reasons()


def test_failed_attempts_leave_their_measured_gpus_too():
    world = training()
    world.fail(FailureClass.OUT_OF_MEMORY, devices=found(L40S))
    world.settle()
    measured = world.job().status.measured
    assert measured is not None
    assert measured.device is not None


def test_replanned_report_without_a_message_is_found_by_its_exit_code():
    world = training()
    world.fail_silently(EXIT_CODES[FailureClass.REPLANNED])
    world.settle()
    status = world.job().status
    assert status.failure is not None
    assert (status.failure.failure_class, status.counted_restarts) == ("Replanned", 1)


def test_resumed_checkpoints_belong_to_the_same_training_after_a_new_plan():
    from finetune_trainer.checkpoint.checkpoints import identity

    world = training(training={"globalBatchSize": 32, "precision": "fp32"})
    less = DeviceFacts(product="NVIDIA Small", memory_bytes=round(2 * GIB), bf16=True, capability="8.0")
    ends(world, less)
    before, after = ordered(world, 1), ordered(world, 2)
    assert (before.device, before != after) != (after.device, False)
    assert identity(before, "f00d", {}) == identity(after, "f00d", {})
    assert json.loads(world.configuration("reviews-train-2"))["device"]["source"] == "measured"


def test_status_page_has_the_assumed_and_then_the_measured_gpu():
    world = training()
    assert device_text(world.job().status) == "unknown GPU with 15.0 GiB and bf16, assumed"
    world.succeed(devices=found(L40S))
    world.settle()
    assert device_text(world.job().status) == "NVIDIA L40S 44.4 GiB, capability 8.9 x 1"
    metadata = {
        "name": "reviews",
        "namespace": "team",
        "uid": "1",
        "generation": 1,
        "creationTimestamp": "2026-01-01T12:00:00Z",
    }
    job = ClusterJob.model_validate({"metadata": metadata, "spec": {}, "status": world.status})
    console = Console(file=io.StringIO(), width=160)
    print_page(console, Page(job, NOON))
    assert isinstance(console.file, io.StringIO)
    assert "  device   NVIDIA L40S 44.4 GiB, capability 8.9 x 1" in console.file.getvalue().splitlines()

"""Start-up before torch is imported: the world, the environment, the arguments, the report."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from finetune_contract import arguments as contract
from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.report import FailureReport, TrainerReport
from finetune_trainer.core.distributed import (
    ProcessWorld,
    device_index,
    discover,
    free_port,
    refuse_missing_gpu,
    settle_environment,
)
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.final_report import report_path, write_report

OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({}, ProcessWorld(), id="nothing: alone"),
        pytest.param(TORCHRUN, ProcessWorld(1, 2, 1, 2, "torchrun"), id="torchrun"),
        pytest.param(OMPI, ProcessWorld(3, 4, 1, 2, "mpi"), id="Open MPI"),
        pytest.param({**OMPI, "PMIX_RANK": "3"}, ProcessWorld(3, 4, 1, 2, "mpi"), id="Open MPI 5 beside PMIx"),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            ProcessWorld(1, 2, 1, 2, "mpi"),
            id="MPICH and Intel MPI",
        ),
        pytest.param({**OMPI, **TORCHRUN}, ProcessWorld(1, 2, 1, 2, "torchrun"), id="torchrun inside mpirun"),
        pytest.param(
            {**OMPI, "RANK": "0", "WORLD_SIZE": "2"},
            ProcessWorld(3, 4, 1, 2, "mpi"),
            id="mpirun in a pod with node ranks",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            ProcessWorld(1, 2, 0, 1, "environment"),
            id="the variables alone",
        ),
    ],
)
def test_world_is_read_from_the_variables_of_each_launcher(environment: dict[str, str], expected: ProcessWorld):
    assert discover(environment) == expected


def test_a_variable_that_is_no_number_is_refused_by_name():
    with pytest.raises(StageError, match="OMPI_COMM_WORLD_RANK is 'x'"):
        discover({**OMPI, "OMPI_COMM_WORLD_RANK": "x"})


def test_processes_share_a_port_within_one_mpirun_only():
    def port(run: str, rank: int) -> str:
        environment = {"PMIX_NAMESPACE": run}
        world = ProcessWorld(rank, 2, rank, 2, "mpi")
        settle_environment(environment, world, device="cpu", threads=1, strategy="ddp")
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        return environment["MASTER_PORT"]

    assert port("prterun-1@1", 0) == port("prterun-1@1", 1)
    assert port("prterun-1@1", 0) != port("prterun-2@1", 0)


def test_process_number_of_mpich_does_not_change_the_port():
    def port(rank: int) -> str:
        environment = {"PMI_ID": str(rank)}
        settle_environment(environment, ProcessWorld(rank, 2, rank, 2, "mpi"), device="cpu", threads=1, strategy="ddp")
        return environment["MASTER_PORT"]

    assert port(0) == port(1)


def test_free_port_is_outside_of_the_ephemeral_range():
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not given.exists() or (lowest := int(given.read_text().split()[0])) < 20_000:
        pytest.skip("this machine gives clients ports of any number")
    assert all(1024 <= free_port() < lowest for _ in range(100))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
)
def test_blocks_of_gpu_memory_grow_unless_the_job_has_settings(given, found):
    environment = dict(given)
    settle_environment(environment, ProcessWorld(), device="cuda", threads=1, strategy="single")
    assert {name: value for name, value in environment.items() if "ALLOC" in name} == found
    on_cpu: dict[str, str] = {}
    settle_environment(on_cpu, ProcessWorld(), device="cpu", threads=1, strategy="single")
    assert not any("ALLOC" in name for name in on_cpu)


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        pytest.param({}, "0", id="of all GPUs the first"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "2,3"}, "2", id="of those that were given the first"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, "", id="none where none was given"),
    ],
)
def test_a_single_process_sees_one_gpu_for_it_would_be_spread_over_all(visible: dict[str, str], left: str):
    environment = dict(visible)
    settle_environment(environment, ProcessWorld(), device="cuda", threads=1, strategy="single")
    assert environment["CUDA_VISIBLE_DEVICES"] == left


INSTANCES = "MIG-11111111-2222-5333-8444-555555555555,MIG-66666666-7777-5888-8999-aaaaaaaaaaaa"


@pytest.mark.parametrize("variable", ["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_each_process_gets_its_own_instance_of_a_partitioned_gpu(variable: str):
    for rank, instance in enumerate(INSTANCES.split(",")):
        environment = {variable: INSTANCES, "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        world = ProcessWorld(rank, 2, rank, 2, "environment")
        settle_environment(environment, world, device="cuda", threads=1, strategy="ddp")
        # CUDA shows one instance to a process, as its device 0.
        assert (environment["CUDA_VISIBLE_DEVICES"], device_index(environment, rank)) == (instance, 0)


@pytest.mark.parametrize("listed", [None, "all", "GPU-1,GPU-2", "0,1", "MIG-1"])
def test_process_of_whole_gpus_has_the_number_of_its_rank(listed: str | None):
    environment = {} if listed is None else {"NVIDIA_VISIBLE_DEVICES": listed}
    environment |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    settle_environment(environment, ProcessWorld(1, 2, 1, 2, "environment"), device="cuda", threads=1, strategy="ddp")
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert device_index(environment, 1) == 1


def test_one_visible_instance_is_no_missing_device(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refuse_missing_gpu(1, device_index({"CUDA_VISIBLE_DEVICES": "MIG-1"}, 1))
    with pytest.raises(StageError, match="process 1 needs GPU 1, and sees 1 of them") as error:
        refuse_missing_gpu(1, device_index({}, 1))
    assert error.value.reason == "DeviceMissing"


def test_several_nodes_without_an_address_are_refused():
    with pytest.raises(StageError, match="MASTER_ADDR is not set"):
        settle_environment({}, ProcessWorld(0, 4, 0, 2, "mpi"), device="cpu", threads=1, strategy="ddp")


def test_single_process_has_no_distributed_variables_and_sees_no_gpu():
    environment = dict(TORCHRUN)
    settle_environment(environment, ProcessWorld(launcher="torchrun"), device="cpu", threads=3, strategy="single")
    assert environment == {
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "3",
        "TOKENIZERS_PARALLELISM": "false",
        "DISABLE_KUBEFLOW_INTEGRATION": "TRUE",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_each_argument_is_free_or_owned_by_exactly_one_field():
    known = set(contract.known_arguments())
    assert len(known) > 100
    assert set(contract.OWNED_BY_PLAN) <= known
    assert known >= contract.FREE
    assert not set(contract.OWNED_BY_PLAN) & contract.FREE


def failed(message: str, at: float, rank: int = 0) -> TrainerReport:
    failure = FailureReport(failure_class=FailureClass.DATA, reason="X", message=message, time=at)
    return TrainerReport(job="j", stage=Stage.TRAIN, rank=rank, world_size=2, outcome="failed", failure=failure)


def test_an_earlier_failure_in_a_shared_report_is_kept(tmp_path: Path):
    path = tmp_path / "termination-log"
    write_report(failed("the cause", time.time()), path)
    write_report(failed("the echo", time.time(), rank=1), path)
    write_report(TrainerReport(job="j", stage=Stage.TRAIN, outcome="succeeded"), path)
    kept = TrainerReport.model_validate_json(path.read_bytes())
    assert kept.failure is not None
    assert kept.failure.message == "the cause"


def test_a_failure_of_an_earlier_attempt_is_replaced(tmp_path: Path):
    path = tmp_path / "termination-log"
    write_report(failed("yesterday", time.time() - 86400), path)
    write_report(TrainerReport(job="j", stage=Stage.TRAIN, outcome="succeeded"), path)
    assert TrainerReport.model_validate_json(path.read_bytes()).outcome == "succeeded"


def test_reports_are_written_to_the_requested_path_by_rank(tmp_path: Path):
    assert report_path(3, {"FINETUNE_REPORT": str(tmp_path / "r-{rank}.json")}) == tmp_path / "r-3.json"
    there = os.access("/dev/termination-log", os.W_OK)
    assert report_path(0, {}) == (Path("/dev/termination-log") if there else None)


def test_a_history_goes_on_from_the_resumed_step_without_a_cut_off_line(tmp_path: Path):
    from finetune_trainer.report.history import History

    history = History(tmp_path / "history.jsonl")
    history.begin(0)
    for step in range(1, 8):
        history.add({"step": step, "loss": 8.0 - step})
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    history.begin(5)
    history.add({"step": 6, "loss": 1.0})
    assert [line["step"] for line in history.read()] == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "history.jsonl").read_text().splitlines()[-1]) == {"step": 6, "loss": 1.0}


def test_figures_of_a_run_by_an_older_image_cover_the_later_steps(caplog):
    from finetune_trainer.report.history import RunFigures

    # As the first release wrote it, as the next one did, and as today's.
    first = {"step": 1, "loss": 4.0}
    second = {"step": 2, "loss": 3.0, "samples_per_second": 2.0}
    now = {
        "step": 3,
        "loss": 2.0,
        "samples_per_second": 6.0,
        "tokens_per_second": 30.0,
        "tokens": 60,
        "computed_tokens": 80,
        "seconds": {"forward": 1.5},
    }
    evaluated = {"step": 3, "eval_loss": 1.0}
    figures = RunFigures([first, second, now, evaluated])
    assert figures.losses() == {"loss_first": 4.0, "loss_last": 2.0}
    assert figures.rates() == pytest.approx(
        {"samples_per_second": 3.0, "tokens": 60, "tokens_per_second": 30.0, "padding_share": 0.25}
    )
    assert figures.seconds() == {"forward": 1.5}
    assert figures.validation() == figures.validation(3) == {"eval_loss": 1.0}
    messages = [record.getMessage() for record in caplog.records]
    assert ["lacks samples_per_second of 1 steps" in messages[0], "of 2 steps" in messages[1]] == [True, True]

    caplog.clear()
    assert RunFigures([now]).rates()["tokens"] == 60
    assert not caplog.records
    assert RunFigures([first]).rates() == {}


def test_first_and_last_loss_are_means_over_a_twentieth_of_the_steps(caplog):
    from finetune_trainer.report.history import RunFigures

    lines = [{"step": at, "loss": loss} for at, loss in enumerate([4.0, *([2.0] * 38), 1.0], start=1)]
    assert RunFigures(lines).losses() == {"loss_first": 3.0, "loss_last": 1.5}
    assert RunFigures(lines[:1]).losses() == {"loss_first": 4.0, "loss_last": 4.0}
    assert caplog.text == ""
    assert RunFigures([{"step": 40, "eval_loss": 1.0}]).losses() == {}
    assert "has no step" in caplog.text

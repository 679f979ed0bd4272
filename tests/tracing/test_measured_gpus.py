"""The trainer's own program on pretended GPUs: it measures them, and ends where they need another plan, before it
opens the data or loads a model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import EXIT_CODES, FailureClass
from finetune_contract.measured_devices import PlannedDevice
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import TrainerJob, Training
from finetune_trainer.core.distributed import free_port
from suite_plugins.patience import patient
from tracing_support import stub_cuda
from trainer_support.tasks import task_job, training_of

H100_BYTES = 85_520_809_984
RUN = """
import sys
from finetune_trainer.core import distributed
# NCCL refuses pretended GPUs.
distributed.BACKENDS = {"cuda": distributed.Backends("gloo", "gloo")}
from finetune_trainer.__main__ import main
main(sys.argv[1:])
"""
INSTANCES = "MIG-11111111-2222-5333-8444-555555555555,MIG-66666666-7777-5888-8999-aaaaaaaaaaaa"


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Return the environment of a process that sees H100s."""
    if (reason := stub_cuda.why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("stub-cuda")
    stub_cuda.build(folder)
    return {**os.environ, "OMP_NUM_THREADS": "1", **stub_cuda.environment(folder)}


def planned(gib: float, **fields: Any) -> PlannedDevice:
    given = {"product": "unknown GPU", "bf16": True, "source": "assumed", "needed_bytes": 0, **fields}
    return PlannedDevice(memory_bytes=round(gib * 2**30), **given)


def order(device: PlannedDevice, processes: int = 1) -> TrainerJob:
    """Return a job whose model and data do not exist: whoever reads them fails."""
    world = {"nodes": 1, "processes_per_node": processes, "device": "cuda", "threads_per_process": 1}
    strategy = {"name": "single" if processes == 1 else "ddp"}
    batch = {"global_batch_size": 16, "micro_batch_size": 8, "gradient_accumulation": 2 // processes}
    training = training_of(steps=2, precision="bf16", world=world, strategy=strategy)
    training["batch"] = {**batch, "data_parallel": processes}
    nowhere = Path("/nowhere")
    columns = ("text", "label")
    given = device.model_dump(mode="json")
    return task_job("text-classification", f"file://{nowhere}", nowhere, columns, training=training, device=given)


def trained(folder: Path, job: TrainerJob, *environments: Mapping[str, str]) -> list[tuple[int, TrainerReport, str]]:
    """Run train, one process for each environment; return exit codes, reports and outputs by rank."""
    file = folder / "job.json"
    file.write_text(job.to_json(), encoding="utf-8")
    command = [sys.executable, "-c", RUN, "train", "--job", file, "--workspace", folder / "w"]
    port, started = str(free_port()), []
    for rank, environment in enumerate(environments):
        world = {"RANK": str(rank), "WORLD_SIZE": str(len(environments)), "LOCAL_RANK": str(rank)}
        world |= {"LOCAL_WORLD_SIZE": str(len(environments)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        given = {**environment, **world, "FINETUNE_REPORT": str(folder / "report-{rank}.json")}
        started.append(
            subprocess.Popen(command, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    ends = []
    for rank, process in enumerate(started):
        output, _ = process.communicate(timeout=patient(60))
        report = TrainerReport.model_validate_json((folder / f"report-{rank}.json").read_bytes())
        ends.append((process.returncode, report, output))
    return ends


def test_more_memory_than_assumed_ends_the_attempt_before_the_model(pretended, tmp_path: Path):
    [(code, report, output)] = trained(tmp_path, order(planned(15, undecided=("memory",))), pretended)
    assert report.failure is not None, output
    assert (code, report.failure.failure_class) == (EXIT_CODES[FailureClass.REPLANNED], FailureClass.REPLANNED), output
    assert "NVIDIA H100 80GB HBM3 has 79.6 GiB, and the plan uses 15.0 GiB" in report.failure.message
    assert report.devices is not None
    assert report.devices.text == "NVIDIA H100 80GB HBM3 79.6 GiB, capability 9.0 x 1"
    assert (report.devices.device.bf16, report.devices.fp8, report.devices.mig) == (True, True, False)


def test_plan_that_stays_the_same_lets_the_attempt_go_on(pretended, tmp_path: Path):
    [(_, report, output)] = trained(tmp_path, order(planned(15)), pretended)
    assert "The plan was made for an unknown GPU, and stays the same" in output
    assert report.failure is not None
    assert report.failure.failure_class is not FailureClass.REPLANNED
    # What was measured is in the report of a later failure too: here of the missing data.
    assert report.devices is not None


def test_all_ranks_agree_on_the_weakest_gpu_of_any(pretended, tmp_path: Path):
    # Each process sees an instance of its own, and nothing else; that of rank 1 is half as large.
    instance = {**pretended, "NVIDIA_VISIBLE_DEVICES": INSTANCES, "STUB_CUDA_DEVICES": "1"}
    del instance["CUDA_VISIBLE_DEVICES"]
    half = {**instance, "STUB_CUDA_MEMORY": str(H100_BYTES // 2)}
    ends = trained(tmp_path, order(planned(79.6), processes=2), instance, half)
    for code, report, output in ends:
        assert report.failure is not None, output
        assert (code, report.failure.reason) == (EXIT_CODES[FailureClass.REPLANNED], "DeviceDiffers"), output
        assert report.devices is not None
        assert report.devices.device.memory_bytes == H100_BYTES // 2
        assert (report.devices.processes, report.devices.per_node, report.devices.peer_access) == (2, 1, None)
    assert ends[0][1].devices == ends[1][1].devices


SETTLED = """
import torch
from pathlib import Path
from finetune_contract.trainer_job import Training
from finetune_trainer.training.training_arguments import training_arguments
arguments = training_arguments(Training.model_validate_json({training!r}), Path("."), {{}})
print(arguments.tf32, torch.backends.cuda.matmul.fp32_precision)
"""


def test_fp32_training_on_an_h100_has_torch_multiply_in_tf32(pretended):
    world = {"nodes": 1, "processes_per_node": 1, "device": "cuda", "threads_per_process": 1}
    found = []
    for arguments in ({}, {"tf32": False}):
        training = Training.model_validate(training_of(steps=1, precision="fp32", world=world, arguments=arguments))
        program = SETTLED.format(training=training.model_dump_json())
        run = subprocess.run([sys.executable, "-c", program], env=pretended, text=True, capture_output=True, check=True)
        found.append(run.stdout.split())
    assert found == [["True", "tf32"], ["False", "ieee"]]


def test_pages_of_host_memory_are_locked_for_the_copies_of_a_gpu(pretended):
    program = (
        "import torch\n"
        "from finetune_trainer.strategies.staging_memory import lock_pages, unlock_pages\n"
        "memory = torch.empty(1000)\n"
        "states = [memory.is_pinned(), lock_pages(memory), memory.is_pinned()]\n"
        "unlock_pages(memory)\n"
        "print(*states, memory.is_pinned())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], env=pretended, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "True", "True", "False"]

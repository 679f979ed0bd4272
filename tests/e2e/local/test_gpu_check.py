"""The check of a machine with GPUs, as it runs on one without: its own code, its report and its exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_contract.facts import DeviceFacts, HardwareFacts
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.settings.settings import LOCAL_SETTINGS
from finetune_operator.spec.types import FineTuneJob
from gpu_check.gpu_baselines import BASELINES
from gpu_check.gpu_baselines import train as train_baseline
from gpu_check.gpu_jobs import BY_MEMORY, SMALL, WAYS, job, size_of, write_inputs
from gpu_check.gpu_kernels import KERNELS
from gpu_check.gpu_predictions import MODES
from gpu_check.gpu_predictions import SMALL as PREDICTED
from gpu_check.gpu_report import Result, SkippedError, as_markdown, checked
from gpu_check.several_nodes import Nodes, together
from suite_plugins.patience import patient

TESTS = Path(__file__).parents[2]


def check(out: Path, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Run the command; return its exit code, its output, and the results in its report."""
    limits = ("--minutes", str(patient(10)), "--seconds", str(patient(500)))
    run = subprocess.run(
        [sys.executable, "-m", "gpu_check", "--small", *limits, "--out", str(out), *options],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=patient(600),
        check=False,
    )
    report = out / "gpu-check.json"
    results = json.loads(report.read_text(encoding="utf-8"))["results"] if report.exists() else []
    return run.returncode, run.stdout + run.stderr, results


@pytest.mark.slow
def test_ways_to_train_are_measured_beside_their_plans(tmp_path: Path) -> None:
    code, output, results = check(tmp_path, "--only", "links", "trainings", "--ways", "single", "ddp")
    assert code == 0, output
    assert [(each["name"], each["outcome"]) for each in results] == [
        ("all-reduce", "ok"),
        ("single", "ok"),
        ("ddp", "skipped"),
    ]
    assert results[0]["figures"]["GB/s of each link"] > 0
    single = results[1]["figures"]
    assert single["strategy"] == "single"
    assert len(single["losses"]) == SMALL.steps
    assert min(single["peak GiB"], single["planned GiB"], single["s a step"]) > 0
    page = (tmp_path / "gpu-check.md").read_text(encoding="utf-8")
    assert "| ddp | skipped |" in page
    assert "needs 2 GPUs" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BASELINES))
def test_other_loops_train_on_the_same_rows(name: str, tmp_path: Path) -> None:
    write_inputs(tmp_path, SMALL)
    figures = train_baseline(name, tmp_path, SMALL, 0, patient(300))
    assert min(figures["s a step"], figures["tokens/s"]) > 0
    # Random words: a model without knowledge begins at the logarithm of the vocabulary.
    assert all(0 < loss < 1.2 * log(SMALL.vocabulary) for loss in figures["first and last loss"])


@pytest.mark.slow
def test_predictions_as_loaded_are_measured(tmp_path: Path) -> None:
    first = next(iter(MODES))
    code, output, results = check(tmp_path, "--only", "predictions", "--modes", first)
    assert code == 0, output
    assert [(each["name"], each["outcome"]) for each in results] == [(first, "ok")]
    assert results[0]["figures"]["rows"] == PREDICTED.rows


@pytest.mark.slow
@pytest.mark.everything
@pytest.mark.parametrize("mode", list(MODES)[1:])
def test_ways_to_predict_are_measured_and_labels_compared(mode: str, tmp_path: Path) -> None:
    first = next(iter(MODES))
    code, output, results = check(tmp_path, "--only", "predictions", "--modes", first, mode)
    assert code == 0, output
    assert [(each["name"], each["outcome"]) for each in results] == [(first, "ok"), (mode, "ok")]
    plain, measured = (each["figures"] for each in results)
    assert plain["rows"] == measured["rows"] == PREDICTED.rows
    assert measured["equal labels"] >= MODES[mode].get("tolerance", 1.0)
    assert measured["chosen"] in measured
    assert "rows/s" in measured["none"]


@pytest.mark.slow
def test_a_failed_way_is_reported_and_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("no folder")
    code, output, results = check(tmp_path, "--only", "trainings", "--ways", "single")
    assert code == 1, output
    (result,) = results
    assert result["outcome"] == "failed"
    assert str(tmp_path / "runs") in result["reason"]


@pytest.mark.slow
def test_first_of_two_nodes_reports_links_and_trainings_of_both(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = f"127.0.0.1:{probe.getsockname()[1]}"
    limits = ("--minutes", str(patient(10)), "--seconds", str(patient(500)))
    command = [sys.executable, "-m", "gpu_check", "--small", *limits, "--out", str(tmp_path), "--first", first]
    command += ["--nodes", "2", "--only", "links", "trainings", "--ways", "single"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    nodes = [subprocess.Popen([*command, "--node", str(node)], env=environment) for node in range(2)]
    assert [node.wait(patient(600)) for node in nodes] == [0, 0]
    report = json.loads((tmp_path / "gpu-check.json").read_text(encoding="utf-8"))
    assert report["machine"]["nodes"].startswith("2 nodes alike")
    results = {each["name"]: each for each in report["results"]}
    assert {name: each["outcome"] for name, each in results.items()} == {
        "all-reduce": "ok",
        "single": "ok",
        "ddp over nodes": "ok",
        "fsdp over nodes": "ok",
        "fsdp in nodes, copies between them": "skipped",
    }
    assert (results["all-reduce"]["figures"]["nodes"], results["all-reduce"]["figures"]["processes"]) == (2, 4)
    assert [results[name]["figures"]["processes"] for name in ("ddp over nodes", "fsdp over nodes")] == [2, 2]


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        (Nodes(), None),
        (Nodes(2, 1, "10.0.0.1:29400"), None),
        (Nodes(2, 2, "10.0.0.1:29400"), "--node is 2, and --nodes 2: number them from 0 to 1."),
        (Nodes(2, 0, "10.0.0.1"), "--first is '10.0.0.1': several nodes need the first one's host:port."),
    ],
)
def test_position_of_a_node_is_checked(nodes: Nodes, problem: str | None) -> None:
    assert nodes.problem() == problem


def test_facts_of_nodes_are_compared() -> None:
    assert together({"0": "a", "1": "a"}, 2) == "2 nodes alike: a"
    assert together({"0": "a", "1": "b"}, 2) == "node 0: a; node 1: b"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_gpu_check_without_a_gpu_prints_a_hint(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "gpu_check", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(120),
    )
    assert run.returncode == 1
    assert "--small" in run.stderr


@pytest.mark.parametrize("name", ["matrix product", "attention", "4-bit product"])
def test_kernels_answer_rightly_on_a_cpu(name: str) -> None:
    assert KERNELS[name](torch.device("cpu"), True)


def test_an_error_is_a_result_and_the_report_has_all() -> None:
    def broken() -> dict[str, Any]:
        raise ValueError("first\nlast | line")

    def impossible() -> dict[str, Any]:
        raise SkippedError("needs 8 GPUs")

    results = [checked("a", "one", broken), checked("a", "two", impossible), checked("b", "three", lambda: {"x": 1.5})]
    assert [each.outcome for each in results] == ["failed", "skipped", "ok"]
    assert results[0].reason == "ValueError: last | line"
    page = as_markdown({"GPUs": 0}, results)
    assert page.count("\n## ") == 2
    assert "1 ok, 1 failed, 1 skipped." in page
    assert "ValueError: last \\| line" in page
    assert "x 1.5" in page


def test_sizes_follow_the_memory_of_a_gpu() -> None:
    assert size_of(None) is SMALL
    assert [size_of(gib) for gib in (79.2, 22.0, 15.0)] == [size for _, size in BY_MEMORY]
    assert isinstance(Result("g", "n", "ok", 0.0).figures, dict)
    assert {"single", "fsdp", "ZeRO-3", "tensor 2", "fp8"} <= WAYS.keys()


@pytest.mark.parametrize("gpus", [1, 8])
def test_trainings_use_all_gpus_of_the_machine(gpus: int, tmp_path: Path) -> None:
    gpu = DeviceFacts(product="NVIDIA H100 80GB HBM3", memory_bytes=79 << 30, bf16=True, capability="9.0")
    hardware = HardwareFacts(cpu_cores=16, memory_bytes=128 << 30, gpus_per_node=gpus, gpu=gpu)
    for name, (needed, fields) in WAYS.items():
        if needed > gpus:
            continue
        content = FineTuneJob.model_validate(job(name, tmp_path, SMALL, gpus, fields))
        training = plan(content, Facts(hardware=hardware, local=True), LOCAL_SETTINGS).trainer.training
        assert training is not None
        assert training.world.device == "cuda", name
        single = fields["parallelism"]["strategy"] == "single"
        assert training.world.processes_per_node == (1 if single else gpus), name


def test_inputs_that_cannot_be_written_are_a_result(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where a folder has to be", encoding="utf-8")
    code, output, results = check(tmp_path, "--only", "trainings", "--ways", "ddp")
    assert code == 1, output
    assert [(each["name"], each["outcome"]) for each in results] == [("inputs", "failed"), ("ddp", "skipped")]

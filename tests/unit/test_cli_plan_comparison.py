"""`finetune plan --alternatives` and `--what-if`: tables for people, data for programs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

from finetune_command import finetune

JOB = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: first}
spec:
  task: text-generation
  model: {uri: hf://meta-llama/Llama-3.1-8B}
  dataset: {uri: hf://org/books}
  training: {globalBatchSize: 64, maxSteps: 20000}
  resources: {gpusPerNode: 8}
"""
PRICES = """\
prices:
  - {product: H100, gpus: 8, perHour: 80}
  - {product: A100-80GB, gpus: 8, perHour: 20}
"""
NODES = ("gpu=H100,gpus=8,hostMemory=2Ti", "gpu=A100-80GB,gpus=8,hostMemory=1Ti")


def test_alternatives_list_each_form_with_why_it_was_not_chosen(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    call = ("plan", "job.yaml", "--cluster", "--hardware", NODES[0], "--alternatives")
    text = finetune(*call, folder=tmp_path)
    data = json.loads(finetune(*call, "-o", "json", folder=tmp_path).stdout)
    rows = data["alternatives"]
    assert data["name"] == "first"
    assert [row["why"] for row in rows if row["chosen"]] == ["chosen"]
    assert next(row for row in rows if row["strategy"] == "ddp")["why"].startswith("needs ")
    assert text.returncode == 0
    assert text.stdout.splitlines()[0].split() == [
        *("strategy", "micro-batch", "checkpointing", "memory", "step", "time", "cost", "why"),
    ]


def test_hardware_is_compared_by_time_or_by_cost(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "settings.yaml").write_text(PRICES)
    call = ["plan", "job.yaml", "--cluster", "--settings", "settings.yaml", "-o", "json"]
    for node in NODES:
        call += ["--what-if", f"{node},nodes=2"]

    def order(*more: str) -> list[str]:
        data = json.loads(finetune(*call, *more, folder=tmp_path).stdout)
        assert all(row["nodes"] == 2 and row["cost"] > 0 for row in data["hardware"])
        return [row["hardware"] for row in data["hardware"]]

    assert order() == list(NODES)
    assert order("--goal", "cost") == list(reversed(NODES))


def test_hardware_that_misses_a_deadline_or_a_budget_comes_last(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "settings.yaml").write_text(PRICES)
    call = ["plan", "job.yaml", "--cluster", "--settings", "settings.yaml", "-o", "json"]
    for node in NODES:
        call += ["--what-if", f"{node},nodes=2"]
    rows = json.loads(finetune(*call, folder=tmp_path).stdout)["hardware"]
    hours, cost = (rows[0]["seconds"] + 1) / 3600, rows[1]["cost"] + 0.01
    assert [row["missed"] for row in rows] == [[], []]

    late = finetune(*call, "--goal", "cost", "--deadline", f"{hours}", folder=tmp_path)
    missed = {row["hardware"]: row["missed"] for row in json.loads(late.stdout)["hardware"]}
    assert (list(missed), late.returncode) == (list(NODES), 0)
    assert missed == {NODES[0]: [], NODES[1]: [f"longer than {hours:g} h"]}

    neither = finetune(*call, "--deadline", f"{hours}", "--max-cost", f"{cost}", folder=tmp_path)
    missed = {row["hardware"]: row["missed"] for row in json.loads(neither.stdout)["hardware"]}
    assert missed == {NODES[0]: [f"costs more than {cost:g}"], NODES[1]: [f"longer than {hours:g} h"]}
    assert neither.returncode == 1


def test_bounds_without_compared_hardware_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    ran = finetune("plan", "job.yaml", "--cluster", "--deadline", "6", folder=tmp_path)
    assert ran.returncode == 2
    assert "--deadline and --max-cost bound the rows of --what-if" in ran.stderr


def test_hardware_that_does_not_do_is_a_row_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    small = ("--what-if", "gpu=T4,gpus=1,hostMemory=8Gi")
    both = finetune("plan", "job.yaml", "--cluster", *small, "--what-if", NODES[0], "-o", "json", folder=tmp_path)
    data = json.loads(both.stdout)
    assert "does not fit" in data["hardware"][1]["refused"]
    assert both.returncode == 0
    assert finetune("plan", "job.yaml", "--cluster", *small, folder=tmp_path).returncode == 1


def test_a_job_without_a_training_has_nothing_to_compare(tmp_path: Path) -> None:
    text = JOB.replace("training: {globalBatchSize: 64, maxSteps: 20000}", "evaluation: {}")
    (tmp_path / "job.yaml").write_text(text)
    ran = finetune("plan", "job.yaml", "--cluster", "--alternatives", "--hardware", NODES[0], folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "first: nothing to compare, as no built-in training runs\n")


def test_nodes_have_as_many_gpus_as_the_job_requests(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    call = ("plan", "job.yaml", "--cluster", "-o", "json", "--what-if", NODES[0], "--what-if")
    data = json.loads(finetune(*call, NODES[0].replace("gpus=8,", ""), folder=tmp_path).stdout)
    one, other = ({**row, "hardware": ""} for row in data["hardware"])
    assert one == other
    assert one["seconds"] > 0

"""`finetune review`: the page for a code review, exit codes, and refusals."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from finetune_command import finetune

PRICED = """\
schemes: [hf]
prices:
  - {product: NVIDIA-H100-80GB-HBM3, gpus: 1, perHour: 12.0}
"""
HARDWARE = "gpu=H100,memory=80Gi,gpus=1,cpu=16,hostMemory=128Gi"


def a_job(name: str, **spec: object) -> str:
    base = {
        "task": "text-classification",
        "model": {"uri": "hf://some-org/some-model"},
        "dataset": {"uri": "hf://some-org/rows"},
        "training": {"epochs": 1},
        "resources": {"gpusPerNode": 1},
    }
    document = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": name}}
    return yaml.safe_dump({**document, "spec": {**base, **spec}})


def review(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return finetune("review", *arguments, folder=folder)


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "settings.yaml").write_text(PRICED)
    (tmp_path / "jobs" / "good.yaml").write_text(a_job("good"))
    return tmp_path


def test_valid_job_is_a_row_with_time_and_cost_and_a_folded_plan(jobs: Path) -> None:
    ran = review(jobs, "jobs", "--settings", "settings.yaml", "--hardware", HARDWARE)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    row = next(line for line in lines if line.startswith("| ✅ "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:4] == ["✅", "good", "single by job", "1 on cuda"]
    assert cells[-1].endswith(" USD")
    assert lines[0] == "## Fine-tuning jobs"
    assert "<summary>good: plan and reasons</summary>" in lines
    assert "### Problems" not in ran.stdout


def test_review_lists_every_problem_with_its_line_and_writes_the_page(jobs: Path) -> None:
    (jobs / "jobs" / "bad.yaml").write_text(a_job("bad", training={"epochs": 0}))
    (jobs / "jobs" / "mpi.yaml").write_text(a_job("big", parallelism={"tensorParallel": 3}))
    ran = review(jobs, "jobs", "--summary", "out/review.md")
    page = (jobs / "out" / "review.md").read_text()
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "see out/review.md" in ran.stderr
    wrong = [line for line in page.splitlines() if line.startswith("- jobs/")]
    assert any("bad.yaml" in line and "spec.training.epochs" in line for line in wrong)
    assert any("mpi.yaml" in line and "tensorParallel" in line for line in wrong)
    assert "| ✅ | good " in page


@pytest.mark.parametrize(
    ("most", "settings", "code", "message"),
    [
        pytest.param("1000", True, 0, "", id="within the bound"),
        pytest.param("0.0001", True, 1, "exceeds --max-cost 0.0001", id="above it"),
        pytest.param("1000", False, 1, "its cost is unknown", id="no prices: the bound cannot be checked"),
    ],
)
def test_a_bound_on_the_cost_is_held_or_the_job_does_not_pass(
    jobs: Path, most: str, settings: bool, code: int, message: str
) -> None:
    options = ["--settings", "settings.yaml"] if settings else []
    ran = review(jobs, "jobs", "--hardware", HARDWARE, "--max-cost", most, *options)
    assert ran.returncode == code, ran.stdout
    assert message in ran.stdout.replace("\\", "")


def test_text_of_a_job_file_cannot_become_markup(jobs: Path) -> None:
    uri = "hf://some-org/x|<img src=a>[l](http://evil)@team`b`"
    (jobs / "jobs" / "good.yaml").write_text(a_job("good", model={"uri": uri}))
    page = review(jobs, "jobs").stdout
    assert "some-org" in page
    shown = page.replace("\\|", "").replace("\\[", "").replace("\\]", "").replace("\\`", "")
    assert not [sign for sign in ("<img", "[l]", "@team", "`b`") if sign in shown]


def test_objects_are_rendered_for_each_job_and_data_is_for_programs(jobs: Path) -> None:
    ran = review(jobs, "jobs", "--render", "rendered", "-o", "json")
    found = json.loads(ran.stdout)
    assert (ran.returncode, found["passes"], [one["name"] for one in found["jobs"]]) == (0, True, ["good"])
    kinds = [one["kind"] for one in yaml.safe_load_all((jobs / "rendered" / "good.yaml").read_text())]
    assert {"PersistentVolumeClaim", "ConfigMap", "Job", "NetworkPolicy"} <= set(kinds)


def test_a_folder_without_jobs_is_a_wrong_call(tmp_path: Path) -> None:
    assert review(tmp_path, "nowhere").returncode == 2

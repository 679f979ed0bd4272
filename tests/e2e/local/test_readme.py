"""README.md stays true: its commands run as printed, its job file is valid, and what it promises comes out."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_operator.cli.main import main  # noqa: F401  (the command that the blocks call must be installed)
from suite_plugins.patience import patient

ROOT = Path(__file__).parents[3]
COMMAND_SECONDS = 1500
"""For one command: the quickstart compiles, trains and evaluates, and took 5 minutes on a machine busy with others."""
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for kind, body in FENCE.findall((ROOT / "README.md").read_text()) if kind == language]


def environment(workspace: Path) -> dict[str, str]:
    """The suite's own environment, its virtual environment first in PATH, results outside of the checkout."""
    scripts = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "WORKSPACE": str(workspace), "HF_HUB_OFFLINE": "1"}


def test_the_readme_has_the_blocks_that_these_tests_run() -> None:
    commands = blocks("console")
    assert any("make quickstart" in block for block in commands)
    assert any("make test" in block for block in commands)
    assert any("finetune plan" in block for block in commands)
    assert len(blocks("yaml")) >= 1


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


def shell_lines() -> list[str]:
    return [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]


# `git clone` and `cd` bring the reader to where the suite is already; `make test` is this suite; `make images` and
# `kind` make a cluster, and what needs one (by `kubectl`, or by an installed `finetune`) runs in
# tests/e2e/cluster/test_box_tour.py and tests/cluster/test_readme_cluster.py.
ELSEWHERE = ("git clone", "cd ", "make test", "make images", "kind ", "helm ", "kubectl ", "finetune ")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_readme_runs_and_the_quickstart_reaches_what_it_promises(workspace: Path) -> None:
    ran: list[str] = []
    for line in shell_lines():
        if line.startswith(ELSEWHERE):
            continue
        # The virtual environment of the suite stands in for .venv, so that the blocks also run where it is named
        # otherwise.
        command = line.replace(".venv/bin/", f"{shlex.quote(str(Path(sys.executable).parent))}/")
        command = command.replace("--workspace runs", f"--workspace {shlex.quote(str(workspace))}")
        if command.startswith("make "):
            command += f" VENV={shlex.quote(str(Path(sys.executable).parents[1]))}"
        result = subprocess.run(
            command,
            shell=True,
            cwd=ROOT,
            env=environment(workspace),
            capture_output=True,
            text=True,
            timeout=patient(COMMAND_SECONDS),
        )
        assert result.returncode == 0, f"{line}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        ran.append(line)
    assert "make quickstart" in ran
    assert len(ran) >= 4

    folder = workspace / "quickstart"
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["evaluate"]["accuracy"] >= 0.85
    assert metrics["evaluate"]["accuracy"] > metrics["majority"]["accuracy"] + 0.3
    assert metrics["train"]["loss_last"] < metrics["train"]["loss_first"]
    assert metrics["train"]["strategy"] == "deepspeed-zero2"
    predictions = (folder / "predictions.jsonl").read_text().splitlines()
    test_rows = (ROOT / "manifests/examples/data/product-reviews/test.jsonl").read_text().splitlines()
    assert len(predictions) == len(test_rows)
    promised = {"model", "predictions.jsonl", "metrics.json", "report.html", "plan.json", "job.json", "deepspeed.json"}
    assert promised <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_job_in_the_readme_is_valid(block: str) -> None:
    program = str(Path(sys.executable).parent / "finetune")
    checked = subprocess.run(
        [program, "validate", "-"], input=block, capture_output=True, text=True, timeout=patient(300)
    )
    assert checked.returncode == 0, checked.stderr

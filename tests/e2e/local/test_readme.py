"""README.md and docs/get-started.md stay true: commands run as printed, jobs are valid, and all pages are linked."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from finetune_operator.cli.main import main  # noqa: F401  (the command that the blocks call must be installed)
from finetune_operator.spec.fields.support import ROWS, served_words
from finetune_operator.spec.launcher_rows import TrainingLauncher
from suite_plugins.patience import patient

ROOT = Path(__file__).parents[3]
COMMAND_SECONDS = 1500
"""Limit of one command: the quickstart compiles, trains and evaluates, and took 5 minutes on a busy machine."""
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README = (ROOT / "README.md").read_text(encoding="utf-8")
HERE, _, CLUSTER = README.partition("## In a cluster\n")
"""The sections for this machine, and those for a cluster."""
GET_STARTED = (ROOT / "docs" / "get-started.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def environment(workspace: Path) -> dict[str, str]:
    """Return the suite's own environment, its virtual environment first in PATH, results outside of the checkout."""
    scripts = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "WORKSPACE": str(workspace), "HF_HUB_OFFLINE": "1"}


def test_the_readme_has_all_blocks_to_run() -> None:
    commands = blocks("console")
    assert any("make quickstart" in block for block in commands)
    assert any("make test" in block for block in commands)
    assert any("finetune plan" in block for block in commands)
    assert len(blocks("yaml")) >= 1


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


def shell_lines() -> list[str]:
    """Return the commands of README's sections for this machine and of docs/get-started.md, each once."""
    texts = [*blocks("console", HERE), *blocks("console", GET_STARTED)]
    return list(dict.fromkeys(line[2:] for text in texts for line in text.splitlines() if line.startswith("$ ")))


# These lead the reader to the suite's starting point, with the command in the PATH; `make test` is this suite. The
# commands for a cluster run in tests/cluster/test_readme_cluster.py.
ELSEWHERE = ("REPOSITORY=", "git clone", "cd ", "make test", "source ")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_of_the_readme_run_and_the_quickstart_learns(workspace: Path) -> None:
    ran: list[str] = []
    for line in shell_lines():
        if line.startswith(ELSEWHERE):
            continue
        command = line.replace("--workspace runs", f"--workspace {shlex.quote(str(workspace))}")
        command = command.replace("ls runs/", f"ls {shlex.quote(str(workspace))}/")
        # The suite's virtual environment stands in for .venv, and may have another name.
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


def test_the_index_lists_every_page() -> None:
    _, begin, by_reader = README.partition("## Read on\n")
    assert begin
    assert "docs/README.md" in by_reader
    assert "docs/api.md" in by_reader
    pages = sorted(file.name for file in (ROOT / "docs").glob("*.md") if file.name != "README.md")
    listed = set(re.findall(r"\]\(([^)#/]+)\)", INDEX))
    assert len(pages) > 15
    assert [page for page in pages if page not in listed] == []


def test_the_readme_calls_the_command_in_one_way() -> None:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    calls = [line for line in lines if re.search(r"\bfinetune (?!-)", line) and "finetune-operator" not in line]
    assert len(calls) > 5
    assert [line for line in calls if not line.startswith("$ finetune ")] == []


def test_the_readme_lists_fields_and_launchers_without_behaviour() -> None:
    section = README.partition("## What does not work yet\n")[2].partition("\n## ")[0]
    (listed,) = re.findall(r"^- \*\*Refused with.*?(?=^- )", section, re.MULTILINE | re.DOTALL)
    launchers: tuple[str, ...] = get_args(TrainingLauncher)
    without = {row.path for row in ROWS if not row.values and not row.schemes}
    without |= set(launchers) - set(served_words("launcher", launchers))
    named = {name for name in re.findall(r"`([\w.]+)`", listed) if name != "NotYetSupported"}
    assert named == without

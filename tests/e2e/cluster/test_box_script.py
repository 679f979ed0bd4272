"""A user's own Hugging Face Trainer program on two nodes: fetched from git, watched live, restarted, evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from box_support.box import SCRIPTS_GIT_HOST, Box
from box_support.faults import kill_pod, puppet
from box_support.git_pod import TEMPLATE, git_pod
from box_support.job_watch import watching
from box_support.team import Team
from cluster_support.api_access import Object, wait_until
from script_support.programs import documented

EPOCHS = 12
"""Epochs, of 32 steps each."""
STEP_SECONDS = 0.08
"""Least time of a step, for several reports: transformers makes one every five seconds."""
BROKEN = """
import os
if os.environ["RANK"] == "1":
    raise ValueError("row 17 has no label")
import time
time.sleep(600)
"""


MEETING = """
import os, pathlib
import torch
torch.distributed.init_process_group("gloo")
ranks = torch.tensor([torch.distributed.get_rank() + 1.0])
torch.distributed.all_reduce(ranks)
assert ranks.item() == 3.0, ranks
assert torch.distributed.get_world_size() == 2
if torch.distributed.get_rank() == 0:
    model = pathlib.Path(os.environ["FINETUNE_OUTPUT"])
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("")
"""
"""Two processes that add up their ranks; no Trainer, no progress."""


def own_program(**script: object) -> Object:
    """Return a job of the program of docs/scripts.md as a plain Indexed Job on two nodes."""
    return {
        "task": "text-classification",
        "model": {"uri": "pvc://inputs/tiny/model"},
        "dataset": {"uri": "pvc://inputs/tiny/data"},
        "training": {
            "script": {
                "git": {"url": f"https://{SCRIPTS_GIT_HOST}/programs"},
                "hyperparameters": {"epochs": EPOCHS, "batch_size": 4, "learning_rate": 2.0e-3, "save_steps": 40},
                **script,
            }
        },
        "resources": {"nodes": 2, "processesPerNode": 1, "cpu": "1", "memory": "2Gi"},
        "launcher": "job",
        "storage": {"size": "1Gi"},
        "template": TEMPLATE,
    }


@pytest.fixture(scope="module")
def programs(team: Team, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a git host of the cluster with the repository `programs`."""
    files = {"train.py": documented("python"), "broken.py": BROKEN, "meeting.py": MEETING}
    with git_pod(team, SCRIPTS_GIT_HOST, {"programs": files}, tmp_path_factory.mktemp("git")):
        yield


def test_unchanged_trainer_program_reports_live_and_resumes(
    box: Box, team: Team, programs: None, tmp_path: Path
) -> None:
    box.own("taking a pod away")
    name, seen = team.new_name("own"), tmp_path / "lines"

    def training() -> list[list[str]]:
        lines = [line.split() for line in seen.read_text().splitlines()]
        return [line for line in lines if line[:2] == [name, "Training"] and len(line) >= 8]

    def percentages() -> set[int]:
        return {int(line[3]) for line in training()} - {0, 100}

    with watching(box, team.namespace, seen):
        slow = puppet(team, STEP_SECONDS)
        template = {part: [*TEMPLATE[part], *slow[part]] for part in TEMPLATE}
        gate = {"gate": {"metric": "accuracy", "minimum": 0.9}}
        team.apply(name, {**own_program(), "template": template, "evaluation": gate})
        team.wait_step(name, 50)
        # transformers' own callback reports the percentage, more than once.
        wait_until(lambda: len(percentages()) >= 2, f"{name}: two percentages", detail=lambda: team.describe(name))
        kill_pod(team, team.pods(name, "train", 1)[1]["metadata"]["name"])
        status = team.succeeds(name)
    assert any(float(line[4]) > 0 for line in training()), "and the loss"

    assert [(stage["name"], stage["state"], stage["attempt"]) for stage in status["stages"]] == [
        ("prepare", "Succeeded", 1),
        ("train", "Succeeded", 2),
        ("evaluate", "Succeeded", 1),
    ]
    assert status["plan"]["strategy"] == "script"
    assert (status["plan"]["worldSize"], "microBatchSize" in status["plan"]) == (2, False)
    script = status["artifacts"]["script"]
    assert script.startswith(f"https://{SCRIPTS_GIT_HOST}/programs@")
    assert len(script.rpartition("@")[2]) == 40
    assert status["artifacts"]["metrics"]["train_epoch"] == EPOCHS
    log = box.kubectl("logs", "-n", team.namespace, team.pods(name, "train", 2)[0]["metadata"]["name"])
    assert f"train.py of commit {script.rpartition('@')[2]} runs as rank 0 of 2, from checkpoint-" in log

    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(team.results(name) / "model")
    assert set(model.config.id2label.values()) == {"good", "bad"}


@pytest.mark.parametrize("launcher", ["pytorchjob", "mpijob"])
def test_processes_of_a_program_find_each_other_by_any_launcher(
    team: Team, programs: None, training_operators: None, launcher: str
) -> None:
    name = team.new_name(f"meeting-{launcher}")
    team.apply(name, {**own_program(entryPoint="meeting.py", hyperparameters={}), "launcher": launcher})
    status = team.succeeds(name)
    assert (status["plan"]["launcher"], status["plan"]["worldSize"]) == (launcher, 2)
    assert status["artifacts"]["model"].endswith("/model")


def test_exception_on_the_second_node_is_reported_with_line_and_rank(team: Team, programs: None) -> None:
    name = team.new_name("broken")
    team.apply(name, own_program(entryPoint="broken.py"))
    failure = team.fails(name)
    assert (failure["class"], failure["reason"], failure["rank"], failure["stage"]) == (
        "ProgramError",
        "ValueError",
        1,
        "train",
    )
    assert "at broken.py, line 4: ValueError: row 17 has no label" in failure["message"]

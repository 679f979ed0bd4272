"""The trainer with the Hub, through the Hub's own client: tokens, and commits in place of branches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass
from hub_stand_in.hub_server import Hub, Repository
from suite_plugins.patience import patient

TOKEN, WRONG = "hf_right", "hf_of_somebody_else"
NAME = "acme/private"


PROGRAM = """
import json, os, sys
from finetune_contract.data_settings import ModelSource
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.failures import StageError
from finetune_trainer.models import load_config, pinned

for case, (token, revision) in json.loads(sys.argv[2]).items():
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    model = ModelSource(uri=sys.argv[1], revision=revision)
    try:
        job, commit = pinned(TrainerJob(name="one", task="text-classification", model=model))
        answer = [load_config(job).model_type, job.model.revision, commit]
    except StageError as error:
        answer = [error.failure_class, error.reason, error.message + error.hint]
    print(json.dumps([case, answer]))
"""
"""Program for a process of its own: the Hub's client reads its address when it is imported."""


@pytest.fixture(scope="module")
def commit(tiny_model: Path) -> str:
    """Return the commit of the only model."""
    return Repository(NAME, tiny_model, private=True).commit


@pytest.fixture(scope="module")
def answers(tiny_model: Path, commit: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Load the model in each case, in this order, and return the results."""
    cases = {
        "without a token": (None, "main"),
        "with somebody else's token": (WRONG, "main"),
        "at a revision that is not there": (TOKEN, "no-such-branch"),
        "at a branch": (TOKEN, "main"),
        "at a commit": (TOKEN, commit),
    }
    with Hub(("127.0.0.1", 0), {NAME: Repository(NAME, tiny_model, private=True)}, TOKEN) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        }
        run = [sys.executable, "-c", PROGRAM, f"hf://{NAME}", json.dumps(cases)]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=patient(180))
        hub.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("without a token", "ModelNotFound"),
        ("with somebody else's token", "TokenRefused"),
        ("at a revision that is not there", "RevisionNotFound"),
    ],
)
def test_refusal_by_the_hub_differs_from_an_unreachable_hub(
    answers: dict[str, list[Any]], case: str, reason: str
) -> None:
    assert answers[case][:2] == [FailureClass.MODEL, reason]


def test_hint_names_the_secret_and_no_message_contains_the_token(answers: dict[str, list[Any]]) -> None:
    messages = [answers["without a token"][2], answers["with somebody else's token"][2]]
    assert all("secrets.hubToken" in text for text in messages)
    assert not any(WRONG in text for text in messages)


def test_a_branch_is_pinned_to_the_commit_that_it_is_at_and_a_commit_stays(
    answers: dict[str, list[Any]], commit: str
) -> None:
    assert answers["at a branch"] == answers["at a commit"] == ["bert", commit, commit]

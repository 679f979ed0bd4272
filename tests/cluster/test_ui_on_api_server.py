"""`finetune ui` beside a real API server and the operator: jobs in several states, viewed in a browser.

`pytest tests/cluster/test_ui_on_api_server.py --record-ui` writes the pictures of docs/ui.md.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

import browser
from cluster_support.plays import RUNS, SUCCEEDS, WRONG_COLUMN
from cluster_support.world import World
from finetune_contract.choices import Stage
from finetune_operator.cli.cluster.cluster_jobs import Connection
from finetune_operator.extras.ui.ui_jobs import ClusterJobs
from suite_plugins.waiting import wait_until
from ui_support import Client, serving, standalone, write_run

DOCS = Path(__file__).parents[2] / "docs"
EXPECTED_SECONDS = 42
"""Time of the training by its plan, about."""
STEP_LOG = "step 40  loss 0.52\nstep 80  loss 0.38\n"


def make_jobs(world: World) -> None:
    """Create jobs that have succeeded, failed, been suspended and that train, as the operator brings them there."""
    playbook = world.kubelet.playbook
    playbook.set("reviews", "evaluate", replace(SUCCEEDS, metrics={"accuracy": 0.9125, "loss": 0.26}))
    playbook.set("typo", "prepare", WRONG_COLUMN)
    playbook.set("topics", "train", replace(RUNS, log=STEP_LOG))
    world.apply("reviews", {"evaluation": {"gate": {"metric": "accuracy", "minimum": 0.85}}})
    world.apply("typo")
    world.apply("later", {"runPolicy": {"suspend": True}})
    world.apply("topics")
    world.wait_phase("reviews", "Succeeded")
    world.wait_phase("typo", "Failed")
    world.wait_phase("later", "Suspended")
    world.wait_running("topics", "train")


def shown(client: Client, *parts: str, text: str) -> str:
    """Return the page, once it holds the word."""
    return wait_until(lambda: page if text in (page := client.page(*parts)) else None, f"{text} is not shown")


def test_jobs_of_a_real_cluster_are_shown_in_each_state_at_each_width(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    make_jobs(world)
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), "sentiment", steps=60, started=time.time() - 600)
    write_run(Path("runs"), "sentiment-again", done=(Stage.PREPARE,), steps=10, started=time.time() - 120)
    here = ("job", world.namespace)
    connection = Connection(world.cluster.kubeconfig, namespace=world.namespace)
    with serving(Path("runs"), ClusterJobs(connection)) as client:
        listed = shown(client, text="topics")
        for part in ("Succeeded", "Failed", "Suspended", "Training", "sentiment"):
            assert part in listed
        assert "accuracy" in shown(client, *here, "reviews", text="0.9125")
        for part in ("dataset.columns.text: &#39;text&#39; is not a column", "set dataset.columns.text", "KeyError"):
            assert part in shown(client, *here, "typo", text="StageFailed")
        for step, loss in ((40, 0.52), (80, 0.38)):
            (pod,) = world.pods("topics", "train", 1)
            values = {"train_loss": loss, "loss": loss, "step": float(step), "total_steps": 240.0}
            left = EXPECTED_SECONDS * (240 - step) // 240
            assert world.report("topics", pod, values, remaining=left).ok
            shown(client, *here, "topics", text=f"step {step}/240")
        assert "step 80  loss 0.38" in shown(client, *here, "topics", text="<polyline")
        pages = {
            "list": (), "succeeded": (*here, "reviews"), "failed": (*here, "typo"), "training": (*here, "topics"),
            "suspended": (*here, "later"), "run": ("run", "sentiment"),
        }  # fmt: skip
        files = {name: standalone(client, tmp_path / f"{name}.html", *parts) for name, parts in pages.items()}
    if request.config.getoption("--record-ui"):
        browser.photograph(files["list"], DOCS / "ui.png", tmp_path / "drawn", width=1100, height=560)
        browser.photograph(files["training"], DOCS / "ui-job.png", tmp_path / "drawn-job", width=1100, height=1250)
    for name, file in files.items():
        for dark in (False, True):
            folder = tmp_path / f"{name}-{dark}"
            folder.mkdir()
            for seen in browser.seen(file, folder, dark=dark):
                assert (seen.wide, seen.empty, seen.flat) == ([], [], []), (name, seen.width)
                assert seen.scroll <= seen.width, name

"""The tour of docs/tour.md, run block by block as printed, from the installation to the last delete.

No line is changed. The lines left out lead the reader to the test's starting point: images on the nodes of a cluster.
The cluster in the box has no internet: an admission policy points the pods of the tour's namespace to a stand-in for
the Hub, which serves the model by the Hub's own protocol.

`pytest tests/e2e/cluster/test_box_tour.py --record-tour` writes docs/tour.svg from the commands' output.
"""

from __future__ import annotations

import html
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from box_support.box import Box
from box_support.hub_pod import Hub
from box_support.team import RESTRICTED, TERMINAL, Team
from box_support.terminal_picture import CommandRun, Excerpt, terminal_svg
from cluster_support.api_access import Object, wait_until
from cluster_support.control_plane import ROOT
from suite_plugins.patience import patient

pytestmark = pytest.mark.bare
"""A reader's first cluster has no training operator."""

PAGE = ROOT / "docs" / "tour.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
LINES = [line.removeprefix("$ ") for block in BLOCKS for line in block.splitlines()]
BEFORE = ("make images", "kind ")
"""Starts of lines that create the cluster and its images."""
WATCH = "kubectl get ftj -w"
JOB = "quickstart-cluster"
PICTURE = ROOT / "docs" / "tour.svg"
SHOWN = {
    "helm install": Excerpt(head=4),
    "kubectl apply -f manifests/examples/quickstart": Excerpt(head=1),
    "kubectl get ftj -w": Excerpt(head=2, middle=10, tail=2),
    "kubectl describe": Excerpt(tail=12),
    "finetune status": Excerpt(head=20),
    "kubectl get ftj quickstart-cluster -o": Excerpt(head=1),
    "kubectl apply -f manifests/examples/tour/use": Excerpt(head=2),
    "kubectl logs job/use-model": Excerpt(head=4),
}
"""Starts of the lines that the picture shows, and the excerpts of their output."""


@pytest.fixture(scope="module")
def namespace(box: Box, hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The reader's namespace, in which PodSecurity enforces `restricted`, on a cluster without any of our objects.

    Afterwards the suite's own operator is installed again.
    """
    box.own("the tour, which installs images that only the box has,")
    box.uninstall_operator()
    name = f"tour-{secrets.token_hex(2)}"
    box.kubectl("create", "namespace", name)
    box.kubectl("label", "namespace", name, *[f"{key}={value}" for key, value in RESTRICTED.items()])
    try:
        with hub.answers(name):
            yield name
    finally:
        box.kubectl("delete", "namespace", name, "--wait=false")
        box.uninstall_operator()
        box.install_operator(tmp_path_factory.mktemp("install"))


@pytest.fixture(scope="module")
def shell(box: Box, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that runs a line in the checkout, as the reader does, with the tour's namespace as context."""
    config = yaml.safe_load(box.cluster.kubeconfig.read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = namespace
    file = tmp_path_factory.mktemp("kube") / "config"
    file.write_text(yaml.safe_dump(config))
    programs = f"{Path(sys.executable).parent}:{Path(box.cluster.kubectl_program).parent}"
    environment = {**os.environ, "KUBECONFIG": str(file), "PATH": f"{programs}:{os.environ['PATH']}", "COLUMNS": "118"}
    team = Team(box, namespace)

    def run(line: str) -> str:
        arguments = shlex.split(line)
        if line == WATCH:
            return watched(arguments, team, environment)
        ran = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patient(300))
        assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}\n{team.describe(JOB)}"
        return ran.stdout

    return run


def watched(arguments: list[str], team: Team, environment: dict[str, str]) -> str:
    """Return the watch's output, ended as the reader would: when it shows that the job has ended."""
    output: list[str] = []
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if set(TERMINAL) & set(line.split()):
                break
        process.terminate()
    team.succeeds(JOB)
    # Events follow the status, and the next line of the tour shows them.
    wait_until(lambda: "Succeeded" in [event["reason"] for event in team.events(JOB)], "the end is told in an event")
    return "".join(output)


@pytest.fixture(scope="module")
def tour(shell: Callable[[str], str], request: pytest.FixtureRequest) -> dict[str, str]:
    """Run the tour; return each line's output. The time of each is printed, for a look at a run by `-rP`."""
    session, began = [], time.monotonic()
    for line in LINES:
        if not line.startswith(BEFORE):
            session.append(CommandRun(line, shell(line)))
            print(f"{time.monotonic() - began:6.1f} s  {line}")
    if request.config.getoption("--record-tour"):
        shown = [(run, part) for run in session for start, part in SHOWN.items() if run.command.startswith(start)]
        PICTURE.write_text(terminal_svg("finetune-operator", shown), encoding="utf-8")
    return {run.command: run.output for run in session}


def output_of(tour: dict[str, str], start: str) -> str:
    (output,) = (output for line, output in tour.items() if line.startswith(start))
    return output


def test_the_tour_is_there() -> None:
    assert len(BLOCKS) >= 7
    assert WATCH in LINES
    assert [line for line in LINES if not line.startswith((*BEFORE, "helm ", "kubectl ", "finetune "))] == []


def test_watch_shows_every_phase_and_the_progress(tour: dict[str, str]) -> None:
    header, *lines = [line.split() for line in output_of(tour, WATCH).splitlines()]
    assert " ".join(header[:10]) == "NAME PHASE STAGE REASON PROGRESS LOSS ETA ROWS/S RESULT RESTARTS"
    phases = list(dict.fromkeys(line[1] for line in lines if len(line) > 2))
    assert phases[-5:] == ["Preparing", "Training", "Evaluating", "Predicting", "Succeeded"]
    percentages = {int(line[4].rstrip("%")) for line in lines if line[1] == "Training" and len(line) >= 9}
    assert percentages - {0, 100}, lines


def test_describe_shows_the_plan_with_reasons_and_events(tour: dict[str, str]) -> None:
    text = output_of(tour, "kubectl describe")
    assert "strategy single: the cheapest one fits" in text
    for reason in ("Planned", "StageSucceeded", "Succeeded"):
        assert reason in text.partition("Events:")[2]


def test_the_short_status_and_the_log_are_of_the_job(tour: dict[str, str]) -> None:
    assert f"{JOB}  Succeeded" in output_of(tour, "finetune status")
    assert output_of(tour, "kubectl logs -l").strip()


def test_artifacts_are_at_the_places_in_the_status(tour: dict[str, str]) -> None:
    artifacts = json.loads(output_of(tour, "kubectl get ftj quickstart-cluster -o"))
    assert artifacts["model"] == f"pvc://{JOB}-workspace/{JOB}/model"
    assert artifacts["predictions"] == f"pvc://{JOB}-workspace/{JOB}/predictions.jsonl"
    assert artifacts["metrics"]["accuracy"] >= 0.75
    assert re.fullmatch("[0-9a-f]{40}", artifacts["modelRevision"])


def test_model_loaded_from_the_claim_classifies_praise_and_complaint(tour: dict[str, str]) -> None:
    labels = [line.split()[0] for line in output_of(tour, "kubectl logs job/use-model").splitlines()]
    assert labels == ["positive", "negative"]


def test_nothing_is_left_behind(tour: dict[str, str], box: Box, namespace: str) -> None:
    def left() -> list[Object]:
        kinds = ("pods", "persistentvolumeclaims", "services")
        return [one for kind in kinds for one in box.api.items(f"/api/v1/namespaces/{namespace}/{kind}")]

    wait_until(lambda: not left(), "everything of the tour is gone", detail=left)


def test_the_picture_on_the_page_shows_commands_of_the_tour() -> None:
    assert f"({PICTURE.relative_to(PAGE.parent)})" in TEXT
    prompted = re.findall(r"\$&#160;</text><text[^>]*>([^<]*)</text>", PICTURE.read_text(encoding="utf-8"))
    shown = [html.unescape(text).replace("\xa0", " ") for text in prompted]
    assert len(shown) >= len(SHOWN)
    assert set(shown) <= set(LINES)

"""Whole jobs on a cluster with nodes: the operator as its Deployment, the trainer's image in pods, inputs on a claim.

Files share nothing but the cluster, so they may run side by side in xdist's workers, each with a namespace of its own.
Exceptions are tests marked `bare`, which need a cluster without training operators, and `alone`, which take a node, the
API server or the operator away. `box_support.phases` runs the three kinds one after the other on one cluster; without
it they run in that order, one test at a time.
"""

from __future__ import annotations

import fcntl
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from box_support.box import CONTROLLERS, Box, held_box, running_box
from box_support.box_inputs import copy_real_inputs, readable_by_all, write_tagged_words
from box_support.hub_pod import Hub, hub_stand_in
from box_support.team import INPUTS, RESTRICTED, Team
from cluster_support.api_access import wait_until
from cluster_support.control_plane import ROOT


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-tour", action="store_true", help="write docs/tour.svg from the output of the tour's commands"
    )


TEST_SECONDS = 2400
"""Limit of a test with the jobs of its fixtures; each of those has a limit of its own, with a better message."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests marked `bare` first, those marked `alone` after the others, and `last` at the end."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
    place = {"bare": -1, "alone": 1, "last": 2}
    items.sort(key=lambda item: next((at for mark, at in place.items() if item.get_closest_marker(mark)), 0))


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """Two nodes, a control plane, and the operator installed as an administrator does it; or the box that another
    process holds for several calls of pytest and their workers.
    """
    if (held := held_box()) is not None:
        yield held
        return
    folder = tmp_path_factory.mktemp("box")
    with running_box(folder) as made:
        made.install_operator(tmp_path_factory.mktemp("install"))
        yield made


@pytest.fixture(scope="session")
def input_files(request: pytest.FixtureRequest, box: Box, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the claim `inputs`: tiny/ (with an untrained classifier), minilm/, reviews/ and, where the sample data
    are, rotten_tomatoes/. Written once for a box that is held, as it takes torch and transformers.
    """
    if held_box() is None or box.folder is None:
        return _write_inputs(tmp_path_factory.mktemp("claim"), request)
    with (box.folder / "inputs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (box.folder / "inputs").is_dir():
            partial = Path(tempfile.mkdtemp(dir=box.folder))
            _write_inputs(partial, request).rename(box.folder / "inputs")
    return box.folder / "inputs"


def _write_inputs(folder: Path, request: pytest.FixtureRequest) -> Path:
    from transformers import AutoModelForSequenceClassification

    tiny: Path = request.getfixturevalue("tiny_inputs")
    shutil.copytree(tiny, folder / "tiny")
    shutil.copytree(tiny / "model", folder / "tiny" / "classifier")
    labels = {0: "negative", 1: "positive"}
    classifier = AutoModelForSequenceClassification.from_pretrained(
        tiny / "model", id2label=labels, label2id={name: number for number, name in labels.items()}
    )
    classifier.save_pretrained(folder / "tiny" / "classifier")
    shutil.copytree(ROOT / "manifests" / "examples" / "data" / "product-reviews", folder / "reviews")
    write_tagged_words(folder / "essays", tiny / "data")
    copy_real_inputs(folder)
    readable_by_all(folder)
    return folder


@pytest.fixture(scope="session")
def team(box: Box, input_files: Path) -> Iterator[Team]:
    """A namespace in which PodSecurity enforces `restricted`, with the inputs on a claim."""
    name = f"team-{secrets.token_hex(2)}"
    box.kubectl("create", "namespace", name)
    box.kubectl("label", "namespace", name, *[f"{key}={value}" for key, value in RESTRICTED.items()])
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    wait_until(lambda: box.api.get(account), "the namespace has the service account that pods run under")
    box.fill_claim(name, INPUTS, input_files)
    yield Team(box, name)
    box.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="session")
def training_operators(box: Box) -> None:
    """Install Training Operator and MPI Operator by their own manifests."""
    for name in CONTROLLERS:
        box.install_controller(name)


@pytest.fixture(scope="session")
def hub(team: Team) -> Iterator[Hub]:
    """Run a stand-in for the Hub: the quickstart's model for everybody, a tiny one behind a token."""
    public = {"sentence-transformers/all-MiniLM-L6-v2": "minilm"}
    with hub_stand_in(team, public=public, private={"your-organisation/your-private-model": "tiny/model"}) as made:
        yield made

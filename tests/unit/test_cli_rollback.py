"""`finetune rollback`: the requested revision, and refusals. `finetune wait --for ready` beside it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_operator.cli.cluster.awaiting import Goal, has_reached
from finetune_operator.cli.cluster.cluster_jobs import ClusterError, ClusterJob, parse_job
from finetune_operator.cli.cluster.rolling_back import Rollback, rollback

NOW = "2026-01-05T10:00:00Z"
KEY = "finetune.dev/rollback"


def revision(number: int, queue: int, ended: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return a revision of the history that serves, or that ended in the minute `ended`."""
    state: dict[str, Any] = (
        {"state": "Serving"} if ended is None else {"state": "Ended", "endTime": f"2026-01-05T10:{ended:02}:00Z"}
    )
    fields_of_all = {
        "number": number,
        "digest": "d",
        "startTime": NOW,
        "readyTime": NOW,
        "endpoint": {"maxQueue": queue},
    }
    return {**fields_of_all, **state, **fields}


THREE = [revision(1, 1, ended=1), revision(2, 2, ended=2), revision(3, 3)]
STARTING = revision(4, 4, state="Starting", readyTime=None)


def job(endpoint: dict[str, Any] | None, annotation: str | None = None) -> ClusterJob:
    metadata: dict[str, Any] = {"name": "reviews", "namespace": "team", "uid": "u"}
    if annotation is not None:
        metadata["annotations"] = {KEY: annotation}
    ready = {"type": "Ready", "status": "True", "reason": "EndpointReady", "lastTransitionTime": NOW}
    status = {"conditions": [ready], **({} if endpoint is None else {"endpoint": endpoint})}
    return parse_job({"metadata": metadata, "status": status})


@dataclass
class Stored:
    """A cluster with one job."""

    found: ClusterJob
    written: list[tuple[str, str | None, bool]] = field(default_factory=list)
    claims: dict[str, Any] = field(default_factory=dict)
    forbidden: bool = False
    """True if claims cannot be read."""

    async def claim(self, job: ClusterJob, name: str) -> dict[str, Any] | None:
        if self.forbidden:
            raise ClusterError("not allowed", 403)
        return self.claims[name]  # type: ignore[no-any-return]

    async def job(self, name: str) -> ClusterJob:
        return self.found

    async def annotate(self, job: ClusterJob, key: str, value: str | None, dry_run: bool = False) -> ClusterJob:
        self.written.append((key, value, dry_run))
        return job


def rolled_back(found: ClusterJob, to: int | None = None) -> tuple[Rollback, list[tuple[str, str | None, bool]]]:
    """Return the result, and the annotations that were written: key, value, dry run."""
    stored = Stored(found)
    return asyncio.run(rollback(stored, "reviews", to)), stored.written  # type: ignore[arg-type]


SERVING = {"revision": 3, "target": 3, "revisions": THREE}
ROLLED = {
    "revision": 4, "target": 4, "rolledBackFrom": 3, "observedRollback": "3:2",
    "revisions": [*THREE[:2], revision(3, 3, ended=3), revision(4, 2)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "to", "written"),
    [
        pytest.param(job(SERVING), None, "3:2", id="the one that served before"),
        pytest.param(job(SERVING), 1, "3:1", id="one that is named"),
        pytest.param(job({**SERVING, "target": 4, "revisions": [*THREE, STARTING]}), None, "4:3", id="in a rollout"),
        pytest.param(job(ROLLED, "3:2"), None, "3:1", id="once more, further back"),
        pytest.param(job(ROLLED, "3:2"), 3, None, id="the spec's own revision again"),
    ],
)
def test_annotation_names_the_revision_of_the_spec_and_the_one_to_serve(
    found: ClusterJob, to: int | None, written: str | None
) -> None:
    change, wrote = rolled_back(found, to)
    assert wrote == [(KEY, written, False)]
    assert change.verb == ("followed" if written is None else "rolledBack")


def test_rollback_that_is_there_already_writes_nothing() -> None:
    change, wrote = rolled_back(job(ROLLED, "3:2"), 2)
    assert (change.verb, change.data()["from"], change.data()["to"], wrote) == ("unchanged", 3, 2, [])


@pytest.mark.parametrize(
    ("endpoint", "to", "message"),
    [
        pytest.param(None, None, "has no endpoint to roll back", id="no endpoint"),
        pytest.param(SERVING, 9, "has no revision 9 of its endpoint; its history has 1, 2, 3", id="not in the history"),
        pytest.param(
            {**SERVING, "revisions": THREE[2:]}, None, "that served before; its history has no other", id="only"
        ),
        pytest.param(
            {**SERVING, "revisions": [revision(2, 3, ended=2), revision(3, 3)]}, 2, "same spec.endpoint", id="same spec"
        ),
    ],
)
def test_rollback_to_a_missing_revision_is_refused(endpoint: Any, to: int | None, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        rolled_back(job(endpoint), to)


@pytest.mark.parametrize(
    ("found", "reached"),
    [
        pytest.param(job(SERVING), True, id="it serves"),
        pytest.param(job({**SERVING, "target": 4, "revisions": [*THREE, STARTING]}), False, id="a rollout goes on"),
        pytest.param(job(SERVING, "3:2"), False, id="the operator has not seen the annotation"),
        pytest.param(job(ROLLED, "3:2"), True, id="it is rolled back"),
        pytest.param(job(None), True, id="a job without an endpoint that has succeeded"),
        pytest.param(
            job({**SERVING, "revision": 2, "target": 3, "canary": {"revision": 3, "servers": 1, "startTime": NOW}}),
            True,
            id="a canary that gets its requests",
        ),
    ],
)
def test_job_is_ready_once_the_wanted_revision_serves(found: ClusterJob, reached: bool) -> None:
    assert has_reached(found, Goal.READY) is reached


SPEC = {
    "task": "text-classification", "model": {"uri": "hf://a/b"}, "dataset": {"uri": "pvc://data/rows"}, "training": {},
    "endpoint": {},
}  # fmt: skip


def trained() -> ClusterJob:
    """Return a job whose model is in the claim of its workspace."""
    found = job(SERVING)
    return found.model_copy(update={"raw": {"spec": SPEC}})


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        pytest.param(None, "claim reviews-workspace with its model does not exist", id="gone"),
        pytest.param(
            {"metadata": {"deletionTimestamp": NOW}}, "claim reviews-workspace with its model is being deleted",
            id="being deleted",
        ),
        pytest.param({"metadata": {}, "status": {"phase": "Lost"}}, "has lost its volume; restore it first", id="lost"),
    ],
)  # fmt: skip
def test_rollback_without_the_claim_of_the_model_is_refused(claim: dict[str, Any] | None, message: str) -> None:
    stored = Stored(trained(), claims={"reviews-workspace": claim})
    with pytest.raises(ClusterError, match=message):
        asyncio.run(rollback(stored, "reviews"))  # type: ignore[arg-type]
    assert stored.written == []


def test_claims_of_the_model_are_checked_as_far_as_rights_go() -> None:
    found = {"metadata": {}, "status": {"phase": "Bound"}}
    change = asyncio.run(rollback(Stored(trained(), claims={"reviews-workspace": found}), "reviews"))  # type: ignore[arg-type]
    assert change.data()["claims"] == {"reviews-workspace": "found"}
    change = asyncio.run(rollback(Stored(trained(), forbidden=True), "reviews"))  # type: ignore[arg-type]
    assert change.data()["claims"] == {"reviews-workspace": "notReadable"}
    assert "claim reviews-workspace with its model was not checked" in change.text


HELD = {
    "revision": 3, "target": 3, "rolledBackFrom": 4, "rollback": "Revision 4 is held back.",
    "revisions": [*THREE, revision(4, 4, ended=9, reason="CanaryFailed", readyTime=None)],
}  # fmt: skip


def test_rollback_beside_a_revision_that_is_held_back_goes_further_back() -> None:
    change, wrote = rolled_back(job(HELD))
    assert (change.target, wrote) == (2, [(KEY, "4:2", False)])

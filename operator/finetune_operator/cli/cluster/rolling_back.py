"""`finetune rollback`: the choice of an endpoint's revision to serve again, and the annotation that requests it.

The annotation names the revision that spec.endpoint defines and the one to serve in its place. The spec is not changed:
a tool that applies manifests from a repository does not undo a rollback, and the next change of spec.endpoint ends it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError

from finetune_contract.choices import Stage
from finetune_operator.cli.cluster.cluster_jobs import Cluster, ClusterError, ClusterJob
from finetune_operator.cli.cluster.steering import Change
from finetune_operator.jobs.render.claims import storage
from finetune_operator.jobs.render.render_types import ROLLBACK_ANNOTATION
from finetune_operator.plan.types.names import JobNames
from finetune_operator.plan.types.plan_types import PlanRefused
from finetune_operator.spec.kubernetes_objects import EPOCH
from finetune_operator.spec.types import EndpointStatus, FineTuneJobSpec, RevisionStatus


@dataclass(frozen=True)
class Rollback(Change):
    """Result of a rollback of one endpoint. The model of all revisions is that of the job."""

    source: int
    """Revision that spec.endpoint defines."""
    target: int
    """Revision to serve in its place."""
    claims: tuple[str, ...] = ()
    """Claims with the model, which exist."""
    unread: tuple[str, ...] = ()
    """Claims with the model that the caller has no right to read."""

    def data(self) -> dict[str, Any]:
        """Return the data for `-o json`."""
        claims = {**dict.fromkeys(self.claims, "found"), **dict.fromkeys(self.unread, "notReadable")}
        return {**super().data(), "from": self.source, "to": self.target, "claims": claims}


async def rollback(cluster: Cluster, name: str, to: int | None = None, dry_run: bool = False) -> Rollback:
    """Request revision `to`, or the one that served before; raise ClusterError if it, or a claim with its model, does
    not exist.
    """
    job = await cluster.job(name)
    if job.metadata.deletion_timestamp is not None:
        raise ClusterError(f"FineTuneJob {name} is being deleted")
    status = job.status.endpoint
    if status is None or status.target is None:
        raise ClusterError(f"FineTuneJob {name} has no endpoint to roll back")
    source = status.rolled_back_from or status.target
    target = _previous(name, status, source) if to is None else to
    history = {one.number: one for one in status.revisions}
    if target not in history:
        raise ClusterError(f"FineTuneJob {name} has no revision {target} of its endpoint; {_choices(status.revisions)}")
    requested = job.metadata.annotations.get(ROLLBACK_ANNOTATION)
    if target == source:
        return await _end_rollback(cluster, job, source, requested, dry_run)
    if source in history and history[target].endpoint == history[source].endpoint:
        raise ClusterError(
            f"revisions {target} and {source} of FineTuneJob {name} have the same spec.endpoint: they differ by the "
            f"operator or its settings, which a rollback does not change; {_choices(status.revisions)}"
        )
    annotation = f"{source}:{target}"
    if requested == annotation and status.rolled_back_from == source:
        return Rollback(job, "unchanged", f"is already rolled back to revision {target}", source, target)
    claims, unread = await _claims_of_model(cluster, job, target)
    changed = await cluster.annotate(job, ROLLBACK_ANNOTATION, annotation, dry_run)
    text = f"is rolled back from revision {source} to {target} until spec.endpoint changes"
    if unread:
        text = f"{text}; claim {', '.join(unread)} with its model was not checked, as you have no right to read it"
    return Rollback(changed, "rolledBack", text, source, target, claims, unread)


async def _claims_of_model(cluster: Cluster, job: ClusterJob, target: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the claims that servers mount, first those that exist, then those that cannot be read. Raise ClusterError
    if one is missing: servers of the earlier revision would not start, while those of the current one still answer.
    """
    existing, unread = [], []
    for name in served_claims(job):
        try:
            claim = await cluster.claim(job, name)
        except ClusterError as error:
            if error.code != HTTPStatus.FORBIDDEN:
                raise
            unread.append(name)
            continue
        state = "does not exist" if claim is None else _obstacle(claim)
        if state is not None:
            raise ClusterError(
                f"revision {target} of FineTuneJob {job.name} cannot start: claim {name} with its model {state}; "
                "restore it first"
            )
        existing.append(name)
    return tuple(existing), tuple(unread)


def served_claims(job: ClusterJob) -> list[str]:
    """Return the claims that servers of the job mount; none for a spec that this version cannot read."""
    try:
        spec = FineTuneJobSpec.model_validate_json(json.dumps(job.raw.get("spec")))
        volumes = storage(spec, JobNames.of(job.name), Stage.SERVE).volumes
    except (ValidationError, PlanRefused):
        return []
    return [one.claim for one in volumes if one.claim is not None]


def _obstacle(claim: Mapping[str, Any]) -> str | None:
    """Return why pods cannot mount a claim; None if they can."""
    if claim["metadata"].get("deletionTimestamp") is not None:
        return "is being deleted"
    return "has lost its volume" if claim.get("status", {}).get("phase") == "Lost" else None


async def _end_rollback(
    cluster: Cluster, job: ClusterJob, source: int, requested: str | None, dry_run: bool
) -> Rollback:
    """End a rollback, so that spec.endpoint is in effect again."""
    if requested is None:
        return Rollback(job, "unchanged", f"is not rolled back from revision {source}", source, source)
    changed = await cluster.annotate(job, ROLLBACK_ANNOTATION, None, dry_run)
    return Rollback(
        changed, "followed", f"is no longer rolled back and serves revision {source} of spec.endpoint", source, source
    )


def _previous(name: str, status: EndpointStatus, source: int) -> int:
    """Return the last revision that served before the wanted one and differs from it."""
    history = {one.number: one for one in status.revisions}
    same = [history[number].endpoint for number in (source, status.target) if number in history]
    if status.revision != status.target and status.revision in history:
        # During a rollout the serving revision is the one before it.
        same = [history[source].endpoint] if source in history else []
    served = [one for one in status.revisions if one.ready_time is not None and one.endpoint not in same]
    if not served:
        raise ClusterError(
            f"FineTuneJob {name} has no revision of its endpoint that served before; {_choices(status.revisions)}"
        )
    return max(served, key=lambda one: (one.state == "Serving", one.end_time or EPOCH, one.number)).number


def _choices(revisions: Sequence[RevisionStatus]) -> str:
    if len(revisions) < 2:
        return "its history has no other revision"
    return f"its history has {', '.join(str(one.number) for one in revisions)}"

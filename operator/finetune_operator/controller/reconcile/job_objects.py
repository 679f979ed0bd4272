"""Write the objects of a decision: create, apply and delete them, unless they belong to somebody else.

Each step may have been done by a reconcile that ended early: an object that exists already is adopted if it is the
job's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue

from finetune_operator.controller.cluster.discovery import Discovery
from finetune_operator.controller.reconcile.operator_state import OperatorState
from finetune_operator.controller.store.owners import controller_of
from finetune_operator.jobs.render.render_types import JOB_LABEL, Manifest
from finetune_operator.jobs.state.decision_types import (
    JobView,
    ObjectRef,
    Refusal,
)
from finetune_operator.kubernetes_api.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    WebhookError,
)
from finetune_operator.kubernetes_api.resources import (
    CLAIM,
    DEPLOYMENT,
    FINETUNE_JOB,
    INFERENCE_SERVICE,
    LAUNCHER_RESOURCES,
    SERVICE,
    resource_of,
)

log = logging.getLogger(__name__)

CONFLICT_CODE = 409
"""HTTP status of a create whose name is taken."""
_STORED_KINDS = frozenset(
    resource.group_kind for resource in (*LAUNCHER_RESOURCES.values(), DEPLOYMENT, INFERENCE_SERVICE)
)


class JobObjects:
    """Objects of jobs on the API server."""

    def __init__(self, state: OperatorState, discovery: Discovery) -> None:
        self._state = state
        self._discovery = discovery

    async def delete(self, namespace: str, ref: ObjectRef) -> None:
        """Delete the object; with a uid, only this very one."""
        resource = resource_of(ref.api_version, ref.kind)
        try:
            remaining = await self._state.kube.delete(resource, namespace, ref.name, ref.uid)
        except ConflictError:
            # Another object has the name: the one that was meant is deleted.
            remaining = None
        if remaining is None:
            self._state.store.mark_deleted(ref.group_kind, namespace, ref.name, ref.uid)
        else:
            await self._state.put(remaining)
        log.info("%s: deleted %s %s", namespace, ref.kind, ref.name)

    async def create(self, job: JobView, manifest: Manifest) -> Refusal | None:
        """Create the object, or adopt the existing one if it is this job's."""
        ref = ObjectRef.of(manifest)
        try:
            stored = await self._state.kube.create(manifest, job.namespace)
        except AlreadyExistsError as error:
            stored = await self._existing(job, ref)
            if not _is_ours(stored, job):
                conflict = f'{ref.kind} "{ref.name}" exists already and does not belong to this job'
                return Refusal(ref, CONFLICT_CODE, conflict)
            if stored.get("data") != manifest.get("data"):
                # Left by a reconcile that ended early, before the spec was edited: nothing runs with it yet, or the
                # child would exist.
                await self.delete(job.namespace, replace(ref, uid=_uid(stored)))
                raise ConflictError(
                    f"{ref.kind} {ref.name}", 409, "Conflict", "it was created from an earlier spec"
                ) from error
        except (InvalidError, ForbiddenError, NotFoundError, WebhookError) as error:
            # Not when the namespace is being deleted: the job is deleted with it, and its status needs nothing.
            self._discovery.outdated()
            return Refusal(ref, error.code, error.message)
        else:
            log.info("%s/%s: created %s %s", job.namespace, job.name, ref.kind, ref.name)
        if ref.group_kind in _STORED_KINDS:
            self._state.store.put(stored)
        return None

    async def apply(self, job: JobView, manifest: Manifest) -> Refusal | None:
        """Create the object, or change the existing one if it is this job's."""
        ref = ObjectRef.of(manifest)
        existing = await self._found(job, ref)
        if existing is not None and not _is_ours(existing, job):
            if _is_being_deleted(existing) or _is_of_earlier_job(existing, job):
                raise ConflictError(
                    f"{ref.kind} {ref.name}", 409, "Conflict", "an object of that name is being deleted"
                )
            return Refusal(
                ref, CONFLICT_CODE, f'{ref.kind} "{ref.name}" exists already and does not belong to this job'
            )
        try:
            uid = None if existing is None else _uid(existing)
            # Two jobs may want one Service: none overwrites what it has not read.
            version = _version(existing) if existing is not None and ref.kind == SERVICE.kind else None
            stored = await self._state.kube.apply(manifest, job.namespace, uid, version)
        except (InvalidError, ForbiddenError, NotFoundError, WebhookError) as error:
            self._discovery.outdated()
            return Refusal(ref, error.code, error.message)
        log.info("%s/%s: applied %s %s", job.namespace, job.name, ref.kind, ref.name)
        if ref.group_kind in _STORED_KINDS:
            self._state.store.put(stored)
        return None

    async def remove(self, job: JobView, ref: ObjectRef) -> None:
        """Delete the object if it exists and is this job's."""
        existing = await self._found(job, ref)
        if existing is None:
            self._state.store.mark_deleted(ref.group_kind, job.namespace, ref.name, ref.uid)
        elif _is_ours(existing, job) and not _is_being_deleted(existing):
            await self.delete(job.namespace, replace(ref, uid=_uid(existing)))

    async def _found(self, job: JobView, ref: ObjectRef) -> Manifest | None:
        """Return the object that has the name now."""
        try:
            return await self._state.kube.get(resource_of(ref.api_version, ref.kind), job.namespace, ref.name)
        except NotFoundError:
            return None

    async def _existing(self, job: JobView, ref: ObjectRef) -> Manifest:
        """Return the object that has the name now. ConflictError while that is being deleted."""
        name = f"{ref.kind} {ref.name}"
        try:
            existing = await self._state.kube.get(resource_of(ref.api_version, ref.kind), job.namespace, ref.name)
        except NotFoundError as error:
            raise ConflictError(name, 409, "Conflict", "it existed a moment ago") from error
        if _is_being_deleted(existing):
            raise ConflictError(name, 409, "Conflict", "an object of that name is still being deleted")
        if _is_of_earlier_job(existing, job):
            raise ConflictError(
                name, 409, "Conflict", "it belongs to a deleted job of this name and will be garbage-collected"
            )
        return existing


def _uid(manifest: Mapping[str, JsonValue]) -> str:
    metadata = manifest["metadata"]
    assert isinstance(metadata, dict)
    return str(metadata["uid"])


def _is_being_deleted(manifest: Mapping[str, JsonValue]) -> bool:
    metadata = manifest["metadata"]
    return isinstance(metadata, dict) and metadata.get("deletionTimestamp") is not None


def _is_ours(manifest: Mapping[str, JsonValue], job: JobView) -> bool:
    """Return whether the job controls it; a claim, which outlives its job with the results, needs its name label."""
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict):
        return False
    if manifest.get("kind") == CLAIM.kind:
        labels = metadata.get("labels")
        return isinstance(labels, dict) and labels.get(JOB_LABEL) == job.name
    owner = controller_of(metadata)
    return owner is not None and owner.uid == job.uid


def _is_of_earlier_job(manifest: Mapping[str, JsonValue], job: JobView) -> bool:
    """Return whether it belongs to an earlier job of the same name: it is not garbage-collected yet."""
    metadata = manifest.get("metadata")
    owners = metadata.get("ownerReferences") if isinstance(metadata, dict) else None
    return isinstance(owners, list) and any(
        isinstance(owner, dict)
        and (owner.get("kind"), owner.get("name")) == (FINETUNE_JOB.kind, job.name)
        and owner.get("uid") != job.uid
        for owner in owners
    )


def _version(manifest: Mapping[str, JsonValue]) -> str:
    metadata = manifest["metadata"]
    assert isinstance(metadata, dict)
    return str(metadata["resourceVersion"])

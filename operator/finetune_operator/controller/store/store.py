"""Everything read from the API server, in memory: jobs, the objects that run their attempts, and their pods.

Updates of an object come from many sides (watches, lists, answers to our own writes) and in any order. The newer
`resourceVersion` wins; Kubernetes promises since 1.35 that versions of one kind compare as integers, and etcd has given
such ones always. A deleted object stays deleted: a late answer does not bring it back. Objects are parsed once, when
they change; a reconcile then reads values only.

An object belongs to a job if its labels claim it and the chain of its controllers leads there (owners.py). Others with
such labels are kept as well, and distinguished.

The store notifies nobody: the caller that puts an object in also queues its job.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_operator.controller.store.owners import (
    DRIVERS,
    JOBS_BETWEEN,
    OwnedObjects,
    Owner,
    controller_of,
    expected_owners,
)
from finetune_operator.controller.store.queue import JobKey
from finetune_operator.endpoints.decide.endpoint_view import endpoint_view, inference_service_view, joined
from finetune_operator.jobs.observed import job_view, pod_view
from finetune_operator.jobs.render.render_types import JOB_LABEL, UID_LABEL
from finetune_operator.jobs.state.children import child_view
from finetune_operator.jobs.state.decision_types import ChildView, EndpointView, JobView, PodView
from finetune_operator.kubernetes_api.resources import (
    DEPLOYMENT,
    FINETUNE_JOB,
    INFERENCE_SERVICE,
    JOB,
    POD,
    REPLICA_SET,
)
from finetune_operator.spec.kubernetes_objects import GroupKind
from finetune_operator.spec.settings.settings import Settings

TOMBSTONE_SECONDS = 600.0
"""Life of the tombstone of a deleted object; no request takes longer than a fraction of it."""
DELETED_VERSION = 2**64
"""Version of a tombstone for an object that is known to be deleted: every update below it is late."""

View: TypeAlias = JobView | ChildView | EndpointView | PodView
Key: TypeAlias = tuple[GroupKind, str, str]
"""Kind, namespace, name."""
JobId: TypeAlias = tuple[str, str]
"""Namespace and uid of a job. A uid alone would let an object of another namespace claim the job by a label."""
Raw: TypeAlias = Mapping[str, JsonValue]


class UnreadableError(ValueError):
    """An object without the metadata that every object on an API server has."""


@dataclass(frozen=True)
class Entry:
    """One object as it was read last."""

    kind: GroupKind
    namespace: str
    name: str
    uid: str
    version: int
    job: JobKey
    """Job that it is, or belongs to."""
    job_uid: str
    view: View | None
    """Parsed object; None: it has our label, but is not ours by its other labels."""
    changed_at: float
    """Time when it changed last for us, on the monotonic clock."""
    owner: Owner | None = None
    """Its controller."""
    deleting: bool = False

    @property
    def key(self) -> Key:
        return self.kind, self.namespace, self.name

    @property
    def job_id(self) -> JobId:
        return self.namespace, self.job_uid


class Store:
    """See the module."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._entries: dict[Key, Entry] = {}
        self._of_job: dict[JobId, dict[Key, Entry]] = {}
        self._children: dict[JobId, dict[Key, Entry]] = {}
        """Those of the objects of a job that run its attempts, its own or not."""
        self._uids: dict[JobKey, Counter[str]] = {}
        """Uids of the jobs that had a name, by name, with the number of their objects."""
        self._tombstones: dict[str, tuple[int, float]] = {}
        """Tombstones by uid: newest version that is known to be over, and when we learnt of it. Oldest first."""
        self._owned: dict[JobId, OwnedObjects] = {}
        """Objects that are known to be a job's own, as long as any of its objects exists."""
        self._deleted_pods: dict[JobId, dict[str, PodView]] = {}
        """Deleted pods while the object that runs their attempt exists, by job, then by uid. A deletion would otherwise
        take the cause of the attempt's failure with it.
        """

    # ------------------------------------------------------------------------------------------------------- reading

    def job(self, key: JobKey) -> JobView | None:
        """Return the job of that name."""
        entry = self._entries.get((FINETUNE_JOB.group_kind, key.namespace, key.name))
        return entry.view if entry is not None and isinstance(entry.view, JobView) else None

    def job_version(self, key: JobKey) -> str | None:
        """Return the resourceVersion of the view that `job` returns."""
        entry = self._entries.get((FINETUNE_JOB.group_kind, key.namespace, key.name))
        return None if entry is None else str(entry.version)

    def jobs(self) -> list[JobKey]:
        """Return all jobs."""
        return [entry.job for entry in self._entries.values() if entry.kind == FINETUNE_JOB.group_kind]

    def children(self, job: JobId) -> tuple[ChildView, ...]:
        """Return the objects that run the job's attempts, by stage and attempt."""
        owned = self._owned.get(job, ())
        children = self._children.get(job, {}).values()
        views = [entry.view for entry in children if isinstance(entry.view, ChildView) and entry.uid in owned]
        return tuple(sorted(views, key=lambda view: (view.stage.value, view.attempt, view.ref.name)))

    def endpoints(self, job: JobId) -> tuple[EndpointView, ...]:
        """Return the objects that serve the job's model, by revision; InferenceServices with the servers by KServe."""
        return joined(entry.view for entry in self._own(job) if isinstance(entry.view, EndpointView))

    def lacks_servers(self, key: JobKey) -> bool:
        """Return whether it is the endpoint's turn, and it has no servers, or none of the requested runtime."""
        job = self.job(key)
        if job is None or job.job is None or job.job.spec.endpoint is None:
            return False
        before = (one for one in job.status.stages if one.name is not Stage.SERVE)
        if not all(one.state == "Succeeded" for one in before):
            return False
        there = {view.runtime for view in self.endpoints(job.id)}
        return not there or (job.job.spec.endpoint.runtime == "kserve" and "kserve" not in there)

    def pods(self, job: JobId) -> tuple[PodView, ...]:
        """Return the job's pods, the oldest first, also deleted ones as long as their attempt is judged by them."""
        views = [entry.view for entry in self._own(job) if isinstance(entry.view, PodView)]
        views += self._deleted_pods.get(job, {}).values()
        return tuple(sorted(views, key=lambda view: (view.created, view.name)))

    def pods_before(self, key: JobKey, job_uid: str) -> tuple[PodView, ...]:
        """Return the pods of earlier jobs of that name; the garbage collector takes a while."""
        others = [uid for uid in self._uids.get(key, ()) if uid != job_uid]
        return tuple(pod for uid in others for pod in self.pods((key.namespace, uid)))

    def get(self, kind: GroupKind, namespace: str, name: str) -> Entry | None:
        """Return one object."""
        return self._entries.get((kind, namespace, name))

    def last_change_at(self, job: JobId) -> float:
        """Return when any of the job's children or pods changed last, on the monotonic clock; 0.0: never."""
        return max((entry.changed_at for entry in self._own(job)), default=0.0)

    # ----------------------------------------------------------------------------------------------------- ownership

    def belongs(self, entry: Entry) -> bool:
        """Return whether the object is its job's own, and not only labelled so."""
        return entry.uid in self._owned.get(entry.job_id, ()) or entry in self._own(entry.job_id)

    def unresolved(self, job: JobId) -> set[Owner]:
        """Return the controllers of pods that claim the job and are not known here: batch Jobs between a child and its
        launcher, ReplicaSets of its Deployment, or nothing of the kind. The API server has to be asked for them
        (`resolve`).
        """
        owned = self._owned.get(job)
        if owned is None:
            return set()
        claims = self._claims(job)
        return {
            entry.owner
            for entry in claims
            if entry.owner and _has_intermediate_owner(entry) and owned.is_unknown(entry.owner)
        }

    def resolve(self, job: JobId, owner: Owner, manifest: Raw | None) -> None:
        """Record the API server's answer about `owner`; None: it does not exist."""
        owned = self._owned.get(job)
        if owned is not None:
            self._own(job)  # with objects that were put in since
            owned.record_owner(owner, None if manifest is None else _metadata(manifest))

    def foreign(self, key: JobKey) -> list[Entry]:
        """Return the objects that claim a job of that name and are not its own, except those that may still turn out to
        be, and those that are being deleted.
        """
        entries = []
        for uid in self._uids.get(key, ()):
            job = (key.namespace, uid)
            open_owners = self.unresolved(job)
            entries += [one for one in self._claims(job) if not one.deleting and one.owner not in open_owners]
        return entries

    def _claims(self, job: JobId) -> list[Entry]:
        """Return the objects that are labelled as the job's, with labels of ours, and are not its own."""
        own, of_job = self._own(job), self._of_job.get(job, {})
        if len(own) == len(of_job):
            return []
        keys = {entry.key for entry in own}
        return [entry for entry in of_job.values() if entry.view is not None and entry.key not in keys]

    def _own(self, job: JobId) -> list[Entry]:
        """Return the job, its children and its pods."""
        owned = self._owned.get(job)
        if owned is None:
            return []
        own, undecided = [], []
        for entry in self._of_job.get(job, {}).values():
            if isinstance(entry.view, JobView) or entry.uid in owned:
                own.append(entry)
            elif isinstance(entry.view, PodView | EndpointView):
                undecided.append(entry)
        # One pod may control others, in whatever order they came, and an InferenceService a Deployment.
        by_owner: dict[str, list[Entry]] = {}
        for entry in undecided:
            if entry.owner is not None:
                by_owner.setdefault(entry.owner.uid, []).append(entry)
        running = {(child.stage, child.attempt) for child in self.children(job)}
        while undecided:
            controlled = [entry for entry in undecided if self._controlled(entry, owned, running)]
            for entry in controlled:
                owned.add(entry.uid)
            own += controlled
            undecided = [
                entry for owner in controlled for entry in by_owner.get(owner.uid, ()) if entry.uid not in owned
            ]
        return own

    def _controlled(self, entry: Entry, owned: OwnedObjects, running: Collection[tuple[Stage, int]]) -> bool:
        """Return whether a pod's controller is the job's own. A deleted one, as that of a pod which outlives it for a
        moment while the operator starts, is known by its name. `running`: attempts whose child exists.
        """
        owner, view = entry.owner, entry.view
        if isinstance(view, EndpointView):
            return owner is not None and owner.kind == INFERENCE_SERVICE.group_kind and owner.uid in owned
        assert isinstance(view, PodView)
        names = tuple(expected_owners(entry.job.name, view.stage, view.attempt))
        if owner is None:
            # Without its webhook, the Spark Operator does not name itself in a driver.
            kinds = [kind for suffix, kind in DRIVERS.items() if names and entry.name == f"{names[0]}{suffix}"]
            children = [self._entries.get((kind, entry.namespace, names[0])) for kind in kinds]
            return any(child is not None and child.uid in owned for child in children)
        if owner.uid in owned or owner.uid == entry.job_uid:
            return True
        if owner.name not in names:
            return False
        if _has_intermediate_owner(entry):
            return owned.absent(owner)
        owner_entry = self._entries.get((owner.kind, entry.namespace, owner.name))
        if owner_entry is not None:
            return False
        return owner.name != names[0] or (view.stage, view.attempt) not in running

    # ------------------------------------------------------------------------------------------------------- writing

    def put(self, raw: Raw, parsed: JobView | None = None) -> Entry | None:
        """Store an object. Return the entry if it is news, None if it is old or was deleted since. `parsed`: the view
        of a job, if it was parsed before.
        """
        version, uid = _version(raw), _text(_metadata(raw), "uid")
        tombstone = self._tombstones.get(uid)
        if tombstone is not None and version <= tombstone[0]:
            return None
        key = key_of(raw)
        known = self._entries.get(key)
        if known is not None and version <= known.version:
            return None
        entry = self._entry(key, uid, version, raw, parsed)
        if known is not None:
            self._drop(known)
        self._entries[key] = entry
        self._of_job.setdefault(entry.job_id, {})[key] = entry
        if isinstance(entry.view, ChildView):
            self._children.setdefault(entry.job_id, {})[key] = entry
        owned = self._owned.setdefault(entry.job_id, OwnedObjects())
        runs = isinstance(entry.view, ChildView | EndpointView)
        if runs and entry.owner is not None and entry.owner.uid == entry.job_uid:
            owned.add(entry.uid)
        self._uids.setdefault(entry.job, Counter())[entry.job_uid] += 1
        return entry

    def remove(self, raw: Raw) -> Entry | None:
        """Remove an object that a watch reports as deleted, with its last state. Return its entry, if there was one."""
        key = key_of(raw)
        uid, last = _text(_metadata(raw), "uid"), pod_view(raw) if key[0] == POD.group_kind else None
        return self._tombstone(key, uid, _version(raw), last)

    def mark_deleted(self, kind: GroupKind, namespace: str, name: str, uid: str | None = None) -> Entry | None:
        """Remove an object that the API server no longer has; with `uid`, only this very one."""
        key = (kind, namespace, name)
        known = self._entries.get(key)
        uid = uid or (known.uid if known is not None else None)
        return None if uid is None else self._tombstone(key, uid, DELETED_VERSION)

    def retain_listed(
        self, kind: GroupKind, listed: Collection[Key], version: int, namespaces: Collection[str] | None = None
    ) -> set[JobKey]:
        """Remove the objects of the kind that a list, read at `version` from `namespaces` (None: from all), does not
        name, unless they are newer than the list. Return the jobs of the removed objects.
        """
        gone = [
            entry
            for entry in self._entries.values()
            if entry.kind == kind
            and entry.key not in listed
            and entry.version <= version
            and (namespaces is None or entry.namespace in namespaces)
        ]
        self._remove_all(gone, version)
        return {entry.job for entry in gone}

    def replace_of_job(self, kind: GroupKind, job: JobId, raws: Iterable[Raw], version: int) -> None:
        """Put the listed objects of one job, and remove its others of the kind as `retain_listed` does."""
        listed = set()
        for raw in raws:
            listed.add(key_of(raw))
            self.put(raw)
        of_job = self._of_job.get(job, {}).values()
        gone = [one for one in of_job if one.kind == kind and one.key not in listed and one.version <= version]
        self._remove_all(gone, version)

    def _remove_all(self, gone: Collection[Entry], version: int) -> None:
        """Remove objects of one kind. Which of them are their job's own is decided once: they may be thousands."""
        for job in {entry.job_id for entry in gone}:
            self._own(job)
        for entry in gone:
            belonged = entry.uid in self._owned.get(entry.job_id, ())
            self._tombstone(entry.key, entry.uid, version, belonged=belonged)

    def _entry(self, key: Key, uid: str, version: int, raw: Raw, parsed: JobView | None) -> Entry:
        kind, namespace, name = key
        labels = _metadata(raw).get("labels")
        labels = labels if isinstance(labels, dict) else {}
        view: View | None
        match kind:
            case FINETUNE_JOB.group_kind:
                view, job, job_uid = (
                    parsed or job_view(raw, self._settings, self.job(JobKey(namespace, name))),
                    name,
                    uid,
                )
            case POD.group_kind:
                view, job, job_uid = pod_view(raw), _text(labels, JOB_LABEL), _text(labels, UID_LABEL)
            case DEPLOYMENT.group_kind:
                view, job, job_uid = endpoint_view(raw), _text(labels, JOB_LABEL), _text(labels, UID_LABEL)
            case INFERENCE_SERVICE.group_kind:
                view, job, job_uid = inference_service_view(raw), _text(labels, JOB_LABEL), _text(labels, UID_LABEL)
            case _:
                view, job, job_uid = child_view(raw), _text(labels, JOB_LABEL), _text(labels, UID_LABEL)
        metadata = _metadata(raw)
        owner, deleting = controller_of(metadata), metadata.get("deletionTimestamp") is not None
        of_job = JobKey(namespace, job)
        return Entry(kind, namespace, name, uid, version, of_job, job_uid, view, self._clock(), owner, deleting)

    def _tombstone(
        self, key: Key, uid: str, version: int, last: PodView | None = None, belonged: bool | None = None
    ) -> Entry | None:
        """Remove an object for good. `belonged`: True if it was its job's own; None: not decided yet."""
        now = self._clock()
        while self._tombstones:
            oldest = next(iter(self._tombstones))
            if self._tombstones[oldest][1] > now - TOMBSTONE_SECONDS:
                break
            del self._tombstones[oldest]
        earlier = self._tombstones.pop(uid, (0, 0.0))[0]
        self._tombstones[uid] = (max(version, earlier), now)
        known = self._entries.get(key)
        if known is None or known.uid != uid or known.version > self._tombstones[uid][0]:
            return None
        if belonged is None:
            belonged = self.belongs(known)
        self._drop(known)
        if belonged:
            self._retain_last_state(known, last)
        if known.job_id not in self._of_job:
            self._owned.pop(known.job_id, None)
        return known

    def _retain_last_state(self, known: Entry, last: PodView | None) -> None:
        """Keep the last state of a pod that ran for as long as the object that runs its attempt exists."""
        view = last or known.view
        deleted_pods = self._deleted_pods.get(known.job_id, {})
        if isinstance(view, PodView):
            attempts = {(child.stage, child.attempt) for child in self.children(known.job_id)}
            if view.phase != "Pending" and (view.stage, view.attempt) in attempts:
                self._deleted_pods.setdefault(known.job_id, {})[view.uid] = replace(view, deleted=True)
        elif isinstance(view, ChildView):
            left = {
                uid: pod for uid, pod in deleted_pods.items() if (pod.stage, pod.attempt) != (view.stage, view.attempt)
            }
            if left:
                self._deleted_pods[known.job_id] = left
            else:
                self._deleted_pods.pop(known.job_id, None)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.key]
        of_job = self._of_job[entry.job_id]
        del of_job[entry.key]
        if not of_job:
            del self._of_job[entry.job_id]
        if isinstance(entry.view, ChildView):
            children = self._children[entry.job_id]
            del children[entry.key]
            if not children:
                del self._children[entry.job_id]
        uids = self._uids[entry.job]
        uids[entry.job_uid] -= 1
        if not uids[entry.job_uid]:
            del uids[entry.job_uid]
        if not uids:
            del self._uids[entry.job]


def _metadata(raw: Raw) -> Mapping[str, JsonValue]:
    metadata = raw.get("metadata")
    if not isinstance(metadata, Mapping):
        raise UnreadableError("an object without metadata")
    return metadata


def _has_intermediate_owner(pod: Entry) -> bool:
    """Return whether a pod's controller can be the batch Job between an MPIJob and its launcher, or the ReplicaSet
    between a Deployment and its servers.
    """
    owner, view = pod.owner, pod.view
    if owner is not None and owner.kind == REPLICA_SET.group_kind:
        return isinstance(view, PodView) and view.stage is Stage.SERVE
    return owner is not None and owner.kind == JOB.group_kind and owner.name.endswith(JOBS_BETWEEN)


def key_of(raw: Raw) -> Key:
    """Return the key under which an object is stored. Raises UnreadableError."""
    metadata = _metadata(raw)
    kind = GroupKind.of(_text(raw, "apiVersion"), _text(raw, "kind"))
    return kind, _text(metadata, "namespace"), _text(metadata, "name")


def _version(raw: Raw) -> int:
    written = _text(_metadata(raw), "resourceVersion")
    if not written.isdecimal():
        raise UnreadableError(f'resourceVersion "{written}" is not a whole number')
    return int(written)


def _text(values: Mapping[str, JsonValue], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""

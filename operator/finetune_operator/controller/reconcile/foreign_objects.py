"""Objects whose labels name a job that does not own them: their owners are looked up, and events report them.

The garbage collector takes a while, so that an object may outlive its owner for a moment; a copy stays.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from finetune_contract.report import shortened
from finetune_operator.controller.reconcile.operator_state import OperatorState
from finetune_operator.controller.store.owners import controller_of
from finetune_operator.controller.store.queue import JobKey
from finetune_operator.controller.store.rate_limit import Rate
from finetune_operator.controller.store.store import Entry, JobId
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.jobs.state.decision_types import (
    ChildView,
    EndpointView,
    EventNote,
)
from finetune_operator.kubernetes_api.errors import (
    NotFoundError,
)
from finetune_operator.kubernetes_api.resources import (
    DEPLOYMENT,
    JOB,
    POD,
    REPLICA_SET,
)

log = logging.getLogger(__name__)

CLAIM_SECONDS = 10.0
"""Time that an object may claim a job that is not its own before an event reports it. The garbage collector needs a
moment for the objects that an owner left behind.
"""
CLAIMS_BURST, CLAIMS_PER_SECOND = 10, 1 / 30
"""Events about such objects, for each namespace."""
MOST_CLAIMS = 10_000
QUEUED = float("-inf")
"""Value in place of the time: the event was queued."""


class ForeignObjects:
    """Objects that claim a job and may not be its own."""

    def __init__(self, state: OperatorState, queue_event: Callable[[Manifest, str, EventNote], None]) -> None:
        self._state = state
        self._queue_event = queue_event
        self._claims: OrderedDict[str, float] = OrderedDict()
        """Time when an object that claims a job and is not its own was seen first, by uid."""
        self._claims_rate = Rate(burst=CLAIMS_BURST, per_second=CLAIMS_PER_SECOND)

    async def resolve_owners(self, job: JobId) -> None:
        """Read the objects between the job's children and pods; each once."""
        namespace, _ = job
        for owner in self._state.store.unresolved(job):
            try:
                resource = REPLICA_SET if owner.kind == REPLICA_SET.group_kind else JOB
                manifest = await self._state.kube.get(resource, namespace, owner.name)
                if resource is REPLICA_SET:
                    await self._read_deployment(namespace, manifest)
            except NotFoundError:
                manifest = None
            self._state.store.resolve(job, owner, manifest)

    async def _read_deployment(self, namespace: str, replica_set: Manifest) -> None:
        """Read the Deployment of a ReplicaSet if it is not known: KServe creates it, so that its pods may arrive first.
        NotFoundError.
        """
        metadata = replica_set.get("metadata")
        owner = controller_of(metadata) if isinstance(metadata, dict) else None
        if owner is None or owner.kind != DEPLOYMENT.group_kind:
            return
        if self._state.store.get(DEPLOYMENT.group_kind, namespace, owner.name) is None:
            self._state.store.put(await self._state.kube.get(DEPLOYMENT, namespace, owner.name))

    def report(self, key: JobKey) -> None:
        """Queue events about objects that are labelled as a job's and are not: each on that object, not on the job."""
        now = time.monotonic()
        for entry in self._state.store.foreign(key):
            first = self._claims.setdefault(entry.uid, now)
            while len(self._claims) > MOST_CLAIMS:
                self._claims.popitem(last=False)
            if now < first + CLAIM_SECONDS:
                self._state.queue.add_after(key, first + CLAIM_SECONDS - now)
            elif first != QUEUED and self._claims_rate.take(key.namespace):
                self._claims[entry.uid] = QUEUED
                log.warning(
                    "ignoring %s %s/%s: its labels name FineTuneJob %s, its owners do not",
                    entry.kind.name,
                    *entry.key[1:],
                    key,
                )
                self._queue_event(_involved(entry), entry.uid, _claim_note(key, entry))


def _involved(entry: Entry) -> Manifest:
    """Return the reference to an object that an event names."""
    version = entry.view.ref.api_version if isinstance(entry.view, ChildView | EndpointView) else POD.api_version
    return {
        "apiVersion": version,
        "kind": entry.kind.name,
        "namespace": entry.namespace,
        "name": entry.name,
        "uid": entry.uid,
    }


def _claim_note(key: JobKey, entry: Entry) -> EventNote:
    return EventNote(
        "Warning",
        "NotOfThisJob",
        f'The operator ignores this object: its labels name FineTuneJob "{key.name}" (uid '
        f"{shortened(entry.job_uid, 63)}), its owner references do not. If it is a copy, remove the labels that begin "
        "with finetune.dev/.",
    )

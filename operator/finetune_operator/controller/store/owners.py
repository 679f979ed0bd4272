"""Ownership of objects by jobs: labels are only a claim, the chain of controllers has to lead to the job.

Kubernetes names the controller of an object in its `ownerReferences`. A child of ours is controlled by the FineTuneJob;
a pod by the child, by an object in between (the batch Job of an MPIJob's launcher), or by another pod (executors of
Spark by their driver). A copy of a pod that kept its labels, and a pod that somebody else labelled, have no such chain.

This keeps objects apart within a namespace; it is not a boundary there: a user who can create pods in a namespace
can write any reference. Between namespaces nothing is shared, as Kubernetes knows no owner in another namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_operator.plan.types.names import JobNames
from finetune_operator.spec.kubernetes_objects import GroupKind
from finetune_operator.spec.launcher_rows import SUPPORTED

JOBS_BETWEEN = tuple(launcher.job_between for launcher in SUPPORTED if launcher.job_between is not None)
DRIVERS = {
    launcher.driver: GroupKind.of(launcher.api_version, launcher.kind)
    for launcher in SUPPORTED
    if launcher.driver is not None
}
"""Suffixes of pods that create others, with the kind that they belong to."""


class Owner(NamedTuple):
    """The controller of an object, as its reference names it."""

    kind: GroupKind
    name: str
    uid: str


def controller_of(metadata: Mapping[str, JsonValue]) -> Owner | None:
    """Return the controller that `metadata` names; None if there is none or the reference cannot be read."""
    references = metadata.get("ownerReferences")
    for one in references if isinstance(references, list) else ():
        if isinstance(one, Mapping) and one.get("controller") is True:
            version, kind, name, uid = (one.get(field) for field in ("apiVersion", "kind", "name", "uid"))
            if isinstance(version, str) and isinstance(kind, str) and isinstance(name, str) and isinstance(uid, str):
                return Owner(GroupKind.of(version, kind), name, uid) if uid else None
    return None


def expected_owners(job: str, stage: Stage, attempt: int) -> Iterable[str]:
    """Return the names that controllers of an attempt's pods can have: its child's, and those that a launcher's
    controller derives from it. Empty for an attempt that no job can have.
    """
    try:
        child = JobNames.of(job).stage(stage, attempt)
    except ValueError:
        return ()
    return child, *(f"{child}{suffix}" for suffix in (*JOBS_BETWEEN, *DRIVERS))


class OwnedObjects:
    """Objects that are known to be one job's own, by uid. They stay known after their deletion: reports of pods are
    read after that.
    """

    def __init__(self) -> None:
        self._own: set[str] = set()
        self._foreign: set[Owner] = set()
        self._absent: set[Owner] = set()

    def __contains__(self, uid: str) -> bool:
        return uid in self._own

    def add(self, uid: str) -> None:
        """Add an object that is the job's own."""
        self._own.add(uid)

    def record_owner(self, owner: Owner, metadata: Mapping[str, JsonValue] | None) -> None:
        """Record the metadata that the API server has for `owner`; None: it does not exist."""
        if metadata is None:
            self._absent.add(owner)
            return
        controller = controller_of(metadata)
        if metadata.get("uid") == owner.uid and controller is not None and controller.uid in self._own:
            self._own.add(owner.uid)
        else:
            self._foreign.add(owner)

    def is_unknown(self, owner: Owner) -> bool:
        """Return whether nothing is known about an owner yet."""
        return owner.uid not in self._own and owner not in self._foreign and owner not in self._absent

    def absent(self, owner: Owner) -> bool:
        """Return whether the API server reported that it does not exist."""
        return owner in self._absent

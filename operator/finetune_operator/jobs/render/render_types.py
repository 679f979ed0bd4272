"""Types that rendering takes beside a plan, and those that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_operator.spec.checks.template import PROGRESS_AUDIENCE as PROGRESS_AUDIENCE
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.types import Capacity, FineTuneJobSpec

Manifest: TypeAlias = dict[str, JsonValue]
"""One Kubernetes object as JSON."""

FIELD_OWNER = "finetune-operator"
"""Field manager of all the operator's writes."""

JOB_LABEL = "finetune.dev/job"
UID_LABEL = "finetune.dev/job-uid"
STAGE_LABEL = "finetune.dev/stage"
ATTEMPT_LABEL = "finetune.dev/attempt"
CAPACITY_LABEL = "finetune.dev/capacity"
"""Label `spot` or `onDemand` on the objects of a training that requests spot nodes."""
PROGRESS_PORT = 8443
"""Port of the operator's pods for progress reports."""
HASH_ANNOTATION = "finetune.dev/config-sha256"
ENDPOINT_ANNOTATION = "finetune.dev/endpoint-sha256"
"""Annotation of the servers' Deployment: digest of all objects of the endpoint, which were applied before it."""
REVISION_ANNOTATION = "finetune.dev/revision-sha256"
"""Annotation of the servers' Deployment: digest of its pod template."""
ROLLBACK_ANNOTATION = "finetune.dev/rollback"
"""Annotation of a FineTuneJob, `FROM:TO`: while spec.endpoint gives revision FROM, revision TO is served."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "finetune-operator"}
"""Label of every object that the operator creates."""


@dataclass(frozen=True)
class Owner:
    """The FineTuneJob that children belong to."""

    name: str
    uid: str


@dataclass(frozen=True)
class ProgressEndpoint:
    """Server to which the pods of the job report progress."""

    base_url: str
    """`https://host:port`, without a path."""
    ca_certificate: str
    """PEM of the authority that signed the server's certificate."""
    namespace: str | None = None
    """Namespace of the operator's pods; None if it runs outside of the cluster."""


@dataclass(frozen=True)
class RenderContext:
    """The job's surroundings; `finetune render` leaves `owner` and `progress` out, as it has no cluster."""

    namespace: str
    spec: FineTuneJobSpec
    settings: Settings = CLUSTER_SETTINGS
    owner: Owner | None = None
    progress: ProgressEndpoint | None = None

    def job_labels(self, job: str) -> dict[str, str]:
        """Return labels that identify the job's objects, also against those of an earlier job of the same name."""
        uid = {} if self.owner is None else {UID_LABEL: self.owner.uid}
        return {JOB_LABEL: job, **uid}


@dataclass(frozen=True)
class Attempt:
    """One try at a stage."""

    stage: Stage
    number: int = 1
    avoid_nodes: tuple[str, ...] = field(default=())
    """Nodes on which an earlier attempt failed; pods prefer others."""
    capacity: Capacity | None = None
    """Capacity type of the nodes that pods request; None and `onDemand`: any."""

"""What rendering needs beside a plan, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_operator.api.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.api.template import PROGRESS_AUDIENCE as PROGRESS_AUDIENCE
from finetune_operator.api.types import Capacity, FineTuneJobSpec

Manifest: TypeAlias = dict[str, JsonValue]
"""One Kubernetes object as JSON."""

FIELD_OWNER = "finetune-operator"
"""Field manager of everything that the operator writes."""

JOB_LABEL = "finetune.dev/job"
UID_LABEL = "finetune.dev/job-uid"
STAGE_LABEL = "finetune.dev/stage"
ATTEMPT_LABEL = "finetune.dev/attempt"
CAPACITY_LABEL = "finetune.dev/capacity"
"""`spot` or `onDemand`, on what belongs to a training that has asked for spot nodes."""
PROGRESS_PORT = 8443
"""Where the operator's pods take progress reports."""
HASH_ANNOTATION = "finetune.dev/config-sha256"
ENDPOINT_ANNOTATION = "finetune.dev/endpoint-sha256"
"""On a Deployment of servers: digest of all that belongs to the endpoint, which was applied before it."""
REVISION_ANNOTATION = "finetune.dev/revision-sha256"
"""On a Deployment of servers: digest of what its pods are made of."""
ROLLBACK_ANNOTATION = "finetune.dev/rollback"
"""On a FineTuneJob, `FROM:TO`: as long as spec.endpoint asks for revision FROM, revision TO is served."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "finetune-operator"}
"""Label of every object that the operator makes."""


@dataclass(frozen=True)
class Owner:
    """The FineTuneJob that children belong to."""

    name: str
    uid: str


@dataclass(frozen=True)
class ProgressEndpoint:
    """Where the pods of the job report progress."""

    base_url: str
    """`https://host:port`, without a path."""
    ca_certificate: str
    """PEM of the authority that signed the server's certificate."""
    namespace: str | None = None
    """Where the operator's pods are; None: it runs outside of the cluster."""


@dataclass(frozen=True)
class RenderContext:
    """The job's surroundings; with `owner` and `progress` left out, what `finetune render` prints without a cluster."""

    namespace: str
    spec: FineTuneJobSpec
    settings: Settings = CLUSTER_SETTINGS
    owner: Owner | None = None
    progress: ProgressEndpoint | None = None

    def job_labels(self, job: str) -> dict[str, str]:
        """What tells the objects of the job from those of any other, one of the same name before it included."""
        uid = {} if self.owner is None else {UID_LABEL: self.owner.uid}
        return {JOB_LABEL: job, **uid}


@dataclass(frozen=True)
class Attempt:
    """One try at a stage."""

    stage: Stage
    number: int = 1
    avoid_nodes: tuple[str, ...] = field(default=())
    """Nodes on which an earlier attempt broke; pods prefer others."""
    capacity: Capacity | None = None
    """Nodes that pods ask for; None and `onDemand`: any."""

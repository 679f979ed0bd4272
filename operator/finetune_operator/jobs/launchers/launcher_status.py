"""Types shared by the modules of launchers: the verdict on an object, and the status that most kinds have."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from pydantic import Field

from finetune_operator.jobs.render.render_types import HASH_ANNOTATION
from finetune_operator.spec.kubernetes_objects import Conditions, Raw, RawCondition, Time

ChildState: TypeAlias = Literal["Pending", "Running", "Succeeded", "Failed", "Suspended"]


@dataclass(frozen=True)
class Verdict:
    """State of an object as its own controller reports it."""

    state: ChildState
    condition: RawCondition | None = None
    """Condition that the state follows from."""
    finished: datetime | None = None
    started: datetime | None = None
    configuration: str | None = None
    """sha256 of the files that its pods read; None if its kind does not expose it."""
    replaces_pods: bool = False
    """True if its controller replaces a lost pod."""


class TemplateMeta(Raw):
    """`metadata` of a pod template, which has no name."""

    annotations: dict[str, str] = Field(default_factory=dict)


class PodTemplate(Raw):
    """A pod template."""

    metadata: TemplateMeta = TemplateMeta()

    @property
    def configuration(self) -> str | None:
        """Return the value of `Verdict.configuration`."""
        return self.metadata.annotations.get(HASH_ANNOTATION)


class RunPolicy(Raw):
    """Kubeflow's `spec.runPolicy`."""

    suspend: bool | None = None


class KubeflowSpec(Raw):
    """The spec of Kubeflow's kinds."""

    run_policy: RunPolicy = RunPolicy()


class ConditionedStatus(Raw):
    """A status with conditions."""

    conditions: Conditions = ()
    start_time: Time | None = None
    completion_time: Time | None = None

    def condition(self, type_: str) -> RawCondition | None:
        """Return the condition of this type if it is true."""
        return next((one for one in self.conditions if one.type == type_ and one.holds), None)


class KubeflowJob(Raw):
    """A PyTorchJob or an MPIJob."""

    spec: KubeflowSpec = KubeflowSpec()
    status: ConditionedStatus = ConditionedStatus()

    def underway(self) -> Verdict:
        """Return the verdict on an unfinished job."""
        started = self.status.start_time
        if self.spec.run_policy.suspend:
            return Verdict("Suspended", self.status.condition("Suspended"), started=started)
        running = self.status.condition("Running")
        return Verdict("Running" if running else "Pending", running, started=started)

"""Settings of the pods, and the life of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_operator.api.types.field_types import (
    MANAGED_BY_PATTERN,
    Count,
    FreeObject,
    MapText,
    NonNegative,
    ObjectName,
    SpecModel,
)
from finetune_operator.api.types.spec_resources import SecretSpec


class TemplateSpec(SpecModel):
    """Pod-level settings merged onto every pod of the job, in the form that Kubernetes has for them."""

    labels: Annotated[dict[str, MapText], Field(max_length=64)] = Field(
        default={}, description="Pod labels. Left out: none."
    )
    annotations: Annotated[dict[str, MapText], Field(max_length=64)] = Field(
        default={}, description="Pod annotations. Left out: none."
    )
    node_selector: Annotated[dict[str, MapText], Field(max_length=64)] = Field(
        default={}, description="Node labels a pod needs. Left out: none."
    )
    tolerations: Annotated[tuple[FreeObject, ...], Field(max_length=64)] = Field(
        default=(), description="Taints a pod bears. Left out: none."
    )
    affinity: FreeObject = Field(default={}, description="Kubernetes Affinity. Left out: none of yours.")
    service_account_name: ObjectName | None = Field(
        default=None, description="Service account. Left out: the namespace's default."
    )
    image_pull_secrets: Annotated[tuple[SecretSpec, ...], Field(max_length=16)] = Field(
        default=(), description="Secrets for pulling images. Left out: none."
    )
    env: Annotated[tuple[FreeObject, ...], Field(max_length=128)] = Field(
        default=(), description="Kubernetes EnvVars of the trainer. Left out: none of yours."
    )
    volumes: Annotated[tuple[FreeObject, ...], Field(max_length=64)] = Field(
        default=(), description="Kubernetes Volumes. Left out: none of yours."
    )
    volume_mounts: Annotated[tuple[FreeObject, ...], Field(max_length=64)] = Field(
        default=(), description="Where those volumes are mounted in the trainer. Left out: nowhere."
    )
    security_context: FreeObject = Field(
        default={}, description="Kubernetes PodSecurityContext. Left out: PodSecurity restricted."
    )


class RunPolicySpec(SpecModel):
    """The job's life."""

    suspend: bool = Field(
        default=False, description="Stop after a checkpoint, and go on when false again. Default false."
    )
    active_deadline_seconds: Count | None = Field(
        default=None, description="Longest life of the job in seconds. Left out: no bound."
    )
    progress_deadline_seconds: Count | None = Field(
        default=None,
        description="Longest time in seconds without progress, for an attempt that has reported any; then it is "
        "stopped and starts again from its last checkpoint. Left out: the operator's settings, limits.progressSeconds.",
    )
    ttl_seconds_after_finished: NonNegative | None = Field(
        default=None, description="Seconds after the end until the job is deleted. Left out: it stays."
    )
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=3, description="Restarts after failures that are not the infrastructure's, a count. Default 3."
    )
    on_out_of_memory: Literal["adapt", "fail"] = Field(
        default="adapt",
        description="adapt (the default) halves the micro-batch and keeps the global batch; fail ends the job.",
    )
    managed_by: Annotated[str, StringConstraints(pattern=MANAGED_BY_PATTERN, max_length=63)] | None = Field(
        default=None,
        description="Controller in charge of the job, domain/name, e.g. kueue.x-k8s.io/multikueue. Left out: this "
        "operator.",
    )
    queue: ObjectName | None = Field(
        default=None, description="Kueue's local queue. Not supported yet. Left out: no queue."
    )
    priority_class_name: ObjectName | None = Field(
        default=None, description="Priority class of the pods. Left out: the cluster's default."
    )

"""Settings of the pods, and the run policy of a job."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from finetune_operator.spec.types.field_types import (
    MANAGED_BY_PATTERN,
    Count,
    FreeObject,
    MapText,
    NonNegative,
    ObjectName,
    SpecModel,
    Supported,
)
from finetune_operator.spec.types.spec_resources import SecretSpec


class TemplateSpec(SpecModel):
    """Pod-level settings, merged into every pod of the job, in the form of a Kubernetes pod."""

    labels: Annotated[dict[str, MapText], Field(max_length=64)] = Field(
        default={}, description="Labels of the pods. Defaults to none."
    )
    annotations: Annotated[dict[str, MapText], Field(max_length=64)] = Field(
        default={}, description="Annotations of the pods. Defaults to none."
    )
    node_selector: Annotated[dict[str, MapText], Field(max_length=64)] = Field(
        default={}, description="Node selector: labels that a node must have. Defaults to none."
    )
    tolerations: Annotated[tuple[FreeObject, ...], Field(max_length=64)] = Field(
        default=(), description="Tolerations of the pods. Defaults to none."
    )
    affinity: FreeObject = Field(
        default={}, description="Kubernetes Affinity of the pods. If unset, none is added to the operator's own."
    )
    service_account_name: ObjectName | None = Field(
        default=None, description="Service account of the pods. Defaults to that of the namespace."
    )
    image_pull_secrets: Annotated[tuple[SecretSpec, ...], Field(max_length=16)] = Field(
        default=(),
        description="Secrets for pulling images, in addition to those of the operator's settings. Defaults to none.",
    )
    env: Annotated[tuple[FreeObject, ...], Field(max_length=128)] = Field(
        default=(),
        description="Kubernetes EnvVars of the trainer, in addition to the operator's own. Defaults to none.",
    )
    volumes: Annotated[tuple[FreeObject, ...], Field(max_length=64)] = Field(
        default=(), description="Kubernetes Volumes of the pods, in addition to the operator's own. Defaults to none."
    )
    volume_mounts: Annotated[tuple[FreeObject, ...], Field(max_length=64)] = Field(
        default=(), description="Kubernetes VolumeMounts of the trainer, for those volumes. Defaults to none."
    )
    security_context: FreeObject = Field(
        default={}, description="Kubernetes PodSecurityContext of the pods. Defaults to that of PodSecurity restricted."
    )


class RunPolicySpec(SpecModel):
    """Suspension, deadlines, restarts and clean-up of the job."""

    suspend: bool = Field(
        default=False,
        description="Whether the job is suspended: true stops it after a checkpoint, false resumes it. Defaults to "
        "false.",
    )
    active_deadline_seconds: Count | None = Field(
        default=None, description="Maximum lifetime of the job in seconds. If unset, there is no limit."
    )
    progress_deadline_seconds: Count | None = Field(
        default=None,
        description="Maximum time without progress in seconds, for an attempt that has reported progress; it is then "
        "restarted from its last checkpoint. Defaults to limits.progressSeconds of the operator's settings.",
    )
    ttl_seconds_after_finished: NonNegative | None = Field(
        default=None,
        description="Seconds after the job finishes until it is deleted. Defaults to that of the operator's settings; "
        "if neither is set, the job is not deleted.",
    )
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=3,
        description="Maximum number of restarts after failures that the infrastructure did not cause. Defaults to 3.",
    )
    on_out_of_memory: Literal["adapt", "fail"] = Field(
        default="adapt",
        description="Reaction to out-of-memory failures. adapt: halve the micro-batch and keep the global batch; fail:"
        " fail the job. Defaults to adapt.",
    )
    managed_by: Annotated[str, StringConstraints(pattern=MANAGED_BY_PATTERN, max_length=63)] | None = Field(
        default=None,
        description="Controller that manages the job, as domain/name, e.g. kueue.x-k8s.io/multikueue. Defaults to this "
        "operator.",
    )
    queue: Annotated[ObjectName | None, Supported()] = Field(
        default=None, description="Local queue of Kueue. Not supported yet. If unset, the job is not queued."
    )
    priority_class_name: ObjectName | None = Field(
        default=None,
        description="Priority class of the pods. Defaults to that of the operator's settings, else to the cluster's "
        "default.",
    )

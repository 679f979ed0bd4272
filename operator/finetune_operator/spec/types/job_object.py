"""A FineTuneJob as `kubectl` sees it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from finetune_operator.spec.types.job_spec import FineTuneJobSpec
from finetune_operator.spec.types.job_status import FineTuneJobStatus


class ObjectMeta(BaseModel):
    """The part of Kubernetes' object metadata that we look at; the rest is the API server's business."""

    model_config = ConfigDict(
        frozen=True, defer_build=True, extra="ignore", alias_generator=to_camel, validate_by_alias=True
    )

    name: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    namespace: str | None = None
    generation: int | None = None
    uid: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class FineTuneJob(BaseModel):
    """One FineTuneJob as `kubectl` sees it."""

    model_config = ConfigDict(
        frozen=True, defer_build=True, extra="forbid", alias_generator=to_camel, validate_by_alias=True
    )

    api_version: Literal["finetune.dev/v1alpha1"]
    kind: Literal["FineTuneJob"]
    metadata: ObjectMeta
    spec: FineTuneJobSpec
    status: FineTuneJobStatus | None = None

    @property
    def name(self) -> str:
        """The job's name."""
        return self.metadata.name

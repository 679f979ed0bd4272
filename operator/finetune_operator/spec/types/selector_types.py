"""Selectors and tolerations as in core/v1 and meta/v1, which settings and pods share."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from finetune_operator.spec.types import MAX_INT, SpecModel

ShortText: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


class Toleration(SpecModel):
    """Toleration of a taint."""

    key: str | None = Field(
        default=None, description="Key of the taint. If unset, with operator Exists, any key matches."
    )
    operator: Literal["Exists", "Equal"] = Field(
        default="Equal",
        description="Relation to the taint: Exists matches any value, Equal the given one. Defaults to Equal.",
    )
    value: str | None = Field(
        default=None, description="Value of the taint, for operator Equal. Defaults to the empty value."
    )
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint. Defaults to any effect."
    )
    toleration_seconds: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = Field(
        default=None, description="Seconds for which a NoExecute taint is tolerated. If unset, it is tolerated forever."
    )


class LabelRequirement(SpecModel):
    """Requirement on a label."""

    key: ShortText = Field(description="Key of the label. Required.")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = Field(
        description="Relation of the label to values. Required."
    )
    values: tuple[str, ...] | None = Field(
        default=None, description="Values for operators In and NotIn; unset for Exists and DoesNotExist."
    )


class LabelSelector(SpecModel):
    """Selector of objects by their labels."""

    match_labels: dict[str, str] | None = Field(
        default=None, description="Labels with their values, all of which must match. Defaults to none."
    )
    match_expressions: tuple[LabelRequirement, ...] | None = Field(
        default=None, description="Requirements on labels, all of which must hold. Defaults to none."
    )

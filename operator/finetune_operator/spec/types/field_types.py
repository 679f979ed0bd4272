"""Texts, numbers and patterns that fields of the API are made of, and the bases of all models."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StringConstraints
from pydantic.alias_generators import to_camel

from finetune_contract.choices import ADAPTER_NAME_PATTERN
from finetune_operator.spec.status_times import whole_seconds

GROUP = "finetune.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
KIND: Literal["FineTuneJob"] = "FineTuneJob"
PLURAL = "finetunejobs"
SINGULAR = "finetunejob"
SHORT_NAME = "ftj"
CATEGORY = "finetune"

MAX_INT = 2**31 - 1
"""Bound of counts. Far above any real one, and small enough for every JSON reader."""

Auto: TypeAlias = Literal["auto"]
Scheme: TypeAlias = Literal["hf", "s3", "gs", "az", "pvc", "file", "pkg"]
StrategyChoice: TypeAlias = Literal["auto", "single", "ddp", "fsdp", "deepspeed"]

# Kubernetes' own rules, from apimachinery's validation: RFC 1123 labels and subdomains, resource quantities.
DNS_SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"

# The grammar of distribution/reference: an optional host, a lowercase path, a tag and a digest.
IMAGE_PATTERN = (
    r"^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?(@sha256:[a-f0-9]{64})?$"
)
MANAGED_BY_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9/._~-]+$"
DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
ENDPOINT_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
GATEWAY_PATTERN = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
HOSTNAME_PATTERN = r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
DATA_KEY_PATTERN = r"^[-._a-zA-Z0-9]+$"
ENV_PATTERN = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
FOLDER_PATTERN = r"^/[^:]+$"
RELATIVE_PATTERN = r"^[^/:][^:]*$"
HTTPS_PATTERN = r"^https://[A-Za-z0-9.-]+(:[0-9]{1,5})?$"
SERVER_PATTERN = r"^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?$"
PLACEMENT_PATTERN = r"^(cluster|spread|D|P|T|DP|DT|PD|PT|TD|TP|DPT|DTP|PDT|PTD|TDP|TPD)$"
CURRENCY_PATTERN = r"^[A-Z]{3}$"
URI_PATTERN = r"^(hf|s3|gs|az|pvc|file|pkg)://.+$"

GPU_RESOURCE_PATTERN = r"^(nvidia|amd)\.com/[a-z0-9][-a-z0-9.]*$"

# What git-check-ref-format leaves, as far as a pattern can say it, without what git takes for an option or a refspec.
GIT_REF_PATTERN = r"^[^-+/.\s~^:?*\[\\][^\s~^:?*\[\\]*$"
HYPERPARAMETER_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]*$"

PATTERN_DESCRIPTIONS = {
    DNS_SUBDOMAIN_PATTERN: "a name of lowercase letters, digits, - and . that begins and ends with a letter or digit",
    DNS_LABEL_PATTERN: "a name of lowercase letters, digits and - that begins and ends with a letter or digit",
    ENDPOINT_NAME_PATTERN: "a name of lowercase letters, digits and - that begins with a letter and does not end in -",
    GATEWAY_PATTERN: "the name of a Gateway such as public, or its namespace and name such as infra/public",
    HOSTNAME_PATTERN: "a host name of lowercase letters, digits, - and . such as reviews.example.com, or *.example.com",
    ADAPTER_NAME_PATTERN: "a name of letters, digits, -, _ and . that begins and ends with a letter or digit",
    DATA_KEY_PATTERN: "a key of letters, digits, -, _ and .",
    IMAGE_PATTERN: "an image such as registry.example.com/team/trainer:1.0, with a lowercase path",
    MANAGED_BY_PATTERN: "a name with a domain, such as kueue.x-k8s.io/multikueue",
    ENV_PATTERN: "a name of letters, digits, -, _ and . that does not begin with a digit",
    FOLDER_PATTERN: "an absolute path such as /mnt/data, without :",
    HTTPS_PATTERN: "https://host or https://host:port, without a path",
    SERVER_PATTERN: "http://host:port or https://host:port, without a user, a password or a query",
    CURRENCY_PATTERN: "an ISO 4217 currency code, such as USD",
    GPU_RESOURCE_PATTERN: "a resource of nvidia.com or amd.com, such as nvidia.com/mig-3g.40gb",
    GIT_REF_PATTERN: "a branch, tag or commit, without spaces and ~ ^ : ? * [ \\",
    HYPERPARAMETER_PATTERN: "a name of letters, digits, -, _ and . that does not begin with a digit or -",
    RELATIVE_PATTERN: "a relative path without :",
    PLACEMENT_PATTERN: "cluster, spread, or an order of D, P and T that names each at most once",
}
"""Descriptions of the patterns of the API, for messages and documentation."""

Text: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""A name that the user chose: any text."""
FreeObject: TypeAlias = Annotated[dict[str, JsonValue], Field(max_length=256)]
"""An object whose form another project defines."""

Uri: TypeAlias = Annotated[str, StringConstraints(pattern=URI_PATTERN, min_length=6, max_length=1024)]
QUANTITY_MARK = "x-kubernetes-int-or-string"
"""Marks quantities in the JSON schema: Kubernetes takes them as numbers too."""
MapText: TypeAlias = Annotated[str, StringConstraints(max_length=4096)]


def _quantity_text(value: object) -> object:
    """`cpu: 8` is a quantity for Kubernetes as much as `cpu: "8"`."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity: TypeAlias = Annotated[
    str,
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=32),
    BeforeValidator(_quantity_text),
    Field(json_schema_extra={QUANTITY_MARK: True}),
]
Image: TypeAlias = Annotated[str, StringConstraints(pattern=IMAGE_PATTERN, min_length=1, max_length=512)]
ObjectName: TypeAlias = Annotated[str, StringConstraints(pattern=DNS_SUBDOMAIN_PATTERN, min_length=1, max_length=253)]
DnsLabel: TypeAlias = Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=63)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=MAX_INT)]
NonNegative: TypeAlias = Annotated[int, Field(ge=0, le=MAX_INT)]


@dataclass(frozen=True)
class Supported:
    """Mark of a field that is not supported yet, but for its default and these values; of a block, with all its fields.
    The field's description contains it. `support` refuses other values, and so does the API server.
    """

    values: tuple[JsonValue, ...] = ()
    """Values that are supported, in addition to the default."""
    schemes: tuple[str, ...] = ()
    """Supported schemes of a URI."""


RETIRED_MARK = "Retired, without effect: "
"""Begin of the description of a field that is kept for stored jobs only; a job that sets it gets a notice."""

ReadUri: TypeAlias = Annotated[Uri, Supported(schemes=("hf", "file", "pkg", "pvc"))]
"""Location of a model or of data."""


class SpecModel(BaseModel):
    """Base of everything that people write: unknown fields are errors, types are not coerced, names are
    camelCase only.

    Importing models is a large part of the time of a command, so they leave out what few commands need. A validator is
    built when it is first used. Defaults that are models are made by `model_construct`, as `Model()` would build a
    validator to check nothing: pydantic does not validate defaults. Their modules do without
    `from __future__ import annotations`, with which pydantic compiles each annotation from its text.
    """

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=False,
        allow_inf_nan=False,
    )


class StatusModel(BaseModel):
    """Base of everything that the operator writes; fields of a newer version are ignored."""

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="ignore",
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
    )

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self:
        """Return a copy with these fields changed; times are rounded down, as they are when they are read."""
        changes = {
            name: whole_seconds(value) if isinstance(value, datetime) else value
            for name, value in (update or {}).items()
        }
        return super().model_copy(update=changes, deep=deep)

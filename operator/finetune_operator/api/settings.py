"""What the administrator decides for all jobs: allow-lists and prices.

A cluster's operator reads them from one YAML file; the `finetune` command without a cluster uses `LOCAL_SETTINGS`.
"""

from __future__ import annotations

from typing import get_args

from pydantic import Field

from finetune_operator.api.types import Scheme, SpecModel

CLUSTER_SCHEMES: tuple[Scheme, ...] = ("hf", "s3", "gs", "az", "pvc")
"""`file` and `pkg` name things on the machine that runs the job: in a cluster that is a pod, where they mean
nothing.
"""


class Price(SpecModel):
    """What one hour of one node costs."""

    product: str = Field(description="GPU product as in accelerator.product; cpu for a node without GPUs.")
    gpus: int = Field(ge=0, description="GPUs on the node, a count.")
    per_hour: float = Field(ge=0, description="Price of the node for one hour, in `currency`.")
    spot_per_hour: float | None = Field(
        default=None, ge=0, description="The same on spot capacity. Left out: not offered."
    )


class Settings(SpecModel):
    """Settings of one installation."""

    schemes: tuple[Scheme, ...] = Field(default=CLUSTER_SCHEMES, description="URI schemes that jobs may use.")
    git_hosts: tuple[str, ...] = Field(
        default=("github.com", "gitlab.com", "huggingface.co"),
        description="Hosts from which training.script may be fetched.",
    )
    images: tuple[str, ...] = Field(default=("*",), description="Globs of images that jobs may name. Default: any.")
    trust_remote_code: tuple[str, ...] = Field(
        default=(), description="Globs of Hub repositories whose code may run (model.trustRemoteCode). Default: none."
    )
    currency: str = Field(default="USD", description="ISO 4217 code of the prices.")
    prices: tuple[Price, ...] = Field(default=(), description="Price table. Left out: costs are not estimated.")
    served_launchers: tuple[str, ...] = Field(
        default=("job",), description="Launchers whose kinds the API server serves; filled from discovery in a cluster."
    )


CLUSTER_SETTINGS = Settings()
LOCAL_SETTINGS = Settings(schemes=get_args(Scheme))

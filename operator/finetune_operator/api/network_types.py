"""Parts of a NetworkPolicy that an administrator may add to those of jobs, as in networking.k8s.io/v1.

Read here, so that a misspelt key is reported with the settings and not by every job that the API server refuses.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from finetune_operator.api.pod_types import LabelSelector
from finetune_operator.api.types import SpecModel

Port: TypeAlias = Annotated[int, Field(ge=1, le=65_535)]
Cidr: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=49)]


class IpBlock(SpecModel):
    """Addresses."""

    cidr: Cidr = Field(description="The addresses, e.g. 10.0.0.0/8. Required.")
    excepted: tuple[Cidr, ...] = Field(default=(), alias="except", description="Those of them that are not meant.")


class Peer(SpecModel):
    """Reachable peers: addresses, or pods by their labels and those of their namespaces."""

    ip_block: IpBlock | None = Field(default=None, description="Addresses; then no selectors.")
    namespace_selector: LabelSelector | None = Field(
        default=None, description="Namespaces; {} is all. Left out: the job's own."
    )
    pod_selector: LabelSelector | None = Field(default=None, description="Pods; {} or left out is all of them.")


class PeerPort(SpecModel):
    """One port, or several in a row."""

    port: Port = Field(description="The port, or the first of them. Required.")
    end_port: Port | None = Field(default=None, description="The last of them. Left out: one port.")
    protocol: Literal["TCP", "UDP", "SCTP"] = Field(default="TCP", description="Protocol. Default TCP.")


class EgressRule(SpecModel):
    """Peers and the ports at which they may be reached."""

    to: tuple[Peer, ...] = Field(default=(), description="Who. Left out: everybody.")
    ports: tuple[PeerPort, ...] = Field(default=(), description="At which ports. Left out: at all.")

"""Parts of a NetworkPolicy that an administrator may add to those of jobs, as in networking.k8s.io/v1.

Read here, so that a misspelt key is reported with the settings and not by every job that the API server refuses.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, StringConstraints

from finetune_operator.spec.types import SpecModel
from finetune_operator.spec.types.selector_types import LabelSelector

Port: TypeAlias = Annotated[int, Field(ge=1, le=65_535)]
Cidr: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$", max_length=49)]


class IpBlock(SpecModel):
    """Address range."""

    cidr: Cidr = Field(description="Address range, e.g. 10.0.0.0/8. Required.")
    excepted: tuple[Cidr, ...] = Field(
        default=(), alias="except", description="Address ranges to exclude from it. Defaults to none."
    )


class Peer(SpecModel):
    """Reachable peers: addresses, or pods by their labels and those of their namespaces."""

    ip_block: IpBlock | None = Field(default=None, description="Address range; excludes the selectors.")
    namespace_selector: LabelSelector | None = Field(
        default=None, description="Selector of namespaces; {} selects all. Defaults to the job's own namespace."
    )
    pod_selector: LabelSelector | None = Field(
        default=None, description="Selector of pods; {} selects all. Defaults to all."
    )


class PeerPort(SpecModel):
    """Port, or range of ports."""

    port: Port = Field(description="Port, or the first of a range. Required.")
    end_port: Port | None = Field(default=None, description="Last port of the range. If unset, the rule has one port.")
    protocol: Literal["TCP", "UDP", "SCTP"] = Field(default="TCP", description="Protocol. Defaults to TCP.")


class EgressRule(SpecModel):
    """Peers and the ports at which they may be reached."""

    to: tuple[Peer, ...] = Field(default=(), description="Reachable peers. Defaults to all.")
    ports: tuple[PeerPort, ...] = Field(default=(), description="Reachable ports. Defaults to all.")

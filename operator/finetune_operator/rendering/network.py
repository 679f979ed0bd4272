"""What the pods of a job may reach, and who may reach them: the rules of its NetworkPolicy, and the same in words.

Only pods of the same job come in. Out go DNS, the job's own pods (rendezvous and collectives choose their ports), the
operator's progress server, and the ports that the settings open to the world, but never the addresses at which clouds
hand out credentials of the node. What the kubelet does for a pod (volumes, images, probes) no policy concerns.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import BaseModel, JsonValue

from finetune_operator.rendering.render_types import (
    PROGRESS_PORT,
    Manifest,
    ProgressEndpoint,
    RenderContext,
)

ALLOWS_ANNOTATION = "finetune.dev/allows"
"""On the policy: what it allows, in plain words."""
OPERATOR_LABELS = {"app.kubernetes.io/component": "operator"}
"""Of the operator's pods, in manifests/operator/deployment.yaml."""
_HTTPS_PORT = 443
_METADATA_IPV4 = ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32")
_METADATA_IPV6 = ("fd00:ec2::254/128", "fd00:ec2::23/128", "fd20:ce::254/128", "fe80::/10")
"""Where clouds hand out credentials of the node or of a pod, each in its maker's own documentation: link-local in all
large ones (169.254.169.254; EKS Pod Identity 169.254.170.23), Alibaba's 100.100.100.200, Azure's 168.63.129.16; for
IPv6 those of EC2, of EKS Pod Identity and of Google.
"""
_METADATA = (*_METADATA_IPV4, *_METADATA_IPV6)
_WORLD: tuple[Manifest, ...] = (
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": [*_METADATA_IPV4]}},
    {"ipBlock": {"cidr": "::/0", "except": [*_METADATA_IPV6]}},
)
_DNS_PORTS = (53, 5353)
"""The second is that of OpenShift's resolvers behind their Service, where policies look."""


@dataclass(frozen=True)
class Rules:
    """The policy of one job."""

    pods: Manifest
    """Selects the job's pods."""
    egress: tuple[Manifest, ...]
    """Beyond the job's own pods, which the template has."""
    words: str


def rules_of(job: str, context: RenderContext) -> Rules:
    """The rules for the job called `job`."""
    settings = context.settings.network_policy
    egress: list[Manifest] = []
    words = ["In: pods of this job. Out: pods of this job"]
    if settings.dns:
        egress.append({
            "to": _written(settings.dns),
            "ports": [_port(port, protocol) for port in _DNS_PORTS for protocol in ("UDP", "TCP")],
        })  # fmt: skip
        words.append("DNS (port 53) of the resolvers that the operator's settings name")
    if context.progress is not None:
        for rule, said in _progress(context.progress, context.settings.progress.url):
            egress.append(rule)
            words.append(said)
    if settings.egress_ports:
        ports = list(dict.fromkeys(settings.egress_ports))
        egress.append({"to": list(_WORLD), "ports": [_port(port) for port in ports]})
        listed = f"port{'s' * (len(ports) > 1)} {', '.join(map(str, ports))}"
        words.append(f"TCP {listed} of any address but the metadata services of clouds ({', '.join(_METADATA)})")
    extra = _written(settings.extra_egress)
    if extra:
        egress += [rule for rule in extra if isinstance(rule, dict)]
        words.append(f"{len(extra)} rule{'s' * (len(extra) > 1)} of the operator's settings, the last of those below")
    return Rules({"matchLabels": {**context.job_labels(job)}}, tuple(egress), f"{'; '.join(words)}.")


def _written(parts: Sequence[BaseModel]) -> list[JsonValue]:
    return [part.model_dump(mode="json", by_alias=True, exclude_defaults=True) for part in parts]


def _progress(endpoint: ProgressEndpoint, url: str | None) -> list[tuple[Manifest, str]]:
    """Rules for reporting progress, each in words: to the operator's pods, and to the address of the settings."""
    found: list[tuple[Manifest, str]] = []
    if endpoint.namespace is not None:
        operator: Manifest = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": endpoint.namespace}},
            "podSelector": {"matchLabels": {**OPERATOR_LABELS}},
        }
        rule: Manifest = {"to": [operator], "ports": [_port(PROGRESS_PORT)]}
        found.append((rule, f"progress reports to the operator in {endpoint.namespace} (port {PROGRESS_PORT})"))
    if url is not None:
        parts = urlsplit(url)
        port = parts.port or _HTTPS_PORT
        rule = {"to": _addresses(parts.hostname or ""), "ports": [_port(port)]}
        found.append((rule, f"progress reports to {parts.hostname} (port {port})"))
    return found


def _addresses(host: str) -> list[JsonValue]:
    """Of a host: one address, or where it has a name, which no policy can hold, the world."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return [dict(peer) for peer in _WORLD]
    return [{"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}]


def _port(port: int, protocol: str = "TCP") -> Manifest:
    return {"port": port, "protocol": protocol}

"""Rules of a job's NetworkPolicy, and a description of them in plain words.

Ingress: pods of the same job. Egress: DNS, the job's own pods (rendezvous and collectives choose their ports), the
operator's progress server, and the ports that the settings open to the world, but never the addresses at which clouds
serve the node's credentials. The kubelet's work for a pod (volumes, images, probes) is not subject to policies.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import BaseModel, JsonValue

from finetune_operator.jobs.render.render_types import (
    PROGRESS_PORT,
    Manifest,
    ProgressEndpoint,
    RenderContext,
)
from finetune_operator.spec.checks.destinations import destinations, opened_by_host

ALLOWS_ANNOTATION = "finetune.dev/allows"
"""Annotation of the policy: its rules in plain words."""
OPERATOR_LABELS = {"app.kubernetes.io/component": "operator"}
"""Labels of the operator's pods, as in manifests/operator/deployment.yaml."""
_HTTPS_PORT = 443
_METADATA_IPV4 = ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32")
_METADATA_IPV6 = ("fd00:ec2::254/128", "fd00:ec2::23/128", "fd20:ce::254/128", "fe80::/10")
"""Addresses at which clouds serve credentials of the node or of a pod, by their own documentation: link-local in all
large ones (169.254.169.254; EKS Pod Identity 169.254.170.23), Alibaba's 100.100.100.200, Azure's 168.63.129.16; for
IPv6 those of EC2, of EKS Pod Identity and of Google.
"""
_METADATA = (*_METADATA_IPV4, *_METADATA_IPV6)
_WORLD: tuple[Manifest, ...] = (
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": [*_METADATA_IPV4]}},
    {"ipBlock": {"cidr": "::/0", "except": [*_METADATA_IPV6]}},
)
_SERVICE = re.compile(r"[^.]+\.(?P<namespace>[^.]+)\.svc(\.cluster\.local)?")
"""Name of a Service, whose addresses are not those of its pods, which policies see."""
_DNS_PORTS = (53, 5353)
"""DNS ports; 5353 is the pod port of OpenShift's resolvers, which policies see instead of the Service's."""


@dataclass(frozen=True)
class Rules:
    """Rules of one job's policy."""

    pods: Manifest
    """Selector of the job's pods."""
    egress: tuple[Manifest, ...]
    """Egress rules beyond the job's own pods, which the template has."""
    summary: str


def rules_of(job: str, context: RenderContext) -> Rules:
    """Return the rules for the job called `job`."""
    settings = context.settings.network_policy
    egress: list[Manifest] = []
    summary = ["In: pods of this job. Out: pods of this job"]
    if settings.dns:
        egress.append({
            "to": dumped(settings.dns),
            "ports": [_port(port, protocol) for port in _DNS_PORTS for protocol in ("UDP", "TCP")],
        })  # fmt: skip
        summary.append("DNS (port 53) of the resolvers that the operator's settings name")
    if context.progress is not None:
        for rule, description in _progress(context.progress, context.settings.progress.url):
            egress.append(rule)
            summary.append(description)
    if settings.egress_ports:
        ports = list(dict.fromkeys(settings.egress_ports))
        egress.append({"to": list(_WORLD), "ports": [_port(port) for port in ports]})
        listed = f"port{'s' * (len(ports) > 1)} {', '.join(map(str, ports))}"
        summary.append(f"TCP {listed} of any address but the metadata services of clouds ({', '.join(_METADATA)})")
    for server in destinations(context.spec):
        if opened_by_host(server, settings) and (peers := _peers(server.host)):
            egress.append({"to": peers, "ports": [_port(server.port)]})
            summary.append(f"TCP port {server.port} for {server.host} of {server.field}")
    extra = dumped(settings.extra_egress)
    if extra:
        egress += [rule for rule in extra if isinstance(rule, dict)]
        summary.append(f"{len(extra)} rule{'s' * (len(extra) > 1)} of the operator's settings, the last of those below")
    return Rules({"matchLabels": {**context.job_labels(job)}}, tuple(egress), f"{'; '.join(summary)}.")


def dumped(parts: Sequence[BaseModel]) -> list[JsonValue]:
    """Return peers or rules of the settings as parts of a NetworkPolicy."""
    return [part.model_dump(mode="json", by_alias=True, exclude_defaults=True) for part in parts]


def operator_peer(namespace: str) -> Manifest:
    """Return the peer that selects the operator's pods in their namespace."""
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": {**OPERATOR_LABELS}},
    }


def _progress(endpoint: ProgressEndpoint, url: str | None) -> list[tuple[Manifest, str]]:
    """Return rules for progress reports, each with a description: to the operator's pods, and to the settings' URL."""
    rules: list[tuple[Manifest, str]] = []
    if endpoint.namespace is not None:
        rule: Manifest = {"to": [operator_peer(endpoint.namespace)], "ports": [_port(PROGRESS_PORT)]}
        rules.append((rule, f"progress reports to the operator in {endpoint.namespace} (port {PROGRESS_PORT})"))
    if url is not None:
        parts = urlsplit(url)
        port = parts.port or _HTTPS_PORT
        rule = {"to": _addresses(parts.hostname or ""), "ports": [_port(port)]}
        rules.append((rule, f"progress reports to {parts.hostname} (port {port})"))
    return rules


def _addresses(host: str) -> list[JsonValue]:
    """Return the peers of a host: its IP address, or the world if it is a name, which no policy can hold."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return [dict(peer) for peer in _WORLD]
    return [{"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}]


def _peers(host: str) -> list[JsonValue]:
    """Return the peers of a host that a job names: none where clouds serve credentials, the namespace of a Service."""
    service = _SERVICE.fullmatch(host)
    if service is not None:
        return [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": service["namespace"]}}}]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _addresses(host)
    return [] if any(address in ipaddress.ip_network(one) for one in _METADATA) else _addresses(host)


def _port(port: int, protocol: str = "TCP") -> Manifest:
    return {"port": port, "protocol": protocol}

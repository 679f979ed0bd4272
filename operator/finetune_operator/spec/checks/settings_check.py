"""Check of an administrator's settings that reports all problems at once: first single fields, then combinations.

The settings decide the rights of every job in a cluster, so nothing is guessed: an unknown setting, a list that does
not allow the defaults, or a duplicate price is refused, and the operator does not start.
"""

from __future__ import annotations

import fnmatch
import ipaddress
from collections.abc import Callable, Iterator
from functools import cache, partial

from pydantic import JsonValue

from finetune_operator.spec.checks.field_checks import read_fields, without_nulls
from finetune_operator.spec.checks.syntax import label_problems
from finetune_operator.spec.checks.template import toleration_problems
from finetune_operator.spec.fields.field_values import Path, Read
from finetune_operator.spec.fields.shapes import shape_of
from finetune_operator.spec.problems import Problem, describe_value, format_path
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types.network_types import Peer

_HUGE_PAGE = 2 << 20
"""Bytes of a page of hugepages-2Mi."""


def check_settings(value: JsonValue) -> tuple[Settings | None, list[Problem]]:
    """Return the settings and all their problems; the settings are None if there is a problem.

    Nothing (an empty file) means the defaults.
    """
    shape = cache(partial(shape_of, Settings))
    read = read_fields(Settings, shape, without_nulls({} if value is None else value, shape))
    problems = list(read.problems)
    if read.value is not None:
        problems.extend(_contradictions(read, read.value))
    return (None, problems) if problems else (read.value, [])


def _contradictions(read: Read[Settings], settings: Settings) -> Iterator[Problem]:
    """Yield contradictions between fields, except with fields that were removed for a fault of their own."""

    def intact(*paths: Path) -> bool:
        return not any(
            removed[: len(path)] == path or path[: len(removed)] == removed for removed in read.gone for path in paths
        )

    image = settings.defaults.image
    allowed = any(fnmatch.fnmatchcase(image, glob) for glob in settings.images)
    if intact(("images",), ("defaults", "image")) and not allowed:
        globs = ", ".join(settings.images) or "none"
        yield Problem(
            "defaults.image", describe_value(image), f"is not allowed by images, {globs}",
            "use an allowed image, or add it to images", reason="Forbidden",
        )  # fmt: skip
    first, most = settings.limits.restart_delay_seconds, settings.limits.restart_delay_most_seconds
    if intact(("limits", "restartDelaySeconds"), ("limits", "restartDelayMostSeconds")) and first > most:
        yield Problem(
            "limits.restartDelaySeconds", describe_value(first),
            f"must not be above limits.restartDelayMostSeconds, {most:g}",
            "swap the two, or raise limits.restartDelayMostSeconds",
        )  # fmt: skip
    if settings.allow.max_cost is not None and not settings.prices and intact(("prices",), ("allow", "maxCost")):
        yield Problem(
            "allow.maxCost", describe_value(settings.allow.max_cost), "needs prices: without them costs are not known",
            "add the prices of your nodes, or leave it out", reason="Required",
        )  # fmt: skip
    yield from _spot(settings, intact)
    if intact(("hardware",)):
        yield from _hardware(settings)
    yield from _network_devices(settings)
    for number, resolver in enumerate(settings.network_policy.dns):
        yield from _peer(("networkPolicy", "dns", number), resolver)
    for number, client in enumerate(settings.network_policy.endpoint_clients):
        yield from _peer(("networkPolicy", "endpointClients", number), client)
    for number, rule in enumerate(settings.network_policy.extra_egress):
        for place, peer in enumerate(rule.to):
            yield from _peer(("networkPolicy", "extraEgress", number, "to", place), peer)
    for name, keys, kind in (
        ("namespaces", settings.namespaces, "namespace"),
        ("schemes", settings.schemes, "scheme"),
        ("prices", tuple((price.product, price.gpus) for price in settings.prices), "price of the same kind of node"),
        ("network.devices", tuple(row.resource for row in settings.network.devices), "resource"),
        ("defaults.imagePullSecrets", tuple(s.name for s in settings.defaults.image_pull_secrets), "Secret"),
    ):
        if intact(tuple(name.split("."))):
            yield from _duplicates(tuple(name.split(".")), keys, kind)


def _network_devices(settings: Settings) -> Iterator[Problem]:
    """Yield amounts of huge pages that the API server refuses, and names that no environment variable has."""
    for number, device in enumerate(settings.network.devices):
        pages = device.huge_pages
        if pages is not None and (not parse_quantity(pages) or parse_quantity(pages) % _HUGE_PAGE):
            yield Problem(
                format_path(("network", "devices", number, "hugePages")), describe_value(pages),
                "must be a multiple of 2Mi above 0, or the API server refuses the pods",
                "round it up, e.g. to 5120Mi, or leave it out",
            )  # fmt: skip
        for name in device.env:
            if not name.isidentifier() or not name.isascii():
                yield Problem(
                    format_path(("network", "devices", number, "env", name)), None,
                    "is not the name of an environment variable", "use letters, digits and _, as in NCCL_IB_HCA",
                )  # fmt: skip


def _hardware(settings: Settings) -> Iterator[Problem]:
    """Yield labels that no node can have, and duplicate names."""
    names: list[str] = []
    for index, row in enumerate(settings.hardware):
        for place, name in enumerate((row.name, *row.aliases)):
            field = ("name",) if place == 0 else ("aliases", place - 1)
            if name.casefold() in names:
                yield Problem(
                    format_path(("hardware", index, *field)), describe_value(name), "is a duplicate product name",
                    "remove one of the two", reason="Duplicate",
                )  # fmt: skip
            names.append(name.casefold())
        for place, label in enumerate(row.labels):
            for value in label.values:
                yield from label_problems(
                    {label.key: value}, ("hardware", index, "labels", place),
                    "write the label as kubectl get nodes --show-labels prints it",
                )  # fmt: skip


def _spot(settings: Settings, intact: Callable[[Path], bool]) -> Iterator[Problem]:
    """Yield labels and tolerations that no API server would accept: each spot job would be refused when it trains."""
    for index, labels in enumerate(settings.spot.nodes if intact(("spot", "nodes")) else ()):
        if not labels:
            yield Problem(
                f"spot.nodes[{index}]",
                None,
                "must have at least one label of spot nodes",
                "add a label, or remove the item",
                reason="Required",
            )
        yield from label_problems(
            labels, ("spot", "nodes", index), "write the label as kubectl get nodes --show-labels prints it"
        )
    for index, toleration in enumerate(settings.spot.tolerations if intact(("spot", "tolerations")) else ()):
        yield from toleration_problems(toleration, ("spot", "tolerations", index))


def _peer(path: Path, peer: Peer) -> Iterator[Problem]:
    """Yield faults for which the API server would refuse a peer in every job's policy."""
    block = peer.ip_block
    if (block is None) == (peer.namespace_selector is None and peer.pod_selector is None):
        yield Problem(
            format_path(path), None, "must have either ipBlock or selectors", "set ipBlock or selectors, not both",
        )  # fmt: skip
    if block is None:
        return
    places: list[tuple[Path, str]] = [(("cidr",), block.cidr)]
    places += [(("except", index), one) for index, one in enumerate(block.excepted)]
    for place, text in places:
        try:
            ipaddress.ip_network(text)
        except ValueError as error:
            yield Problem(
                format_path((*path, "ipBlock", *place)), describe_value(text), f"is not a network: {error}",
                "write it like 10.0.0.0/8",
            )  # fmt: skip


def _duplicates(path: Path, keys: tuple[object, ...], kind: str) -> Iterator[Problem]:
    for index, key in enumerate(keys):
        if key in keys[:index]:
            shown = " with ".join(map(str, key)) + " GPUs" if isinstance(key, tuple) else str(key)
            yield Problem(
                format_path((*path, index)), describe_value(shown), f"is a duplicate {kind}", "remove one of the two",
                reason="Duplicate",
            )  # fmt: skip

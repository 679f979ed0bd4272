"""What kopf hears, put into the store: nothing is decided here.

Only `on.event` handlers are used. They watch and never write: no finalizers, no annotations on users' objects, no
events of kopf's own. Objects without our label are filtered out by the API server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from finetune_operator.api.settings import Settings
from finetune_operator.rendering.types import JOB_LABEL
from finetune_operator.shell.kube import FINETUNE_JOB, JOB, MPI_JOB, POD, PYTORCH_JOB, Resource
from finetune_operator.shell.state import OperatorState
from finetune_operator.shell.store import UnreadableError
from finetune_operator.shell.sync import Syncer

log = logging.getLogger(__name__)

WATCHED = (FINETUNE_JOB, JOB, POD, PYTORCH_JOB, MPI_JOB)


class _Backoffs:
    """Seconds between kopf's tries, without an end: an API server that is away for long does not end the operator."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1, 2, 3)
        while True:
            yield 5


def kopf_settings(wanted: Settings) -> kopf.OperatorSettings:
    """How kopf works for us."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    # CRDs that appear later are noticed cluster-wide; for that, kopf has to list and watch them.
    settings.scanning.disabled = bool(wanted.namespaces)
    settings.networking.error_backoffs = _Backoffs()
    settings.networking.connect_timeout = 10
    settings.watching.connect_timeout = 10
    # Each object with news has a task of kopf's for this long: enough to take a burst, and none stays.
    settings.queueing.idle_timeout = 1.0
    for resource in WATCHED:
        if resource is not FINETUNE_JOB:
            settings.watching.label_selectors[_selector(resource)] = JOB_LABEL
    return settings


def _selector(resource: Resource) -> tuple[str, str, str]:
    group, _, version = resource.api_version.rpartition("/")
    return group, version, resource.plural


def registry(
    state: OperatorState, syncer: Syncer, api: Configuration, loop: asyncio.AbstractEventLoop
) -> kopf.OperatorRegistry:
    """The handlers. What they hear is handed over to `loop`, which owns the store."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection(api)

    for resource in WATCHED:
        group, version, plural = _selector(resource)

        @kopf.on.event(group, version, plural, id=f"heard-of-{plural}", param=resource.kind, registry=handlers)
        async def heard(event: kopf.RawEvent, param: Any = "", **_: Any) -> None:
            loop.call_soon_threadsafe(take, state, syncer, param, event)

    return handlers


def take(state: OperatorState, syncer: Syncer, kind: str, event: kopf.RawEvent) -> None:
    """Put what a watch tells into the store, and have the job looked at when it is news."""
    raw: dict[str, Any] = {"kind": kind, **event["object"]}
    try:
        if event["type"] == "DELETED":
            entry = state.store.remove(raw)
        else:
            if event["type"] is None and _known(state, kind, raw):
                # A list that is told anew: what vanished before it is in no event.
                syncer.request(kind, "relist")
            entry = state.store.put(raw)
    except UnreadableError as error:
        log.warning("passed over a %s that cannot be read: %s", kind, error)
        return
    if entry is not None:
        state.queue.add(entry.job)


def _known(state: OperatorState, kind: str, raw: dict[str, Any]) -> bool:
    metadata = raw["metadata"]
    return state.store.get(kind, metadata.get("namespace", ""), metadata["name"]) is not None


async def connection(api: Configuration) -> kopf.ConnectionInfo:
    """The connection that our own client uses, in kopf's words; asked for again when its token is no longer taken."""
    bearer = await api.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _, token = (bearer or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=api.host,
        ca_path=api.ssl_ca_cert,
        ca_data=None if api.ssl_ca_cert else api.ca_cert_data,
        insecure=not api.verify_ssl,
        scheme=(scheme.strip() or "Bearer").capitalize() if token else None,
        token=token.strip() or None,
        certificate_path=api.cert_file,
        private_key_path=api.key_file,
        proxy_url=api.proxy,
    )

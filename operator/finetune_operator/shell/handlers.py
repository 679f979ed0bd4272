"""What kopf hears of jobs, put into the store: nothing is decided here.

Only an `on.event` handler is used. It watches and never writes: no finalizers, no annotations on users' objects, no
events of kopf's own. What runs the jobs is followed by following.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from finetune_operator.api.settings import Settings
from finetune_operator.api.types import GROUP, KIND, PLURAL, VERSION
from finetune_operator.reconcile.types import JobView
from finetune_operator.shell.state import OperatorState
from finetune_operator.shell.store import UnreadableError
from finetune_operator.shell.sync import Syncer

log = logging.getLogger(__name__)

LOGIN_AGAIN_SECONDS = 1.0
"""Before a connection whose credentials were not taken is tried again."""


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
    return settings


def registry(
    state: OperatorState, syncer: Syncer, api: Configuration, loop: asyncio.AbstractEventLoop
) -> kopf.OperatorRegistry:
    """The handlers. What they hear is handed over to `loop`, which owns the store."""
    handlers = kopf.OperatorRegistry()
    logins = itertools.count()

    @kopf.on.login(registry=handlers)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        if number := next(logins):
            await asyncio.sleep(LOGIN_AGAIN_SECONDS)
        # An API server that starts says 401 to tokens that are good. kopf never takes a connection again that has met
        # one, and its watches would end for ever: the number makes it another connection.
        return dataclasses.replace(await connection(api), priority=number)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=handlers)
    async def heard_of_job(event: kopf.RawEvent, **_: Any) -> None:
        loop.call_soon_threadsafe(take, state, syncer, event)

    return handlers


def take(state: OperatorState, syncer: Syncer, event: kopf.RawEvent) -> None:
    """Put what the watch tells into the store, and have the job looked at when it is news."""
    raw: dict[str, Any] = {"kind": KIND, **event["object"]}
    try:
        if event["type"] == "DELETED":
            entry = state.store.remove(raw)
        else:
            if event["type"] is None and _known(state, raw):
                # A list that is told anew: what vanished before it is in no event.
                syncer.request(KIND, "relist")
            entry = state.store.put(raw)
    except UnreadableError as error:
        log.warning("passed over a %s that cannot be read: %s", KIND, error)
        return
    if entry is not None:
        state.queue.add(entry.job, new=isinstance(entry.view, JobView) and entry.view.status.plan is None)


def _known(state: OperatorState, raw: dict[str, Any]) -> bool:
    metadata = raw["metadata"]
    return state.store.get(KIND, metadata.get("namespace", ""), metadata["name"]) is not None


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

"""One process of the operator: kopf.operator with the handlers of handlers.py, in the main thread and its loop."""

from __future__ import annotations

import gc
import random
import socket
from contextlib import suppress
from typing import Any, cast

import kopf

from finetune_operator.controller import handlers
from finetune_operator.controller.cluster.leader import identity
from finetune_operator.controller.kopf_guard import ServedKinds
from finetune_operator.controller.lifecycle import Operator, Options
from finetune_operator.controller.reconcile.reconciler import Decide
from finetune_operator.jobs.render.render_types import FIELD_OWNER
from finetune_operator.kubernetes_api.client import connect
from finetune_operator.kubernetes_api.resources import FINETUNE_JOB

SPARE_CONNECTIONS = 8
"""Connections beside those of workers and watches: for lists, tokens, events."""


async def run(options: Options, decide: Decide) -> None:
    """Run until a signal ends it. NoClusterError when no cluster is configured; OSError when a port is in use; ApiError
    when the API server refuses a request that is needed to begin.
    """
    # Only jobs with faults or a template need them: the first one's validation has a time limit.

    # Imported code stays: full collections, during which no probe is answered, need not inspect its 100,000 objects.
    gc.collect()
    gc.freeze()
    namespaces = options.settings.namespaces
    watches = (1 + len(handlers.CHILDREN)) * max(1, len(namespaces))
    pool = 2 * options.workers + SPARE_CONNECTIONS + watches
    api, _ = await connect(FIELD_OWNER, options.kubeconfig, options.context, pool)
    # The Lease has a connection of its own: after a request that had no answer the next one opens a new connection,
    # instead of another one of a pool that may all lead to a server that is gone; and it waits for no other request.
    lease_api, _ = await connect(FIELD_OWNER, options.kubeconfig, options.context, 1)
    settings, registry = kopf.OperatorSettings(), kopf.get_default_registry()
    # Groups of Kubernetes itself have no dot.
    groups = {child.group_kind.group for child in handlers.CHILDREN if "." in child.group_kind.group}
    kinds = ServedKinds(settings, registry, FINETUNE_JOB, groups)
    liveness = f"http://127.0.0.1:{_free_port()}/"
    operator = Operator(options, api, lease_api, decide, kinds, liveness)
    try:
        await kopf.operator(
            registry=registry,
            settings=settings,
            insights=kinds.insights,
            # kopf would look for the name of the user, which a container's user has not.
            identity=cast(Any, identity()),
            memo=kopf.Memo(operator=operator),
            standalone=True,  # Replicas elect a leader by a Lease, which excludes; peering does not.
            clusterwide=not namespaces,
            namespaces=namespaces,
            liveness_endpoint=liveness,
        )
    except Exception:
        if operator.failure is not None:
            raise operator.failure from None
        raise
    finally:
        for client in (api, lease_api):
            await client.close()  # type: ignore[no-untyped-call]


def _free_port() -> int:
    """Return a port that is free now, below those of clients' connections: kopf binds it later."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise OSError("no port of 127.0.0.1 is free for kopf's liveness endpoint")

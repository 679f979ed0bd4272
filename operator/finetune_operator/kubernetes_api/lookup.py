"""Objects that a job names, one GET each, all at the same time; what may not be read is an answer, too."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

from finetune_operator.jobs.missing_objects import Answers, Facts, NamedKind, NamedObject, Unread
from finetune_operator.kubernetes_api.client import KubernetesClient
from finetune_operator.kubernetes_api.errors import ForbiddenError, NotFoundError
from finetune_operator.kubernetes_api.resources import (
    CLAIM,
    CONFIG_MAP,
    PRIORITY_CLASS,
    SECRET,
    SERVICE_ACCOUNT,
    STORAGE_CLASS,
    Resource,
)

RESOURCES: Mapping[NamedKind, Resource] = {
    "PersistentVolumeClaim": CLAIM,
    "ServiceAccount": SERVICE_ACCOUNT,
    "StorageClass": STORAGE_CLASS,
    "PriorityClass": PRIORITY_CLASS,
    "ConfigMap": CONFIG_MAP,
    "Secret": SECRET,
}


async def look_up(client: KubernetesClient, namespace: str, named: Collection[NamedObject]) -> Answers:
    """Return the facts of each object; values of Secrets are dropped at once. ApiError if there is no answer."""
    wanted = list(dict.fromkeys((one.kind, one.name) for one in named))
    answers = await asyncio.gather(*(_facts(client, namespace, kind, name) for kind, name in wanted))
    return dict(zip(wanted, answers, strict=True))


async def _facts(client: KubernetesClient, namespace: str, kind: NamedKind, name: str) -> Facts | Unread | None:
    resource = RESOURCES[kind]
    try:
        return Facts.of(await client.get(resource, namespace if resource.namespaced else None, name))
    except NotFoundError:
        return None
    except ForbiddenError:
        return Unread(f"no permission to read {resource.plural}")

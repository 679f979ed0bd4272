"""Objects and images that jobs name, looked up in the cluster and in registries with the caller's own rights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from finetune_operator.cli.cluster.cluster_jobs import Cluster, ClusterError, connect
from finetune_operator.cli.local.image_registry import Answer, image_state
from finetune_operator.jobs.missing_objects import LookUp, compare, named_by
from finetune_operator.kubernetes_api.configuration import is_configured

if TYPE_CHECKING:
    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.spec.settings.settings import Settings
    from finetune_operator.spec.types import FineTuneJob


async def look_up_jobs(cluster: Cluster, jobs: Iterable[FineTuneJob], settings: Settings) -> tuple[LookUp, ...]:
    """Return how the objects that exist fit each job. ClusterError if the cluster does not answer."""
    found = []
    for job in jobs:
        named, namespace = named_by(job, settings), job.metadata.namespace or cluster.namespace
        found.append(compare(job, named, await cluster.look_up(namespace, named), namespace))
    return tuple(found)


def look_up_if_configured(
    jobs: Sequence[FineTuneJob], settings: Settings, connection: Connection
) -> tuple[tuple[LookUp, ...], str | None]:
    """Return the same, and the reason if it is not known: there is no cluster, or it does not answer."""

    async def read() -> tuple[LookUp, ...]:
        async with connect(connection) as cluster:
            return await look_up_jobs(cluster, jobs, settings)

    unknown = tuple(LookUp() for _ in jobs)
    if not is_configured(connection.kubeconfig) and connection.kubeconfig is None:
        return unknown, "no cluster is configured"
    try:
        return asyncio.run(read()), None
    except ClusterError as error:
        return unknown, str(error)


def image_states(images: Iterable[str]) -> dict[str, Answer]:
    """Return the state of each image, which is asked once."""
    return {image: image_state(image) for image in dict.fromkeys(images)}

"""Stand-ins for machines and training operators around an API server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster_support.api_access import AsyncApi
from cluster_support.background import Background
from cluster_support.control_plane import Cluster, needs_controllers
from cluster_support.gangs import Gangs
from cluster_support.kserve_stand_in import KServe
from cluster_support.kubelet import Kubelet
from cluster_support.spark_stand_in import SparkOperator


@dataclass(frozen=True)
class StandIns:
    """Stand-ins of one cluster."""

    background: Background
    kubelet: Kubelet
    gangs: Gangs
    watching: AsyncApi


@contextmanager
def running_stand_ins(cluster: Cluster, folder: Path, *, spark: bool = True) -> Iterator[StandIns]:
    """Run nodes and training operators; skip if there are no controllers. `spark`: include the Spark Operator's
    stand-in, which would conflict with the real one.
    """
    needs_controllers(cluster)
    background = Background()
    api = AsyncApi(cluster.access)
    background.run(api.open())
    kubelet = Kubelet(api, background, folder)
    gangs = Gangs(api, background)
    kubelet.up()
    gangs.up()
    KServe(api, background).up()
    if spark:
        SparkOperator(api, background).up()
    try:
        yield StandIns(background, kubelet, gangs, api)
    finally:
        kubelet.down()
        background.close(api.close())

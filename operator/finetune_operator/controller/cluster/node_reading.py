"""The cluster's nodes, for plans of jobs with GPUs.

They are read when such a job has to be planned, at most once a minute. A watch would report every node's heartbeat,
while labels and allocatable resources change when nodes come and go.
"""

from __future__ import annotations

import asyncio
import logging
import time

from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.jobs.state.decision_types import NodesRead
from finetune_operator.kubernetes_api.errors import ApiError, ForbiddenError
from finetune_operator.kubernetes_api.resources import NODE
from finetune_operator.plan.hardware.gpu_nodes import Node, read_node

log = logging.getLogger(__name__)

FRESH_SECONDS = 60.0


class NodeReading:
    """Latest answer of the API server."""

    def __init__(self, kube: Kube, allowed: bool) -> None:
        self._kube = kube
        self._allowed = allowed
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self.answer: NodesRead | None = None

    async def refresh(self) -> None:
        """Read the nodes, if allowed and not done recently. A failure keeps no job from being planned."""
        if not self._allowed:
            return
        async with self._reading:
            if time.monotonic() < self._read_at + FRESH_SECONDS:
                return
            try:
                self.answer = NodesRead(await self._read())
            except ForbiddenError:
                self._failed("the operator has no right to read nodes (rbac.nodes of the chart)")
            except ApiError as error:
                self._failed(f"the nodes could not be read: {error}")
                return  # the next plan reads them again
            self._read_at = time.monotonic()

    async def _read(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        async for page in self._kube.pages(NODE):
            if page.first:
                nodes.clear()
            nodes += map(read_node, page.items)
        return tuple(nodes)

    def _failed(self, why: str) -> None:
        if self.answer is None or self.answer.failure != why:
            log.warning("%s", why)
        if self.answer is None or self.answer.failure is not None:
            self.answer = NodesRead(failure=why)

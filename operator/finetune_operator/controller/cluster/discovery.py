"""Launchers, KServe, HTTPRoutes, HTTPScaledObjects and custom metrics, as far as the API server serves them.

They are read again when a job has to be planned, at most every few seconds, so that a training operator that is
installed later is used without a restart. No right is needed for it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.kubernetes_api.resources import (
    CUSTOM_METRICS_GROUP,
    DEPLOYMENT,
    HTTP_ROUTE,
    HTTP_SCALED_OBJECT,
    INFERENCE_SERVICE,
    LAUNCHER_RESOURCES,
    Resource,
)
from finetune_operator.spec.launcher_rows import BUILT_IN, LauncherName

log = logging.getLogger(__name__)

FRESH_SECONDS = 10.0


class Discovery:
    """Latest answer of the API server."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self.served = BUILT_IN
        self.kserve = False
        """True if InferenceServices are served."""
        self.custom_metrics = False
        """True if the custom metrics API is served, by an adapter such as prometheus-adapter."""
        self.http_routes = False
        """True if HTTPRoutes of the Gateway API are served."""
        self.http_scaled_objects = False
        """True if HTTPScaledObjects of the KEDA HTTP add-on are served."""
        self.changed = asyncio.Event()
        """Set when the served kinds change; for one listener, which clears it."""

    @property
    def resources(self) -> tuple[Resource, ...]:
        """Kinds that attempts can have, and kinds that run servers."""
        launchers = (LAUNCHER_RESOURCES[launcher] for launcher in self.served)
        # An InferenceService is known before the Deployment that KServe creates for it.
        return *launchers, *((INFERENCE_SERVICE,) if self.kserve else ()), DEPLOYMENT

    @property
    def endpoint_extensions(self) -> tuple[bool, bool, bool]:
        """APIs that an endpoint uses beside the kinds above: custom metrics, HTTPRoutes and HTTPScaledObjects."""
        return self.custom_metrics, self.http_routes, self.http_scaled_objects

    async def served_now(self) -> tuple[LauncherName, ...]:
        """Return a fresh answer. ApiError."""
        await self.refresh()
        return self.served

    async def refresh(self) -> None:
        """Ask the API server, unless the answer is fresh."""
        async with self._reading:
            if time.monotonic() < self._read_at + FRESH_SECONDS:
                return
            served, kserve = await self._kube.served_launchers(), await self._kube.serves(INFERENCE_SERVICE)
            if served != self.served:
                log.info("the API server serves the launchers %s", ", ".join(served))
            if kserve != self.kserve:
                log.info("the API server %s InferenceServices of KServe", "serves" if kserve else "no longer serves")
            custom_metrics = await self._kube.serves_group(CUSTOM_METRICS_GROUP)
            if custom_metrics != self.custom_metrics:
                log.info("the API server %s custom metrics", "serves" if custom_metrics else "no longer serves")
            http_routes = await self._kube.serves(HTTP_ROUTE)
            if http_routes != self.http_routes:
                log.info("the API server %s HTTPRoutes", "serves" if http_routes else "no longer serves")
            scaled = await self._kube.serves(HTTP_SCALED_OBJECT)
            if scaled != self.http_scaled_objects:
                log.info("the API server %s HTTPScaledObjects", "serves" if scaled else "no longer serves")
            if (served, kserve) != (self.served, self.kserve):
                self.changed.set()
            self.served, self.kserve, self.custom_metrics = served, kserve, custom_metrics
            self.http_routes, self.http_scaled_objects = http_routes, scaled
            self._read_at = time.monotonic()

    def outdated(self) -> None:
        """Discard the answer: an object of such a kind was refused."""
        self._read_at = float("-inf")

"""Read the metrics of an endpoint's servers during a canary, each by one plain GET of its pod's address.

Pods run programs that users choose: an answer is limited in time and size, redirects are not followed, and nothing of
an answer but its numbers goes anywhere. Counters of the last reading are in memory; a new process of the operator takes
its first reading as the base.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from finetune_contract.layout import INFERENCE_PATHS, LATENCY_METRIC, METRICS_PATH, REQUESTS_METRIC, SERVE_PORT
from finetune_operator.launchers.vllm_facts import VLLM_FAILED, VLLM_REJECTED, VLLM_REQUESTS, VLLM_SECONDS
from finetune_operator.reconcile.endpoint_canary import reading, reading_seconds, servers_to_read
from finetune_operator.reconcile.reconcile_types import CanaryReading, JobView, PodView, RequestCounts

READ_SECONDS = 3.0
"""Time limit of one server's answer, which takes some milliseconds unless the server is stuck."""
MOST_BYTES = 512 * 1024
"""Largest answer; those of our servers have some 20 KiB, and those of vLLM several times as many."""
MOST_REQUESTS = 2**53
"""Beyond it a JSON number is not exact."""
TOO_MANY_REQUESTS, SERVER_ERROR = 429, 500


@dataclass
class ServerMemory:
    """Last reading of one job's servers, which may be lost."""

    counts: dict[str, RequestCounts] | None = None
    """Counters by the pod's uid; None before the first reading."""
    read_at: datetime | None = None
    """Time of the last reading without a failure."""
    tried_at: datetime | None = None
    canary: int | None = None
    """Revision of the canary that was read."""
    reading: CanaryReading | None = None


@dataclass
class ServerReading:
    """Reader of servers' metrics."""

    port: int = SERVE_PORT
    seconds: float = READ_SECONDS
    """Time limit of one server's answer."""
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    async def refresh(self, job: JobView, pods: Iterable[PodView], memory: ServerMemory, now: datetime) -> None:
        """Read the servers of both revisions if a canary is in progress and the interval is over."""
        servers = servers_to_read(job, pods)
        endpoint = job.status.endpoint
        canary = None if endpoint is None or endpoint.canary is None else endpoint.canary.revision
        if not servers or canary is None or canary != memory.canary:
            memory.counts = memory.read_at = memory.tried_at = memory.reading = None
            memory.canary = canary
        if not servers or canary is None:
            return
        if memory.tried_at is not None and (now - memory.tried_at).total_seconds() < reading_seconds(job):
            return
        memory.tried_at = now
        every = [pod for of_revision in servers.values() for pod in of_revision]
        read = dict(zip((pod.uid for pod in every), await asyncio.gather(*map(self._read, every)), strict=True))
        seconds = 0.0 if memory.read_at is None else (now - memory.read_at).total_seconds()
        memory.reading = reading(servers, canary, read, memory.counts, now, seconds)
        if memory.reading.failure is None:
            counts = {uid: one for uid, one in read.items() if isinstance(one, RequestCounts)}
            memory.counts = {**(memory.counts or {}), **counts}
            memory.read_at = now

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _read(self, pod: PodView) -> RequestCounts | str:
        """Return the counters of a server, or the reason why it could not be read."""
        try:
            address = ipaddress.ip_address(pod.address or "")
        except ValueError:
            return "it has no IP address"
        host = f"[{address}]" if address.version == 6 else str(address)
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self.seconds)
            self._session = aiohttp.ClientSession(
                timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        try:
            async with self._session.get(f"http://{host}:{self.port}{METRICS_PATH}", allow_redirects=False) as answer:
                if answer.status != 200:
                    return f"{METRICS_PATH} answered {answer.status}"
                body = await _limited(answer.content)
        except TimeoutError:
            return f"no answer within {self.seconds:g} s (is a NetworkPolicy in the way?)"
        except (aiohttp.ClientError, OSError) as error:
            return f"{type(error).__name__} at {host} port {self.port}"
        if body is None:
            return f"its answer is larger than {MOST_BYTES:,} bytes"
        try:
            return request_counts(body.decode())
        except (ValueError, OverflowError):
            return "its answer is not in the format of Prometheus"


async def _limited(content: aiohttp.StreamReader) -> bytes | None:
    """Return the body; None if it is larger than the limit."""
    body = b""
    while len(body) <= MOST_BYTES:
        more = await content.read(MOST_BYTES + 1 - len(body))
        if not more:
            return body
        body += more
    return None


def request_counts(text: str) -> RequestCounts:
    """Return the requests to the model that a server's metrics count. ValueError or OverflowError: the text is not in
    the format of Prometheus, or has impossible numbers.
    """
    requests = errors = 0
    seconds = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in (VLLM_REQUESTS, VLLM_REJECTED):
                failed = sample.name == VLLM_REJECTED or sample.labels.get("finished_reason") == VLLM_FAILED
                requests += int(sample.value)
                errors += int(sample.value) * failed
            elif sample.name == VLLM_SECONDS:
                seconds += sample.value
            if sample.labels.get("path") not in INFERENCE_PATHS:
                continue
            if sample.name == f"{REQUESTS_METRIC}_total":
                requests += int(sample.value)
                errors += int(sample.value) * _is_error(sample.labels.get("code", ""))
            elif sample.name == f"{LATENCY_METRIC}_sum":
                seconds += sample.value
    if not (0 <= errors <= requests <= MOST_REQUESTS and 0 <= seconds <= MOST_REQUESTS):
        raise ValueError("impossible numbers")
    return RequestCounts(requests, errors, seconds)


def _is_error(code: str) -> bool:
    return code.isdecimal() and (int(code) == TOO_MANY_REQUESTS or int(code) >= SERVER_ERROR)

"""Canary of a new revision: its servers, the readings of both revisions' metrics, and the verdict.

A canary is one revision of few servers. Either the Service selects it beside the serving one, so that its share of the
requests is its share of the servers; or an HTTPRoute leads a share to a Service of its own. The operator reads the
counters of both revisions' servers. The sums are in the status, since counters are lost with their pods, and readings
with the operator. A canary fails if its errors or its latency exceed the bounds of spec.endpoint.traffic, or if one of
its servers exits. It passes after `canarySeconds` of readings without that. Time without readings does not count, so
that nobody takes silence for health.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TypeAlias

from finetune_contract.choices import Stage
from finetune_operator.api.status_times import seconds_since, whole_seconds
from finetune_operator.api.types import CanaryStatus, RequestsStatus, TrafficSpec
from finetune_operator.reconcile.reconcile_state import ReconcileState, Stalled
from finetune_operator.reconcile.reconcile_types import CanaryReading, EndpointView, JobView, PodView, RequestCounts
from finetune_operator.reconcile.status import condition

LONGEST_INTERVAL_SECONDS = 10.0
"""Longest interval between two readings; each changes the status."""
READINGS = 4
"""Least number of readings within `canarySeconds`."""
MIN_REQUESTS = 50
"""Requests of each revision before their latencies are compared."""
MIN_ERRORS = 5
"""Errors of a canary that end it before its time is over, so that a single one among few requests does not."""
MOST_PODS = 32
"""Servers of one revision that are read; more would not change the ratios."""
UNREAD_SECONDS = 900
"""Time without readings after which the job is Stalled; as long as for a revision that does not become ready."""
MESSAGE_LIMIT = 1024

Counts: TypeAlias = Mapping[str, RequestCounts]
"""Counters of servers since their start, by the uid of the pod."""


@dataclass(frozen=True)
class Canary:
    """Canary after one reconcile."""

    servers: int
    """Number of its servers."""
    status: CanaryStatus | None = None
    """None before all of its servers are ready."""
    failure: str | None = None
    """Reason why it fails now."""

    @property
    def limit(self) -> int | None:
        """Number of servers to request; None once it has passed: as many as the endpoint needs."""
        return None if self.status is not None and self.status.passed_time is not None else self.servers


def canary_servers(traffic: TrafficSpec, running: int) -> int:
    """Return the number of servers of a canary beside `running` others, at least one: as many as have a share of at
    most `canaryPercent`, or with weights, as many as get no more requests each than the others do.
    """
    if traffic.canary_percent is None:
        return 1
    share = running * traffic.canary_percent / (100 - traffic.canary_percent)
    return max(1, math.floor(share) if weight_of(traffic) is None else math.ceil(share))


def weight_of(traffic: TrafficSpec) -> int | None:
    """Return the share of the requests that an HTTPRoute gives a canary, in percent; None without an HTTPRoute."""
    return None if traffic.gateway is None else traffic.canary_percent


def is_same_canary(one: CanaryStatus | None, other: CanaryStatus) -> bool:
    """Return whether it is the same canary: another weight starts it over."""
    return one is not None and (one.revision, one.weight) == (other.revision, other.weight)


def next_canary(
    state: ReconcileState, traffic: TrafficSpec, target: int, target_view: EndpointView | None, serving: EndpointView
) -> Canary:
    """Return the canary `target` beside the revision that serves, after this reconcile."""
    stored = None if state.status.endpoint is None else state.status.endpoint.canary
    weight = weight_of(traffic)
    if stored is None or (stored.revision, stored.weight) != (target, weight) or target_view is None:
        servers = canary_servers(traffic, serving.replicas)
        if target_view is None or not target_view.ready or target_view.replicas != servers:
            return Canary(servers)
        return Canary(servers, CanaryStatus(revision=target, servers=servers, weight=weight, start_time=state.now))
    now = _with_reading(stored, state.observed.canary_reading, serving.revision, target_view)
    failure = _exited(state, target) or _violation(now, traffic, serving.revision, over=False)
    if failure is None and now.passed_time is None and now.measured_seconds >= traffic.canary_seconds:
        failure = _violation(now, traffic, serving.revision, over=True)
        if failure is None:
            now = now.model_copy(update={"passed_time": state.now})
    return Canary(stored.servers, now, failure)


def _with_reading(
    canary: CanaryStatus, reading: CanaryReading | None, serving: int, servers: EndpointView
) -> CanaryStatus:
    """Return the canary with a reading that it does not include yet."""
    if reading is None or reading.at <= canary.start_time:
        return canary
    at = whole_seconds(reading.at)
    if reading.failure is not None:
        since = canary.problem_time or at
        return canary.model_copy(update={"problem": reading.failure[:MESSAGE_LIMIT], "problem_time": since})
    if canary.read_time is not None and at <= canary.read_time:
        return canary
    counts = dict(reading.counts)
    # Servers that are not ready get no requests, and time without requests proves nothing.
    measured = reading.seconds if servers.available >= canary.servers else 0.0
    return canary.model_copy(
        update={
            "read_time": at,
            "measured_seconds": round(canary.measured_seconds + measured, 1),
            "serving": _sum(canary.serving, counts.get(serving, RequestCounts())),
            "canary": _sum(canary.canary, counts.get(canary.revision, RequestCounts())),
            "problem": None,
            "problem_time": None,
        }
    )


def _sum(before: RequestsStatus, more: RequestCounts) -> RequestsStatus:
    return RequestsStatus(
        requests=before.requests + more.requests,
        errors=before.errors + more.errors,
        seconds=round(before.seconds + more.seconds, 3),
    )


# -------------------------------------------------------------------------------------------------------- the verdict


def _exited(state: ReconcileState, revision: int) -> str | None:
    """Return the exit of one of the canary's servers, unless its node or another pod displaced it."""
    for pod in state.pods(Stage.SERVE, revision):
        displaced = pod.deleted or pod.deleting_until is not None or pod.disruption or pod.status_reason
        if pod.ended is not None and not displaced:
            return f"the server in pod {pod.name} exited with code {pod.ended.exit_code}"
    return None


def _violation(canary: CanaryStatus, traffic: TrafficSpec, serving: int, over: bool) -> str | None:
    """Return which bound the canary exceeds; None if it exceeds none. `over`: its time is over, so any error counts."""
    new, old = canary.canary, canary.serving
    share, before = _error_percent(new), _error_percent(old)
    if share > before + traffic.max_error_percent and (over or new.errors >= MIN_ERRORS):
        return (
            f"{new.errors:,} of its {new.requests:,} requests failed ({share:.1f} %), and {before:.1f} % of those to "
            f"revision {serving} (maxErrorPercent is {traffic.max_error_percent:g})"
        )
    if min(new.requests, old.requests) < MIN_REQUESTS or old.seconds <= 0:
        return None
    ratio = _latency(new) / _latency(old)
    if ratio <= traffic.max_latency_ratio:
        return None
    return (
        f"its mean latency is {1000 * _latency(new):.0f} ms, {ratio:.1f} times that of revision {serving} "
        f"(maxLatencyRatio is {traffic.max_latency_ratio:g})"
    )


def _error_percent(one: RequestsStatus) -> float:
    return 100 * one.errors / max(1, one.requests)


def _latency(one: RequestsStatus) -> float:
    return one.seconds / max(1, one.requests)


def figures(canary: CanaryStatus, serving: int | None) -> str:
    """Return a sentence on the requests during a canary, for the history and for events."""
    other = "the serving revision" if serving is None else f"revision {serving}"
    return f"{_figures(canary.canary)} in {canary.measured_seconds:.0f} s; {other}: {_figures(canary.serving)}."


def _figures(one: RequestsStatus) -> str:
    latency = f", mean latency {1000 * _latency(one):.0f} ms" if one.requests else ""
    return f"{one.errors:,} of {one.requests:,} requests failed{latency}"


# ----------------------------------------------------------------------------------------------------------- readings


def reading_seconds(job: JobView) -> float:
    """Return the interval between two readings."""
    endpoint = None if job.job is None else job.job.spec.endpoint
    traffic = None if endpoint is None else endpoint.traffic
    seconds = LONGEST_INTERVAL_SECONDS if traffic is None else traffic.canary_seconds / READINGS
    return min(LONGEST_INTERVAL_SECONDS, max(1.0, seconds))


def servers_to_read(job: JobView, pods: Iterable[PodView]) -> dict[int, tuple[PodView, ...]]:
    """Return the running servers of both revisions during a canary, by revision; empty if there is no canary."""
    endpoint = job.status.endpoint
    if job.job is None or endpoint is None or endpoint.canary is None or endpoint.revision is None:
        return {}
    running = [pod for pod in pods if pod.stage is Stage.SERVE and _answers(pod)]
    revisions = (endpoint.revision, endpoint.canary.revision)
    return {
        number: tuple(sorted((pod for pod in running if pod.attempt == number), key=lambda pod: pod.name)[:MOST_PODS])
        for number in revisions
    }


def _answers(pod: PodView) -> bool:
    return pod.phase == "Running" and pod.address is not None and not pod.deleted and pod.deleting_until is None


def reading(
    servers: Mapping[int, tuple[PodView, ...]],
    canary: int,
    read: Mapping[str, RequestCounts | str],
    before: Counts | None,
    at: datetime,
    seconds: float,
) -> CanaryReading:
    """Return the requests since the counters in `before`, which are None at the first reading. `read`: counters by the
    pod's uid, or the reason why a server could not be read. A server that did not run before counts from zero.
    """
    for revision, pods in servers.items():
        failures = [f"pod {pod.name}: {text}" for pod in pods if isinstance(text := read[pod.uid], str)]
        # The serving revision may scale meanwhile, so that a server of it does not answer yet, or no more.
        if not pods or len(failures) == len(pods) or (failures and revision == canary):
            why = failures[0] if failures else f"revision {revision} has no running server"
            return CanaryReading(at, failure=f"The metrics of revision {revision} cannot be read: {why}.")
    if before is None:
        return CanaryReading(at)
    counts = []
    for revision, pods in servers.items():
        total = RequestCounts()
        for pod in pods:
            if isinstance(now := read[pod.uid], RequestCounts):
                new = pod.started_at is not None and pod.started_at >= at - timedelta(seconds=seconds)
                total = _added(total, _since(now, before.get(pod.uid, RequestCounts() if new else now)))
        counts.append((revision, total))
    return CanaryReading(at, seconds, tuple(counts))


def _since(now: RequestCounts, before: RequestCounts) -> RequestCounts:
    """Return the requests between two counters; a server that was restarted counts from zero."""
    if now.requests < before.requests:
        return now
    return RequestCounts(
        now.requests - before.requests, max(0, now.errors - before.errors), max(0.0, now.seconds - before.seconds)
    )


def _added(one: RequestCounts, other: RequestCounts) -> RequestCounts:
    return replace(
        one,
        requests=one.requests + other.requests,
        errors=one.errors + other.errors,
        seconds=one.seconds + other.seconds,
    )


# ---------------------------------------------------------------------------------------------- in status and events


def with_canary_problem(state: ReconcileState, before: CanaryStatus | None) -> ReconcileState:
    """Return the state with an event once the servers cannot be read, Stalled if that lasts, and the time of the next
    reading. `before`: canary in the stored status.
    """
    endpoint = state.status.endpoint
    canary = None if endpoint is None else endpoint.canary
    if canary is None:
        return state
    state = state.requeue(state.now + timedelta(seconds=reading_seconds(state.job)))
    if canary.problem is None:
        return state
    if before is None or before.problem is None:
        state = state.with_event("CanaryNotMeasured", canary.problem, warning=True)
    if seconds_since(canary.problem_time, state.now) < UNREAD_SECONDS or state.findings.stalled is not None:
        return state
    stalled = Stalled("CanaryNotMeasured", f"The canary does not end: {canary.problem}")
    known = condition(state.job.status, "Stalled")
    if known is None or known.reason != stalled.reason:
        state = state.with_event(stalled.reason, stalled.message, warning=True)
    return state.with_findings(stalled=stalled)

"""Events about objects that keep an attempt from starting: the only place where Kubernetes tells some of the causes.

They are read once a wait is longer than usual, and then at intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import Field, JsonValue, ValidationError

from finetune_contract.report import shortened
from finetune_operator.jobs.outcomes.wait_ends import scheduling_end
from finetune_operator.jobs.state.decision_state import job_redactor
from finetune_operator.jobs.state.decision_types import ChildView, JobView, PodView, StartEvent
from finetune_operator.spec.kubernetes_objects import EPOCH, Raw, Time
from finetune_operator.spec.printable import printable

QUIET_SECONDS = 60
"""Wait after which events are read, and between two readings."""
MESSAGE_LIMIT = 1024
_MOST_OBJECTS = 3
_SCHEDULING = frozenset({"Scheduled", "FailedScheduling"})
"""The scheduler's events, which the pod's condition repeats."""


@dataclass(frozen=True)
class EventSource:
    """Object whose events are read."""

    kind: str
    name: str
    uid: str | None = None


class _Series(Raw):
    last_observed_time: Time | None = None


class _Object(Raw):
    kind: str = ""
    name: str = ""


class _Event(Raw):
    involved_object: _Object = _Object()
    reason: str = ""
    message: str = ""
    type: str = ""
    event_time: Time | None = None
    last_timestamp: Time | None = None
    series: _Series | None = Field(default=None)

    @property
    def time(self) -> datetime:
        """Return when it was seen last."""
        series = None if self.series is None else self.series.last_observed_time
        return max(one for one in (series, self.last_timestamp, self.event_time, EPOCH) if one is not None)


def wanted_events(
    job: JobView, children: Sequence[ChildView], pods: Sequence[PodView], now: datetime
) -> tuple[EventSource, ...]:
    """Return the objects whose events may tell why the running attempt does not start; none for a short wait: its child
    while it has no pods, else its first pod that waits. `children` and `pods` are those of the job.
    """
    stage = next((one for one in job.status.stages if one.state == "Running"), None)
    if stage is None:
        return ()
    attempt, long = (stage.name, stage.attempt), now - timedelta(seconds=QUIET_SECONDS)
    pods = [one for one in pods if (one.stage, one.attempt) == attempt]
    child = next((one for one in children if (one.stage, one.attempt) == attempt), None)
    if child is not None and not pods and child.state == "Pending" and child.created <= long:
        return (EventSource(child.ref.kind, child.ref.name, child.ref.uid),)
    waiting = [pod for pod in pods if pod.phase == "Pending" and pod.waiting is None and pod.deleting_until is None]
    for pod in sorted(waiting, key=lambda pod: (pod.optional, pod.created, pod.name)):
        if (pod.scheduled or pod.created) > long:
            continue
        source = EventSource("Pod", pod.name, pod.uid)
        if pod.node is not None:
            return (source,)
        # Full nodes need no event; claims and autoscalers report by theirs.
        if pod.unschedulable is not None and scheduling_end(pod.unschedulable, ()).waits_for != "Capacity":
            claims = (EventSource("PersistentVolumeClaim", name) for name in pod.claims)
            return (source, *claims)[:_MOST_OBJECTS]
    return ()


def newest_event(job: JobView, values: Sequence[Mapping[str, JsonValue]]) -> StartEvent | None:
    """Return the newest of an object's events, a warning before others of the same second; None if there is none.

    An older warning is over: whatever it reports has succeeded since, as an image is pulled once volumes are mounted.
    """
    events = []
    for value in values:
        try:
            event = _Event.model_validate(value)
        except ValidationError:
            continue
        if event.reason not in _SCHEDULING:
            events.append(event)
    if not events:
        return None
    newest = max(events, key=lambda event: (event.time, event.type == "Warning"))
    message = shortened(job_redactor(job).text(printable(newest.message)), MESSAGE_LIMIT)
    involved = newest.involved_object
    return StartEvent(involved.kind, involved.name, newest.reason, message, newest.type == "Warning")

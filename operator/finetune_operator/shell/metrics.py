"""Figures about the operator for Prometheus.

Labels are drawn from closed sets, so that the number of series does not grow with the number of jobs; a value outside
its set is counted as `other`. No name of a job, namespace, pod or node is ever a label: metrics are readable by people
who may not read the jobs.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from finetune_contract.layout import FailureClass
from finetune_operator.api.types import FineTuneJobStatus, Phase, StageStatus
from finetune_operator.reconcile.remedies import OperatorCause
from finetune_operator.reconcile.times import moment
from finetune_operator.shell.kube import LAUNCHER_RESOURCES, RESOURCES

OTHER = "other"

RESYNC_REASONS = frozenset({"start", "leadership", "outage", "relist"})
VERBS = frozenset({"get", "list", "watch", "create", "update", "patch", "delete"})
RESOURCE_NAMES = frozenset(
    {"leases", "finetunejobs/status", "pods/log"}
    | {resource.plural for resource in RESOURCES}
    | {f"{resource.plural}/discovery" for resource in LAUNCHER_RESOURCES.values()}
)
"""What requests are about, in the words of `kube.py`."""

_PHASES: tuple[str, ...] = get_args(Phase)
_CAUSES = frozenset[str](FailureClass) | frozenset[str](OperatorCause)
_STAGE_BUCKETS = (10, 30, 60, 300, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86_400, 3 * 86_400)
"""Seconds: a check of some rows takes half a minute, a training run days."""
_RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
"""Seconds: one pass is a millisecond of thinking and a few requests."""


class Metrics:
    """What the parts of the operator tell, each by one method; `exposition` is what Prometheus reads."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        # Memory, processor seconds and open files of this process, where the system tells them.
        ProcessCollector(registry=registry)
        self._jobs = Gauge("finetune_jobs", "FineTuneJobs by phase.", ["phase"], registry=registry)
        self._stages = Histogram(
            "finetune_stage_seconds",
            "Duration of attempts at a stage, from the start of the child to its end.",
            ["stage", "outcome"],
            buckets=_STAGE_BUCKETS,
            registry=registry,
        )
        self._restarts = Counter(
            "finetune_restarts", "Attempts made anew, by the class of the failure before.", ["cause"], registry=registry
        )
        self._reconcile = Histogram(
            "finetune_reconcile_seconds",
            "Duration of one pass over one job, requests included.",
            buckets=_RECONCILE_BUCKETS,
            registry=registry,
        )
        self._reconcile_errors = Counter(
            "finetune_reconcile_errors", "Passes that ended in an error and are made again.", registry=registry
        )
        self._requests = Counter(
            "finetune_api_requests",
            "Requests to the API server by verb, resource and status code; code 0: no answer.",
            ["verb", "resource", "code"],
            registry=registry,
        )
        self._request_seconds = Histogram(
            "finetune_api_request_seconds",
            "Time until the API server had answered, by verb.",
            ["verb"],
            buckets=_RECONCILE_BUCKETS,
            registry=registry,
        )
        self._depth = Gauge("finetune_queue_depth", "Jobs that wait for a worker.", registry=registry)
        self._lag = Gauge(
            "finetune_event_loop_lag_seconds", "How much too late the event loop woke up last.", registry=registry
        )
        self._leading = Gauge("finetune_leading", "1 where this replica acts, 0 where it stands by.", registry=registry)
        self._posts = Counter(
            "finetune_progress_posts", "Progress reports by the status code of the answer.", ["code"], registry=registry
        )
        self._resyncs = Counter(
            "finetune_resyncs", "Times that everything was listed again, by reason.", ["reason"], registry=registry
        )
        self._phases: Callable[[], Iterable[str]] = tuple

    def follow_jobs(self, phases: Callable[[], Iterable[str]]) -> None:
        """Ask `phases` for the phase of every job whenever metrics are read."""
        self._phases = phases

    def status_written(self, before: FineTuneJobStatus, after: FineTuneJobStatus) -> None:
        """Counts attempts that ended and attempts that were made anew between the two."""
        earlier = {stage.name: stage for stage in before.stages}
        for stage in after.stages:
            then = earlier.get(stage.name)
            if stage.state in ("Succeeded", "Failed") and (then is None or then.state != stage.state):
                self._stage_ended(stage)
        if after.restarts > before.restarts:
            cause = after.failure or before.failure
            self._restarts.labels(_known(cause.failure_class if cause else OTHER, _CAUSES)).inc(
                after.restarts - before.restarts
            )

    def _stage_ended(self, stage: StageStatus) -> None:
        started, ended = moment(stage.start_time), moment(stage.completion_time)
        if started is not None and ended is not None:
            seconds = max(0.0, (ended - started).total_seconds())
            self._stages.labels(stage.name, stage.state.lower()).observe(seconds)

    def pass_done(self, seconds: float, outcome: str) -> None:
        """One pass over a job."""
        self._reconcile.observe(seconds)
        if outcome == "failed":
            self._reconcile_errors.inc()

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One request to the API server; `code` is 0 when there was no answer."""
        answered = str(code) if 100 <= code <= 599 else "0"
        self._requests.labels(_known(verb, VERBS), _known(resource, RESOURCE_NAMES), answered).inc()
        self._request_seconds.labels(_known(verb, VERBS)).observe(seconds)

    def follow_queue(self, depth: Callable[[], int]) -> None:
        """Ask `depth` for the length of the queue whenever metrics are read."""
        self._depth.set_function(depth)

    def event_loop_lag(self, seconds: float) -> None:
        self._lag.set(seconds)

    def follow_leading(self, leading: Callable[[], bool]) -> None:
        """Ask `leading` whether this replica acts whenever metrics are read."""
        self._leading.set_function(lambda: float(leading()))

    def progress_post(self, code: int) -> None:
        self._posts.labels(str(code)).inc()

    def resynced(self, reason: str) -> None:
        """Everything was listed again."""
        self._resyncs.labels(_known(reason, RESYNC_REASONS)).inc()

    def exposition(self) -> bytes:
        """All figures in Prometheus' text format, version 0.0.4."""
        counted = Tally(_known(phase, _PHASES) for phase in self._phases())
        for phase in (*_PHASES, OTHER):
            self._jobs.labels(phase).set(counted[phase])
        return generate_latest(self._registry)


def _known(value: str, known: Iterable[str]) -> str:
    return value if value in known else OTHER

"""Metrics of the operator and its jobs for Prometheus.

Labels are drawn from closed sets (`metric_families.py`), so that the number of series does not grow with the number of
jobs. No name of a job, namespace, pod or node is ever a label: metrics are readable by people who may not read the
jobs.

Counters of jobs count statuses that this process has written. A status names the version that it was computed from, so
that of several replicas one alone writes each change, and the sum over replicas counts it once, also when the
leadership changes in between. A process that ends between the write and the count, or never learns that its write was
accepted, loses that one count; nothing is counted twice. Counts end with the process: they begin at zero in the next,
which `rate` and `increase` handle.

Gauges of jobs are exported by every replica, as each has the whole view: take their `max` over replicas, not their sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Generic, Literal, TypeAlias, TypeVar, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.plan_check import OFF_SHARE
from finetune_operator.jobs.fleet_metrics import (
    CapacityLabel,
    Fleet,
    PlanFigure,
    estimate_ratio,
    plan_ratios,
    usage_added,
    wait_seconds,
)
from finetune_operator.jobs.outcomes.remedies import OperatorCause
from finetune_operator.jobs.outcomes.status import ended
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.kubernetes_api.resources import INFERENCE_SERVICE, LAUNCHER_RESOURCES, OPENID, RESOURCES
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import FineTuneJobStatus, Phase, StageStatus

# ------------------------------------------------------------------------------------------------------------- families
# A value outside of its set is counted as `other`, so that no text from outside becomes a series.

OTHER = "other"

M = TypeVar("M", bound=MetricWrapperBase)
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

# A time of creation beside each counter would double their series, and nothing here reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Row:
    """Description of a metric."""

    name: str
    """Name in queries; a histogram's ends in _bucket, _sum and _count there."""
    kind: Kind
    labels: Mapping[str, tuple[str, ...]]
    """Values of each label, in order."""
    meaning: str
    max_series: int
    """Maximum number of series."""


class Family(Generic[M]):
    """One metric."""

    def __init__(self, metric: M, labels: Mapping[str, tuple[str, ...]]) -> None:
        self._metric: M = metric
        self.labels = labels
        """Values of each label."""

    def of(self, *values: str) -> M:
        """Return the child for these values of the labels, in their order."""
        if not self.labels and not values:
            return self._metric
        known = zip(values, self.labels.values(), strict=True)
        return self._metric.labels(*(value if value in allowed else OTHER for value, allowed in known))

    def show(self, *rows: Sequence[str]) -> None:
        """Create these series from the start: a series that appears with its first count has no increase in a query."""
        for row in rows or itertools.product(*self.labels.values()):
            self.of(*row)


class Families:
    """All metrics of a registry, in the order of the reference."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rows: list[Row] = []

    def counter(self, name: str, meaning: str, **labels: Collection[str]) -> Family[Counter]:
        """Add a counter; `name` without _total."""
        values = _ordered(labels)
        self.rows.append(Row(f"{name}_total", "counter", values, meaning, _combinations(values)))
        return Family(Counter(name, meaning, list(values), registry=self.registry), values)

    def gauge(self, name: str, meaning: str, **labels: Collection[str]) -> Family[Gauge]:
        """Add a gauge."""
        values = _ordered(labels)
        self.rows.append(Row(name, "gauge", values, meaning, _combinations(values)))
        return Family(Gauge(name, meaning, list(values), registry=self.registry), values)

    def histogram(
        self, name: str, meaning: str, buckets: Sequence[float], **labels: Collection[str]
    ) -> Family[Histogram]:
        """Add a histogram; `buckets` are upper bounds, to which the one without a bound is added."""
        values = _ordered(labels)
        # Beside the buckets: the one without a bound, the sum and the number.
        self.rows.append(Row(name, "histogram", values, meaning, _combinations(values) * (len(buckets) + 3)))
        metric = Histogram(name, meaning, list(values), buckets=buckets, registry=self.registry)
        return Family(metric, values)


def _ordered(labels: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """Return the labels with `other` at the end of every set; sets without an order of their own are sorted."""
    return {
        name: (*(one for one in (sorted(values) if isinstance(values, frozenset) else values) if one != OTHER), OTHER)
        for name, values in labels.items()
    }


def _combinations(labels: Mapping[str, Iterable[str]]) -> int:
    return len(list(itertools.product(*labels.values())))


# -------------------------------------------------------------------------------------------------------------- metrics

RESYNC_REASONS = frozenset({"start", "leadership", "outage", "relist"})
VERBS = frozenset({"get", "list", "watch", "create", "update", "patch", "delete"})
RESOURCE_NAMES = frozenset(
    {"leases", "finetunejobs/status", "pods/log", "apis/discovery", OPENID}
    | {resource.plural for resource in RESOURCES}
    | {f"{resource.plural}/discovery" for resource in (*LAUNCHER_RESOURCES.values(), INFERENCE_SERVICE)}
)
"""Resources of requests, as `kube.py` names them."""
NO_ANSWER = "0"
API_CODES = (
    NO_ANSWER, "200", "201", "202", "400", "401", "403", "404", "405", "409", "410", "413", "415", "422", "429", "500",
    "502", "503", "504",
)  # fmt: skip
SERVERS = ("progress", "webhook")
"""Servers that have a certificate."""
POST_CODES = ("200", "400", "401", "403", "404", "405", "408", "413", "429", "500", "503")
"""Answers of the progress server."""
NO_CAUSE = "none"
"""Cause of jobs that have succeeded."""

_PHASES: tuple[str, ...] = get_args(Phase)
_STAGES = tuple(stage.value for stage in Stage)
_CAPACITIES: tuple[str, ...] = get_args(CapacityLabel)
_STRATEGIES = ("single", "ddp", "fsdp", *(f"deepspeed-zero{stage}" for stage in range(4)))
_CAUSES = (*(cause.value for cause in FailureClass), *(cause.value for cause in OperatorCause))
_STAGE_BUCKETS = (10, 30, 60, 300, 900, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86_400, 3 * 86_400)
"""Seconds: a check of some rows takes half a minute, a training run days, and a wait for a full cluster as long."""
_RECONCILE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
"""Seconds: one reconcile takes a millisecond of computing and a few requests."""
_PLAN_RATIO_BUCKETS = (0.5, 1 - OFF_SHARE, 1, 1 + OFF_SHARE, 2)
"""Few, as there is a series of each for every strategy: half, right to 15 %, and double."""
_RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
"""An estimate leaves out loading and saving, and knows the speed only within a factor of two."""


class _FleetGauges:
    """Gauges of all jobs at the moment that metrics are read."""

    def __init__(self, families: Families, currency: str) -> None:
        self._jobs = families.gauge("finetune_jobs", "FineTuneJobs by phase.", phase=_PHASES)
        self._waiting = families.gauge(
            "finetune_jobs_waiting",
            "Jobs whose first pods do not run yet because of capacity, a queue or the operator.",
        )
        self._oldest_waiting = families.gauge(
            "finetune_oldest_waiting_seconds", "Longest wait of those jobs so far; 0: none waits."
        )
        self._progress_age = families.gauge(
            "finetune_progress_age_seconds",
            "Longest time since a running attempt reported a new step or figure, of those that have reported any; "
            "0: there is none.",
        )
        self._samples = families.gauge(
            "finetune_samples_per_second",
            "Rows per second of all running attempts, by their latest reports.",
            stage=_STAGES,
        )
        self._tokens = families.gauge(
            "finetune_tokens_per_second",
            "Tokens per second of all running attempts, by their latest reports.",
            stage=_STAGES,
        )
        self._estimated_cost = families.gauge(
            "finetune_estimated_cost",
            "Estimated cost of the trainings of all unfinished jobs.",
            currency=(currency,),
        )

    def set(self, fleet: Fleet) -> None:
        _set(self._jobs, fleet.phases)
        self._waiting.of().set(fleet.waiting)
        self._oldest_waiting.of().set(fleet.oldest_waiting_seconds)
        self._progress_age.of().set(fleet.progress_age_seconds)
        _set(self._samples, fleet.samples_per_second)
        _set(self._tokens, fleet.tokens_per_second)
        _set(self._estimated_cost, fleet.estimated_cost)


class _UsageSums:
    """Sums of the usage and the cost of ended attempts."""

    def __init__(self, families: Families, currency: str) -> None:
        self._node_seconds = families.counter(
            "finetune_node_seconds",
            "Seconds in which pods of ended attempts had nodes, times the nodes; these are billed.",
            stage=_STAGES,
            capacity=_CAPACITIES,
        )
        self._running_node_seconds = families.counter(
            "finetune_running_node_seconds",
            "Seconds in which all pods of ended attempts ran, times the nodes.",
            stage=_STAGES,
            capacity=_CAPACITIES,
        )
        self._gpu_seconds = families.counter(
            "finetune_gpu_seconds",
            "finetune_node_seconds_total times the GPUs that the attempt used on a node.",
            stage=_STAGES,
            capacity=_CAPACITIES,
        )
        self._cost = families.counter(
            "finetune_cost", "Cost of ended attempts, as far as the settings have prices.", currency=(currency,)
        )
        self._saved = families.counter(
            "finetune_cost_saved", "Additional cost of the same node seconds on demand.", currency=(currency,)
        )
        for family in (self._node_seconds, self._running_node_seconds, self._gpu_seconds, self._cost, self._saved):
            family.show()

    def count(self, job: JobView, after: FineTuneJobStatus) -> None:
        """Count the usage that the status `after` adds to the one in `job`."""
        taken = usage_added(job, after)
        if taken is None:
            return
        where = (taken.stage.value, taken.capacity)
        self._node_seconds.of(*where).inc(taken.node_seconds)
        self._running_node_seconds.of(*where).inc(taken.running_node_seconds)
        self._gpu_seconds.of(*where).inc(taken.gpu_seconds)
        if taken.currency is not None:
            self._cost.of(taken.currency).inc(taken.cost)
            self._saved.of(taken.currency).inc(taken.saved)


class _JobSums:
    """Sums over jobs, from the statuses that this process has written."""

    def __init__(self, families: Families, currency: str) -> None:
        self._ends = families.counter(
            "finetune_job_ends",
            "Jobs that have ended, by the class of the failure; none: a success.",
            outcome=("succeeded", "failed"),
            cause=(NO_CAUSE, *_CAUSES),
        )
        self._ends.show(("succeeded", NO_CAUSE), *product(["failed"], (*_CAUSES, OTHER)))
        self._wait = families.histogram(
            "finetune_job_wait_seconds",
            "Time from a job's creation until all pods of its first stage ran; from its first child if the spec was "
            "edited before, e.g. to resume it.",
            _STAGE_BUCKETS,
        )
        self._stages = families.histogram(
            "finetune_stage_seconds",
            "Duration of attempts at a stage, from the start of the child to its end.",
            _STAGE_BUCKETS,
            stage=_STAGES,
            outcome=("succeeded", "failed"),
        )
        self._restarts = families.counter(
            "finetune_restarts", "Restarts of attempts, by the class of the failure before.", cause=_CAUSES
        )
        self._restarts.show()
        self._preemptions = families.counter(
            "finetune_preemptions", "Attempts that ended because a spot node was reclaimed."
        )
        self._usage = _UsageSums(families, currency)
        self._estimates = families.histogram(
            "finetune_estimate_ratio",
            "Duration of a training divided by the plan's estimate, for trainings that succeeded in one attempt.",
            _RATIO_BUCKETS,
        )
        self._plan_ratios = families.histogram(
            "finetune_plan_ratio",
            "Measured value divided by the plan's estimate, for trainings that succeeded: peak memory of the fullest "
            "device, and median time of a step.",
            _PLAN_RATIO_BUCKETS,
            strategy=_STRATEGIES,
            figure=get_args(PlanFigure),
        )

    def count(self, job: JobView, after: FineTuneJobStatus) -> None:
        """Count the changes between the status in `job` and the one that replaced it."""
        before = job.status
        self._attempts_ended(before, after)
        if after.restarts > before.restarts:
            self._restarts.of(_cause(after, before)).inc(after.restarts - before.restarts)
        if ended(before) is None and (outcome := ended(after)) is not None:
            cause = NO_CAUSE if outcome == "Succeeded" else _cause(after)
            self._ends.of(outcome.lower(), cause).inc()
        if (waited := wait_seconds(job, after)) is not None:
            self._wait.of().observe(waited)
        if (ratio := estimate_ratio(job, after)) is not None:
            self._estimates.of().observe(ratio)
        for strategy, figure, measured in plan_ratios(job, after):
            self._plan_ratios.of(strategy, figure).observe(measured)
        taken = (0 if after.spot is None else after.spot.preemptions) - (
            0 if before.spot is None else before.spot.preemptions
        )
        self._preemptions.of().inc(max(0, taken))
        self._usage.count(job, after)

    def _attempts_ended(self, before: FineTuneJobStatus, after: FineTuneJobStatus) -> None:
        earlier = {stage.name: stage for stage in before.stages}
        for stage in after.stages:
            then = earlier.get(stage.name)
            if stage.state in ("Succeeded", "Failed") and (then is None or then.state != stage.state):
                self._stage_ended(stage)

    def _stage_ended(self, stage: StageStatus) -> None:
        started, over = stage.start_time, stage.completion_time
        if started is not None and over is not None:
            seconds = max(0.0, (over - started).total_seconds())
            self._stages.of(stage.name, stage.state.lower()).observe(seconds)


class Metrics:
    """Metrics of all parts of the operator, each set by one method; Prometheus reads `exposition`."""

    def __init__(self, currency: str = CLUSTER_SETTINGS.currency) -> None:
        """`currency` of the prices; amounts of jobs that began under another one are counted as `other`."""
        self.families = made = Families()
        # Memory, processor seconds and open files of this process, where the system reports them.
        ProcessCollector(registry=made.registry)
        self._fleet: Callable[[], Fleet] = Fleet
        self._fleet_gauges = _FleetGauges(made, currency)
        self._job_sums = _JobSums(made, currency)
        self._leading = made.gauge("finetune_leading", "1 if this replica leads, 0 if it is a stand-by.")
        self._reconcile = made.histogram(
            "finetune_reconcile_seconds", "Duration of one reconcile of a job, requests included.", _RECONCILE_BUCKETS
        )
        self._reconcile_errors = made.counter(
            "finetune_reconcile_errors", "Reconciles that ended in an error and are retried."
        )
        self._requests = made.counter(
            "finetune_api_requests",
            "Requests to the API server by verb, resource and status code; code 0: no answer.",
            verb=VERBS,
            resource=RESOURCE_NAMES,
            code=API_CODES,
        )
        self._request_seconds = made.histogram(
            "finetune_api_request_seconds",
            "Duration of requests to the API server, by verb.",
            _RECONCILE_BUCKETS,
            verb=VERBS,
        )
        self._depth = made.gauge("finetune_queue_depth", "Jobs that wait for a worker.")
        self._lag = made.gauge(
            "finetune_event_loop_lag_seconds", "Largest delay of a wake-up of the event loop within the last minute."
        )
        self._reviews = made.counter(
            "finetune_webhook_reviews",
            "Admission reviews of jobs, by outcome; failed: an invalid review, or a client without a permitted "
            "certificate; late: not answered in time, so that failurePolicy decides.",
            outcome=("allowed", "refused", "failed", "late"),
        )
        self._posts = made.counter(
            "finetune_progress_posts", "Progress reports by the status code of the answer.", code=POST_CODES
        )
        self._certificates = made.gauge(
            "finetune_certificate_expiration_timestamp_seconds",
            "Unix time at which the certificate of a server expires.",
            server=SERVERS,
        )
        self._resyncs = made.counter("finetune_resyncs", "Relists of all objects, by reason.", reason=RESYNC_REASONS)
        self._leftover_claims = made.gauge(
            "finetune_leftover_claims",
            "Claims that the operator created for jobs that are deleted, and that no job names.",
        )
        self._leftover_bytes = made.gauge("finetune_leftover_claim_bytes", "Size of those claims.")

    def follow_jobs(self, fleet: Callable[[], Fleet]) -> None:
        """Ask `fleet` for all jobs whenever metrics are read."""
        self._fleet = fleet

    def status_written(self, job: JobView, after: FineTuneJobStatus) -> None:
        """Count the changes between the status in `job` and the one that replaced it."""
        self._job_sums.count(job, after)

    def reconcile_done(self, seconds: float, outcome: str) -> None:
        """Count one reconcile of a job."""
        self._reconcile.of().observe(seconds)
        if outcome == "failed":
            self._reconcile_errors.of().inc()

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count one request to the API server; `code` is 0 if there was no answer."""
        self._requests.of(verb, resource, str(code)).inc()
        self._request_seconds.of(verb).observe(seconds)

    def follow_queue(self, depth: Callable[[], int]) -> None:
        """Ask `depth` for the length of the queue whenever metrics are read."""
        self._depth.of().set_function(depth)

    def follow_event_loop(self, lag: Callable[[], float]) -> None:
        """Ask `lag` for the largest lag of the event loop whenever metrics are read."""
        self._lag.of().set_function(lag)

    def follow_leading(self, leading: Callable[[], bool]) -> None:
        """Ask `leading` whether this replica acts whenever metrics are read."""
        self._leading.of().set_function(lambda: float(leading()))

    def webhook_review(self, outcome: str) -> None:
        self._reviews.of(outcome).inc()

    def progress_post(self, code: int) -> None:
        self._posts.of(str(code)).inc()

    def follow_certificate(self, server: str, valid_until: Callable[[], datetime]) -> None:
        """Ask `valid_until` for the end of a server's certificate whenever metrics are read."""
        self._certificates.of(server).set_function(lambda: valid_until().timestamp())

    def relisted(self, reason: str) -> None:
        """Count a list of everything."""
        self._resyncs.of(reason).inc()

    def claims_left_over(self, sizes: Sequence[int]) -> None:
        """Set the number and the bytes of claims of deleted jobs."""
        self._leftover_claims.of().set(len(sizes))
        self._leftover_bytes.of().set(sum(sizes))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        self._fleet_gauges.set(self._fleet())
        return generate_latest(self.families.registry)


def _cause(*statuses: FineTuneJobStatus) -> str:
    """Return the class of the first failure in these statuses."""
    classes = (status.failure.failure_class for status in statuses if status.failure is not None)
    return next(classes, OTHER)


def _set(family: Family[Gauge], values: Mapping[str, float]) -> None:
    """Set one gauge for each value of its only label; values that are not given are 0."""
    (labels,) = family.labels.values()
    totals = dict.fromkeys(labels, 0.0)
    for label, value in values.items():
        totals[label if label in totals else OTHER] += value
    for label, value in totals.items():
        family.of(label).set(value)


def reference() -> str:
    """Return all metrics as Markdown: a table of them, and one of the values of their labels. Ends in a newline."""
    rows = Metrics().families.rows
    labels: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, values in row.labels.items():
            labels.setdefault(name, {}).update(dict.fromkeys(value for value in values if value != OTHER))
    labels["currency"] = {"`currency` of the settings": None}
    lines = [
        "| metric | type | labels | series at most | meaning |",
        "|---|---|---|---|---|",
        *(
            f"| `{row.name}` | {row.kind} | {', '.join(f'`{name}`' for name in row.labels)} | {row.max_series} "
            f"| {row.meaning} |"
            for row in rows
        ),
        "",
        f"A label value outside of these sets is counted as `{OTHER}`.",
        "",
        "| label | values |",
        "|---|---|",
        *(f"| `{name}` | {', '.join(values)} |" for name, values in labels.items()),
    ]
    return "\n".join(lines) + "\n"

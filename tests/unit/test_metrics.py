"""Figures for Prometheus: their names, and that labels come from closed sets."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from finetune_operator.api.types import FailureStatus, FineTuneJobStatus, StageStatus
from finetune_operator.shell.kube import RequestCounter
from finetune_operator.shell.metrics import Metrics
from finetune_operator.shell.state import Measurements


def samples(metrics: Metrics, *, zeros: bool = False) -> dict[str, float]:
    """Own samples as `name{label="value"}`, buckets and times of creation left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if not sample.name.startswith("finetune_") or sample.name.endswith(("_bucket", "_created")):
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            if sample.value or zeros:
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_everything_that_is_told_is_shown() -> None:
    metrics = Metrics()
    told: Measurements = metrics
    counter: RequestCounter = metrics
    metrics.follow_jobs(lambda: ["Training", "Training", "Failed", "a word of its own"])
    metrics.follow_queue(lambda: 7)
    metrics.follow_leading(lambda: True)
    metrics.event_loop_lag(0.5)
    metrics.progress_post(200)
    metrics.progress_post(429)
    told.pass_done(0.25, "done")
    told.pass_done(0.5, "failed")
    told.resynced("outage")
    counter.request_done("create", "pytorchjobs", 200, 0.5)
    counter.request_done("list", "pods", 0, 1.5)
    assert samples(metrics) == {
        'finetune_jobs{phase="Training"}': 2,
        'finetune_jobs{phase="Failed"}': 1,
        'finetune_jobs{phase="other"}': 1,
        "finetune_queue_depth": 7,
        "finetune_leading": 1,
        "finetune_event_loop_lag_seconds": 0.5,
        'finetune_progress_posts_total{code="200"}': 1,
        'finetune_progress_posts_total{code="429"}': 1,
        "finetune_reconcile_seconds_count": 2,
        "finetune_reconcile_seconds_sum": 0.75,
        "finetune_reconcile_errors_total": 1,
        'finetune_resyncs_total{reason="outage"}': 1,
        'finetune_api_requests_total{code="200",resource="pytorchjobs",verb="create"}': 1,
        'finetune_api_requests_total{code="0",resource="pods",verb="list"}': 1,
        'finetune_api_request_seconds_count{verb="create"}': 1,
        'finetune_api_request_seconds_sum{verb="create"}': 0.5,
        'finetune_api_request_seconds_count{verb="list"}': 1,
        'finetune_api_request_seconds_sum{verb="list"}': 1.5,
    }


def test_phases_without_jobs_are_shown_as_none() -> None:
    zeros = samples(Metrics(), zeros=True)
    assert zeros['finetune_jobs{phase="Succeeded"}'] == 0
    assert len([name for name in zeros if name.startswith("finetune_jobs")]) == 11


def stage(state: str, attempt: int = 1, end: str | None = None) -> StageStatus:
    return StageStatus.model_validate(
        {
            "name": "train", "state": state, "attempt": attempt, "startTime": "2026-01-01T00:00:00Z",
            "completionTime": end,
        }
    )  # fmt: skip


def test_a_status_that_takes_the_place_of_another_tells_of_ends_and_restarts() -> None:
    metrics = Metrics()
    running = FineTuneJobStatus(stages=(stage("Running"),))
    failure = FailureStatus.model_validate({"class": "OutOfMemory", "reason": "A", "message": "b"})
    again = FineTuneJobStatus(stages=(stage("Running", 2),), restarts=1, failure=failure)
    over = FineTuneJobStatus(stages=(stage("Succeeded", 2, "2026-01-01T00:01:30Z"),), restarts=1)
    for before, after in [(FineTuneJobStatus(), running), (running, again), (again, over), (over, over)]:
        metrics.status_written(before, after)
    assert samples(metrics) == {
        'finetune_restarts_total{cause="OutOfMemory"}': 1,
        'finetune_stage_seconds_count{outcome="succeeded",stage="train"}': 1,
        'finetune_stage_seconds_sum{outcome="succeeded",stage="train"}': 90,
    }


def test_words_from_outside_become_no_labels() -> None:
    metrics = Metrics()
    before = len(samples(metrics, zeros=True))
    for number in range(50):
        metrics.request_done(f"verb-{number}", f"resource-{number}", 1000 + number, 0.0)
        metrics.resynced(f"reason-{number}")
        failure = FailureStatus.model_validate({"class": f"class-{number}", "reason": "A", "message": "b"})
        metrics.status_written(FineTuneJobStatus(), FineTuneJobStatus(restarts=1, failure=failure))
    shown = samples(metrics, zeros=True)
    assert shown['finetune_api_requests_total{code="0",resource="other",verb="other"}'] == 50
    assert shown['finetune_restarts_total{cause="other"}'] == 50
    assert len(shown) == before + 5

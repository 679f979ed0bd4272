"""The cluster's jobs in `finetune ui`: their pages, and that the API server is only read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_operator.cli.cluster.cluster_jobs import Connection
from finetune_operator.extras.ui import ui_jobs
from finetune_operator.extras.ui.ui_jobs import ClusterJobs
from suite_plugins.waiting import wait_until
from ui_support import JOBS, TOKEN, TRAINING, Api, Client, api_server, serving


@pytest.fixture
def api() -> Iterator[Api]:
    with api_server() as api:
        yield api


@pytest.fixture
def client(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setattr(ui_jobs, "REFRESH_SECONDS", 0.0)  # every page asks again
    with serving(tmp_path / "runs", ClusterJobs(Connection(api.write_kubeconfig(tmp_path / "config")))) as client:
        yield client


def shown(client: Client, *parts: str, text: str) -> str:
    """Return the page, once it holds the word."""
    return wait_until(lambda: page if text in (page := client.page(*parts)) else None, f"{text} is not shown")


def test_the_list_has_the_columns_of_finetune_status(client: Client) -> None:
    page = shown(client, text="reviews")
    assert page.index("reviews") < page.index("broken")
    for part in ('href="/job/team/reviews"', "Training", "50 %", "0.500", "Failed"):
        assert part in page


def test_job_page_shows_progress_stages_events_and_pod_logs(client: Client) -> None:
    page = shown(client, "job", "team", "reviews", text="AttemptStarted")
    for part in (
        "step 5/10",
        "ddp by job, 2 processes",
        "1:05",
        "attempt 2",
        "[train-2/0] step 5",
        "finetune watch reviews",
    ):
        assert part in page
    assert "<script>alert" not in page
    assert TOKEN not in page


def test_page_of_failed_job_shows_cause_hint_and_log_tail(client: Client) -> None:
    page = shown(client, "job", "team", "broken", text="MissingColumn")
    for part in ("no &lt;b&gt;text&lt;/b&gt;", "Name it.", "the last words", "the pods of prepare-1 are deleted"):
        assert part in page


def test_a_job_that_nests_too_deep_does_not_hide_the_others(client: Client, api: Api) -> None:
    nested: dict[str, Any] = {}
    for _ in range(400):
        nested = {"a": nested}
    metadata = {**TRAINING["metadata"], "name": "deep", "uid": "3"}
    api.jobs.append({**TRAINING, "metadata": metadata, "spec": {**TRAINING["spec"], "training": nested}})
    page = shown(client, text="deep")
    assert "reviews" in page


def test_progress_that_was_seen_becomes_a_curve(client: Client, api: Api) -> None:
    shown(client, "job", "team", "reviews", text="step 5/10")
    progress = {"step": 6, "totalSteps": 10, "percent": 60, "loss": 0.4}
    api.jobs[0] = {**TRAINING, "status": {**TRAINING["status"], "progress": progress}}
    page = shown(client, "job", "team", "reviews", text="<polyline")
    assert "Collected since this page was opened" in page


def test_unlisted_job_is_not_requested(client: Client, api: Api) -> None:
    shown(client, text="reviews")
    for path in ("/job/team/other", "/job/kube-system/reviews", "/job/team/..%2f..%2fsecrets"):
        assert client.send(path).code == 404
    assert {path for _, path in api.calls} == {JOBS}


def test_refusal_is_shown_beside_the_last_answer(client: Client, api: Api) -> None:
    shown(client, text="reviews")
    api.refuses = 403
    page = shown(client, text="not allowed: no.")
    assert "reviews" in page
    api.refuses = None
    wait_until(lambda: "not allowed" not in client.page(), "the refusal stays")


def test_the_api_server_is_only_read(client: Client, api: Api) -> None:
    shown(client, "job", "team", "reviews", text="AttemptStarted")
    shown(client, "job", "team", "broken", text="MissingColumn")
    assert {method for method, _ in api.calls} == {"GET"}
    assert any(path.endswith("/log") for _, path in api.calls)


def test_page_reports_unreachable_api_server(client: Client, api: Api, tmp_path: Path) -> None:
    config = tmp_path / "away"
    config.write_text((tmp_path / "config").read_text().replace(str(api.port), "1"))
    with serving(tmp_path / "runs", ClusterJobs(Connection(config))) as other:
        page = shown(other, text="cannot be reached")
    assert "Runs" in page


def test_page_reports_missing_kubeconfig(tmp_path: Path) -> None:
    with serving(tmp_path, ClusterJobs(Connection(tmp_path / "none"))) as client:
        assert "the file does not exist" in shown(client, text="--kubeconfig")

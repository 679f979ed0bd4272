"""Metrics of a real server under real requests, which a real Prometheus scrapes: panels, alerts and limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import start_http_server

from dashboard_picture import DASHBOARDS
from finetune_contract.inference_settings import Serving
from finetune_contract.layout import INFERENCE_PATHS, JobPaths
from monitoring import ROOT, matchers, promtool
from picture_support.panels import View, put_in
from picture_support.samples import Engine, missing_programs, prometheus
from served_series import TARGET, VLLM_TARGET, VllmMetrics
from suite_plugins.waiting import wait_until
from trainer_support.served import Served, served
from trainer_support.served_models import ROWS, write_served_model
from trainer_support.tasks import task_job

TASK = "text-classification"
SELECTED = {"namespace": ".*", "endpoint": ".*", "__rate_interval": "20s"}
LABELS = ("namespace", "pod", "finetunejob", "endpoint_revision")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model = write_served_model(folder / "model", TASK, tiny_bert)
    job = task_job(TASK, model, folder, ["text"], evaluation=None, predict=None)
    serving = Serving(model_name="tiny", device="cpu", max_batch_tokens=512, max_queue=3, max_latency_seconds=0.2)
    with served(job.model_copy(update={"serving": serving}), JobPaths(folder / "job")) as found:
        yield found


def targets(ports: dict[int, dict[str, str]]) -> str:
    """Return a configuration of Prometheus that scrapes these ports, with the labels of their targets."""
    static = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {name: labels[name] for name in LABELS}}
        for port, labels in ports.items()
    ]
    overlay = yaml.safe_load((ROOT / "manifests/overlays/monitoring/endpoint-monitor.yaml").read_text())
    (endpoint,) = overlay["spec"]["podMetricsEndpoints"]
    named = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    renamed = [{named.get(key, key): value for key, value in rule.items()} for rule in endpoint["metricRelabelings"]]
    scraped = {
        "job_name": "servers",
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": static,
        "metric_relabel_configs": renamed,
    }
    return yaml.safe_dump({"scrape_configs": [scraped]})


@pytest.fixture(scope="module")
def scraped(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yield a Prometheus that scrapes the server and vLLM's metrics, with requests answered, refused and late."""
    if missing := missing_programs():
        pytest.skip(f"{' and '.join(missing)} not in PATH (Debian's package prometheus has them)")
    chat = VllmMetrics()
    vllm, thread = start_http_server(0, "127.0.0.1", chat.registry)
    configuration = targets({server.port: TARGET, vllm.server_port: VLLM_TARGET})
    try:
        with prometheus(tmp_path_factory.mktemp("prometheus"), configuration) as found:

            def counted() -> bool:
                send(server)
                for reason in ("stop", "error", "refused"):
                    chat.request(reason)
                return all(answers(found, expression) for _, expression in expressions())

            wait_until(counted, lambda: "Prometheus answers\n" + "\n".join(unanswered(found)), poll_seconds=0.5)
            yield found
    finally:
        vllm.shutdown()
        thread.join()


def send(server: Served) -> None:
    """Send a request that is answered once the others are: one whose deadline is over, and one that finds the queue
    full.
    """
    texts = [row["text"] for row in ROWS[TASK]]
    with server.held({"inputs": texts[:2]}) as (entered, codes):
        wait_until(entered.is_set, "the server computes")
        late = server.request("/", {"inputs": texts[0]}, {"X-Request-Timeout-Ms": "1"}).code
        refused = server.infer(text=texts[:4]).code
    assert (codes, late, refused) == ([200], 504, 429)


def expressions() -> list[tuple[str, str]]:
    """Return title and expression of each panel of the dashboard, as Grafana sends it."""
    view = View(0.0, 60.0, SELECTED, {})
    return [
        (panel["title"], put_in(target["expr"], view, 15))
        for panel in DASHBOARDS["endpoints"]["panels"]
        for target in panel.get("targets", ())
    ]


def answers(engine: Engine, expression: str) -> list[Any]:
    return engine.over(expression, *last_seconds(engine))


def last_seconds(engine: Engine) -> tuple[float, float, float]:
    (now,) = engine.session.get(f"{engine.url}/api/v1/query", params={"query": "time()"}).json()["data"]["result"][1:]
    return float(now) - 5, float(now), 1


def unanswered(engine: Engine) -> Iterator[str]:
    yield from (f"{title}: {expression}" for title, expression in expressions() if not answers(engine, expression))


def test_prometheus_answers_every_panel_of_endpoints(scraped: Engine) -> None:
    assert len(expressions()) > 25
    assert list(unanswered(scraped)) == []


def test_conditions_on_paths_select_requests_to_the_model(scraped: Engine) -> None:
    conditions = {
        value
        for _, expression in expressions()
        for _, label, operator, value in matchers(expression)
        if (label, operator) == ("path", "=~")
    }
    (condition,) = conditions
    assert all(re.fullmatch(condition, path) for path in INFERENCE_PATHS)
    for path in ("/metrics", "/v2/health/ready", "/v2/models/{name}", "/v1/models", "/openapi.json", "/page/{name}"):
        assert not re.fullmatch(condition, path)


def test_shares_of_errors_and_refusals_are_those_of_the_requests(scraped: Engine) -> None:
    """Each of the three requests of `send` has a code of its own. The last scrape may have been between two of them."""
    requests = 'finetune_serving_requests_total{path=~"/|/v2/models/.*/infer"}'

    def shares() -> list[float]:
        ratios = (f'sum({requests[:-1]},code="{code}"}}) / sum({requests})' for code in (200, 429, 504))
        return [scraped.at(ratio, last_seconds(scraped)[1])[0].points[0][1] for ratio in ratios]

    wait_until(lambda: shares() == pytest.approx([1 / 3] * 3), shares)
    for limit, expected in (("max_latency_seconds", 0.2), ("max_queue_rows", 3.0)):
        (answer,) = scraped.at(f"max(finetune_serving_{limit})", last_seconds(scraped)[1])
        assert answer.points[0][1] == expected


def test_server_metrics_follow_conventions_of_prometheus(server: Served) -> None:
    done = promtool("check", "metrics", stdin=server.request("/metrics").content.decode())
    assert (done.returncode, done.stdout + done.stderr) == (0, "")

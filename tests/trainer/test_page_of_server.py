"""The page in Debian's Chromium, sent by the server itself with a model."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM
from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until

pytest.importorskip("fastapi", reason="fastapi is not installed (make install)")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make install)")
import uvicorn
from playwright.sync_api import expect, sync_playwright

from finetune_trainer.serving.batcher import Batcher
from finetune_trainer.serving.server_state import ServerState
from finetune_trainer.serving.serving_app import make_app
from finetune_trainer.serving.serving_engine import ServingEngine
from finetune_trainer.serving.serving_metrics import ServingMetrics

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
LABELS = ("bad", "good", "neither")
TOKEN = "s3cret"


@pytest.fixture
def url(tmp_path: Path, tiny_bert: Callable[..., Path]) -> Iterator[str]:
    model = tiny_bert(tmp_path / "model", labels=LABELS)
    document: dict[str, Any] = {
        "name": "reviews",
        "task": "text-classification",
        "model": {"uri": model.as_uri()},
        "predict": {"device": "cpu", "batch_tokens": 512},
        "serving": {"model_name": "reviews", "device": "cpu", "max_batch_tokens": 512},
    }
    job = TrainerJob.model_validate(document)
    engine = ServingEngine.load(job, JobPaths.of(tmp_path, job.name))
    metrics = ServingMetrics(engine.name, job.task, "1")
    state = ServerState(engine, Batcher(engine, metrics), metrics, TOKEN, "1")
    server = uvicorn.Server(uvicorn.Config(make_app(state), host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started and state.ready, "the server answers", seconds=60)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(patient(30))


def test_page_shows_the_answer_of_the_server(url: str) -> None:
    text = "the soup was good"
    body = json.dumps({"inputs": text}).encode()
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=patient(30)) as answer:
        (shares,) = json.load(answer)
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        view = browser.new_page()
        view.on("console", lambda message: complaints.append(message.text))
        view.on("pageerror", lambda error: complaints.append(str(error)))
        sent = view.goto(url)
        assert sent is not None
        assert sent.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        expect(view.locator("#about")).to_contain_text("3 labels: bad, good, neither")
        view.get_by_label("Text").fill(text)
        view.keyboard.press("Control+Enter")
        expect(view.get_by_label("Token")).to_be_focused(timeout=patient(30) * 1000)
        view.keyboard.type(TOKEN)
        view.keyboard.press("Control+Enter")
        expect(view.locator("#took")).to_contain_text("Answered in", timeout=patient(30) * 1000)
        bars = view.get_by_role("progressbar")
        shown = {
            view.locator("#answer tbody th").nth(at).inner_text(): float(bars.nth(at).get_attribute("value") or "nan")
            for at in range(bars.count())
        }
        browser.close()
    assert shown == pytest.approx({each["label"]: each["score"] for each in shares}, abs=1e-6)
    assert [each for each in complaints if "401" not in each] == []

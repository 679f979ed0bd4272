"""Clients of an endpoint: steady requests, each on its own connection, with counted answers."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

import requests

from cluster_support.api_access import Object, new_session
from suite_plugins.patience import patient

EACH_SECONDS = 0.1
"""Time between the starts of two requests."""
MANY_SECONDS = 1 / float(os.environ.get("FINETUNE_TEST_REQUESTS_A_SECOND", 10))
"""The same during a rollout. Fifty requests a second take a quarter of two cores."""
MOST_AT_ONCE = 16
"""Most pending requests; clients of a slow server wait before they send more. With 64, each waited half a minute at a
server that answered two a second, as beside others that start.
"""
ANSWER_SECONDS = 60
"""Time-out of a request at a server that answers, however slowly."""
HUNG_SECONDS = 10
"""The same where servers are killed: through the box's proxy a client does not see that a killed server hung up."""
BACK_OFF = (0.1, 0.2, 0.4, 0.8, 1.5, 2.0)
"""Seconds before each retry of a client that retries: 5 in all."""


@dataclass
class Answers:
    """Results of steady requests."""

    sent: int = 0
    failed: list[str] = field(default_factory=list)
    """Time since the start of the block and error of each request that got no answer in the end."""
    retried: int = 0
    """Number of failed tries that were retried."""
    labels: Counter[str] = field(default_factory=Counter)
    revisions: list[tuple[float, int]] = field(default_factory=list)
    """Start of each answered request on the monotonic clock, and the revision that answered."""

    @property
    def over(self) -> int:
        """Number of requests that were answered or given up."""
        return len(self.revisions) + len(self.failed)


@dataclass(frozen=True)
class Client:
    """Sends requests to an endpoint like a program with a plain HTTP library."""

    url: str
    token: str | None = None
    answer_seconds: float = ANSWER_SECONDS

    def post(self, path: str, body: Object) -> requests.Response:
        """Send one request, on its own connection."""
        headers = {"Connection": "close", **({"Authorization": f"Bearer {self.token}"} if self.token else {})}
        with new_session() as session:
            reply: requests.Response = session.post(
                f"{self.url}{path}", json=body, headers=headers, timeout=patient(self.answer_seconds)
            )
            return reply

    def infer(self, model: str, texts: Sequence[str]) -> dict[str, list[Any]]:
        """Return outputs by name, by the Open Inference Protocol."""
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}
        reply = self.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})
        assert reply.status_code == 200, reply.text
        return {output["name"]: output["data"] for output in reply.json()["outputs"]}

    def label(self, *texts: str) -> tuple[str, int]:
        """Return the likeliest label of the first text, and the revision that answered. OSError without an answer."""
        reply = self.post("/", {"inputs": list(texts)})
        reply.raise_for_status()
        return str(reply.json()[0][0]["label"]), int(reply.headers["X-Endpoint-Revision"])

    def label_with_retries(
        self,
        texts: Sequence[str],
        back_off: Sequence[float],
        failures: type[OSError] = requests.ConnectionError,
        on_retry: Callable[[], None] = lambda: None,
    ) -> tuple[float, str, int]:
        """Do what `label` does, and try again after each time of `back_off` if one of `failures` is raised, by default
        no answer at all. Return the start of the answered try on the monotonic clock, label and revision.
        """
        for wait in back_off:
            began = time.monotonic()
            try:
                return began, *self.label(*texts)
            except failures:
                on_retry()
            time.sleep(patient(wait))
        return time.monotonic(), *self.label(*texts)

    @contextmanager
    def steady_requests(
        self, text: str, back_off: Sequence[float] = (), each_seconds: float = EACH_SECONDS
    ) -> Iterator[Answers]:
        """Send a request every `each_seconds` while the block runs; the answers are complete after it."""
        answers, over, lock, start = Answers(), Event(), Lock(), time.monotonic()

        def count_retry() -> None:
            with lock:
                answers.retried += 1

        def send_request() -> None:
            sent = time.monotonic() - start
            try:
                began, label, revision = self.label_with_retries([text], back_off, OSError, count_retry)
            except OSError as error:
                with lock:
                    answers.failed.append(f"{sent:.1f} to {time.monotonic() - start:.1f} s: {error!r}")
            else:
                with lock:
                    answers.labels[label] += 1
                    answers.revisions.append((began, revision))

        def send(pool: ThreadPoolExecutor) -> None:
            while not over.wait(each_seconds):
                if answers.sent - answers.over < MOST_AT_ONCE:
                    answers.sent += 1
                    pool.submit(send_request)

        with ThreadPoolExecutor(MOST_AT_ONCE, "requests") as pool:
            thread = Thread(target=send, args=(pool,), name="steady requests")
            thread.start()
            try:
                yield answers
            finally:
                over.set()
                thread.join()

    @contextmanager
    def waves_of_rows(self, texts: Sequence[str], clients: int) -> Iterator[None]:
        """Have so many clients send all texts in one request after the other while the block runs, answered or not."""
        over = Event()

        def send() -> None:
            while not over.is_set():
                with suppress(OSError):
                    self.post("/", {"inputs": list(texts)})

        threads = [Thread(target=send, name=f"rows {number}") for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

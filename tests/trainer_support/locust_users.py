"""Users of locust for a server of text-classification: each sends requests at a constant rate, as far as the
server keeps up, and compares the labels. LOCUST_LOAD has texts, their labels, the name of the model and the number of
requests after which locust ends, as JSON.

locust imports this file in a process of its own, since it replaces the sockets of the process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import count
from typing import Any

import gevent
from locust import FastHttpUser, constant_throughput, events, task

LOAD: dict[str, Any] = json.loads(os.environ["LOCUST_LOAD"])
RATE = 10
"""Requests of a user in a second."""
_sent = count()


@events.init.add_listener
def end_after_requests(environment: Any, **_: object) -> None:
    """End locust once all requests were answered; its exit code is 1 if one has failed."""
    answered = count(1)

    def on_request(**_: object) -> None:
        if next(answered) == LOAD["requests"]:
            gevent.spawn(environment.runner.quit)  # it would wait for this user, which waits here

    environment.events.request.add_listener(on_request)


class Client(FastHttpUser):
    """A client that sends one text after another by two protocols."""

    wait_time = constant_throughput(RATE)

    @task
    def request_both(self) -> None:
        at = next(_sent) % len(LOAD["texts"])
        text, label = LOAD["texts"][at], LOAD["labels"][at]
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
        body = {"inputs": [tensor], "outputs": [{"name": "label"}]}
        self._send(
            f"/v2/models/{LOAD['model']}/infer", "infer", body, lambda found: found["outputs"][0]["data"], [label]
        )
        self._send("/", "hugging-face", {"inputs": text}, lambda found: found[0][0]["label"], label)

    def _send(self, path: str, name: str, body: Any, label_of: Callable[[Any], Any], expected: Any) -> None:
        with self.client.post(path, json=body, name=name, catch_response=True) as reply:
            if reply.status_code == 200 and label_of(reply.json()) != expected:
                reply.failure(f"expected {expected}, found {label_of(reply.json())}")

"""Ten minutes of an endpoint: real servers as processes under real requests, scraped as by Prometheus.

Two servers of revision 1 answer a steady load; then it exceeds what they compute, and their queues refuse requests;
then a server of revision 2 takes over. The labels of the targets are those that Prometheus adds in a cluster.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import requests
from prometheus_client.parser import text_string_to_metric_families

from cluster_support.api_access import new_session, wait_until
from cluster_support.control_plane import free_port
from finetune_contract.layout import ENV_ENDPOINT_REVISION, INFERENCE_PATHS, METRICS_PATH
from finetune_contract.trainer_job import TrainerJob
from picture_support.samples import Samples, notation
from suite_plugins.patience import patient

SOURCE = """\
The metrics of real servers of an endpoint, each a process with a small random model on one core, under real requests.
Pods and revisions are labels only: there was no cluster.
Written by `python tests/dashboard_picture.py record-endpoint`."""
"""Comment at the head of the file."""
MINUTES = 10.0
TEAM, JOB = "ml-team", "reviews"
QUEUE_ROWS = 128
_VOCABULARY = ("the", "film", "was", "a", "quiet", "pleasure", "and", "its", "end", "came", "much", "too", "late")


@dataclass(frozen=True)
class Phase:
    """Load of the endpoint from a time on."""

    at: float
    """Share of the recording."""
    pause: float
    """Mean seconds between two requests of a client."""
    rows: int
    """Most rows of a request."""
    clients: int


PHASES = (Phase(0.0, 0.8, 3, 3), Phase(0.25, 0.4, 4, 3), Phase(0.45, 0.1, 64, 6), Phase(0.55, 0.6, 3, 3))
TAKEOVER = 0.7
"""Share of the recording after which revision 2 serves."""
STARTS_BEFORE = 0.35
"""Share of the recording between its start and that moment."""


@dataclass
class Server:
    """A server's process."""

    pod: str
    revision: int
    process: subprocess.Popen[bytes]
    port: int
    session: requests.Session = field(default_factory=new_session)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ready(self) -> bool:
        assert self.process.poll() is None, f"{self.pod} has ended"
        try:
            return self.session.get(f"{self.url}/v2/health/ready", timeout=patient(5)).ok
        except requests.ConnectionError:
            return False

    def scrape(self, wanted: Callable[[str], bool]) -> dict[str, float]:
        """Return the wanted metrics as in Prometheus, without paths that no dashboard shows."""
        text = self.session.get(f"{self.url}{METRICS_PATH}", timeout=patient(5)).text
        target = {
            "namespace": TEAM, "pod": self.pod, "instance": f"{self.pod}:8080", "finetunejob": JOB,
            "endpoint_revision": str(self.revision),
        }  # fmt: skip
        return {
            notation(sample.name, {**sample.labels, **target}): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if wanted(sample.name) and sample.labels.get("path", "/") in INFERENCE_PATHS
        }


@contextmanager
def server(job: TrainerJob, folder: Path, pod: str, revision: int) -> Iterator[Server]:
    """Run a server of the job in `folder`."""
    file, port = folder / "job.json", free_port()
    file.write_text(job.to_json(), encoding="utf-8")
    command = [sys.executable, "-m", "finetune_trainer", "serve", "--job", str(file), "--workspace", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", ENV_ENDPOINT_REVISION: str(revision)}
    with (folder / f"{pod}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log, env=environment
        )
    try:
        yield Server(pod, revision, process, port)
    finally:
        process.terminate()
        process.wait(patient(60))


class Load:
    """Clients of the endpoint, each with one request in flight."""

    def __init__(self, servers: Callable[[], list[Server]], minutes: float) -> None:
        self._servers, self._seconds, self._began = servers, 60 * minutes, time.monotonic()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(number,), daemon=True)
            for number in range(max(phase.clients for phase in PHASES))
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _send(self, number: int) -> None:
        chance, session = random.Random(number), new_session()
        for turn in itertools.count(number):
            share = (time.monotonic() - self._began) / self._seconds
            phase = [phase for phase in PHASES if phase.at <= share][-1]
            if self._over.wait(chance.expovariate(1 / phase.pause)):
                return
            servers = self._servers()
            if number >= phase.clients or not servers:
                continue
            lengths = [chance.randint(4, 40) for _ in range(chance.randint(1, phase.rows))]
            texts = [" ".join(chance.choices(_VOCABULARY, k=length)) for length in lengths]
            # A deadline that a full queue does not keep, as impatient clients send it.
            headers = {"X-Request-Timeout-Ms": "1000"} if turn % 7 == 0 else {}
            address = f"{servers[turn % len(servers)].url}/"
            try:
                session.post(address, json={"inputs": texts}, headers=headers, timeout=patient(30))
            except requests.ConnectionError:
                continue  # The server of the former revision has just ended.


def record_endpoint(
    job: TrainerJob, out: Path, minutes: float, every: int, metrics: set[str], log_line: Callable[[str], None]
) -> Samples:
    """Serve the job under load, and write the scrapes to `out`."""
    scrapes = int(minutes * 60 / every) + 1
    with tempfile.TemporaryDirectory() as name, ExitStack() as former, ExitStack() as stack:
        first = [former.enter_context(server(job, Path(name), f"{JOB}-endpoint-1-{pod}", 1)) for pod in range(2)]
        wait_until(lambda: all(each.ready for each in first), "servers are ready", 300)
        current, there = list(first), list(first)
        with Load(lambda: current, minutes):
            samples = Samples(float(int(time.time()) + 1), every, SOURCE)
            for number in range(scrapes):
                late = time.time() - samples.start - number * every
                if late > every:
                    continue  # A missed scrape, as Prometheus misses one that takes too long.
                time.sleep(max(0.0, -late))
                found: dict[str, float] = {}
                for each in there:
                    found |= each.scrape(metrics.__contains__) if each.ready else {}
                samples.add(number, found)
                share = number / scrapes
                if share > TAKEOVER - STARTS_BEFORE and len(there) == len(first):
                    there.append(stack.enter_context(server(job, Path(name), f"{JOB}-endpoint-2-0", 2)))
                elif share > TAKEOVER and current == first and there[-1].ready:
                    current, there = there[-1:], there[-1:]
                    former.close()
                if number % 12 == 0:
                    log_line(f"{number * every:>5} s, {len(found)} series")
    samples.write(out)
    return samples

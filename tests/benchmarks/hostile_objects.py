"""Measure the delay of honest jobs while thousands of hostile jobs are stored.

    python tests/benchmarks/hostile_objects.py [--objects 10000] [--rate 100] [--arms nothing suspended hostile]

Baseline: as many valid, suspended jobs, stored at the same rate. Arms, in turn: nothing else is stored; valid suspended
jobs; hostile jobs (deep, wide, long, of odd types and characters, with labels of others; the API server stored them
before the CRD had bounds). Meanwhile 20 honest jobs run to their end on stand-ins for nodes. Told are their times from
their creation to Succeeded, the longest answer of /healthz, the operator's largest memory, its processor time, and
restarts. Checked: all honest jobs succeed, the operator's process is the same throughout, and in the end it has judged
every hostile job and refused those of a sample of 200.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import requests

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster_support.api_access import Access, Api, ApiError, new_session, path_of, wait_until
from cluster_support.control_plane import Cluster, running_cluster
from cluster_support.operator_process import OperatorProcess, install
from cluster_support.stand_ins import running_stand_ins
from cluster_support.world import BASE, SETTINGS, fresh_namespace, install_kinds, loose_crd, merged, namespace_for_pods
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

ARMS = ("nothing", "suspended", "hostile")
HONEST = 20
CLIENTS = 8
CONFLICT = 409
SAMPLE = 200
"""Hostile jobs whose refusal is read at the end."""
NESTED = "(nested)"
HONEST_SPEC = merged(BASE, {"predict": None})


@dataclass
class Seen:
    """Measurements of one arm."""

    name: str
    seconds: list[float] = field(default_factory=list)
    longest_answer: float = 0.0
    memory: float = 0.0
    """Largest resident memory in MiB."""
    cpu: float = 0.0
    stored: int = 0
    storing: float = 0.0
    """Seconds for storing them."""
    judged: float = 0.0
    """Seconds until all were judged."""


def suspended(number: int) -> str:
    """Return a valid, suspended job as JSON."""
    return json.dumps(job_of(f"noise-{number}", merged(HONEST_SPEC, {"runPolicy": {"suspend": True}})))


def hostile(number: int) -> str:
    """Return a hostile job as JSON, always the same for a number."""
    draw = random.Random(number)
    make = HOSTILE[number % len(HOSTILE)]
    spec = merged(HONEST_SPEC, {"training": {"arguments": {"x": NESTED}}})
    document = job_of(f"noise-{number}", spec)
    document["metadata"]["labels"] = {"finetune.dev/job": "honest-1", "finetune.dev/job-uid": str(number)}
    return json.dumps(document).replace(json.dumps(NESTED), make(draw))


def _deep(draw: random.Random) -> str:
    levels = draw.choice([101, 500, 1_000, 3_000, 9_000])
    opening, closing = draw.choice([('{"a":', "}"), ("[", "]"), ('[{"a":', "}]")])
    return opening * levels + "1" + closing * levels


def _wide(draw: random.Random) -> str:
    return json.dumps({f"k{at}": at for at in range(draw.choice([1_000, 5_000]))})


def _long(draw: random.Random) -> str:
    return json.dumps(draw.choice(["x", "eyJ-", "a-a-", "\\", "password="]) * draw.choice([5_000, 50_000]))


def _odd(draw: random.Random) -> str:
    values: list[Any] = [None, True, -1, 1e308, "\U0001f600\u202e\ufeff", [], {}, [[{}]], "hf_" + "A" * 34, 2**62]
    return json.dumps(draw.choices(values, k=20))


def _names(draw: random.Random) -> str:
    return json.dumps({draw.choice(["\u202e", "é", "../", "\x00", "a" * 300]) + str(at): 1 for at in range(50)})


HOSTILE: tuple[Callable[[random.Random], str], ...] = (_deep, _wide, _long, _odd, _names)


def job_of(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}


def store(access: Access, namespace: str, texts: Iterator[str], rate: float, stop: threading.Event) -> int:
    """Store the jobs at `rate` per second; return how many the API server accepted."""
    path, began, local = path_of(API_VERSION, PLURAL, namespace), time.monotonic(), threading.local()

    def post(numbered: tuple[int, str]) -> bool:
        number, text = numbered
        if stop.wait(max(0.0, began + number / rate - time.monotonic())):
            return False
        if not hasattr(local, "session"):
            local.session = new_session()
            local.session.verify, local.session.cert = access.ca or True, access.client_certificate
            local.session.headers.update({**access.headers, "Content-Type": "application/json"})
        try:
            return bool(local.session.post(access.host + path, data=text.encode(), timeout=60).ok)
        except requests.RequestException:
            return False

    with ThreadPoolExecutor(CLIENTS) as clients:
        return sum(clients.map(post, enumerate(texts)))


def watch_over(process: OperatorProcess, seen: Seen, stop: threading.Event) -> None:
    """Record the longest answer and the largest memory, until `stop`."""
    session, operator = new_session(), psutil.Process(process.pid)
    while not stop.wait(0.1):
        began = time.monotonic()
        answer = session.get(f"http://127.0.0.1:{process.http_port}/healthz", timeout=120)
        assert answer.ok, answer.text
        seen.longest_answer = max(seen.longest_answer, time.monotonic() - began)
        seen.memory = max(seen.memory, operator.memory_info().rss / 2**20)


def run(cluster: Cluster, process: OperatorProcess, name: str, texts: Iterator[str], rate: float) -> Seen:
    """Run one arm, with an operator of its own."""
    seen, stop = Seen(name), threading.Event()
    process.start()
    pid, operator = process.pid, psutil.Process(process.pid)
    with namespace_for_pods(cluster) as team, fresh_namespace(cluster) as noise, ThreadPoolExecutor(2) as beside:
        watching = beside.submit(watch_over, process, seen, stop)
        try:
            endure(cluster, seen, team, noise, beside.submit(store, cluster.access, noise, texts, rate, stop))
        finally:
            stop.set()
        watching.result()
        seen.cpu = sum(operator.cpu_times()[:2])
        assert (process.running, process.pid) == (True, pid), "the operator was started again"
    process.terminate()
    return seen


def endure(cluster: Cluster, seen: Seen, team: str, noise: str, storing: Future[int]) -> None:
    """Run the honest jobs while others are stored; then wait until those are refused."""
    began = time.monotonic()
    time.sleep(5)
    api, path = Api(cluster.access), path_of(API_VERSION, PLURAL, team)
    for number in range(HONEST):
        document = job_of(f"honest-{number}", HONEST_SPEC)
        wait_until(lambda document=document: created(api, path, document), "an honest job is stored", 1800)
    wait_until(lambda: ended(api, path), "all honest jobs have ended", 1800)
    for job in api.items(path):
        assert job["status"]["phase"] == "Succeeded", job["status"]
        begun = datetime.fromisoformat(job["metadata"]["creationTimestamp"])
        seen.seconds.append((datetime.fromisoformat(job["status"]["completionTime"]) - begun).total_seconds())
    seen.stored = storing.result()
    seen.storing = time.monotonic() - began
    while seen.name == "hostile" and unjudged(cluster, noise) != 0:
        time.sleep(2)
    seen.judged = time.monotonic() - began
    if seen.name == "hostile":
        not_refused = accepted(cluster, noise, seen.stored)
        assert not not_refused, not_refused


def created(api: Api, path: str, document: dict[str, Any]) -> bool:
    """Store the job, if an earlier try whose answer did not arrive in time has not. Return True."""
    try:
        api.create(path, document)
    except ApiError as error:
        if error.code != CONFLICT:
            raise
    return True


def ended(api: Api, path: str) -> bool:
    return all(job.get("status", {}).get("phase") in ("Succeeded", "Failed") for job in api.items(path))


def unjudged(cluster: Cluster, namespace: str) -> int | None:
    """Count the jobs without a phase yet by the table that the API server prints of them, as Python could not read the
    jobs, and kubectl takes minutes. None: the API server, full of them, did not answer in time.
    """
    access, left, continued = cluster.access, 0, ""
    session = new_session()
    session.verify, session.cert = access.ca or True, access.client_certificate
    session.headers.update({**access.headers, "Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"})
    while True:
        query = {"limit": "250", "includeObject": "None", **({"continue": continued} if continued else {})}
        try:
            answer = session.get(access.host + path_of(API_VERSION, PLURAL, namespace), params=query, timeout=300)
        except requests.RequestException:
            return None
        if not answer.ok:
            return None
        table = answer.json()
        phase = [column["name"] for column in table["columnDefinitions"]].index("Phase")
        left += sum(row["cells"][phase] != "Pending" for row in table["rows"] or [])
        continued = table["metadata"].get("continue", "")
        if not continued:
            return left


def accepted(cluster: Cluster, namespace: str, stored: int) -> list[str]:
    """Return the jobs of a sample that were not refused."""
    each = '{.metadata.name} {.status.conditions[?(@.type=="Accepted")].status}'
    found = []
    for number in random.Random(7).sample(range(stored), min(SAMPLE, stored)):
        name = f"noise-{number}"
        read = cluster.kubectl("get", PLURAL, name, "-n", namespace, "-o", f"jsonpath={each}", seconds=60)
        missing = "NotFound" in read.stderr  # the API server did not take it
        if not missing and read.stdout.split() != [name, "False"]:
            found.append(read.stdout or f"{name}: {read.stderr}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=100, help="stored a second")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="each takes minutes")
    arguments = parser.parse_args()
    numbers = range(arguments.objects)
    texts_of = {"nothing": iter(()), "suspended": map(suspended, numbers), "hostile": map(hostile, numbers)}
    arms = {name: texts_of[name] for name in arguments.arms}
    print(
        f"{'arm':<11}{'stored':>8}{'in s':>7}{'judged s':>10}{'median s':>10}{'longest s':>11}"
        f"{'longest /healthz ms':>21}{'MiB':>6}{'CPU s':>7}"
    )
    with tempfile.TemporaryDirectory() as text, running_cluster(Path(text)) as cluster:
        folder = Path(text)
        install_kinds(cluster)
        install(cluster)
        cluster.must("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=loose_crd())
        with running_stand_ins(cluster, folder):
            for number, (name, texts) in enumerate(arms.items()):
                process = OperatorProcess(cluster, folder, SETTINGS, name=f"operator-{number}")
                try:
                    seen = run(cluster, process, name, texts, arguments.rate)
                finally:
                    if process.running:
                        process.kill()
                print(
                    f"{name:<11}{seen.stored:>8}{seen.storing:>7.0f}{seen.judged:>10.0f}{statistics.median(seen.seconds):>10.1f}"
                    f"{max(seen.seconds):>11.1f}{1000 * seen.longest_answer:>21.0f}{seen.memory:>6.0f}{seen.cpu:>7.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

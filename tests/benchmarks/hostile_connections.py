"""Measure lost reports and slow probes while hostile connections fill all ports of the operator.

    python tests/benchmarks/hostile_connections.py [--minutes 10]

Baseline: the same pods and reports without other clients. Arms, in turn: nothing else; thousands of connections from 16
addresses to the ports for progress, for the webhook, and for probes and metrics: silent before TLS and after it, with
requests and bodies that do not end, with unknown tokens, and with garbage. Meanwhile four pods report once in two
seconds each, from one of the attacker's addresses, and the kubelet requests /healthz once a second. Reported: posts
that were not taken, the longest time of a report and of /healthz, and the operator's largest memory. Checked: the
operator's process is the same throughout, and no attempt was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import ssl
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests
import urllib3
from requests.adapters import HTTPAdapter

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster_support.api_access import Api, new_session
from cluster_support.control_plane import Cluster, free_port, running_cluster
from cluster_support.operator_process import OperatorProcess, install
from cluster_support.plays import RUNS
from cluster_support.stand_ins import StandIns, running_stand_ins
from cluster_support.world import SETTINGS, World, install_kinds, namespace_for_pods, states

PODS = 4
EVERY_SECONDS = 2.0
ADDRESSES = [f"127.0.1.{number}" for number in range(1, 17)]
HELD = 3_000
"""Connections that the attacker tries to hold open at a time, over all ports."""
BODY = b"x" * 65_536


@dataclass
class Seen:
    """Measurements of one arm."""

    answers: Counter[str] = field(default_factory=Counter)
    """Count of answers by HTTP status, or by error."""
    longest_report: float = 0.0
    longest_health: float = 0.0
    memory: float = 0.0
    opened: int = 0


class From(HTTPAdapter):
    """Adapter whose requests come from one address."""

    def init_poolmanager(self, *args: object, **kw: object) -> None:
        super().init_poolmanager(*args, **kw, source_address=(ADDRESSES[0], 0))  # type: ignore[no-untyped-call]


async def attack(ports: Sequence[tuple[int, bool]], seen: Seen, seconds: float) -> None:
    """Hold HELD connections open, each of which sends one hostile input; reopen closed ones."""
    end = time.monotonic() + seconds
    draw = random.Random(0)
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    kinds = itertools.cycle(["silent", "handshake", "head", "body", "token", "garbage"])
    targets = itertools.cycle(ports)

    async def one() -> None:
        while time.monotonic() < end:
            (port, tls), kind = next(targets), next(kinds)
            await asyncio.sleep(draw.random())
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                context = trusting if tls and kind != "silent" else None
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=context, local_addr=(draw.choice(ADDRESSES), 0)
                )
                seen.opened += 1
                try:
                    for part in hostile_bytes(kind, draw):
                        writer.write(part)
                        await writer.drain()
                    # Until the operator closes it.
                    async with asyncio.timeout(max(0.1, end - time.monotonic())):
                        await reader.read()
                finally:
                    writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(HELD)))


def hostile_bytes(kind: str, draw: random.Random) -> list[bytes]:
    """Return the bytes that one hostile connection sends."""
    path = "/v1alpha1/namespaces/a/finetunejobs/b/stages/train/attempts/1"
    head = f"POST {draw.choice([path, '/validate', '/healthz'])} HTTP/1.1\r\nHost: x\r\n"
    token = f"Authorization: Bearer a.{draw.randrange(10**9)}.c\r\n"
    match kind:
        case "head":
            return [head.encode()]
        case "body":
            return [f"{head}{token}Content-Length: 3000000\r\n\r\n".encode(), *[BODY] * 40]
        case "token":
            return [f"{head}{token}Content-Length: 2\r\n\r\n{{}}".encode()]
        case "garbage":
            return [draw.randbytes(2_000)]
        case _:
            return []


def report(world: World, number: int, seen: Seen, stop: threading.Event) -> None:
    """Report progress as the trainer of one pod does, until `stop` is set."""
    (pod,) = world.pods(f"honest-{number}", "train")
    token = world.token(pod)
    container = pod["spec"]["containers"][0]
    url = str({entry["name"]: entry.get("value") for entry in container["env"]}["KUBEFLOW_TRAINER_SERVER_URL"])
    steps = itertools.count(1)
    while not stop.wait(EVERY_SECONDS):
        metrics = [{"name": "step", "value": str(next(steps))}]
        update = {"trainerStatus": {"metrics": metrics, "lastUpdatedTime": "2026-01-01T00:00:00Z"}}
        session = requests.Session()
        session.trust_env, session.verify = False, False
        session.mount("https://", From())
        began = time.monotonic()
        try:
            answer = session.post(
                url, data=json.dumps(update), headers={"Authorization": f"Bearer {token}"}, timeout=30
            )
            seen.answers[str(answer.status_code)] += 1
        except requests.RequestException as error:
            seen.answers[type(error).__name__] += 1
        seen.longest_report = max(seen.longest_report, time.monotonic() - began)


def watch_over(process: OperatorProcess, seen: Seen, stop: threading.Event) -> None:
    """Request /healthz once a second, as the kubelet does, until `stop` is set."""
    operator = psutil.Process(process.pid)
    while not stop.wait(1.0):
        began = time.monotonic()
        try:
            healthy = new_session().get(f"http://127.0.0.1:{process.http_port}/healthz", timeout=30).ok
        except requests.RequestException:
            healthy = False
        seen.answers["healthz failed"] += not healthy
        seen.longest_health = max(seen.longest_health, time.monotonic() - began)
        seen.memory = max(seen.memory, operator.memory_info().rss / 2**20)


def run(
    cluster: Cluster, around: StandIns, process: OperatorProcess, webhook: int, minutes: float, hostile: bool
) -> Seen:
    """Run one arm."""
    seen, stop = Seen(), threading.Event()
    process.start()
    pid = process.pid
    with namespace_for_pods(cluster) as namespace, ThreadPoolExecutor(PODS + 2) as beside:
        world = World(
            namespace, cluster, Api(cluster.access), around.kubelet, around.gangs, process, around.background,
            around.watching,
        )  # fmt: skip
        names = [f"honest-{number}" for number in range(PODS)]
        for name in names:
            world.kubelet.playbook.set(name, "train", RUNS)
            world.apply(name, {"predict": None})
        for name in names:
            world.wait_running(name, "train")
        running = [beside.submit(report, world, number, seen, stop) for number in range(PODS)]
        running.append(beside.submit(watch_over, process, seen, stop))
        ports = [(process.progress_port, True), (webhook, True), (process.http_port, False)]
        if hostile:
            asyncio.run(attack(ports, seen, 60 * minutes))
        else:
            time.sleep(60 * minutes)
        stop.set()
        for each in running:
            each.result()
        assert process.pid == pid
        for name in names:
            assert states(world.status(name))["train"] == ("Running", 1), world.describe(name)
        around.kubelet.playbook.clear()
    process.terminate()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    arguments = parser.parse_args()
    # The attacker's connections end in many ways.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    urllib3.disable_warnings()
    print(f"{'arm':<9}{'opened':>8}{'taken':>7}{'lost':>6}{'report s':>10}{'/healthz s':>12}{'MiB':>6}  answers")
    with tempfile.TemporaryDirectory() as text, running_cluster(Path(text)) as cluster:
        folder = Path(text)
        install_kinds(cluster)
        install(cluster)
        with running_stand_ins(cluster, folder) as around:
            for hostile in (False, True):
                webhook = free_port()
                name = "hostile" if hostile else "nothing"
                process = OperatorProcess(
                    cluster, folder, SETTINGS, name=f"operator-{name}", options=["--webhook-port", str(webhook)]
                )
                try:
                    seen = run(cluster, around, process, webhook, arguments.minutes, hostile)
                finally:
                    if process.running:
                        process.kill()
                taken = seen.answers["200"]
                lost = sum(seen.answers.values()) - taken
                print(
                    f"{name:<9}{seen.opened:>8}{taken:>7}{lost:>6}{seen.longest_report:>10.2f}"
                    f"{seen.longest_health:>12.2f}{seen.memory:>6.0f}  {dict(seen.answers)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

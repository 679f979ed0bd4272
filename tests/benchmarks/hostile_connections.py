"""Measure lost reports and slow probes while hostile connections fill all ports of the operator.

    python tests/benchmarks/hostile_connections.py [--minutes 10] [--arms nothing hostile] [--attackers 1]

Baseline: the same pods and reports without other clients. Arms, in turn: nothing else; thousands of connections from 16
addresses to the ports for progress, for the webhook, and for probes and metrics: silent before TLS, in the middle of
its handshake and after it, with requests and bodies that do not end or come a byte a second, with answers that nobody
reads, with unknown tokens, and with garbage. Meanwhile eight pods report every 5 s each,
with the trainer's own sender and from one of the attacker's addresses, and the kubelet requests /healthz once a second.
Attackers are processes of their own, as they are on other nodes. Reported: reports, posts beyond one for each report,
reports that no post delivered, the longest time of a post and of /healthz, and the operator's largest memory. Checked:
the operator's process is the same throughout, and no attempt was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import logging
import multiprocessing
import random
import ssl
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster_support.api_access import Api, new_session
from cluster_support.control_plane import Cluster, free_port, running_cluster
from cluster_support.operator_process import OperatorProcess, install
from cluster_support.plays import RUNS
from cluster_support.stand_ins import StandIns, running_stand_ins
from cluster_support.world import SETTINGS, World, install_kinds, namespace_for_pods, states
from finetune_contract.choices import Stage
from finetune_contract.report import KubeflowUpdate, Progress
from finetune_trainer.core.progress import KUBEFLOW_INTERVAL_SECONDS, KubeflowProgress

ARMS = ("nothing", "hostile")
PODS = 8
ADDRESSES = ["127.0.0.1", *(f"127.0.1.{number}" for number in range(1, 16))]
"""The attackers' addresses; the first is that of the pods and of the kubelet as well."""
HELD = 3_000
"""Connections that the attackers try to hold open at a time, over all ports."""
BODY = b"x" * 65_536
UNREAD_SECONDS = 60.0
"""Time that a client holds a connection whose answers it does not read; it cannot see the connection's end."""


@dataclass
class Seen:
    """Measurements of one arm."""

    posts: Counter[str] = field(default_factory=Counter)
    """Count of posts by result: `accepted`, or an error."""
    reports: int = 0
    lost: int = 0
    longest_post: float = 0.0
    longest_health: float = 0.0
    unhealthy: int = 0
    memory: float = 0.0
    opened: int = 0


class Sender(KubeflowProgress):
    """The trainer's sender, whose posts are counted."""

    def __init__(self, url: str, ca_file: Path, token_file: Path, seen: Seen) -> None:
        self._seen = seen
        self.delivered: set[str] = set()
        """Steps whose update was accepted."""
        super().__init__(url, ca_file, token_file)

    def post(self, update: KubeflowUpdate) -> None:
        began, result = time.monotonic(), "accepted"
        try:
            super().post(update)
            self.delivered.add(step_of(update))
        except (OSError, http.client.HTTPException) as error:
            result = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._seen.posts[result] += 1
            self._seen.longest_post = max(self._seen.longest_post, time.monotonic() - began)


def step_of(update: KubeflowUpdate) -> str:
    return next(metric.value for metric in update.trainer_status.metrics if metric.name == "step")


def attack(ports: Sequence[tuple[int, bool]], held: int, seconds: float, seed: int) -> int:
    """Hold `held` connections open, each of which sends one hostile input; reopen closed ones. Return how many were
    opened.
    """
    # Connections end in many ways.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    return asyncio.run(_attack(ports, held, seconds, random.Random(seed)))


async def _attack(ports: Sequence[tuple[int, bool]], held: int, seconds: float, draw: random.Random) -> int:
    end, opened = time.monotonic() + seconds, 0
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    kinds = itertools.cycle(
        [
            "silent",
            "half handshake",
            "handshake",
            "head",
            "slow head",
            "body",
            "slow body",
            "unread",
            "token",
            "garbage",
        ]
    )
    targets = itertools.cycle(ports)

    async def one() -> None:
        nonlocal opened
        while time.monotonic() < end:
            (port, tls), kind = next(targets), next(kinds)
            await asyncio.sleep(draw.random())
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                context = trusting if tls and kind not in ("silent", "half handshake") else None
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=context, local_addr=(draw.choice(ADDRESSES), 0)
                )
                opened += 1
                try:
                    for part in hostile_bytes(kind, draw):
                        writer.write(part)
                        await writer.drain()
                    # Until the operator closes it.
                    async with asyncio.timeout(max(0.1, end - time.monotonic())):
                        if kind == "unread":
                            writer.transport.pause_reading()
                        while kind.startswith("slow") and not reader.at_eof():
                            writer.write(b"a")
                            await writer.drain()
                            await asyncio.sleep(1)
                        await (asyncio.sleep(UNREAD_SECONDS) if kind == "unread" else reader.read())
                finally:
                    writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(held)))
    return opened


def hostile_bytes(kind: str, draw: random.Random) -> list[bytes]:
    """Return the bytes that one hostile connection sends."""
    path = "/v1alpha1/namespaces/a/finetunejobs/b/stages/train/attempts/1"
    head = f"POST {draw.choice([path, '/validate', '/healthz'])} HTTP/1.1\r\nHost: x\r\n"
    token = f"Authorization: Bearer a.{draw.randrange(10**9)}.c\r\n"
    match kind:
        case "head" | "slow head":
            return [head.encode(), b"X: "]
        case "slow body":
            return [f"{head}{token}Content-Length: 3000000\r\n\r\n".encode()]
        case "half handshake":
            return [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]
        case "unread":
            return [b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100]
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
    name = f"honest-{number}"
    (pod,) = world.pods(name, "train")
    configuration = world.api.get(world.path("v1", "configmaps", f"{name}-train-1"))
    assert configuration is not None
    ca_file, token_file = (world.operator.folder / f"{name}.{kind}" for kind in ("ca.crt", "token"))
    ca_file.write_text(configuration["data"]["ca.crt"])
    token_file.write_text(world.token(pod))
    container = pod["spec"]["containers"][0]
    url = str({entry["name"]: entry.get("value") for entry in container["env"]}["KUBEFLOW_TRAINER_SERVER_URL"])
    sender, step = Sender(url, ca_file, token_file, seen), 0
    while not stop.wait(KUBEFLOW_INTERVAL_SECONDS):
        step += 1
        sender.publish(Progress(stage=Stage.TRAIN, step=step, total_steps=10**6, time=time.time()))
    sender.close()
    seen.reports += step
    seen.lost += step - len(sender.delivered)


def watch_over(process: OperatorProcess, seen: Seen, stop: threading.Event) -> None:
    """Request /healthz once a second, as the kubelet does, until `stop` is set."""
    operator = psutil.Process(process.pid)
    while not stop.wait(1.0):
        began = time.monotonic()
        try:
            healthy = new_session().get(f"http://127.0.0.1:{process.http_port}/healthz", timeout=30).ok
        except requests.RequestException:
            healthy = False
        seen.unhealthy += not healthy
        seen.longest_health = max(seen.longest_health, time.monotonic() - began)
        seen.memory = max(seen.memory, operator.memory_info().rss / 2**20)


def run(
    cluster: Cluster, around: StandIns, process: OperatorProcess, webhook: int, minutes: float, attackers: int
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
        if attackers:
            seen.opened = attacked(ports, 60 * minutes, attackers)
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


def attacked(ports: Sequence[tuple[int, bool]], seconds: float, attackers: int) -> int:
    """Attack with so many processes; return how many connections they opened."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(attackers, mp_context=context) as pool:
        running = [pool.submit(attack, ports, HELD // attackers, seconds, seed) for seed in range(attackers)]
        return sum(each.result() for each in running)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--attackers", type=int, default=1, help="processes that attack")
    arguments = parser.parse_args()
    print(
        f"{'arm':<9}{'opened':>8}{'reports':>9}{'repeated':>10}{'lost':>6}{'post s':>8}{'/healthz s':>12}"
        f"{'failed':>8}{'MiB':>6}  posts"
    )
    with tempfile.TemporaryDirectory() as text, running_cluster(Path(text)) as cluster:
        folder = Path(text)
        install_kinds(cluster)
        install(cluster)
        with running_stand_ins(cluster, folder) as around:
            for name in arguments.arms:
                webhook = free_port()
                process = OperatorProcess(
                    cluster, folder, SETTINGS, name=f"operator-{name}", options=["--webhook-port", str(webhook)]
                )
                attackers = arguments.attackers if name == "hostile" else 0
                try:
                    seen = run(cluster, around, process, webhook, arguments.minutes, attackers)
                finally:
                    if process.running:
                        process.kill()
                print(
                    f"{name:<9}{seen.opened:>8}{seen.reports:>9}{sum(seen.posts.values()) - seen.reports:>10}"
                    f"{seen.lost:>6}{seen.longest_post:>8.2f}{seen.longest_health:>12.2f}{seen.unhealthy:>8}"
                    f"{seen.memory:>6.0f}  {dict(seen.posts)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

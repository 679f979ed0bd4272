"""Pods that predict while they are killed at random, the workspace fails and a node is lost: the output has the bytes
of an undisturbed job, and no shard is begun more often than the faults explain.

`FINETUNE_PREDICT_ROWS=10000 FINETUNE_PREDICT_KILLS=20` runs the whole measurement (`tests/benchmarks/README.md`).
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from box_support.box import Box, on_fragile_nodes
from box_support.faults import kill_pod, node_off
from box_support.steered_predictions import HOLD, OUTAGE, parts_folder, steered_template
from box_support.team import INPUTS, Team, stage_of
from cluster_support.api_access import ApiError, Object, wait_until
from finetune_trainer.data.row_shards import LEAST_BYTES, SHARDS
from suite_plugins.patience import patient

WORKERS = 4
ROWS = int(os.environ.get("FINETUNE_PREDICT_ROWS", "1200"))
KILLS = int(os.environ.get("FINETUNE_PREDICT_KILLS", "3"))
SEED = int(os.environ.get("FINETUNE_SEED", "7"))
FILLER = "-" * 2100
"""Text of a column that nobody reads, so that 30 rows are a shard of 64 KiB."""
SHARD_SECONDS = 1.5
"""Least time of a shard, so that faults find pods at work."""


class Claims:
    """Claims of shards, seen by listing the job's folder while it runs; they are removed with the parts."""

    def __init__(self, team: Team, name: str) -> None:
        self._team, self._name = team, name
        self._seen: set[tuple[str, str]] = set()
        self._folder: Path | None = None
        self._over = threading.Event()

    @property
    def begun(self) -> Counter[str]:
        """Number of times that each shard was begun."""
        return Counter(claim.rpartition(".")[0] for _, claim in self._seen)

    def parts(self) -> int:
        """Return the number of finished parts; 0 before there is a folder."""
        return len(list(self._parts_folder.glob("*/*.arrow")))

    @property
    def _parts_folder(self) -> Path:
        if self._folder is None:
            # A busy API server may answer with an error; the next look asks again.
            with suppress(ApiError):
                self._folder = parts_folder(self._team, self._name)
        return self._folder or Path("/nowhere")

    @contextmanager
    def watched(self) -> Iterator[None]:
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            with suppress(FileNotFoundError):  # the parts are removed while they are listed
                for file in self._parts_folder.glob("*/attempt-*/claims/*.*"):
                    if file.name[:1].isdecimal():
                        self._seen.add((file.parent.parent.name, file.name))


def write_rows(folder: Path) -> int:
    """Write to-answer/rows.jsonl into the folder of the inputs; return the number of its shards."""
    vocabulary = ("good", "bad", "lamp", "soup", "chair", "was", "very", "broken", "stale", "fresh")
    (folder / "to-answer").mkdir(exist_ok=True)
    with (folder / "to-answer" / "rows.jsonl").open("w", encoding="utf-8") as file:
        for number in range(ROWS):
            text = " ".join(vocabulary[(number * step + step) % len(vocabulary)] for step in range(1, 3 + number % 20))
            file.write(json.dumps({"id": f"r-{number:05}", "text": text, "filler": FILLER}) + "\n")
    for path in (folder / "to-answer", folder / "to-answer" / "rows.jsonl"):
        path.chmod(0o755)
    size = (folder / "to-answer" / "rows.jsonl").stat().st_size
    return -(-size // max(LEAST_BYTES, size // SHARDS))


def spec_of(workers: int, template: Object) -> Object:
    return {
        "task": "text-classification",
        "model": {"uri": f"pvc://{INPUTS}/tiny/classifier"},
        "predict": {
            "dataset": {"uri": f"pvc://{INPUTS}/to-answer/rows.jsonl"}, "workers": workers, "idColumn": "id",
        },
        "resources": {"cpu": "1", "memory": "2Gi"},
        "storage": {"size": "1Gi"},
        "runPolicy": {"maxRestarts": 20},
        "template": template,
    }  # fmt: skip


def running(team: Team, name: str) -> list[str]:
    """Return the running pods of the current attempt."""
    pods = [pod for pod in team.pods(name, "predict") if pod["status"].get("phase") == "Running"]
    return [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def kill_at_random(team: Team, name: str, claims: Claims, shards: int) -> int:
    """Kill pods at random while shards are left; return how many were killed."""
    draw, killed = random.Random(SEED), 0
    for number in range(KILLS):
        more = (number + 1) * shards // (3 * KILLS)

        def due(more: int = more) -> bool:
            return claims.parts() >= more and bool(running(team, name))

        wait_until(due, f"{more} parts are written", 300, lambda: team.describe(name))
        try:
            kill_pod(team, draw.choice(running(team, name)))
        except AssertionError:
            continue  # it ended by itself meanwhile
        killed += 1
    return killed


def fail_writes(team: Team, name: str) -> None:
    """Have writes of parts fail for a while, as on a share whose server does not respond; then hold them."""
    mark = team.results(name) / OUTAGE
    mark.touch()
    ended = [pod["metadata"]["name"] for pod in team.pods(name, "predict")]
    try:
        wait_until(lambda: not set(ended) <= set(running(team, name)), "a pod has lost its storage")
    finally:
        (team.results(name) / HOLD).touch()
        mark.unlink()


@pytest.mark.timeout(900 + 60 * KILLS)
def test_pods_predict_the_bytes_of_an_undisturbed_job_after_many_faults(box: Box, team: Team) -> None:
    box.own("losing a node")
    shards = write_rows(box.claim_folder(team.namespace, INPUTS))
    calm, name = team.new_name("calm"), team.new_name("struck")
    team.apply(calm, spec_of(1, {}))
    team.apply(name, spec_of(WORKERS, {**on_fragile_nodes(box, "inference"), **steered_template(team, SHARD_SECONDS)}))
    claims = Claims(team, name)
    with claims.watched():
        killed = kill_at_random(team, name, claims, shards)
        assert killed
        fail_writes(team, name)
        wait_until(lambda: running(team, name), "pods run again", 120, lambda: team.describe(name))
        assert claims.parts() < shards, "the rows were answered before the node was lost"
        node = team.pod(running(team, name)[0])["spec"]["nodeName"]
        there = [pod for pod in map(team.pod, running(team, name)) if pod["spec"]["nodeName"] == node]
        with node_off(box, node):
            (team.results(name) / HOLD).unlink()
            status = team.succeeds(name, patient(600))
    found, expected = (team.results(each) / "predictions.jsonl" for each in (name, calm) if team.succeeds(each))
    assert found.read_bytes() == expected.read_bytes()
    assert len(found.read_bytes().splitlines()) == ROWS
    stage = stage_of(status, "predict")
    # While writes fail, each worker loses a shard at most; with an attempt, too.
    lost = killed + WORKERS + len(there) + WORKERS * (stage["attempt"] - 1)
    again = {shard: count - 1 for shard, count in claims.begun.items() if count > 1}
    repeated = sum(again.values())
    print(f"{ROWS} rows, {shards} shards, {killed} kills, at most {lost} workers lost, {repeated} shards begun again")
    assert len(claims.begun) == shards, "claims were not seen"
    assert repeated <= lost
    team.delete(name)
    team.delete(calm)

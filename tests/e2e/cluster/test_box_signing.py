"""A signed training by mpirun in a shared workspace, whose newest checkpoint somebody forges, and whose model then
misses its gate: ranks have the key and nobody else sees it, and the failure's hint works as printed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest
import yaml

from box_support.box import Box
from box_support.faults import Rank, kill_rank, puppet, ranks
from box_support.team import Team, stage_of, tiny_spec
from cluster_support.api_access import Object, wait_until
from finetune_contract.layout import ENV_CHECKPOINT_SECRET
from finetune_trainer.checkpoint.checkpoints import MANIFEST, SIGNATURE, Manifest
from finetune_trainer.core.files import entries_of

EVERY, HOLDS_AT, STEPS = 5, 14, 16
"""The first attempt waits with two checkpoints until it is killed; the second one does not get so far."""


KUBELET_STARTS = (b"setpriv\0", b"env\0-i\0")
"""Prefixes of the command lines by which the kubelet of the box starts a container, with the environment for a moment:
`setpriv` becomes `env`, and that the container's program.
"""


@contextmanager
def command_lines_with(text: str) -> Iterator[list[str]]:
    """Collect the command lines of this machine, and of pods on it, that hold `text`, all the time."""
    found: list[str] = []
    over = Event()

    def look() -> None:
        while not over.wait(0.1):
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    line = file.read_bytes()
                    if text.encode() in line and not line.startswith(KUBELET_STARTS):
                        found.append(line.replace(b"\0", b" ").decode(errors="replace"))

    thread = Thread(target=look, name="command lines")
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def forge(checkpoint: Path) -> None:
    """Change the weights, and make the manifest match, as anyone who can write to the volume may."""
    manifest = Manifest.model_validate_json((checkpoint / MANIFEST).read_bytes())
    weights = max((checkpoint / "state").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    files = {name: entry for name, entry in entries_of(checkpoint).items() if name not in (MANIFEST, SIGNATURE)}
    (checkpoint / MANIFEST).write_text(manifest.model_copy(update={"files": files}).to_json())


@dataclass(frozen=True)
class Signed:
    """The signed job, and records of it."""

    name: str
    key: str
    failure: Object
    status: Object
    environments: dict[int, str | None]
    """Rank -> the key in the rank's environment."""
    command_lines: list[str]
    objects: str
    """All objects of the namespace but Secrets, while the job ran and after it."""
    logs: dict[int, str]
    """Attempt -> output of its pods."""


def logs_of(team: Team, name: str, attempt: int) -> str:
    pods = [pod["metadata"]["name"] for pod in team.pods(name, "train", attempt)]
    return "".join(team.box.cluster.kubectl("logs", "-n", team.namespace, pod).stdout for pod in pods)


def objects_of(team: Team) -> str:
    kinds = "ftj,pods,jobs,mpijobs,configmaps,services,events,persistentvolumeclaims"
    return team.box.kubectl("get", kinds, "-n", team.namespace, "-o", "yaml")


@pytest.fixture(scope="module")
def signed(box: Box, team: Team, training_operators: None) -> Signed:
    box.own("looking into pods and claims")
    name, key = team.new_name("signed"), secrets.token_hex(32)
    team.apply_manifest(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "signing"}, "stringData": {"key": key}}
    )
    training = {"maxSteps": STEPS, "globalBatchSize": 16, "learningRate": 0.002, "precision": "fp32"}
    spec = tiny_spec(
        launcher="mpijob",
        training=training,
        checkpoints={"every": {"steps": EVERY}, "keep": 3, "signingKey": {"name": "signing", "key": "key"}},
        evaluation={"gate": {"metric": "loss", "maximum": 0.000001}},
        template=puppet(team, holds_at=HOLDS_AT),
    )
    with command_lines_with(key) as command_lines:
        team.apply(name, spec)

        def held() -> list[Rank] | None:
            assert stage_of(team.status(name), "train").get("attempt", 1) <= 1, team.describe(name)
            if team.step(name) < HOLDS_AT - 1:
                return None
            found = [rank for pod in team.pods(name, "train", 1) for rank in ranks(team, pod["metadata"]["name"])]
            return found if len(found) == 2 else None

        found = wait_until(held, f"both ranks of {name} wait", 600, lambda: team.describe(name))
        environments = {one.rank: one.process.environ().get(ENV_CHECKPOINT_SECRET) for one in found}
        objects = objects_of(team)
        checkpoints = team.results(name) / "checkpoints"
        assert {path.name for path in checkpoints.glob(f"step-*/{SIGNATURE}")} == {SIGNATURE}
        forge(checkpoints / f"step-{2 * EVERY}")
        (pod,) = (
            pod["metadata"]["name"]
            for pod in team.pods(name, "train", 1)
            if any(rank.rank == 1 for rank in ranks(team, pod["metadata"]["name"]))
        )
        logs = {1: logs_of(team, name, 1)}
        kill_rank(team, pod, 1)
        failure = team.fails(name)
        logs[2] = logs_of(team, name, 2)
    return Signed(name, key, failure, team.status(name), environments, command_lines, objects + objects_of(team), logs)


def test_only_ranks_started_by_mpirun_have_the_signing_key(signed: Signed, box: Box, team: Team) -> None:
    assert stage_of(signed.status, "train")["child"]["kind"] == "MPIJob"
    assert signed.environments == {0: signed.key, 1: signed.key}
    assert signed.command_lines == []
    assert "name: signing" in signed.objects
    assert signed.key not in signed.objects
    assert all(signed.logs.values())
    assert signed.key not in "".join(signed.logs.values())
    assert signed.key not in box.operator_log(2000)
    written = [path for path in team.results(signed.name).rglob("*") if path.is_file()]
    assert [path for path in written if signed.key.encode() in path.read_bytes()] == []


def test_a_forged_checkpoint_is_skipped_and_the_one_before_it_resumed(signed: Signed) -> None:
    assert (signed.status["restarts"], stage_of(signed.status, "train")["attempt"]) == (1, 2)
    assert re.search(rf"step-{2 * EVERY} .*does not belong to the manifest and the job's signing key", signed.logs[2])
    assert re.search(rf"Resuming from \S+ \(step {EVERY}\)", signed.logs[2])


def test_the_job_that_the_hint_of_a_missed_gate_prints_judges_the_model(signed: Signed, team: Team) -> None:
    assert signed.failure["class"] == "GateNotMet"
    printed = re.search(r"spec\.model (\{uri: \S+\})", signed.failure["hint"])
    assert printed is not None, signed.failure["hint"]
    spec = tiny_spec(model=yaml.safe_load(printed[1]), evaluation={"gate": {"metric": "loss", "maximum": 100}})
    del spec["training"]
    again = team.new_name("judged-again")
    team.apply(again, spec)
    status = team.succeeds(again)
    assert [stage["name"] for stage in status["stages"]] == ["prepare", "evaluate"]
    assert 0.000001 < status["artifacts"]["metrics"]["loss"] < 100

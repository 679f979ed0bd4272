"""The runner of tiers: its queues, the exit codes that it judges, and the programs that it has built."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import suites
from dear_tests import Choice, read_areas
from suites import Queues, programs

BOX_FILE, CLUSTER_FILE = "tests/e2e/cluster/test_box_tour.py", "tests/cluster/test_crd.py"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), []),
        (("tests/trainer/test_launch.py",), []),
        ((CLUSTER_FILE,), ["etcd", "kubernetes"]),
        (("tests/cluster/test_operator_chart.py",), ["etcd", "kubernetes", "helm"]),
        ((BOX_FILE,), ["etcd", "kubernetes", "training-operator", "mpi-operator"]),
    ],
)
def test_only_programs_of_the_chosen_tests_are_built(files: Sequence[str], expected: list[str]) -> None:
    assert programs(Choice(dict.fromkeys(files, "core"), {}), read_areas()) == expected


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in place of the reports of this checkout."""
    monkeypatch.setattr(suites, "REPORTS", tmp_path)
    handler = signal.getsignal(signal.SIGTERM)  # which the runner replaces
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


def test_queues_run_each_suite_and_keep_its_exit_code(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: dict[str, list[str]] = {}
    script = 'echo "$0 of $FINETUNE_TRIAL"; exit 3'
    monkeypatch.setenv("FINETUNE_TRIAL", "a trial")
    run = Queues._suite

    def recorded(queues: Queues, name: str, command: list[str], more: dict[str, str], nice: int = 0) -> None:
        commands[name] = command
        run(queues, name, ["bash", "-c", script, name], more, nice)

    monkeypatch.setattr(Queues, "_suite", recorded)
    queues = Queues(everything=True)
    queues.run(["tests/trainer/test_launch.py", CLUSTER_FILE, BOX_FILE], cheap=True)

    assert queues.codes == {"test": 3, "dear": 3, "cluster": 3, "e2e": 3}
    assert (reports / "e2e.log").read_text() == "e2e of a trial\n"
    assert commands["test"][:2] == ["make", "test"]
    assert [command[-1] for name, command in commands.items() if name != "test"].count(BOX_FILE) == 1
    assert "--everything" in commands["dear"]
    assert "--everything" in commands["test"][-1]


@pytest.mark.parametrize(
    ("code", "phases", "expected"),
    [
        (0, {"bare": 0, "shared": 0}, {"e2e-bare": 0, "e2e-shared": 0}),
        (1, {"bare": 0, "shared": 1}, {"e2e-bare": 0, "e2e-shared": 1}),
        (1, {"bare": 70, "shared": 70}, {"e2e-bare": 70, "e2e-shared": 70}),
        (143, {"bare": 0}, {"e2e": 143, "e2e-bare": 0}),
        (1, {}, {"e2e": 1}),
    ],
    ids=["good", "a phase failed", "the box did not start", "the box did not end", "nothing was written"],
)
def test_box_is_judged_by_its_phases_and_by_its_end(
    code: int, phases: dict[str, int], expected: dict[str, int], reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def phases_of(queues: Queues, name: str, *_: object, **__: object) -> None:
        queues.codes[name] = code
        for phase, ended in phases.items():
            (reports / f"e2e-{phase}.code").write_text(f"{ended}\n")

    monkeypatch.setattr(Queues, "_suite", phases_of)
    queues = Queues()
    queues.run([BOX_FILE], cheap=False)
    assert queues.codes == expected


def test_seconds_of_an_earlier_box_are_forgotten(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (reports / "e2e-bare.cpu").write_text("500\n")
    monkeypatch.setattr(suites, "beside_each_other", lambda: 1.0)
    monkeypatch.setattr(Queues, "run", lambda queues, files, cheap: None)
    monkeypatch.setattr(suites, "finish", lambda queues, choice, tier: 0)
    monkeypatch.setenv(suites.PATIENCE, os.environ[suites.PATIENCE])
    monkeypatch.chdir(Path.cwd())
    assert suites.main(["t3", "--part", "2/6"]) == 0
    assert list(reports.iterdir()) == []

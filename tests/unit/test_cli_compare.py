"""`finetune compare`: differences, better values, and incomplete runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import browser
from finetune_command import finetune
from finetune_contract.choices import Stage
from finetune_contract.report import TrainerReport
from finetune_operator.extras.compare.comparing import Comparison, compare, page, print_comparison
from finetune_operator.extras.compare.runfolders import NoRunError, find_runs
from finetune_operator.spec.types import FailureStatus

HOSTILE = "<script>alert(1)</script>&"
METRICS = {"accuracy": 0.9, "loss": 0.3, "mood": 1.0, "rows": 100, "split": "test"}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that creates the folder of a run in `runs`."""

    def made(
        name: str,
        *,
        folder: str = "runs",
        rate: float = 2e-5,
        steps_per_epoch: int = 20,
        evaluated: Mapping[str, Any] | None = None,
        stages: tuple[Stage, ...] = (Stage.PREPARE, Stage.TRAIN, Stage.EVALUATE),
        seconds: float = 60.0,
        **job: Any,
    ) -> Path:
        root = tmp_path / folder / name
        (root / "state").mkdir(parents=True)
        world = {"nodes": 2, "processesPerNode": 1, "device": "cpu"}
        training = {"maxSteps": 40, "stepsPerEpoch": steps_per_epoch, "learningRate": rate, "world": world}
        trainer = {"schemaVersion": 1, "name": name, "task": "text-classification", "model": {"uri": "hf://org/model"}}
        trainer |= {"dataset": {"uri": "hf://org/data"}, "training": training, "evaluation": {"device": "cpu"}, **job}
        plan = {
            "trainer": trainer,
            "strategy": "single",
            "estimate": {"seconds": 100.0, "cost": 2.0, "currency": "EUR"},
        }
        train = {"loss_last": rate, "samples_per_second": 10 / rate, "peak_memory_bytes": 3 << 30, "steps": 40}
        lines = [{"step": i, "epoch": i / steps_per_epoch, "loss": 1 / i, "learning_rate": rate} for i in range(1, 41)]
        lines.append({"step": 40, "eval_loss": rate})
        write(root / "job.json", trainer)
        write(root / "plan.json", plan)
        write(root / "metrics.json", {"train": train, "evaluate": {**METRICS, **(evaluated or {})}})
        (root / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        for stage in stages:
            ended = TrainerReport(job=name, stage=stage, rank=0, world_size=1, outcome="succeeded", seconds=seconds)
            (root / "state" / f"{stage}.json").write_text(ended.to_json())
        return root

    return made


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def compared(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return finetune("compare", *arguments, folder=tmp_path)


def of(tmp_path: Path, *names: str) -> Comparison:
    return compare(find_runs(names, tmp_path / "runs"))


def data(tmp_path: Path, *names: str, every: bool = False) -> dict[str, Any]:
    return of(tmp_path, *names).data(every=every)


def text(tmp_path: Path, *names: str, every: bool = False) -> str:
    console = Console(file=StringIO(), width=200, markup=False)
    print_comparison(console, of(tmp_path, *names), every=every)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    return shown


def row(found: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    (one,) = (each for each in found[kind] if each.get("name", each.get("field")) == name)
    return dict(one)


def test_differing_settings_are_shown_and_equal_ones_on_request(tmp_path, run):
    run("a")
    run("b", rate=1e-4)
    found = data(tmp_path, "a", "b")
    assert [each["field"] for each in found["settings"]] == ["training.learningRate"]
    assert found["settings"][0]["values"] == {"a": 2e-5, "b": 1e-4}
    assert row(data(tmp_path, "a", "b", every=True), "settings", "task")["differs"] is False
    shown = text(tmp_path, "a", "b")
    assert "training.learningRate  2e-05  0.0001" in shown
    assert "model.uri" not in shown
    assert "model.uri" in text(tmp_path, "a", "b", every=True)


def test_the_better_value_is_marked_by_the_direction_of_its_metric(tmp_path, run):
    run("a", evaluated={"accuracy": 0.95, "loss": 0.4, "mood": 1.0})
    run("b", evaluated={"accuracy": 0.9, "loss": 0.2, "mood": 2.0}, seconds=30.0, rate=1e-4)
    run("c", evaluated={"accuracy": 0.95, "loss": float("nan")})
    found = data(tmp_path, "a", "b", "c")
    assert row(found, "metrics", "accuracy")["best"] == ["a", "c"]
    assert row(found, "metrics", "loss")["best"] == ["b"]
    assert row(found, "metrics", "loss")["values"]["c"] is None
    assert row(found, "metrics", "mood") == {**row(found, "metrics", "mood"), "better": None, "best": []}
    assert row(found, "figures", "time of train")["best"] == ["b"]
    assert row(found, "figures", "samples/s")["best"] == ["a", "c"]
    assert row(found, "figures", "peak memory of a process")["best"] == []
    run("d", evaluated={"accuracy": 0.95004})
    assert row(data(tmp_path, "a", "d"), "metrics", "accuracy")["best"] == []  # as both are shown as 0.9500
    shown = text(tmp_path, "a", "b", "c")
    assert "0.9500 *  0.9000" in shown
    assert "* the best of its row" in shown


def test_the_cost_is_of_the_nodes_that_were_used_at_the_price_of_the_plan(tmp_path, run):
    run("a")
    run("b", seconds=30.0)
    # 2 EUR for 100 s on two nodes; used: 180 s, and 60 s more on the second node.
    assert row(data(tmp_path, "a", "b"), "figures", "cost in EUR")["values"] == pytest.approx({"a": 2.4, "b": 1.2})


def test_runs_of_the_same_name_are_distinguished_by_folder(tmp_path, run):
    run("a")
    other = run("a", folder="elsewhere", rate=1e-4)
    names = [each["name"] for each in data(tmp_path, "a", str(other))["runs"]]
    assert names == ["a", str(other)]


def test_unfinished_failed_and_damaged_runs_are_compared_with_notes(tmp_path, run):
    run("whole")
    unfinished = run("unfinished", stages=(Stage.PREPARE,))
    failed = run("failed", stages=(Stage.PREPARE, Stage.TRAIN), rate=1e-4)
    failure = FailureStatus(failure_class="GateNotMet", reason="GateNotMet", message="too low", stage="evaluate")
    write(failed / "failure.json", failure.model_dump(mode="json", by_alias=True, exclude_none=True))
    broken = run("broken")
    (broken / "metrics.json").write_text('{"train": ')
    (broken / "job.json").write_text("[]")
    (broken / "history.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"st\n{"step": 3, "loss": 1.0}\n')
    (unfinished / "metrics.json").unlink()
    found = data(tmp_path, "whole", "unfinished", "failed", "broken")
    states = {each["name"]: each["state"] for each in found["runs"]}
    assert states == {
        "whole": "finished",
        "unfinished": "unfinished: train at step 40 of 40",
        "failed": "failed: GateNotMet in evaluate",
        "broken": "finished",
    }
    problems = {each["name"]: each["problems"] for each in found["runs"]}
    assert [name for name, listed in problems.items() if listed] == ["broken"]
    assert [each.split()[0].rstrip(":") for each in problems["broken"]] == [
        "job.json",
        "history.jsonl",
        "metrics.json",
    ]
    assert set(row(found, "metrics", "accuracy")["values"]) == {"whole", "failed"}
    assert set(row(found, "figures", "time of all stages")["values"]) == {"whole", "broken"}
    assert row(found, "settings", "training.learningRate")["values"]["broken"] == 2e-5  # plan.json has it, too
    ran = compared(tmp_path, "whole", "unfinished", "failed", "broken", "--html", "page.html")
    assert ran.returncode == 0
    assert "Note: broken: metrics.json cannot be read" in ran.stderr
    assert "failed: GateNotMet in evaluate" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_without_a_plan_its_settings_are_not_known_rather_than_different(tmp_path, run):
    run("a")
    (run("b") / "plan.json").unlink()
    assert data(tmp_path, "a", "b")["settings"] == []
    (shown,) = (line for line in text(tmp_path, "a", "b", every=True).splitlines() if "plan.strategy" in line)
    assert shown.split() == ["plan.strategy", "single", "?"]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        pytest.param("nope", "nope is neither a folder nor a run in --workspace", id="name"),
        pytest.param("empty", "empty is not the folder of a run (it has no job.json", id="folder"),
        pytest.param("runs", "it contains the runs a, b: name those", id="workspace"),
    ],
)
def test_folder_without_a_run_is_refused_with_a_hint(named, message, tmp_path, run, monkeypatch):
    run("a")
    run("b")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NoRunError) as caught:
        find_runs(["a", named], Path("runs"))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ("a", "nope"), "nope is neither a folder nor a run in --workspace runs, which has a.", id="no run"
        ),
        pytest.param(("a",), "name two or more different runs", id="one"),
        pytest.param(("a", "runs/a"), "name two or more different runs", id="twice"),
    ],
)
def test_wrong_call_exits_with_2_and_the_reason(arguments, message, tmp_path, run):
    run("a")
    ran = compared(tmp_path, *arguments)
    assert ran.returncode == 2
    assert message in " ".join(ran.stderr.split())


def test_a_page_that_cannot_be_written_ends_with_2(tmp_path, run):
    run("a")
    run("b")
    ran = compared(tmp_path, "a", "b", "--html", "runs")
    assert ran.returncode == 2
    assert "--html runs: cannot be written" in ran.stderr


def test_metrics_of_different_rows_come_with_a_warning(tmp_path, run):
    run("a")
    run("b", evaluated={"rows": 7})
    assert "different rows" in data(tmp_path, "a", "b")["notes"][0]
    run("c", task="summarization", dataset={"uri": "hf://org/other"})
    notes = " ".join(data(tmp_path, "a", "c")["notes"])
    assert "different tasks: summarization, text-classification" in notes
    assert "different rows" in notes


def test_yaml_and_json_contain_the_data_of_the_tables(tmp_path, run):
    run("a")
    run("b", rate=1e-4)
    found = data(tmp_path, "a", "b")
    assert yaml.safe_load(compared(tmp_path, "a", "b", "-o", "yaml").stdout) == found
    assert json.loads(compared(tmp_path, "a", "b", "-o", "json").stdout) == found


def test_secrets_in_settings_are_not_shown(tmp_path, run):
    secret = "hf_abcdefghijklmnopqrstuvwxyz123456"
    run("a", script={"url": "https://user:s3cr3t-word@host/repo", "arguments": ["--token", secret]})
    run("b")
    shown = text(tmp_path, "a", "b") + page(of(tmp_path, "a", "b"), every=True)
    assert "script.url" in shown
    assert secret not in shown
    assert "s3cr3t-word" not in shown


class Tags(HTMLParser):
    """Names of all tags, all text, and the labels of charts in a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.labels: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.labels += [value for name, value in attrs if name == "aria-label" and value]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_lays_the_curves_over_each_other_and_loads_nothing(tmp_path, run):
    run("a", model={"uri": f"hf://{HOSTILE}"})
    run("b", rate=1e-4)
    tags = Tags(page(of(tmp_path, "a", "b"), every=False))
    assert not {"script", "link", "img", "iframe", "a"} & set(tags.names)
    assert f"hf://{HOSTILE}" in tags.text
    assert [label.split(":")[0] for label in tags.labels] == ["Training loss", "Learning rate"]
    assert "a from 1 at step 1 to 0.025 at step 40; b from" in tags.labels[0]


def test_curves_of_runs_with_different_step_sizes_are_aligned_by_epoch(tmp_path, run):
    run("a")
    run("b", steps_per_epoch=10)
    tags = Tags(page(of(tmp_path, "a", "b"), every=False))
    assert "a from 1 at epoch 0.05 to 0.025 at epoch 2; b from 1 at epoch 0.1 to 0.025 at epoch 4" in tags.labels[0]


@pytest.mark.slow
def test_the_page_fits_telephones_and_screens_and_shows_no_empty_section(tmp_path, run):
    names = [f"run-{i}-with-a-name-that-is-rather-long-for-a-column" for i in range(7)]
    for i, name in enumerate(names):
        run(name, rate=2e-5 * (i + 1), model={"uri": "hf://org/" + "x" * 300 * (i == 3)})
    (tmp_path / "page.html").write_text(page(of(tmp_path, *names), every=True), encoding="utf-8")
    folder = tmp_path / "browser"
    folder.mkdir()
    for seen in browser.seen(tmp_path / "page.html", folder):
        assert seen.scroll <= seen.width, seen.wide
        assert (seen.wide, seen.empty, seen.flat) == ([], [], [])
        assert seen.charts == 2

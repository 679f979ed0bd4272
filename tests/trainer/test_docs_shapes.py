"""The rows of docs/data-shapes.md suit the jobs beside them, and have the shapes that the page names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from finetune_contract.data_settings import ModelSource
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.cli.main import app
from finetune_operator.plan.trainer_order import data_source
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import LOCAL_SETTINGS
from finetune_trainer.prepare.check import Trains, check

PAGE = (Path(__file__).parents[2] / "docs" / "data-shapes.md").read_text(encoding="utf-8")
SECTIONS = {
    title: content for title, _, content in (part.partition("\n") for part in re.split(r"^### ", PAGE, flags=re.M)[1:])
}
HEAD = "apiVersion: finetune.dev/v1alpha1\nkind: FineTuneJob\nmetadata: {name: job}\n"


def written(title: str) -> str:
    """Write the files of a section into the current folder, and return its job."""
    for name, content in re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)```", SECTIONS[title], re.M | re.S):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content, encoding="utf-8")
    for code in re.findall(r"```python\n(from datasets.*?)```", SECTIONS[title], re.S):
        exec(code, {})
    (job,) = re.findall(r"```yaml\n(.*?)```", SECTIONS[title], re.S)
    return HEAD + str(job)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_rows_of_a_section_suit_its_job(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    job, problems = validate_job(yaml.safe_load(written(title)), LOCAL_SETTINGS)
    assert job is not None, problems
    task, dataset = job.spec.task, job.spec.dataset
    assert dataset is not None
    trained = TrainerJob(
        name="job", task=task, model=ModelSource(uri=job.spec.model.uri), dataset=data_source(task, dataset)
    )
    found = check(trained, trains=Trains(batch=4))
    assert found.problems == ()
    assert [split.rows for split in found.splits] == [4 if title == "Essays with spans" else 5]
    assert [note for note in found.notes if note.startswith("Rows ")] == re.findall(
        r"^`(Rows have the shape .*)`$", SECTIONS[title], re.M
    )


def test_the_command_names_the_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(written("Alpaca"), encoding="utf-8")
    ran = CliRunner().invoke(app, ["validate", "job.yaml", "--data"])
    assert (ran.exit_code, "job.yaml:1: job is valid" in ran.output) == (0, True), ran.output
    assert "Rows have the shape Alpaca: instruction, input, output, history, system are read as messages." in ran.output


def test_the_page_has_each_shape() -> None:
    assert len(SECTIONS) == 15

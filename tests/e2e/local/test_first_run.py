"""docs/first-run.md stays true: a newcomer's commands run as printed, from a CSV file to a model that answers."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path

import pytest

from finetune_operator.cli.main import main  # noqa: F401  (the command that the page calls must be installed)
from first_run import GATE_NOT_MET, PAGE, PICTURE, SHOWN, Step, blocks, commands, lines_of, prepared, walk
from suite_plugins.patience import patient

COMMAND_SECONDS = 900


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Step]]:
    """Run the walk; return its folder and its steps."""
    mine = prepared(tmp_path_factory.mktemp("first-run"))
    return mine, list(walk(mine, patient(COMMAND_SECONDS), Path(sys.executable).parent))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_walk_ends_at_a_model_that_answers(steps: tuple[Path, list[Step]]) -> None:
    folder, walked = steps
    runs = [step for step in walked if step.run.command == "finetune run job.yaml"]
    assert [step.code for step in runs] == [GATE_NOT_MET, 0], [step.run.output[-2000:] for step in runs]
    assert [step for step in walked if step.code and step not in runs] == []
    first, second = (step.run.output for step in runs)
    assert "0.99" in first
    assert "train     started" in first
    assert "train     started" not in second
    assert json.loads((folder / "runs/reviews/metrics.json").read_text())["evaluate"]["accuracy"] >= 0.8
    answers = next(step.run.output for step in walked if step.run.command == "python ask.py")
    assert re.findall(r"^(positive|negative) [01]\.\d\d  ", answers, re.MULTILINE) == ["positive", "negative"]


def test_the_page_has_the_blocks_that_are_run() -> None:
    languages = [language for language, _ in blocks()]
    assert (languages.count("yaml"), languages.count("python")) == (1, 1)
    assert sum(len(commands(text)) for language, text in blocks() if language == "console") >= 8


def test_the_picture_shows_commands_of_the_page() -> None:
    assert f"]({PICTURE.name})" in PAGE.read_text(encoding="utf-8")
    known = [line for language, text in blocks() if language == "console" for line in lines_of(text)]
    prompted = re.findall(r"\$&#160;</text><text[^>]*>([^<]*)</text>", PICTURE.read_text(encoding="utf-8"))
    shown = [html.unescape(text).replace("\xa0", " ").removeprefix("time ") for text in prompted]
    assert len(shown) >= len(SHOWN)
    assert set(shown) <= set(known)

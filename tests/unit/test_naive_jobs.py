"""Jobs that beginners wrote without knowing our messages, and their state after reading the first message alone.

`jobs/naive` has the original files; `jobs/naive-mended` the fixes of somebody who saw nothing but
the file and its message. `messages.txt` records every message: a change of a hint is reviewed as a change of that file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_operator.api.settings import LOCAL_SETTINGS
from finetune_operator.cli.job_files import Inputs, read_inputs

JOBS = Path(__file__).parent / "jobs"
NAIVE = sorted(path.name for path in (JOBS / "naive").glob("*.yaml"))
MENDED = sorted(path.name for path in (JOBS / "naive-mended").glob("*.yaml"))
VALID = (
    "112.yaml",
    "113.yaml",
    "114.yaml",
    "115.yaml",
    "116.yaml",
    "117.yaml",
    "118.yaml",
    "119.yaml",
    "120.yaml",
    "147.yaml",
    "148.yaml",
)
"""Jobs whose faults only a model, a node or the data show: `finetune plan` and prepare report them."""


def inputs_of(folder: str, name: str) -> Inputs:
    return read_inputs([JOBS / folder / name], LOCAL_SETTINGS)


def messages(name: str) -> str:
    inputs = inputs_of("naive", name)
    problems = [f"{each.path}: {each.value}: {each.rule}. {each.hint}" for _, each in inputs.problems]
    return "\n".join([name, *(f"  {line}" for line in (*inputs.notes, *problems))]).replace(f"{JOBS}/", "")


def test_messages_about_naive_jobs_are_those_on_record(golden: Callable[[str, str], None]) -> None:
    assert len(NAIVE) == 150
    golden("jobs/naive/messages.txt", "\n".join(map(messages, NAIVE)) + "\n")


@pytest.mark.parametrize("name", NAIVE)
def test_naive_job_has_a_problem(name: str) -> None:
    assert bool(inputs_of("naive", name).problems) == (name not in VALID)


@pytest.mark.parametrize("name", MENDED)
def test_job_corrected_by_its_first_message_is_valid(name: str) -> None:
    assert [problem.path for _, problem in inputs_of("naive-mended", name).problems] == []


def test_there_are_corrected_jobs() -> None:
    assert len(MENDED) >= 120

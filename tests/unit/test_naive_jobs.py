"""Jobs that beginners wrote without knowing our messages, and what becomes of them when the messages are followed.

`jobs/naive/messages.txt` records every message: a change of a hint is reviewed as a change of that file. The files were
chosen so that each kind of hint, each row of a table that a beginner needed, and nearly all code for hints is met.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from each_case import each_case
from finetune_operator.cli.files.job_files import read_inputs
from finetune_operator.documents import read_documents
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import LOCAL_SETTINGS
from mending import alternatives, mend

JOBS = Path(__file__).parent / "jobs" / "naive"
NAIVE = sorted(path.name for path in JOBS.glob("*.yaml"))
ROUNDS = 3
"""Rounds of following all hints: a fix may uncover another problem, which the first message could not name."""


def messages(name: str) -> str:
    inputs = read_inputs([str(JOBS / name)], LOCAL_SETTINGS)
    problems = [f"{each.path}: {each.value}: {each.rule}. {each.hint}" for _, each in inputs.problems]
    return "\n".join([name, *(f"  {line}" for line in (*inputs.notes, *problems))]).replace(f"{JOBS}/", "")


def test_messages_about_naive_jobs_are_those_on_record(golden: Callable[[str, str], None]) -> None:
    golden("jobs/naive/messages.txt", "\n".join(map(messages, NAIVE)) + "\n")


@each_case("name", NAIVE)
def test_job_is_valid_once_its_hints_are_followed(name: str) -> None:
    """Advice that leaves a choice to its reader ends the attempt."""
    documents, unreadable = read_documents((JOBS / name).read_bytes())
    value = documents[-1].value if documents and not unreadable else None
    for _ in range(ROUNDS):
        problems = validate_job(value, LOCAL_SETTINGS)[1] if isinstance(value, dict) else []
        if not isinstance(value, dict) or not all(map(alternatives, problems)):
            return
        value, _ = mend(value, problems, {})
    left = [each for each in validate_job(value, LOCAL_SETTINGS)[1] if not isinstance(each.remedy, str)]
    assert [f"{each.path}: {each.rule}. {each.hint}" for each in left] == []

"""Jobs that beginners wrote without knowing our messages, and their state after reading the first message alone.

`jobs/naive` has the original files; `jobs/naive-mended` the fixes of somebody who saw nothing but
the file and its message. `messages.txt` records every message: a change of a hint is reviewed as a change of that file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from each_case import each_case
from finetune_operator.api.settings import LOCAL_SETTINGS
from finetune_operator.api.validation import validate_job
from finetune_operator.cli.job_files import Inputs, read_inputs
from finetune_operator.documents import read_documents
from mending import mend

JOBS = Path(__file__).parent / "jobs"
NAIVE = sorted(path.name for path in (JOBS / "naive").glob("*.yaml"))
MENDED = sorted(path.name for path in (JOBS / "naive-mended").glob("*.yaml"))
FIRST_MENDED_LITERALLY = 151
"""Number of the first file whose corrected form is that of its messages, followed literally by `mending`."""
BY_HAND = frozenset({
    152, 153, 154, 155, 158, 167, 168, 171, 185, 186, 191, 192, 195, 200, 201, 203, 207, 209, 210, 231, 236, 238, 261,
    264, 269, 290, 299, 300, 322, 330, 349, 358, 384, 389, 391, 392, 393, 396, 410, 414, 416, 422, 431, 433, 440, 441,
    449, 451, 452, 453, 460, 466, 476, 488, 489, 490, 491, 492, 493, 497, 509, 511, 513, 518, 525, 539, 540, 541, 549,
    556, 558, 559, 561, 562, 576, 592, 593, 599, 600, 602, 605, 614, 617, 625,
    632, 633, 635, 636, 643, 647, 651, 658, 664, 665, 675, 676, 682, 691, 699, 701, 703, 710, 712,
})  # fmt: skip
"""Files with a syntax error, a hidden value, or a choice that a message leaves to its reader."""


def document_in(folder: str, name: str) -> dict[str, Any]:
    documents, problems = read_documents((JOBS / folder / name).read_bytes())
    assert problems == []
    value = documents[-1].value
    assert isinstance(value, dict)
    return value


def inputs_of(folder: str, name: str) -> Inputs:
    return read_inputs([JOBS / folder / name], LOCAL_SETTINGS)


def messages(name: str) -> str:
    inputs = inputs_of("naive", name)
    problems = [f"{each.path}: {each.value}: {each.rule}. {each.hint}" for _, each in inputs.problems]
    return "\n".join([name, *(f"  {line}" for line in (*inputs.notes, *problems))]).replace(f"{JOBS}/", "")


def test_messages_about_naive_jobs_are_those_on_record(golden: Callable[[str, str], None]) -> None:
    assert len(NAIVE) == 715
    golden("jobs/naive/messages.txt", "\n".join(map(messages, NAIVE)) + "\n")


@each_case("name", MENDED)
def test_job_corrected_by_its_first_message_is_valid(name: str) -> None:
    assert [problem.path for _, problem in inputs_of("naive-mended", name).problems] == []


@each_case(
    "name", [each for each in MENDED if int(each[:3]) >= FIRST_MENDED_LITERALLY and int(each[:3]) not in BY_HAND]
)
def test_messages_followed_literally_give_the_corrected_job(name: str) -> None:
    document = document_in("naive", name)
    mended, _ = mend(document, validate_job(document, LOCAL_SETTINGS)[1], {})
    assert mended == document_in("naive-mended", name)


def test_there_are_corrected_jobs() -> None:
    assert len(MENDED) >= 567

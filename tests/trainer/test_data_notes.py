"""Notes before a training: columns that nothing reads, rows of train that are judged again, rows that teach nothing;
and packs that do not fill a step.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.file_formats import Unread
from finetune_trainer.data.sources import ColumnNeed, HubSplit
from finetune_trainer.prepare.check import Trains, check
from finetune_trainer.prepare.data_notes import row_hashes
from finetune_trainer.prepare.prepare import prepare
from trainer_support.tasks import WORDS, task_job, texts, training_of, write_decoder, write_lines

Rows = Sequence[Mapping[str, Any]]


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist([{**row} for row in rows]), path, row_group_size=2)


WRITE: dict[str, Callable[[Path, Rows], Any]] = {"jsonl": write_lines, "csv": write_csv, "parquet": write_parquet}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("decoder"))


def notes(job: TrainerJob, folder: Path) -> tuple[str, ...]:
    """Return the notes of prepare, which those of the check equal."""
    facts = prepare(job, JobPaths(folder / "job"), NoProgress())
    assert check(job, trains=Trains()).notes == tuple(note for note in facts.notes if " tokens" not in note)
    return facts.notes


def prompts(model: Path, data: Path, **changes: Any) -> TrainerJob:
    """Return a job that reads instructions and outputs, as one for Alpaca's rows without their inputs."""
    columns = {"source": "instruction", "target": "output"}
    return task_job("text-generation", model, data, columns, training=training_of(steps=1), **changes)


def alpaca(first: int, count: int, given: Callable[[int], object]) -> list[dict[str, Any]]:
    """Return rows with different instructions."""
    rows = []
    for row in range(first, first + count):
        words = " ".join(WORDS[row // 15**place % 15] for place in range(3))
        rows.append({"instruction": words, "input": given(row), "output": "the cat sleeps", "id": row})
    return rows


@pytest.mark.parametrize(
    ("ending", "empty", "shown"),
    [
        ("jsonl", "", "'input' (filled in 40 % of rows)"),
        ("jsonl", None, "'input' (filled in 40 % of rows)"),
        ("csv", "", "'input' (filled in 40 % of rows)"),
        ("parquet", None, "'input' (filled in 40 % of rows)"),
        # An empty text is not null, and only the text itself would show it.
        ("parquet", "", "'input'"),
    ],
)
def test_columns_that_nothing_reads_are_noted_with_how_many_rows_fill_them(
    ending: str, empty: object, shown: str, decoder: Path, tmp_path: Path
) -> None:
    def given(row: int) -> object:
        return "the dog" if row % 5 < 2 else empty

    WRITE[ending](tmp_path / f"train.{ending}", alpaca(0, 20, given))
    WRITE[ending](tmp_path / f"validation.{ending}", alpaca(20, 10, given))
    expected = f"Columns {shown}, 'id' (filled in all rows) are not read."
    assert notes(prompts(decoder, tmp_path), tmp_path) == (expected,)
    # A column that the predictions repeat is read.
    predict = {"device": "cpu", "batch_tokens": 64, "columns": ["id"]}
    repeating = prompts(decoder, tmp_path, predict=predict)
    assert check(repeating, trains=Trains()).notes == (f"Column {shown} is not read.",)


def test_unread_columns_of_a_hub_data_set_are_counted_where_they_lie(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict(
        {"text": ["a", "b", "c"], "input": ["", "x", None], "id": [0, None, 2], "tags": [["a"], [], None]}
    )
    need = ColumnNeed("dataset.columns.text", "text")
    assert HubSplit("train", "org/data", rows).read([need], tmp_path).unread == Unread(
        3, {"input": 1, "id": 2, "tags": 1}
    )
    shuffled = rows.select([2, 0])
    assert HubSplit("train", "org/data", shuffled).read([need], tmp_path).unread == Unread(
        2, {"input": None, "id": None, "tags": None}
    )


def test_a_key_that_only_later_rows_have_is_empty_in_the_others(decoder: Path, tmp_path: Path) -> None:
    rows = [{**row} for row in texts(12, 1)]
    rows[9]["source"] = "book"
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "validation.jsonl", [{"text": "a bird sees a river"}, {"text": "a bird finds a tree"}] * 4)
    job = task_job("text-generation", decoder, tmp_path, ["text"], training=training_of(steps=1))
    assert notes(job, tmp_path) == ("Column 'source' (filled in 5 % of rows) is not read.",)


def test_rows_that_stand_in_train_and_in_a_judged_split_are_counted(decoder: Path, tmp_path: Path) -> None:
    train = alpaca(0, 20, lambda _: "x")
    write_lines(tmp_path / "train.jsonl", train)
    # The outputs do not matter: the answer to the same instruction was learnt.
    write_lines(tmp_path / "validation.jsonl", alpaca(20, 6, lambda _: "x"))
    repeated = [{**row, "output": "a river"} for row in train[:3]]
    write_lines(tmp_path / "test.jsonl", [*repeated, *repeated[:1], *alpaca(30, 4, lambda _: "x")])
    found = notes(prompts(decoder, tmp_path), tmp_path)
    assert found[1:] == (
        "4 of 8 rows of test (50.0 %) have the same inputs as rows of train, so that metrics are better than for new "
        "rows.",
    )


def test_repeated_conversations_are_found_by_all_of_their_messages(decoder: Path, tmp_path: Path) -> None:
    def talk(content: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "the cat"}]}

    write_lines(tmp_path / "train.jsonl", [talk(f"the {word}") for word in WORDS])
    write_lines(tmp_path / "validation.jsonl", [talk("the cat"), talk("the cat sees")])
    job = task_job("text-generation", decoder, tmp_path, ["messages"], training=training_of(steps=1))
    (note,) = notes(job, tmp_path)
    assert note.startswith("1 of 2 rows of validation (50.0 %) have the same inputs")


def test_rows_without_a_token_to_learn_are_counted(decoder: Path, tmp_path: Path) -> None:
    # An end token follows each text; the first token follows no other, so that an empty text teaches nothing.
    write_lines(tmp_path / "train.jsonl", [*texts(8, 1), {"text": ""}, {"text": " "}])
    write_lines(tmp_path / "validation.jsonl", texts(4, 2))
    job = task_job("text-generation", decoder, tmp_path, ["text"], training=training_of(steps=1))
    facts = prepare(job, JobPaths(tmp_path / "job"), NoProgress())
    assert facts.notes == ("2 of 10 rows of train (20.0 %) have no token to learn from or to evaluate.",)


def test_packs_that_do_not_fill_a_step_are_a_problem_before_prepare(decoder: Path, tmp_path: Path) -> None:
    # 15 words and an end token: four rows fill a pack of 64 tokens, and 40 rows 10 packs.
    write_lines(tmp_path / "train.jsonl", [{"text": " ".join(WORDS)}] * 40)
    write_lines(tmp_path / "validation.jsonl", texts(4, 2))
    preparation = {"max_length": 64, "packing": True}
    job = task_job(
        "text-generation", decoder, tmp_path, ["text"], training=training_of(steps=1), preparation=preparation
    )
    facts = prepare(job, JobPaths(tmp_path / "job"), NoProgress())
    assert (facts.splits["train"].rows, facts.splits["train"].packs_of) == (10, 40)
    assert check(job, trains=Trains(batch=10)).problems == ()
    (problem,) = check(job, trains=Trains(batch=11)).problems
    assert (problem.reason, problem.message, problem.hint) == (
        "FewRows",
        "training.globalBatchSize is 11, and 10 packs of 40 rows are left for training.",
        "Add rows, or set training.globalBatchSize to 10 or less, or preparation.packing to never.",
    )
    # Without a tokenizer on this machine, packs are not known.
    far = job.model_copy(update={"model": job.model.model_copy(update={"uri": "hf://no-org/no-model"})})
    assert check(far, trains=Trains(batch=11)).problems == ()


VALUES: dict[str, list[Any]] = {
    "texts": ["a", "b", "a", None, "", "a b", "b"],
    "words": [["a", "b"], ["a b"], ["a", "b"], ["b", "a"], ["a"], ["b"], ["a"]],
    "messages": [[{"role": "user", "content": text}] for text in "abacabd"],
}


@pytest.mark.parametrize("columns", [["texts"], ["words"], ["messages"], ["texts", "words"]])
def test_rows_have_equal_hashes_where_their_values_are_equal(columns: list[str]) -> None:
    hashes = row_hashes(pa.table(VALUES), columns).tolist()
    rows = [repr([VALUES[name][row] for name in columns]) for row in range(7)]
    assert [[one == other for other in hashes] for one in hashes] == [[one == other for other in rows] for one in rows]


def test_notes_of_a_check_say_that_they_are_of_the_rows_it_read(decoder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{**row, "id": "x"} for row in texts(30, 1)])
    write_lines(tmp_path / "validation.jsonl", texts(4, 2))
    job = task_job("text-generation", decoder, tmp_path, ["text"], training=training_of(steps=1))
    (note,) = check(job, trains=Trains(), most=10).notes
    assert note.startswith("In the rows that were read: Column 'id' (filled in ")


def test_a_note_names_the_first_columns_of_many(decoder: Path, tmp_path: Path) -> None:
    more = {f"c{number:02}": number for number in range(20)}
    write_lines(tmp_path / "train.jsonl", [{**row, **more} for row in texts(8, 1)])
    write_lines(tmp_path / "validation.jsonl", texts(8, 2))
    job = task_job("text-generation", decoder, tmp_path, ["text"], training=training_of(steps=1))
    (note,) = check(job, trains=Trains()).notes
    assert note.startswith("Columns 'c00' (filled in 50 % of rows), 'c01'")
    assert note.endswith("'c11' (filled in 50 % of rows) and 8 more are not read.")

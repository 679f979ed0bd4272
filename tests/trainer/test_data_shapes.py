"""Shapes of data: rows of each are learnt as the same rows under the names of the task's columns."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_contract.data_settings import Columns, DataSource
from finetune_contract.facts import DataFacts
from finetune_contract.layout import JobPaths
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.job_file import as_prepared
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.data.row_shards import row_source
from finetune_trainer.data.sources import ColumnNeed, RawSplit, predict_split
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.check import Trains, check
from finetune_trainer.prepare.prepare import parts_of, prepare
from finetune_trainer.tasks.task_registry import task_of
from trainer_support.tasks import (
    SPECIAL,
    WORDS,
    losses,
    predictions,
    task_job,
    train_here,
    training_of,
    write_decoder,
    write_lines,
)

ALPACA = [
    {"instruction": "the cat", "input": "a dog", "output": "sees"},
    {"instruction": "then", "input": "", "output": "sleeps", "system": "house", "history": [["the bird", "finds"]]},
]
CHATS = [
    [{"from": "human", "value": "the cat\na dog"}, {"from": "gpt", "value": "sees"}],
    [
        {"from": "system", "value": "house"},
        {"from": "human", "value": "the bird"},
        {"from": "gpt", "value": "finds"},
        {"from": "human", "value": "then"},
        {"from": "gpt", "value": "sleeps"},
    ],
]
MESSAGES = [
    [{"role": "user", "content": "the cat\na dog"}, {"role": "assistant", "content": "sees"}],
    [
        {"role": "system", "content": "house"},
        {"role": "user", "content": "the bird"},
        {"role": "assistant", "content": "finds"},
        {"role": "user", "content": "then"},
        {"role": "assistant", "content": "sleeps"},
    ],
]
LEARNT_CHATS = [
    ("<|user|> the cat a dog </s> <|assistant|> sees </s>", ". . . . . . . sees </s>"),
    (
        "<|system|> house </s> <|user|> the bird </s> <|assistant|> finds </s> <|user|> then </s> "
        "<|assistant|> sleeps </s>",
        ". . . . . . . . finds </s> . . . . sleeps </s>",
    ),
]
"""Tokens of both rows, and those that are learnt."""
GENERATION: dict[str, tuple[list[dict[str, Any]], list[tuple[str, str]], str]] = {
    "Alpaca": (ALPACA, LEARNT_CHATS, "messages"),
    "Dolly": (
        [{"instruction": "the cat", "context": "a dog", "response": "sees", "category": "house"}] * 2,
        LEARNT_CHATS[:1] * 2,
        "messages",
    ),
    "ShareGPT": ([{"conversations": turns} for turns in CHATS], LEARNT_CHATS, "messages"),
    "messages": ([{"messages": messages} for messages in MESSAGES], LEARNT_CHATS, "messages"),
    "messages in conversations": ([{"conversations": each} for each in MESSAGES], LEARNT_CHATS, "messages"),
    "prompt and completion": (
        [{"prompt": "the cat", "completion": "sees"}, {"prompt": "a dog", "completion": "then sleeps"}],
        [("the cat sees </s>", ". . sees </s>"), ("a dog then sleeps </s>", ". . then sleeps </s>")],
        "source",
    ),
    "prompt and completion as messages": (
        [{"prompt": MESSAGES[0][:1], "completion": MESSAGES[0][1:]}] * 2,
        LEARNT_CHATS[:1] * 2,
        "messages",
    ),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("decoder"))


def prepared(task: str, model: Path, rows: list[dict[str, Any]], folder: Path, columns: Any, **job: Any) -> DataFacts:
    """Prepare rows as train and as validation, without a file for each, in `folder`."""
    for split in ("train", "validation"):
        write_lines(folder / "data" / f"{split}.jsonl", rows)
    job = {"training": training_of(steps=1), "predict": None, "evaluation": None, **job}
    return prepare(task_job(task, model, folder / "data", columns, **job), JobPaths.of(folder, "job"), NoProgress())


def words(ids: Any) -> str:
    return " ".join("." if token < 0 else [*SPECIAL, *WORDS][token] for token in ids)


def learnt(folder: Path) -> list[tuple[str, str]]:
    """Return tokens and learnt tokens of the prepared train split."""
    split = PreparedData.open(JobPaths.of(folder, "job")).of("train")
    return [(words(split.list_of("input_ids", at)), words(split.list_of("labels", at))) for at in range(split.rows)]


@pytest.mark.parametrize("shape", GENERATION)
def test_rows_to_generate_from_are_learnt_by_their_shape(shape: str, decoder: Path, tmp_path: Path) -> None:
    rows, expected, role = GENERATION[shape]
    facts = prepared("text-generation", decoder, rows, tmp_path, ["text"], preparation={"packing": True})
    assert learnt(tmp_path) == expected
    assert (facts.shape, role in facts.columns) == (shape, True)
    assert facts.splits["train"].packs_of is None
    assert facts.notes[0].startswith(f"Rows have the shape {shape}: ")


PAIRS = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sees"},
    {"role": "assistant", "content": "hears"},
]
LEARNT_PAIR = (
    "<|user|> the cat </s> <|assistant|> sees </s> <|user|> the cat </s> <|assistant|> hears </s>",
    ". . . . . sees </s> . . . . . hears </s>",
)
LEARNT_TEXTS = ("the cat sees </s> the cat hears </s>", ". . sees </s> . . hears </s>")
"""Tokens of a pair, the chosen one first, and those that are learnt."""
PREFERENCE: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "two conversations with one beginning": (
        {"prompt": "the cat", "chosen": PAIRS[:2], "rejected": [PAIRS[0], PAIRS[2]]},
        LEARNT_PAIR,
    ),
    "two texts with one beginning": ({"chosen": "the cat sees", "rejected": "the cat hears"}, LEARNT_TEXTS),
    "Alpaca with two answers": (
        {"instruction": "the", "input": "cat", "chosen": "sees", "rejected": "hears"},
        LEARNT_PAIR,
    ),
    "ShareGPT with two answers": (
        {
            "conversations": [{"from": "human", "value": "the cat"}],
            "chosen": {"from": "gpt", "value": "sees"},
            "rejected": {"from": "gpt", "value": "hears"},
        },
        LEARNT_PAIR,
    ),
}


@pytest.mark.parametrize("shape", PREFERENCE)
def test_preferred_rows_are_learnt_by_their_shape(shape: str, decoder: Path, tmp_path: Path) -> None:
    row, expected = PREFERENCE[shape]
    facts = prepared("preference-tuning", decoder, [row] * 2, tmp_path, ["prompt", "chosen", "rejected"])
    assert learnt(tmp_path) == [expected] * 2
    assert facts.shape == shape


def test_beginnings_are_those_that_trl_extracts() -> None:
    trl = pytest.importorskip("trl.data_utils")
    from finetune_trainer.data.row_shapes import SHAPES

    texts = [("a b c", "a b d"), ("abc", "abd"), ("x", "x y"), ("same", "same"), ("q", "r")]
    rows: list[dict[str, Any]] = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in texts]
    rows.append({"chosen": PAIRS[:2], "rejected": [PAIRS[0], PAIRS[2]]})
    shape = next(shape for shape in SHAPES if shape.name == "two texts with one beginning")
    assert shape.row is not None
    assert [shape.row(row) for row in rows] == [trl.extract_prompt(row) for row in rows]


# ---------------------------------------------------------------------------------------------------- labels and words


def labelled(task: str, data: Path, columns: Any = None, role: str = "train") -> tuple[RawSplit, list[Any], Any]:
    """Return a split as the task reads it, its targets and the names of their labels."""
    defaults = {"text-classification": ["text", "label"], "token-classification": ["tokens", "tags"]}
    defaults["question-answering"] = ["question", "context", "answers"]
    job = task_job(task, "pkg://none", data, columns or defaults[task], training=training_of(steps=1))
    encoding = task_of(job).encoding
    part = parts_of(job, encoding, trains=True)[role]  # type: ignore[index]
    split = part.source.read(part.needs, Path(tempfile.mkdtemp(dir=data.parent)))
    encoding.check(split, part.columns, part.setting)
    targets = encoding.targets({role: split}, part.columns, None)
    return split, list(targets.of[role]), targets.labels.names


def tagged(data: Path, role: str = "train") -> list[list[tuple[str, str]]]:
    """Return the words of each row with their tags."""
    split, tags, names = labelled("token-classification", data, role=role)
    return [
        list(zip(tokens, (names[tag] for tag in row), strict=True))
        for tokens, row in zip(split.table["tokens"].to_pylist(), tags, strict=True)
    ]


SENTENCES = [
    [("EU", "B-ORG"), ("rejects", "O"), ("German", "B-MISC"), ("call", "O")],
    [("Peter", "B-PER"), ("Blackburn", "I-PER")],
]
CONLL = "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\nGerman JJ B-NP B-MISC\ncall NN I-NP O\n\n"
CONLL += "Peter NNP B-NP B-PER\nBlackburn NNP I-NP I-PER\n"
TABS = "# id one\nEU\tB-ORG\nrejects\tO\nGerman\tB-MISC\ncall\tO\n\n\n# id two\nPeter\tB-PER\nBlackburn\tI-PER"


@pytest.mark.parametrize(("name", "content"), [("train.conll", CONLL), ("train.txt", CONLL), ("train.iob", TABS)])
def test_sentences_are_read_from_lines_of_word_and_tag(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert tagged(tmp_path / name) == SENTENCES


def test_a_number_sign_is_a_word_where_its_line_has_the_fields_of_others(tmp_path: Path) -> None:
    (tmp_path / "train.bio").write_text("go\tO\n#\tO\n#wm\tB-TAG\n\nso\tO\n", encoding="utf-8")
    assert tagged(tmp_path / "train.bio") == [[("go", "O"), ("#", "O"), ("#wm", "B-TAG")], [("so", "O")]]


def test_plain_text_with_short_lines_is_no_file_of_tags(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("O what\na day O\n\nfor x B-side\n", encoding="utf-8")
    with pytest.raises(StageError, match="has the columns text"):
        tagged(tmp_path / "train.txt")


TEXT = "Ann Lee's flat in New-York."
SPANS = [(0, 7, "PER"), (18, 26, "LOC")]
WORDS_OF_TEXT = [
    ("Ann", "B-PER"),
    ("Lee", "I-PER"),
    ("'", "O"),
    ("s", "O"),
    ("flat", "O"),
    ("in", "O"),
    ("New", "B-LOC"),
    ("-", "I-LOC"),
    ("York", "I-LOC"),
    (".", "O"),
]
SPAN_FORMS: dict[str, dict[str, Any]] = {
    "doccano": {"id": 1, "label": [list(span) for span in SPANS]},
    "doccano with relations": {
        "entities": [
            {"id": at, "label": label, "start_offset": start, "end_offset": end}
            for at, (start, end, label) in enumerate(SPANS)
        ]
    },
    "prodigy": {
        "tokens": [{"text": "Ann", "start": 0, "end": 3, "id": 0}],
        "spans": [{"start": start, "end": end, "label": label} for start, end, label in SPANS],
    },
    "label studio": {
        "label": [{"start": start, "end": end, "text": "", "labels": [label]} for start, end, label in SPANS],
        "annotator": 1,
    },
}


@pytest.mark.parametrize("form", SPAN_FORMS)
def test_spans_of_characters_become_tags_of_words(form: str, tmp_path: Path) -> None:
    (empty,) = [key for key, value in SPAN_FORMS[form].items() if isinstance(value, list) and key != "tokens"]
    write_lines(tmp_path / "train.jsonl", [{"text": TEXT, **SPAN_FORMS[form]}, {"text": "No name", empty: []}])
    assert tagged(tmp_path / "train.jsonl") == [WORDS_OF_TEXT, [("No", "O"), ("name", "O")]]


def test_a_border_inside_a_word_divides_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"text": "5kg now", "entities": [[1, 3, "UNIT"]]}] * 2)
    assert tagged(tmp_path / "train.jsonl")[0] == [("5", "O"), ("kg", "B-UNIT"), ("now", "O")]


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ([2, 5, "B"], "row 2: the first rows have the shape text with spans, and this one does not: its spans overlap"),
        ([0, 99, "B"], "a span is from 0 to 99, in a text of 9 characters"),
        (["0", 2, "B"], "not start, end and one label"),
    ],
)
def test_spans_that_cannot_be_tags_are_refused_with_their_row(span: Any, message: str, tmp_path: Path) -> None:
    rows = [{"text": "one row  ", "spans": [[0, 3, "A"]]}, {"text": "other row", "spans": [[0, 3, "A"], span]}]
    write_lines(tmp_path / "train.jsonl", rows)
    with pytest.raises(StageError, match=message):
        tagged(tmp_path / "train.jsonl")


def test_rows_that_were_rejected_in_prodigy_are_refused(tmp_path: Path) -> None:
    spans = [{"start": 0, "end": 3, "label": "A"}]
    rows = [{"text": "one", "spans": spans, "answer": answer} for answer in ("accept", "reject")]
    write_lines(tmp_path / "train.jsonl", rows)
    with pytest.raises(StageError, match=r"row 2: .*: its answer is reject; leave out rows that nobody accepted"):
        tagged(tmp_path / "train.jsonl")


def test_essays_beside_their_spans_are_words_with_tags(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "A1.txt").write_text("Phones are bad.\n\nI think so, too.", encoding="utf-8")
    (tmp_path / "train" / "B2.txt").write_text("Yes we can", encoding="utf-8")
    (tmp_path / "sample_submission.csv").write_text("id,class,predictionstring\n", encoding="utf-8")
    table = "id,discourse_id,discourse_start,discourse_end,discourse_text,discourse_type,discourse_type_num,"
    table += "predictionstring\nA1,1,0,15,Phones are bad.,Claim,Claim 1,0 1 2\n"
    table += "A1,2,17,33,so,Position,Position 1,4 5\nB2,3,0,10,x,Lead,Lead 1,0 1 2\n"
    (tmp_path / "train.csv").write_text(table, encoding="utf-8")
    assert tagged(tmp_path) == [
        [
            ("Phones", "B-Claim"),
            ("are", "I-Claim"),
            ("bad.", "I-Claim"),
            ("I", "O"),
            ("think", "B-Position"),
            ("so,", "I-Position"),
            ("too.", "O"),
        ],
        [("Yes", "B-Lead"), ("we", "I-Lead"), ("can", "I-Lead")],
    ]


@pytest.mark.parametrize("indent", [None, 2])
def test_questions_are_read_from_the_paragraphs_of_squad(indent: int | None, tmp_path: Path) -> None:
    paragraph = {
        "context": "Ann lives in Rome.",
        "qas": [
            {"question": "Who?", "id": "1", "answers": [{"text": "Ann", "answer_start": 0}], "is_impossible": False},
            {"question": "When?", "id": "2", "answers": [], "is_impossible": True, "plausible_answers": []},
        ],
    }
    whole = {"version": "v2.0", "data": [{"title": "Ann", "paragraphs": [paragraph]}]}
    (tmp_path / "train.json").write_text(json.dumps(whole, indent=indent), encoding="utf-8")
    split, answers, _ = labelled("question-answering", tmp_path / "train.json")
    assert split.table["question"].to_pylist() == ["Who?", "When?"]
    assert split.table["context"].to_pylist() == ["Ann lives in Rome."] * 2
    assert [tuple(answer) for answer in answers] == [(["Ann"], [0]), ([], [])]


def test_rows_in_a_list_called_data_are_read(tmp_path: Path) -> None:
    rows = {"data": [{"text": "fine", "label": "good"}, {"text": "poor", "label": "bad"}]}
    (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    split, labels, names = labelled("text-classification", tmp_path / "train.json")
    assert (split.table["text"].to_pylist(), [names[at] for at in labels]) == (["fine", "poor"], ["good", "bad"])


def test_lines_that_begin_with_a_column_data_are_rows(tmp_path: Path) -> None:
    lines = [json.dumps({"data": [{"at": 1}], "text": text, "label": text[0]}) for text in ("ab", "cd")]
    (tmp_path / "train.json").write_text("\n".join(lines), encoding="utf-8")
    split, _, names = labelled("text-classification", tmp_path / "train.json")
    assert (split.table["text"].to_pylist(), names) == (["ab", "cd"], ("a", "c"))


def test_a_damaged_saved_data_set_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"], "label": [1]}).save_to_disk(str(tmp_path / "one"))
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(StageError, match=r"one cannot be read: .*"):
        labelled("text-classification", tmp_path / "one")


def test_texts_are_labelled_by_their_folder(tmp_path: Path) -> None:
    files = {"train/pos/0_9": "fine", "train/neg/0_2": "poor", "train/unsup/0_0": "eh", "test/pos/1_8": "nice"}
    for name, text in {**files, "test/neg/3_1": "bad", "imdbEr": "words"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    split, labels, names = labelled("text-classification", tmp_path)
    assert split.table["text"].to_pylist() == ["poor", "fine"]
    assert [names[at] for at in labels] == ["neg", "pos"]
    test, _, _ = labelled("text-classification", tmp_path, role="test")
    assert test.table["text"].to_pylist() == ["bad", "nice"]


def test_a_saved_data_set_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    for folder in ("one", "both"):
        split, labels, names = labelled("text-classification", tmp_path / folder)
        assert (split.table["text"].to_pylist(), list(labels), names) == (["a", "b"], [1, 0], ("no", "yes"))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_columns_of_zero_and_one_are_labels(ending: str, tmp_path: Path) -> None:
    rows = [
        {"id": 7, "text": "one", "toxic": 1, "insult": 0, "threat": 1},
        {"id": 8, "text": "two", "toxic": 0, "insult": 0, "threat": 0},
        {"id": 9, "text": "six", "toxic": 0, "insult": 1, "threat": 0},
    ]
    if ending == "jsonl":
        write_lines(tmp_path / "train.jsonl", rows)
    else:
        lines = [",".join(map(str, values)) for values in (rows[0], *(row.values() for row in rows))]
        (tmp_path / "train.csv").write_text("\n".join(lines), encoding="utf-8")
    split, labels, names = labelled("text-classification", tmp_path / f"train.{ending}")
    assert split.table["label"].to_pylist() == [["toxic", "threat"], [], ["insult"]]
    assert names == ("insult", "threat", "toxic")
    assert [list(label) for label in labels] == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert split.notes == ("Rows have the shape columns of 0 and 1: toxic, insult, threat are read as label.",)


def test_a_test_split_may_lack_the_columns_of_labels(tiny_model: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "data" / "test.jsonl", [{"text": "one"}, {"text": "two"}])
    rows = [{"text": "one", "toxic": 1, "mild": 0}, {"text": "two", "toxic": 0, "mild": 1}]
    facts = prepared("text-classification", tiny_model, rows, tmp_path, ["text", "label"])
    assert (facts.labels, facts.splits["test"].rows) == (("mild", "toxic"), 2)
    assert [note for note in facts.notes if "shape" in note] == [
        "Rows have the shape columns of 0 and 1: toxic, mild are read as label."
    ]


def test_columns_of_zero_and_one_beside_another_label_are_none(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"text": "a", "labels": "fine", "long": 0, "seen": 1}] * 2)
    with pytest.raises(StageError, match="has the columns text, labels, long, seen"):
        labelled("text-classification", tmp_path / "train.jsonl")


# ------------------------------------------------------------------------------------------------- what is not a shape


def test_replies_in_a_prompt_are_not_learnt(decoder: Path, tmp_path: Path) -> None:
    prepared(
        "text-generation", decoder, [{"prompt": MESSAGES[1][:4], "completion": MESSAGES[1][4:]}] * 2, tmp_path, ["text"]
    )
    assert learnt(tmp_path) == [(LEARNT_CHATS[1][0], LEARNT_CHATS[1][1].replace("finds </s>", ". ."))] * 2


TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


def test_calls_and_results_of_sharegpt_are_those_of_openai(tmp_path: Path) -> None:
    call = {"name": "find", "arguments": {"of": None}}
    turns = [
        {"from": "human", "value": "the cat"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": '{"at": 1}'},
        {"from": "gpt", "value": "sees"},
    ]
    row = {"chat": turns, "system": "house", "tools": json.dumps([TOOL])}
    write_lines(tmp_path / "train.jsonl", [row])
    job = task_job("text-generation", "pkg://none", tmp_path, {"messages": "chat"}, training=training_of(steps=1))
    part = parts_of(job, task_of(job).encoding, trains=True)["train"]
    split = part.source.read(part.needs, tmp_path)
    assert split.table.column_names == ["chat", "tools"]
    assert json.loads(split.table["chat"][0].as_py()) == [
        {"role": "system", "content": "house"},
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": '{"at": 1}'},
        {"role": "assistant", "content": "sees"},
    ]
    assert json.loads(split.table["tools"][0].as_py()) == [TOOL]


def test_named_columns_are_read_whatever_the_shape(decoder: Path, tmp_path: Path) -> None:
    facts = prepared("text-generation", decoder, ALPACA, tmp_path, {"source": "instruction", "target": "output"})
    assert learnt(tmp_path) == [("the cat sees </s>", ". . sees </s>"), ("then sleeps </s>", ". sleeps </s>")]
    assert (facts.shape, facts.columns) == (None, {})


def test_the_name_of_messages_prefers_the_shape_to_a_text_beside_it(decoder: Path, tmp_path: Path) -> None:
    rows = [{**row, "text": "the tree"} for row in ALPACA]
    prepared("text-generation", decoder, rows, tmp_path / "a", ["text"])
    assert learnt(tmp_path / "a") == [("the tree </s>", ". tree </s>")] * 2
    prepared("text-generation", decoder, rows, tmp_path / "b", ["messages"])
    assert learnt(tmp_path / "b") == LEARNT_CHATS
    rows = [{"prompt": "the cat", "completion": "sees", "text": "the tree"}] * 2
    prepared("text-generation", decoder, rows, tmp_path / "c", ["messages"])
    assert learnt(tmp_path / "c") == [("the cat sees </s>", ". . sees </s>")] * 2


def test_a_named_column_that_is_missing_is_an_error(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"dataset.columns.source is 'source', but split train"):
        prepared("text-generation", decoder, ALPACA, tmp_path, ["source", "target"])
    with pytest.raises(StageError, match=r"dataset.columns.text is 'txt', but split train .* has the columns instr"):
        prepared("text-generation", decoder, ALPACA, tmp_path, {"text": "txt"})


@pytest.mark.parametrize(
    ("task", "row", "reason"),
    [
        ("text-generation", {"prompt": "a", "completion": "b", "label": True}, "UnpairedPreference"),
        ("preference-tuning", {"prompt": "a", "completion": "b", "label": False}, "UnpairedPreference"),
        (
            "text-generation",
            {"prompt": MESSAGES[0][:1], "completion": MESSAGES[0][1:], "label": 1},
            "UnpairedPreference",
        ),
        ("text-generation", {"messages": MESSAGES[0], "label": True}, "UnpairedPreference"),
        ("text-generation", {**ALPACA[0], "kto_tag": False}, "UnpairedPreference"),
        ("text-generation", {"conversations": [{"from": "alien", "value": "b"}]}, "WrongShape"),
        ("text-generation", {"instruction": "a"}, "MissingColumn"),
    ],
)
def test_rows_that_cannot_be_learnt_as_they_are_meant_are_refused(
    task: str, row: dict[str, Any], reason: str, decoder: Path, tmp_path: Path
) -> None:
    columns = ["text"] if task == "text-generation" else ["prompt", "chosen", "rejected"]
    with pytest.raises(StageError) as raised:
        prepared(task, decoder, [row, row], tmp_path, columns)
    assert raised.value.reason == reason


def test_all_splits_have_the_shape_of_the_first(decoder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "data" / "test.jsonl", [{"messages": MESSAGES[0]}])
    with pytest.raises(StageError, match=r"a key of the shape Alpaca is 'instruction', but split test .* messages\."):
        prepared("text-generation", decoder, ALPACA, tmp_path, ["text"])


def test_a_row_without_a_key_of_the_shape_is_refused(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"row 3: the first rows have the shape Alpaca, .*: it has no instruction"):
        prepared("text-generation", decoder, [*ALPACA, {"output": "sees"}], tmp_path, ["text"])


def test_spans_of_rows_to_judge_may_be_missing(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"text": "a b", "spans": [[0, 1, "A"]]}])
    write_lines(tmp_path / "test.jsonl", [{"text": "a c", "id": 7}])
    job = task_job("token-classification", "pkg://none", tmp_path, ["tokens", "tags"], training=training_of(steps=1))
    part = parts_of(job, task_of(job).encoding, trains=True)["test"]
    assert part.source.read(part.needs, tmp_path).table.to_pylist() == [{"tokens": ["a", "c"]}]


@pytest.mark.parametrize("kind", ["json", "parquet", "saved"])
def test_shapes_are_known_in_every_format(kind: str, tmp_path: Path) -> None:
    rows = [{"conversations": turns} for turns in CHATS]
    if kind == "json":
        (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "train"))
    uri = tmp_path / {"json": "train.json", "parquet": "train.parquet", "saved": "train"}[kind]
    job = task_job("text-generation", "pkg://none", uri, ["text"], training=training_of(steps=1))
    part = parts_of(job, task_of(job).encoding, trains=True)["train"]
    split = part.source.read(part.needs, tmp_path)
    assert [json.loads(cell) for cell in split.table["messages"].to_pylist()] == MESSAGES


def test_pairs_without_a_shared_beginning_are_refused(decoder: Path, tmp_path: Path) -> None:
    rows = [{"chosen": PAIRS[:2], "rejected": [PAIRS[0], PAIRS[2]]}, {"chosen": PAIRS[1:2], "rejected": PAIRS[2:]}]
    for expected, given in ((r"row 2: .*: its answers share no message", rows), ("columns.prompt is", rows[1:])):
        with pytest.raises(StageError, match=expected):
            prepared("preference-tuning", decoder, given, tmp_path, ["prompt", "chosen", "rejected"])


def test_packing_that_the_job_asks_for_packs_conversations(decoder: Path, tmp_path: Path) -> None:
    preparation = {"packing": True, "packing_asked": True}
    facts = prepared("text-generation", decoder, ALPACA, tmp_path, ["text"], preparation=preparation)
    assert facts.splits["train"].packs_of == 2


def test_prompts_are_messages_where_the_job_asks_for_the_template(decoder: Path, tmp_path: Path) -> None:
    row = {"prompt": "the cat a dog", "completion": "sees"}
    preparation = {"chat_template": "always"}
    facts = prepared("text-generation", decoder, [row] * 2, tmp_path / "a", ["text"], preparation=preparation)
    assert learnt(tmp_path / "a") == LEARNT_CHATS[:1] * 2
    assert facts.columns == {"source": "prompt", "target": "completion"}
    named = {"source": "question", "target": "answer"}
    rows = [{"question": row["prompt"], "answer": row["completion"]}] * 2
    prepared("text-generation", decoder, rows, tmp_path / "b", named, preparation=preparation)
    assert learnt(tmp_path / "b") == LEARNT_CHATS[:1] * 2
    with pytest.raises(StageError, match=r"preparation.chatTemplate is always, and column 'text' is plain text"):
        prepared("text-generation", decoder, [{"text": "a dog"}], tmp_path / "c", ["text"], preparation=preparation)


def test_later_stages_follow_the_shape_of_the_rows(decoder: Path, tmp_path: Path) -> None:
    """The verb of an animal is learnt from rows like Alpaca's, and written for new instructions."""
    verbs = {"cat": "sees", "dog": "hears", "bird": "finds"}
    rows = [{"instruction": f"the {animal}", "input": "", "output": verb} for animal, verb in verbs.items()]
    for split, count in {"train": 32, "test": 1}.items():
        write_lines(tmp_path / "data" / f"{split}.jsonl", rows * count)
    asked = [{"instruction": "the dog", "number": 1}, {"instruction": "the cat", "number": 2}]
    write_lines(tmp_path / "new.jsonl", asked)
    job, paths = (
        task_job(
            "text-generation",
            decoder,
            tmp_path / "data",
            ["text"],
            training=training_of(steps=30, learning_rate=1e-2),
            preparation={"packing": True},
            predict={"device": "cpu", "batch_tokens": 512, "dataset": {"uri": f"file://{tmp_path}/new.jsonl"}}
            | {"columns": ["instruction", "number"]},
            generation={"max_new_tokens": 8},
        ),
        JobPaths.of(tmp_path, "job"),
    )
    prepare(job, paths, NoProgress())
    later = as_prepared(job, paths)
    assert later.dataset is not None
    assert (later.dataset.columns, later.preparation.packing) == (Columns(messages="messages"), False)
    train_here(later, paths)
    paths.state.mkdir(exist_ok=True)
    (paths.state / "train.json").write_text("{}")
    assert evaluate(later, paths, NoProgress())["evaluate"]["accuracy"] == 1.0
    predict(later, paths, NoProgress())
    assert [(row["number"], row["generated_text"]) for row in predictions(paths)] == [(1, "hears"), (2, "sees")]


SPANS = [{"text": "the cat sees", "entities": [{"start": 4, "end": 7, "label": "X"}]}]
TRAINED: dict[str, tuple[str, list[dict[str, Any]], Sequence[str]]] = {
    "ShareGPT": ("text-generation", GENERATION["ShareGPT"][0], ["text"]),
    "prompt and completion": ("text-generation", GENERATION["prompt and completion"][0], ["text"]),
    "two conversations with one beginning": (
        "preference-tuning",
        [{"chosen": MESSAGES[0], "rejected": [*MESSAGES[0][:-1], {"role": "assistant", "content": "then"}]}],
        ["prompt", "chosen", "rejected"],
    ),
    "text with spans": ("token-classification", SPANS, ["tokens", "tags"]),
    "columns of 0 and 1": (
        "text-classification",
        [{"text": "the cat", "x": 1, "y": 0}, {"text": "a dog", "x": 0, "y": 1}],
        ["text", "label"],
    ),
}


@pytest.mark.parametrize("shape", TRAINED)
def test_a_step_is_trained_on_rows_of_a_shape(shape: str, decoder: Path, tiny_model: Path, tmp_path: Path) -> None:
    task, rows, columns = TRAINED[shape]
    for split in ("train", "validation"):
        write_lines(tmp_path / "data" / f"{split}.jsonl", rows * 16)
    model = decoder if task in ("text-generation", "preference-tuning") else tiny_model
    job = task_job(task, model, tmp_path / "data", columns, training=training_of(steps=1), predict=None)
    paths = JobPaths.of(tmp_path, "job")
    assert prepare(job, paths, NoProgress()).shape == shape
    train_here(as_prepared(job, paths), paths)
    (loss,) = losses(paths)
    # A model that knows nothing gives each of its answers the same probability.
    answers = {"text-generation": 22, "token-classification": 2}.get(task, 2)
    assert loss == pytest.approx(math.log(answers), rel=0.1)
    assert (paths.model / "config.json").is_file()


def test_the_check_of_data_names_the_shape(tmp_path: Path) -> None:
    rows = [{"text": f"row {at}", "toxic": at % 2, "mild": 1} for at in range(4)]
    write_lines(tmp_path / "train.jsonl", rows)
    job = task_job("text-classification", "file:///none", tmp_path, ["text", "label"], evaluation=None, predict=None)
    found = check(job, trains=Trains())
    assert found.notes == ("Rows have the shape columns of 0 and 1: toxic, mild are read as label.",)
    assert found.splits[0].labels == {"mild": 4, "toxic": 2}
    assert [problem.reason for problem in found.problems] == ["ModelNotFound"]


@pytest.mark.parametrize("name", ["new.conll", "new.txt"])
def test_rows_to_predict_are_sentences_of_words_and_tags(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(CONLL, encoding="utf-8")
    split = predict_split(DataSource(uri=f"file://{tmp_path / name}"))
    (shard,) = row_source(split, (ColumnNeed("", "tokens"),)).shards()
    rows = shard.read()
    assert rows.table_of([0, 1])["tokens"].to_pylist() == [[word for word, _ in row] for row in SENTENCES]
    assert rows.lines is not None
    assert list(rows.lines) == [6, 9]

"""The task question-answering: spans of paragraphs over windows, evaluated as by SQuAD's own scripts."""

from __future__ import annotations

import collections
import json
import random
import re
import shutil
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.models.loading import load_tokenizer
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.serving.request_rows import Form
from finetune_trainer.serving.serving_engine import ServingEngine
from finetune_trainer.tasks.answer_spans import LONGEST_ANSWER, measured
from finetune_trainer.tasks.question_answering import NO_ANSWER, question_answering
from trainer_support.tasks import (
    DATA,
    INFERENCE,
    WITHOUT_DATA,
    predictions,
    read_lines,
    run_card,
    task_job,
    trained,
    training_of,
    write_lines,
)

SQUAD = DATA / "squad"
THINGS = ["lamp", "soup", "chair", "table", "phone", "shirt", "coat", "door"]
PLACES = ["kitchen", "garden", "cellar", "attic", "hall", "yard"]
WORDS = ["where", "is", "the", "in", "and", "a", "we", "saw", ".", "?", "dark", "old", *THINGS, *PLACES]


def question(draw: random.Random, facts: int, *, answered: bool = True) -> dict[str, Any]:
    """Return a question for the place of a thing that the paragraph mentions, or of one that it does not."""
    things = draw.sample(THINGS, min(facts, len(THINGS) - 1))
    sentences = [f"the {thing} is in the {draw.choice(['dark', 'old'])} {draw.choice(PLACES)} ." for thing in things]
    fillers = ["we saw a " + draw.choice(["dark", "old"]) + " door ." for _ in range(facts)]
    mixed = [text for pair in zip(sentences, fillers, strict=False) for text in pair]
    context = "  ".join(mixed)  # two blanks, so that places in the text are not those of words
    if not answered:
        other = next(thing for thing in THINGS if thing not in things)
        return {"question": f"where is the {other} ?", "context": context, "answers": {"text": [], "answer_start": []}}
    chosen = draw.randrange(len(things))
    answer = sentences[chosen].split(" in ")[1].removesuffix(" .")
    start = context.index(sentences[chosen]) + sentences[chosen].index(answer)
    return {
        "question": f"where is the {things[chosen]} ?",
        "context": context,
        "answers": {"text": [answer], "answer_start": [start]},
    }


def questions(count: int, seed: int, *, without: bool = False) -> list[dict[str, Any]]:
    """Return questions on paragraphs of one to six facts; with `without`, every fourth has no answer."""
    draw = random.Random(seed)
    return [{"id": f"q{i}", **question(draw, 1 + i % 6, answered=not (without and i % 4 == 3))} for i in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random BERT of 2 layers that knows the words."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=5 + len(WORDS),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, (split, count) in enumerate({"train": 160, "validation": 12, "test": 40}.items()):
        write_lines(tmp_path / "data" / f"{split}.jsonl", questions(count, seed))
    return tmp_path / "data"


def a_job(model: Path, data: Path, *, steps: int = 2, max_length: int = 200, **changes: Any) -> TrainerJob:
    body: dict[str, Any] = {
        "training": training_of(steps=steps),
        "preparation": {"max_length": max_length},
        "predict": {**INFERENCE, "columns": ("id",)},
    }
    return task_job("question-answering", model, data, ["question", "context", "answers"], **{**body, **changes})


# ---------------------------------------------------------------------------------------------------------- metrics


def normalized_tokens(text: str) -> list[str]:
    """Return the words by SQuAD's rules: lower case, without punctuation and articles."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", kept).split()


def by_the_rules(answers: Sequence[str], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the mean of each row's best score over its gold answers; an empty answer is right or wrong as a whole."""
    exact, f1 = 0.0, 0.0
    for answer, texts in zip(answers, gold, strict=True):
        scores = []
        for text in texts or [""]:
            one, other = normalized_tokens(answer), normalized_tokens(text)
            shared = sum((collections.Counter(one) & collections.Counter(other)).values())
            overlap = 2 * shared / (len(one) + len(other)) if shared else 0.0
            scores.append((float(one == other), overlap if one and other else float(one == other and not texts)))
        exact += max(score[0] for score in scores)
        f1 += max(score[1] for score in scores)
    return {"exact_match": exact / len(gold), "f1": f1 / len(gold)}


@pytest.mark.skipif(not SQUAD.is_dir(), reason=WITHOUT_DATA)
def test_metrics_are_those_of_squad_on_a_thousand_rows() -> None:
    """The answers are right, cut, too long, of another row, and none."""
    rows = [row for split in ("validation", "train") for row in read_lines(SQUAD / f"{split}.jsonl")][:1000]
    draw, gold = random.Random(3), [row["answers"]["text"] for row in rows]
    answers = []
    for row, texts in zip(rows, gold, strict=True):
        text, start = texts[0], row["answers"]["answer_start"][0]
        parts = text.split()
        choices = [
            text,
            " ".join(parts[: max(1, len(parts) // 2)]),
            row["context"][max(0, start - 12) : start + len(text) + 9],
            f"The {text}!",
            rows[draw.randrange(1000)]["answers"]["text"][0],
            "",
        ]
        answers.append(draw.choice(choices))
    found = measured(answers, gold)
    assert found == pytest.approx(by_the_rules(answers, gold), abs=1e-6)
    assert 0.2 < found["exact_match"] < found["f1"] < 0.9
    some_open = [texts if at % 3 else [] for at, texts in enumerate(gold)]
    assert measured(answers, some_open) == pytest.approx(by_the_rules(answers, some_open), abs=1e-6)


# ---------------------------------------------------------------------------------------------------------- windows


def test_every_answer_is_in_a_window_that_points_to_it(model: Path, data: Path, paths: JobPaths) -> None:
    prepare(a_job(model, data, max_length=32), paths, NoProgress())
    split, rows = PreparedData.open(paths).of("test"), questions(40, 2)
    tokenizer = load_tokenizer(a_job(model, data))
    assert len(split.position) > split.rows == 40
    ids, first, last = split.lists("input_ids"), split.lists("first"), split.lists("last")
    found = set()
    for at, row in enumerate(split.position.tolist()):
        start, end = int(split.numbers("start")[at]), int(split.numbers("end")[at])
        text, place = rows[row]["answers"]["text"][0], rows[row]["answers"]["answer_start"][0]
        assert len(ids[at]) <= 32
        question_ids = tokenizer(rows[row]["question"])["input_ids"]
        assert ids[at][: len(question_ids)].tolist() == question_ids
        if start == 0:
            inside = first[at] >= 0
            assert first[at][inside][0] > place or last[at][inside][-1] < place + len(text), "it is not whole in here"
            continue
        assert (int(first[at][start]), int(last[at][end])) == (place, place + len(text))
        assert ids[at][start : end + 1].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        found.add(row)
    assert found == set(range(40))


@pytest.mark.parametrize("stride", [None, 16])
def test_a_question_that_is_too_long_leaves_room_for_the_paragraph(
    stride: int | None, model: Path, data: Path, paths: JobPaths
) -> None:
    rows = questions(8, 9)
    rows[2]["question"] = "where is the old " * 30 + "lamp ?"
    write_lines(data / "train.jsonl", rows)
    facts = prepare(a_job(model, data, preparation={"max_length": 32, "stride": stride}), paths, NoProgress())
    assert facts.splits["train"].truncated_rows == 1
    split = PreparedData.open(paths).of("train")
    assert all((first >= 0).any() for first in split.lists("first"))


@pytest.mark.parametrize(("before", "after"), [(" ", " "), (" \u200b", "\u200b "), ("  \n", "\n ")], ids=repr)
def test_an_answer_with_nothing_to_read_at_its_edge_is_learnt(
    before: str, after: str, model: Path, data: Path, paths: JobPaths
) -> None:
    answer = f"{before}dark hall{after}"
    context = f"the lamp is in the{answer}and the soup is old ."
    row = {
        "question": "where is the lamp ?",
        "context": context,
        "answers": {"text": [answer], "answer_start": [context.index(answer)]},
    }
    write_lines(data / "train.jsonl", [row, *questions(3, 1)])
    facts = prepare(a_job(model, data), paths, NoProgress())
    assert facts.splits["train"].truncated_rows == 0
    prepared = PreparedData.open(paths)
    (feature,) = prepared.features("train", [0])
    tokens = load_tokenizer(a_job(model, data)).convert_ids_to_tokens(feature["input_ids"].tolist())
    assert tokens[feature["start"] : feature["end"] + 1] == ["dark", "hall"]


def test_an_answer_without_tokens_is_refused(model: Path, data: Path, paths: JobPaths) -> None:
    row = {"question": "where ?", "context": "the \u200b lamp", "answers": {"text": ["\u200b"], "answer_start": [4]}}
    write_lines(data / "train.jsonl", [*questions(3, 1), {"id": "odd", **row}])
    with pytest.raises(StageError) as refused:
        prepare(a_job(model, data), paths, NoProgress())
    assert (refused.value.failure_class, refused.value.reason) == (FailureClass.DATA, "AnswerWithoutTokens")
    assert "to the question 'where ?' has no token" in refused.value.message


def test_an_answer_that_no_window_holds_counts_as_truncated(model: Path, data: Path, paths: JobPaths) -> None:
    context = "the lamp is " + "in the old dark hall and " * 20 + "."
    row = {"question": "where ?", "context": context, "answers": {"text": [context[12:-2]], "answer_start": [12]}}
    write_lines(data / "train.jsonl", [*questions(3, 1), {"id": "long", **row}])
    facts = prepare(a_job(model, data, max_length=64), paths, NoProgress())
    assert facts.splits["train"].truncated_rows == 1


# ---------------------------------------------------------------------------------------------------------- results


def plainly(
    paths: JobPaths, rows: Sequence[dict[str, Any]], *, handle_impossible_answer: bool = False
) -> tuple[list[str], list[float], float]:
    """Return, without windows, the best span of each row, by trying all; its share among none and the best 20 spans of
    the 20 likeliest starts and ends; and the mean loss as the model itself computes it.

    `handle_impossible_answer`, as of the former pipeline of transformers: an answer may be none, whatever the config.
    """
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    network = AutoModelForQuestionAnswering.from_pretrained(paths.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    answers, shares, losses = [], [], []
    for row in rows:
        given = tokenizer(row["question"], row["context"], return_tensors="pt", return_offsets_mapping=True)
        offsets, parts = given.pop("offset_mapping")[0].tolist(), given.sequence_ids(0)
        inside = [at for at, part in enumerate(parts) if part == 1]
        with torch.inference_mode():
            out = network(**given)
        start, end = out.start_logits[0], out.end_logits[0]
        spans = [(float(start[a] + end[b]), a, b) for a in inside for b in inside if a <= b < a + LONGEST_ANSWER]
        score, a, b = max(spans)
        none = float(start[0] + end[0])
        may_be_none = handle_impossible_answer or getattr(network.config, "answers_may_be_missing", False)
        empty = may_be_none and none > score
        starts, ends = (set(sorted(inside, key=lambda at: -float(part[at]))[:20]) for part in (start, end))
        likely = sorted((each[0] for each in spans if each[1] in starts and each[2] in ends), reverse=True)
        best = likely[:20] + ([none] if may_be_none else [])
        shares.append(float(torch.tensor(best, dtype=torch.float64).softmax(0).max()))
        answers.append("" if empty else row["context"][offsets[a][0] : offsets[b][1]])
        if row["answers"]["text"]:
            place, text = row["answers"]["answer_start"][0], row["answers"]["text"][0]
            gold = [at for at in inside if offsets[at][0] >= place and offsets[at][1] <= place + len(text)]
            where = (torch.tensor([gold[0]]), torch.tensor([gold[-1]]))
        else:
            where = (torch.tensor([0]), torch.tensor([0]))
        with torch.inference_mode():
            losses.append(float(network(**given, start_positions=where[0], end_positions=where[1]).loss))
    return answers, shares, float(np.mean(losses))


@pytest.mark.parametrize("without", [False, True], ids=["always an answer", "sometimes none"])
def test_it_answers_and_is_judged_as_a_plain_loop_would(
    without: bool, model: Path, data: Path, paths: JobPaths
) -> None:
    for seed, (split, count) in enumerate({"train": 160, "validation": 12, "test": 40}.items()):
        write_lines(data / f"{split}.jsonl", questions(count, seed, without=without))
    job = trained(a_job(model, data, steps=30), paths)
    rows = questions(40, 2, without=without)
    facts = PreparedData.open(paths).facts
    assert facts.labels == ((NO_ANSWER,) if without else ())
    assert facts.label_counts == ({NO_ANSWER: 40} if without else {})
    answers, shares, loss = plainly(paths, rows)
    sections = evaluate(job, paths, NoProgress())
    assert sections["evaluate"]["loss"] == pytest.approx(loss, rel=1e-4)
    expected = by_the_rules(answers, [row["answers"]["text"] for row in rows])
    assert {name: sections["evaluate"][name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert sections["majority"] == ({"exact_match": 0.25, "f1": 0.25} if without else {})
    result = predict(job, paths, NoProgress())
    lines = predictions(paths)
    assert result["rows"] == len(lines) == 40
    assert [line["answer"] for line in lines] == answers
    assert [line["score"] for line in lines] == pytest.approx(shares, abs=1e-5)
    for line, row in zip(lines, rows, strict=True):
        assert line["id"] == row["id"]
        assert line["candidates"][0]["answer"] == line["answer"]
        assert [each["score"] for each in line["candidates"]] == sorted(
            (each["score"] for each in line["candidates"]), reverse=True
        )
        if line["answer"]:
            assert row["context"][line["start"] : line["end"]] == line["answer"]
        else:
            assert (line["start"], line["end"]) == (None, None)


def test_windows_find_answers_behind_the_first_window(model: Path, data: Path, paths: JobPaths) -> None:
    """Windows of 40 tokens are shorter than most paragraphs."""
    job = trained(a_job(model, data, steps=40, max_length=40), paths)
    measured_ = evaluate(job, paths, NoProgress())["evaluate"]
    predict(job, paths, NoProgress())
    rows, lines = questions(40, 2), predictions(paths)
    behind = [at for at, row in enumerate(rows) if row["answers"]["answer_start"][0] > 100]
    assert len(behind) >= 4
    right = [lines[at]["answer"] in rows[at]["answers"]["text"] for at in range(40)]
    assert measured_["exact_match"] == pytest.approx(np.mean(right), abs=1e-6)
    assert all(lines[at]["start"] is not None for at in behind)


def test_untrained_model_keeps_its_handling_of_missing_answers(model: Path, data: Path, paths: JobPaths) -> None:
    write_lines(data / "train.jsonl", questions(40, 1, without=True))
    trained(a_job(model, data), paths)
    again = JobPaths(paths.root.with_name("again"))
    rows = [{key: row[key] for key in ("id", "question", "context")} for row in questions(6, 7)]
    write_lines(data / "ask.jsonl", rows)
    dataset = {"uri": f"file://{data / 'ask.jsonl'}", "columns": {"question": "question", "context": "context"}}
    job = a_job(
        paths.model, data, training=None, dataset=None, evaluation=None, predict={**INFERENCE, "dataset": dataset}
    )
    prepare(job, again, NoProgress())
    assert PreparedData.open(again).facts.labels == (NO_ANSWER,)
    predict(job, again, NoProgress())
    assert len(predictions(again)) == 6


@pytest.fixture(scope="module")
def elsewhere(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of plain transformers, without the field in its config. Its weights are random, and its
    first token scores so high that it is the answer to some rows of `ASKED`, and not to others.
    """
    from transformers import AutoTokenizer, BertForQuestionAnswering

    place = JobPaths(tmp_path_factory.mktemp("elsewhere"))
    torch.manual_seed(3)
    network = BertForQuestionAnswering.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(place.model)
    given = tokenizer(
        [row["question"] for row in ASKED], [row["context"] for row in ASKED], return_tensors="pt", padding=True
    )
    with torch.no_grad():
        weights = network.qa_outputs.weight.normal_().clone()
        states = network.bert(**given).last_hidden_state
        first = states[:, 0].mean(0) - states[:, 1:].mean((0, 1))
        none, low, high = 0, 0.0, 16.0
        while not 4 <= none <= len(ASKED) - 4:
            middle = (low + high) / 2
            network.qa_outputs.weight.copy_(weights + middle * first)
            network.save_pretrained(place.model)
            none = plainly(place, ASKED, handle_impossible_answer=True)[0].count("")
            low, high = (middle, high) if none < 4 else (low, middle)
    return place.model


ASKED = questions(40, 5, without=True)


def asking(elsewhere: Path, data: Path, **changes: Any) -> TrainerJob:
    """Return a job without training whose rows to predict are in `ask.jsonl`, without answers."""
    write_lines(data / "ask.jsonl", [{key: row[key] for key in ("question", "context")} for row in ASKED])
    dataset = {"uri": f"file://{data / 'ask.jsonl'}", "columns": {"question": "question", "context": "context"}}
    return a_job(elsewhere, data, training=None, **{"predict": {**INFERENCE, "dataset": dataset}, **changes})


def test_rows_without_answers_let_a_model_of_others_answer_none(elsewhere: Path, data: Path, paths: JobPaths) -> None:
    rows = questions(40, 2, without=True)
    write_lines(data / "test.jsonl", rows)
    place = JobPaths(elsewhere.parent)
    answers, _, loss = plainly(place, rows, handle_impossible_answer=True)
    job = asking(elsewhere, data)
    facts = prepare(job, paths, NoProgress())
    assert (facts.labels, facts.label_counts) == ((NO_ANSWER,), {NO_ANSWER: 10})

    sections = evaluate(job, paths, NoProgress())

    expected = by_the_rules(answers, [row["answers"]["text"] for row in rows])
    assert {name: sections["evaluate"][name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert sections["evaluate"]["loss"] == pytest.approx(loss, rel=1e-4)
    assert sections["majority"] == {"exact_match": 0.25, "f1": 0.25}
    never, _, _ = plainly(place, rows)
    assert "" in answers
    assert "" not in never
    split = job.model_copy(update={"predict": job.predict.model_copy(update={"dataset": None})})  # type: ignore[union-attr]
    predict(split, paths, NoProgress())
    assert [line["answer"] for line in predictions(paths)] == answers

    # The same model answers other rows, and requests, as it was evaluated.
    asked, _, _ = plainly(place, ASKED, handle_impossible_answer=True)
    assert "" in asked
    predict(job, paths, NoProgress())
    assert [line["answer"] for line in predictions(paths)] == asked
    engine = ServingEngine.load(job, paths)
    form = Form(("question", "context"), engine.generation)
    served = engine.answer(form, engine.encode(form, [{role: row[role] for role in form.roles} for row in ASKED]))
    assert [row["answer"] for row in served] == asked


@pytest.mark.parametrize("field", [None, False, True])
def test_config_lets_a_model_of_others_answer_none_without_rows(
    field: bool | None, elsewhere: Path, data: Path, paths: JobPaths, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(elsewhere, folder)
    if field is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "answers_may_be_missing": field}))
    expected, _, _ = plainly(JobPaths(elsewhere.parent), ASKED, handle_impossible_answer=bool(field))
    assert ("" in expected) == bool(field)
    job = asking(folder, data, dataset=None, evaluation=None)
    prepare(job, paths, NoProgress())
    predict(job, paths, NoProgress())
    assert [line["answer"] for line in predictions(paths)] == expected


def test_rows_without_answers_in_any_split_count_in_training(model: Path, data: Path, paths: JobPaths) -> None:
    write_lines(data / "test.jsonl", questions(40, 2, without=True))
    assert prepare(a_job(model, data), paths, NoProgress()).labels == (NO_ANSWER,)


def test_card_shows_how_to_query_the_model(model: Path, data: Path, paths: JobPaths) -> None:
    job = trained(a_job(model, data), paths)
    evaluate(job, paths, NoProgress())
    card = run_card(job, paths)
    assert "windows of 200 tokens" in card
    assert "pipeline(" not in card


# ---------------------------------------------------------------------------------------------------------- bad data

CONTEXT = "the lamp is in the old hall ."
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no question": ({"question": " "}, "NullText", "a row needs its question"),
    "no paragraph": ({"context": None}, "NullText", "a row needs its context"),
    "an answer that is not there": (
        {"answers": {"text": ["old hall"], "answer_start": [4]}}, "AnswerNotThere", "its paragraph has 'lamp is ' at 4"
    ),
    "a text without a place": (
        {"answers": {"text": ["old hall", "hall"], "answer_start": [19]}}, "NotAnswers", "2 texts for 1 places"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_refused_with_the_row_and_the_rule(case: str, model: Path, data: Path, paths: JobPaths) -> None:
    change, reason, text = BAD[case]
    good = {
        "id": "a", "question": "where is the lamp ?", "context": CONTEXT,
        "answers": {"text": ["old hall"], "answer_start": [CONTEXT.index("old hall")]},
    }  # fmt: skip
    write_lines(data / "train.jsonl", [good, {**good, **change}])
    with pytest.raises(StageError) as caught:
        prepare(a_job(model, data), paths, NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.DATA, reason)
    assert "Split train" in caught.value.message
    assert "row 2" in caught.value.message
    assert text in caught.value.message


def test_answers_that_are_no_pairs_of_texts_and_places_are_refused(model: Path, data: Path, paths: JobPaths) -> None:
    write_lines(data / "train.jsonl", [{**row, "answers": "old hall"} for row in questions(4, 1)])
    with pytest.raises(StageError) as caught:
        prepare(a_job(model, data), paths, NoProgress())
    assert (caught.value.reason, "as in SQuAD" in caught.value.message) == ("NotAnswers", True)


def test_smoothing_of_labels_is_refused_where_the_loss_has_none(model: Path, data: Path, paths: JobPaths) -> None:
    job = a_job(model, data)
    assert job.training is not None
    job = job.model_copy(update={"training": job.training.model_copy(update={"label_smoothing": 0.1})})
    with pytest.raises(StageError) as caught:
        trained(job, paths)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "LabelSmoothing")


def test_the_loss_counts_every_window_alike(model: Path, data: Path, paths: JobPaths) -> None:
    task = question_answering()
    prepare(a_job(model, data, max_length=40), paths, NoProgress())
    prepared = PreparedData.open(paths)
    batch = task.encoding.collate(prepared.features("train", range(5)), pad_token_id=0)
    assert int(task.encoding.items(batch)) == 5


def test_windows_too_short_to_move_on_are_refused(model: Path, data: Path, paths: JobPaths) -> None:
    job = a_job(model, data, preparation={"max_length": 4, "stride": 2})
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "MaxLengthTooShort")

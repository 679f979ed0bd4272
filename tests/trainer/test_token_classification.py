"""The task token-classification: a tag for every word, for any tokenizer and windows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.models.loading import load_tokenizer
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.token_classification import _owned, token_classification
from trainer_support.tasks import (
    INFERENCE,
    predictions,
    read_lines,
    run_card,
    task_job,
    train_here,
    trained,
    training_of,
    write_lines,
)

NAMES = ("O", "B-place", "I-place", "B-person")
PLACES = [["Paris"], ["New", "York"], ["Sao", "Tome", "Principe"]]
PEOPLE = ["Ada", "Grace", "Alan"]
PLAIN = ["we", "went", "to", "and", "saw", "unbelievable", "things", "with", "in", "yesterday"]
SMALL = {**INFERENCE, "batch_tokens": 256}


def sentence(draw: random.Random, least: int) -> dict[str, Any]:
    """Return at least so many words; places and people among others."""
    tokens: list[str] = []
    tags: list[str] = []
    while len(tokens) < least:
        kind = draw.random()
        if kind < 0.2:
            place = draw.choice(PLACES)
            tokens += place
            tags += ["B-place", *["I-place"] * (len(place) - 1)]
        elif kind < 0.35:
            tokens.append(draw.choice(PEOPLE))
            tags.append("B-person")
        else:
            tokens.append(draw.choice(PLAIN))
            tags.append("O")
    return {"tokens": tokens, "tags": tags}


def sentences(count: int, seed: int, long: int = 60) -> list[dict[str, Any]]:
    """Return sentences of 3 to 20 words, every fifth with `long`."""
    draw = random.Random(seed)
    return [{"id": f"r{i}", **sentence(draw, long if i % 5 == 4 else draw.randint(3, 20))} for i in range(count)]


def write_model(folder: Path, kind: str) -> Path:
    """Write a random model of 2 layers in Hub layout whose tokenizer cuts words into pieces: BERT's (WordPiece), or
    Longformer's (bytes, with an attention window of 8).
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import BertConfig, BertModel, BertTokenizerFast, LongformerConfig, LongformerModel

    folder.mkdir(parents=True)
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.4}
    if kind == "bert":
        letters = "abcdefghijklmnopqrstuvwxyz"
        pieces = [
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            *letters,
            *(f"##{c}" for c in letters),
            "we",
            "to",
            "and",
        ]
        (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
        BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
        BertModel(BertConfig(vocab_size=len(pieces), max_position_embeddings=512, **shape, **quiet)).save_pretrained(
            folder
        )
        return folder
    from transformers import RobertaTokenizerFast

    byte_pairs = ByteLevelBPETokenizer()
    byte_pairs.train_from_iterator(
        [" ".join(PLAIN)] * 3, 300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    )
    byte_pairs.save_model(str(folder))
    tokenizer = RobertaTokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.save_pretrained(folder)
    config = LongformerConfig(
        vocab_size=len(tokenizer), max_position_embeddings=514, attention_window=8, pad_token_id=1, **shape, **quiet
    )
    LongformerModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_model(folder / kind, kind) for kind in ("bert", "longformer")}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, (split, count) in enumerate({"train": 40, "validation": 10, "test": 15}.items()):
        write_lines(tmp_path / "data" / f"{split}.jsonl", sentences(count, seed))
    return tmp_path / "data"


def a_job(model: Path, data: Path, *, max_length: int = 32, **changes: Any) -> TrainerJob:
    training = training_of(
        steps=4,
        batch=8,
        micro=2,
        learning_rate=5e-3,
        threads=1,
        steps_per_epoch=5,
        scheduler="constant",
        max_grad_norm=0.0,
        optimizer="sgd",
    )
    body: dict[str, Any] = {
        "training": training,
        "preparation": {"max_length": max_length},
        "evaluation": SMALL,
        "predict": {**SMALL, "columns": ("id", "tags")},
    }
    return task_job("token-classification", model, data, ["tokens", "tags"], **{**body, **changes})


# ------------------------------------------------------------------------------------------------------------ windows


@given(
    pieces=st.lists(st.integers(1, 6), min_size=1, max_size=60),
    room=st.integers(4, 24),
    shared=st.floats(0, 0.5),
)
@settings(max_examples=200, deadline=None)
def test_each_word_is_answered_once_at_the_token_with_most_context(pieces: list[int], room: int, shared: float) -> None:
    """`pieces`: tokens of each word; windows hold `room` of them between two special tokens."""
    stride = int(room * shared)
    tokens = [word for word, count in enumerate(pieces) for _ in range(count)]
    starts = [0]
    while starts[-1] + room < len(tokens):
        starts.append(starts[-1] + room - stride)
    windows: list[list[int | None]] = [[None, *tokens[start : start + room], None] for start in starts]
    made = _owned(windows, stride)
    assert sorted(word for words in made for word in words if word >= 0) == list(range(len(pieces)))
    first = np.cumsum([0, *pieces[:-1]])
    for number, words in enumerate(made):
        for at, word in enumerate(words):
            if word < 0:
                continue
            assert starts[number] + at - 1 == first[word]
            distance = [
                min(first[word] - start + 1, len(windows[each]) - 2 - (first[word] - start))
                for each, start in enumerate(starts)
                if start <= first[word] < start + room
            ]
            assert min(at, len(words) - 1 - at) == max(distance)


@pytest.mark.parametrize("kind", ["bert", "longformer"])
def test_windows_hold_each_token_and_its_tag_once(
    kind: str, models: dict[str, Path], data: Path, paths: JobPaths
) -> None:
    facts = prepare(a_job(models[kind], data), paths, NoProgress())
    prepared, rows = PreparedData.open(paths), sentences(40, 0)
    split = prepared.of("train")
    assert (facts.labels, split.rows) == (("O", "B-person", "B-place", "I-place"), 40)
    assert len(split.position) > 40
    assert (facts.splits["train"].rows, facts.splits["train"].windows_of) == (len(split.position), 40)
    assert facts.splits["train"].truncated_rows == 0
    assert facts.splits["train"].longest <= 32
    assert facts.label_counts == {
        name: sum(row["tags"].count(name) for row in rows) for name in facts.labels
    }  # fmt: skip
    found: dict[int, dict[int, str]] = {}
    for at, row in enumerate(split.position):
        words, tags = split.lists("words")[at], split.lists("tags")[at]
        assert ((words >= 0) == (tags >= 0)).all()
        for word, tag in zip(words[words >= 0], tags[words >= 0], strict=True):
            assert word not in found.setdefault(int(row), {}), "a word is answered by one window"
            found[int(row)][int(word)] = facts.labels[tag]
    assert [[found[row][word] for word in sorted(found[row])] for row in range(40)] == [row["tags"] for row in rows]


def test_only_the_first_token_of_a_split_token_has_a_tag(models: dict[str, Path], data: Path, paths: JobPaths) -> None:
    write_lines(data / "train.jsonl", [GOOD, *sentences(20, 0)])
    prepare(a_job(models["bert"], data), paths, NoProgress())
    prepared = PreparedData.open(paths)
    batch = token_classification().encoding.collate(prepared.features("train", [0]), pad_token_id=0)
    tokenizer = load_tokenizer(a_job(models["bert"], data))
    assert tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist()) == [
        "[CLS]", "we", "s", "##a", "##w", "a", "##d", "##a", "[SEP]",
    ]  # fmt: skip
    person = prepared.facts.labels.index("B-person")
    assert batch["labels"][0].tolist() == [-100, 0, 0, -100, -100, person, -100, -100, -100]


def test_only_models_that_need_it_get_the_mask_of_prefix_tokens(
    models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    for kind in models:
        paths = JobPaths(tmp_path / kind)
        prepare(a_job(models[kind], data), paths, NoProgress())
        features = PreparedData.open(paths).features("train", range(3))
        batch = token_classification().encoding.collate(features, pad_token_id=1)
        assert ("global_attention_mask" in batch) == (kind == "longformer")
    assert batch["global_attention_mask"].sum(dim=1).tolist() == [1, 1, 1]
    assert batch["global_attention_mask"][:, 0].tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------------ results


def plainly(paths: JobPaths, rows: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    """Return the logits of each row's words without windows, padding, batches or any code of ours."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    network = AutoModelForTokenClassification.from_pretrained(paths.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    found = []
    for row in rows:
        encoded = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
        words = encoded.word_ids(0)
        extra = {}
        if network.config.model_type == "longformer":
            extra["global_attention_mask"] = torch.zeros_like(encoded["input_ids"]).index_fill(1, torch.tensor([0]), 1)
        with torch.inference_mode():
            logits = network(**encoded, **extra).logits[0].numpy()
        found.append(logits[[words.index(word) for word in range(len(row["tokens"]))]])
    return found


@pytest.mark.parametrize("kind", ["bert", "longformer"])
def test_evaluation_and_predictions_equal_a_plain_loop_with_seqeval(
    kind: str, models: dict[str, Path], data: Path, paths: JobPaths
) -> None:
    from seqeval.metrics import f1_score, precision_score, recall_score

    job = trained(a_job(models[kind], data, max_length=500), paths)
    names, rows = PreparedData.open(paths).facts.labels, sentences(15, 2)
    logits, gold = plainly(paths, rows), [row["tags"] for row in rows]
    predicted = [[names[at] for at in each.argmax(axis=1)] for each in logits]
    flat = torch.tensor([names.index(tag) for tags in gold for tag in tags])
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    assert measured["loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(torch.from_numpy(np.concatenate(logits)), flat).item(), rel=1e-4
    )
    for name, score in {"f1": f1_score, "precision": precision_score, "recall": recall_score}.items():
        assert measured[name] == pytest.approx(score(gold, predicted, zero_division=0))
    right = [a == b for one, other in zip(gold, predicted, strict=True) for a, b in zip(one, other, strict=True)]
    assert measured["accuracy"] == pytest.approx(np.mean(right))
    assert (measured["rows"], measured["split"]) == (15, "test")
    predict(job, paths, NoProgress())
    for line, tags, each in zip(predictions(paths), predicted, logits, strict=True):
        assert line["tags"] == tags
        shares = torch.from_numpy(each).double().softmax(dim=1).max(dim=1).values
        assert line["scores"] == pytest.approx(shares.tolist(), abs=1e-5)


def test_windows_answer_each_token_once_in_the_order_of_the_file(
    models: dict[str, Path], data: Path, paths: JobPaths
) -> None:
    """Rows include words that the tokenizer reduces to nothing."""
    rows = sentences(15, 2)
    rows[3]["tokens"][1] = "\u200b"
    write_lines(data / "test.jsonl", rows)
    job = trained(a_job(models["bert"], data), paths)
    assert evaluate(job, paths, NoProgress())["evaluate"]["rows"] == 15
    result = predict(job, paths, NoProgress())
    lines = predictions(paths)
    assert (result["rows"], [line["row"] for line in lines]) == (15, list(range(15)))
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    assert [line["input_tags"] for line in lines] == [row["tags"] for row in rows], "a copied column of the same name"
    for line, row in zip(lines, rows, strict=True):
        assert len(line["tags"]) == len(line["scores"]) == len(row["tokens"])
        assert set(line["tags"]) <= set(NAMES)
        for entity in line["entities"]:
            part = slice(entity["first"], entity["last"] + 1)
            assert entity["text"] == " ".join(row["tokens"][part])
            assert {tag.partition("-")[2] for tag in line["tags"][part]} == {entity["type"]}
            assert entity["score"] == pytest.approx(min(line["scores"][part]))


@pytest.mark.parametrize("names", [("B-place", "O"), ("noun", "verb")], ids=["entities", "others"])
def test_tokens_dropped_by_the_tokenizer_count_as_missed(
    names: tuple[str, str], models: dict[str, Path], data: Path, paths: JobPaths
) -> None:
    """The last row misses all words, and the metrics miss their share, whichever tag is the first."""
    first, second = names
    rows = [{"id": "even", "tokens": ["we", "saw"], "tags": [first, second]}] * 7
    odd = {"id": "odd", "tokens": ["\u200b", "\u200b"], "tags": [first, first]}
    for split in ("train", "validation"):
        write_lines(data / f"{split}.jsonl", rows)
    write_lines(data / "test.jsonl", [*rows, odd])
    job = trained(
        a_job(models["bert"], data, training=training_of(steps=30, batch=4, micro=4, learning_rate=3e-2)), paths
    )
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    assert measured["accuracy"] == 14 / 16, "what has tokens is learnt by heart"
    assert measured["recall"] < 1
    predict(job, paths, NoProgress())
    last = predictions(paths)[-1]
    assert last["scores"] == [0, 0]
    assert last["tags"] == (["O", "O"] if "O" in names else [None, None])
    (sample,) = [each for each in json.loads((paths.root / "samples.json").read_text()) if each["row"] == 7]
    assert sample["predicted"] == ("O O" if "O" in names else "- -")
    confusion = json.loads((paths.root / "confusion.json").read_text())
    assert sum(map(sum, confusion["counts"])) == 16
    assert ("no tag" in confusion["labels"]) == ("O" not in names)


def test_loss_of_a_step_is_the_mean_over_its_tags(models: dict[str, Path], data: Path, paths: JobPaths) -> None:
    """One word fills several windows, of which only the first answers it."""
    rows = [{"tokens": ["we", "x" * 200], "tags": ["O", "B-person"]}, *sentences(7, 5, long=8)]
    write_lines(data / "train.jsonl", rows)
    job = a_job(models["bert"], data, max_length=16)
    prepare(job, paths, NoProgress())
    prepared = PreparedData.open(paths)
    count = len(prepared.lengths("train"))
    assert any((words < 0).all() for words in prepared.of("train").lists("words")), "a window without a word"
    batch = {"global_batch_size": count, "micro_batch_size": 1, "gradient_accumulation": count, "data_parallel": 1}
    assert job.training is not None
    one_step = {**job.training.model_dump(), "batch": batch, "max_steps": 1}
    job = TrainerJob.model_validate({**job.model_dump(), "training": one_step})

    task = token_classification()
    model = task.head.build_model(job, prepared.facts).eval()
    losses, words = 0.0, 0
    for at in range(count):
        features = task.encoding.collate(prepared.features("train", [at]), pad_token_id=0)
        labels = features.pop("labels")[0]
        with torch.no_grad():
            logits = model(**features).logits[0]
        losses += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        words += int((labels >= 0).sum())
    train_here(job, paths)
    (line,) = [line for line in read_lines(paths.history) if "loss" in line]
    assert line["loss"] == pytest.approx(losses / words, rel=1e-5)
    assert np.isfinite(line["grad_norm"])


def test_tags_that_are_no_entities_are_judged_one_by_one(models: dict[str, Path], data: Path, paths: JobPaths) -> None:
    """Such tags are parts of speech."""
    from sklearn.metrics import f1_score

    for split in ("train", "validation", "test"):
        path = data / f"{split}.jsonl"
        rows = read_lines(path)
        write_lines(path, [{**row, "tags": ["NAME" if tag != "O" else "WORD" for tag in row["tags"]]} for row in rows])
    job = trained(a_job(models["bert"], data, max_length=500), paths)
    rows = read_lines(data / "test.jsonl")
    predicted = np.concatenate([each.argmax(axis=1) for each in plainly(paths, rows)])
    gold = [("NAME", "WORD").index(tag) for row in rows for tag in row["tags"]]
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    assert measured["f1"] == pytest.approx(f1_score(gold, predicted, average="macro", zero_division=0))
    predict(job, paths, NoProgress())
    assert {tuple(line["entities"]) for line in predictions(paths)} == {()}


def test_the_card_and_the_report_are_of_a_tagger(models: dict[str, Path], data: Path, paths: JobPaths) -> None:
    from finetune_trainer.report.reporting import write_pages

    job = trained(a_job(models["bert"], data), paths)
    evaluate(job, paths, NoProgress())
    write_pages(job, paths)
    card = run_card(job, paths)
    assert 'pipeline("token-classification"' in card
    assert "- 0: O (" in card
    assert " words in training)" in card
    assert "windows of 32 tokens" in card
    assert "B-person" in paths.report.read_text(encoding="utf-8")


def test_class_ids_and_a_trained_model_keep_their_names(models: dict[str, Path], data: Path, paths: JobPaths) -> None:
    """An untrained model decides the ids; data with ids only fit."""
    trained(a_job(models["bert"], data), paths)
    names = PreparedData.open(paths).facts.labels
    numbers = [{**row, "tags": [names.index(tag) for tag in row["tags"]]} for row in sentences(15, 2)]
    write_lines(data / "test.jsonl", numbers)
    other = JobPaths(paths.root.with_name("other"))
    job = a_job(paths.model, data, training=None)
    prepare(job, other, NoProgress())
    assert PreparedData.open(other).facts.labels == names
    again = evaluate(job, other, NoProgress())["evaluate"]
    write_lines(data / "test.jsonl", sentences(15, 2))
    assert again["f1"] == pytest.approx(evaluate(a_job(models["bert"], data), paths, NoProgress())["evaluate"]["f1"])


# ----------------------------------------------------------------------------------------------------------- bad data

GOOD = {"id": "good", "tokens": ["we", "saw", "Ada"], "tags": ["O", "O", "B-person"]}
BAD: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "text in place of words": ({"tokens": "we saw", "tags": ["O"]}, "NotWords", ["row 1", "not a list of words"]),
    "numbers in place of words": ({"tokens": [1, 2], "tags": ["O", "O"]}, "NotWords", ["not a list of words"]),
    "no words": ({"tokens": [], "tags": []}, "NoWords", ["at least one word"]),
    "a word that is null": ({"tokens": ["we", None], "tags": ["O", "O"]}, "NullWord", ["a word is text"]),
    "text in place of tags": ({"tokens": ["we"], "tags": "O"}, "NotTags", ["not a list of words or of class ids"]),
    "one tag too few": ({"tokens": ["we", "saw"], "tags": ["O"]}, "TagsAndWords", ["1 tags for 2 words"]),
    "a tag that is null": ({"tokens": ["we", "saw"], "tags": ["O", None]}, "NullLabel", ["each word needs its tag"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_refused_with_the_row_and_the_rule(
    case: str, models: dict[str, Path], data: Path, paths: JobPaths
) -> None:
    row, reason, texts = BAD[case]
    kinds = [type(value) for value in row.values()]
    rows = [row] if kinds != [list, list] or reason == "NotWords" else [GOOD, row]
    write_lines(data / "train.jsonl", rows)
    with pytest.raises(StageError) as caught:
        prepare(a_job(models["bert"], data), paths, NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.DATA, reason)
    for text in ["Split train", *texts]:
        assert text in caught.value.message
    if len(rows) == 2:
        assert "row 2" in caught.value.message


def test_a_tag_that_train_does_not_have_is_refused_with_its_row(
    models: dict[str, Path], data: Path, paths: JobPaths
) -> None:
    write_lines(data / "test.jsonl", [GOOD, {**GOOD, "tags": ["O", "O", "B-planet"]}])
    with pytest.raises(StageError) as caught:
        prepare(a_job(models["bert"], data), paths, NoProgress())
    assert caught.value.reason == "LabelOutOfRange"
    assert "Split test" in caught.value.message
    assert "row 2" in caught.value.message
    assert "'B-planet' is not one of O, B-person, B-place, I-place" in caught.value.message


@pytest.mark.parametrize(
    ("columns", "reason", "text"),
    [
        ({"tags": "tags"}, "MissingSetting", "dataset.columns.tokens is not set"),
        ({"tokens": "tokens"}, "MissingSetting", "dataset.columns.tags is not set"),
        ({"tokens": "tokens", "tags": "tags", "text": "x"}, "ColumnOfAnotherTask", "reads tokens and tags"),
    ],
)
def test_columns_are_those_of_the_task(
    columns: dict[str, str], reason: str, text: str, models: dict[str, Path], data: Path, paths: JobPaths
) -> None:
    job = a_job(models["bert"], data, dataset={"uri": f"file://{data}", "columns": columns})
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, reason)
    assert text in caught.value.message


def test_windows_that_bring_little_new_are_refused(models: dict[str, Path], data: Path, paths: JobPaths) -> None:
    job = a_job(models["bert"], data, preparation={"max_length": 32, "stride": 17})
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    assert (caught.value.reason, "16 or less" in caught.value.hint) == ("StrideTooLong", True)


def test_windows_too_short_to_move_on_are_refused(models: dict[str, Path], data: Path, paths: JobPaths) -> None:
    job = a_job(models["bert"], data, preparation={"max_length": 4, "stride": 2})
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "MaxLengthTooShort")

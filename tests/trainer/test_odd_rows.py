"""Rows with little or nothing in them: no later stage may die of a row that prepare accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.predict.predict import predict
from finetune_trainer.prepare.prepare import prepare
from trainer_support.tasks import (
    predictions,
    task_job,
    texts,
    train_here,
    training_of,
    word_tokenizer,
    write_decoder,
    write_encoder_decoder,
    write_lines,
)

ODD = ["", " ", "\n", "\u200b", "\x00", "\ufeff", "\u0301", "🙂", "…", "x" * 3000, "the cat " * 400]
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A task on a model, and its row around a text."""

    task: str
    model: str
    row: Callable[[str], Row]
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.task} {self.model}"


def answered(text: str) -> Row:
    """Return a paragraph whose answer is the whole text, if there is a text."""
    context = f"the cat sees {text}"
    found = {"text": [text], "answer_start": [13]} if text else {"text": [], "answer_start": []}
    return {"question": text or "?", "context": context, "answers": found}


GENERATION = {"generation": {"max_new_tokens": 4}}
CASES = [
    *(
        Case(task, model, row)
        for model in ("bert", "gpt2")
        for task, row in {
            "text-classification": lambda text: {"text": text, "label": len(text) % 2},
            "token-classification": lambda text: {"tokens": [text], "tags": ["B-x"]},
            "question-answering": answered,
        }.items()
    ),
    Case("masked-lm", "bert", lambda text: {"text": text}),
    Case("summarization", "t5", lambda text: {"source": text, "target": text}, GENERATION),
    Case("summarization", "bart", lambda text: {"source": text, "target": text}, GENERATION),
    Case("text-generation", "llama", lambda text: {"text": text}, GENERATION),
    Case("text-generation", "llama", lambda text: {"source": text, "target": text}, GENERATION),
    Case("preference-tuning", "llama", lambda text: {"prompt": text, "chosen": text, "rejected": text}, GENERATION),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> dict[str, Path]:
    """One model drops odd characters and adds special tokens; others take each word and add none, or an end."""
    folder = tmp_path_factory.mktemp("models")
    plain = folder / "bart"
    write_encoder_decoder(plain, "bart")
    word_tokenizer().save_pretrained(plain)
    return {
        "bert": tiny_bert(folder / "bert", words=["the", "cat", "sees", "dog", "a", "house"]),
        "gpt2": write_decoder(folder / "gpt2", "gpt2"),
        "llama": write_decoder(folder / "llama"),
        "t5": write_encoder_decoder(folder / "t5"),
        "bart": plain,
    }


def job_of(case: Case, model: Path, data: Path, *, steps: int = 2) -> TrainerJob:
    training = training_of(steps=steps, batch=4, micro=2) if steps else None
    how = {"preparation": {"max_length": 32}, **case.changes}
    return task_job(case.task, model, data, list(case.row("a")), training=training, **how)


def refusal(job: TrainerJob, paths: JobPaths) -> FailureClass | None:
    """Prepare the job; return the class of the error that refuses it."""
    try:
        prepare(job, paths, NoProgress())
    except StageError as error:
        return error.failure_class
    return None


def normal(case: Case) -> list[Row]:
    found = [case.row(row["text"]) for row in texts(6, 3)]
    if case.task == "token-classification":
        found += [{"tokens": ["the", "cat"], "tags": ["O", "B-x"]}]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_that_prepare_lets_pass_are_learnt_judged_and_predicted(
    case: Case, models: dict[str, Path], tmp_path: Path
) -> None:
    """Rows are tried all together, and each in a test split of its own."""
    passed = []
    for number, text in enumerate(ODD):
        data = tmp_path / f"data-{number}"
        for split, rows in {"train": normal(case), "validation": normal(case), "test": [case.row(text)]}.items():
            write_lines(data / f"{split}.jsonl", rows)
        refused = refusal(job_of(case, models[case.model], data), JobPaths(tmp_path / f"w-{number}"))
        assert refused in (None, FailureClass.DATA), text
        if refused is None:
            passed.append((number, case.row(text)))
    assert passed

    rows = [*normal(case), *(row for _, row in passed)]
    for split in ("train", "validation", "test"):
        write_lines(tmp_path / "all" / f"{split}.jsonl", rows)
    job, paths = job_of(case, models[case.model], tmp_path / "all"), JobPaths(tmp_path / "w")
    prepare(job, paths, NoProgress())
    train_here(job, paths)
    paths.state.mkdir(exist_ok=True)
    (paths.state / "train.json").write_text("{}")
    assert torch.isfinite(torch.tensor(evaluate(job, paths, NoProgress())["evaluate"]["loss"]))
    predict(job, paths, NoProgress())
    assert len(predictions(paths)) == len(rows)

    for number, _ in passed:
        alone = job_of(case, paths.model, tmp_path / f"data-{number}", steps=0)
        own = JobPaths(tmp_path / f"alone-{number}")
        prepare(alone, own, NoProgress())
        if case.task != "preference-tuning":  # evaluated by the effect of training
            assert torch.isfinite(torch.tensor(evaluate(alone, own, NoProgress())["evaluate"]["loss"])), number
        predict(alone, own, NoProgress())
        assert len(predictions(own)) == 1

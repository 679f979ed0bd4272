"""The result of training does not depend on the cut of a global batch into micro-batches, nor on their padding."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.evaluate import evaluate
from finetune_trainer.prepare.prepare import prepare
from trainer_support.tasks import (
    WORDS,
    largest_difference,
    lines_with,
    losses,
    task_job,
    train_here,
    training_of,
    write_decoder,
    write_encoder_decoder,
    write_lines,
)

ROWS = 12
CUTS = (1, 2, 4, 12)
Row = dict[str, Any]


def paragraph(row: int, text: str) -> Row:
    """Return a question whose answer is the last word."""
    start = text.rindex(" ") + 1 if " " in text else 0
    return {"question": "a cat", "context": text, "answers": {"text": [text[start:]], "answer_start": [start]}}


TASKS: dict[str, tuple[str, Callable[[int, str], Row]]] = {
    "text-classification": ("bert", lambda row, text: {"text": text, "label": row % 2}),
    "token-classification": (
        "bert",
        lambda row, text: {"tokens": text.split(), "tags": [["O", "B-x"][row % 2]] * len(text.split())},
    ),
    "question-answering": ("bert", paragraph),
    "masked-lm": ("bert", lambda row, text: {"text": text}),
    "summarization": ("t5", lambda row, text: {"source": text, "target": text}),
    "text-generation": ("llama", lambda row, text: {"source": text, "target": text}),
    "preference-tuning": ("llama", lambda row, text: {"prompt": "a", "chosen": text, "rejected": "the dog"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Callable[..., Path]) -> dict[str, Path]:
    """Models without dropout."""
    folder = tmp_path_factory.mktemp("models")
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {
        "bert": tiny_bert(folder / "bert", words=WORDS, max_position_embeddings=128, **still),
        "llama": write_decoder(folder / "llama"),
        "t5": write_encoder_decoder(folder / "t5"),
    }


@pytest.fixture
def data(tmp_path: Path, task: str) -> Path:
    """Write twelve rows of 1 to 60 words."""
    draw = random.Random(4)
    sizes = [1, 2, 60, 3, 1, 40, 5, 2, 25, 1, 8, 4]
    rows = [TASKS[task][1](at, " ".join(draw.choices(WORDS, k=size))) for at, size in enumerate(sizes)]
    for split in ("train", "validation", "test"):
        write_lines(tmp_path / "data" / f"{split}.jsonl", rows)
    return tmp_path / "data"


def trained(task: str, model: Path, data: Path, paths: JobPaths, cut: int, **changes: Any) -> TrainerJob:
    """Train one step of plain gradient descent over all rows, cut into so many micro-batches."""
    how = {"optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "scheduler": "constant", **changes}
    training = training_of(steps=1, batch=ROWS, micro=ROWS // cut, **how)
    columns = list(TASKS[task][1](0, "a"))
    job = task_job(task, model, data, columns, training=training, preparation={"max_length": 100})
    prepare(job, paths, NoProgress())
    train_here(job, paths)
    return job


@pytest.mark.parametrize("task", TASKS)
def test_number_of_micro_batches_does_not_change_the_training(
    task: str, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    found = []
    for cut in CUTS:
        paths = JobPaths(tmp_path / f"cut-{cut}")
        trained(task, models[TASKS[task][0]], data, paths, cut)
        norm = lines_with(paths, "loss")[0]["grad_norm"]
        found.append((losses(paths)[0], norm, load_file(paths.model / "model.safetensors")))
    loss, norm, weights = found[0]
    for cut, (other_loss, other_norm, other) in zip(CUTS, found, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-5), cut
        assert other_norm == pytest.approx(norm, rel=1e-4), cut
        assert largest_difference(other, weights) < 1e-5, cut


@pytest.mark.parametrize("task", [task for task in TASKS if task != "masked-lm"])
def test_the_loss_of_training_is_that_of_evaluation(
    task: str, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """Both are of the same rows and weights; masked-lm hides other tokens in each."""
    paths = JobPaths(tmp_path / "w")
    job = trained(task, models[TASKS[task][0]], data, paths, 2, learning_rate=1e-12)
    paths.state.mkdir(exist_ok=True)
    (paths.state / "train.json").write_text("{}")
    assert evaluate(job, paths, NoProgress())["evaluate"]["loss"] == pytest.approx(losses(paths)[0], rel=1e-4)

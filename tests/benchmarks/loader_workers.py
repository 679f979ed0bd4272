"""Time in which the training process gets a micro-batch, with and without loader workers.

Baseline: `dataloader_num_workers: 0`, which is the default: the training process reads and pads rows itself. Our other
arms leave that to one and two processes, which pass batches back through shared memory. The process takes a batch every
`--step` seconds, as beside a GPU that computes; so workers have time to read ahead. Arms are interleaved and repeated,
and the first batches of each, before which workers start, are shown apart.

Quality: all arms get the same tensors.

    python tests/benchmarks/loader_workers.py --data ../shared/data/rotten_tomatoes/train.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

from prepare_rate import a_job
from torch.utils.data import DataLoader

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import Batch, TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.prepared import PreparedData
from finetune_trainer.prepare.prepare import prepare
from finetune_trainer.tasks.task_registry import task_of
from finetune_trainer.training.order import Collate, EpochOrder, TrainRows

CASES = {"text-classification": (32, 1), "masked-lm": (32, 32)}
"""Task -> rows of a micro-batch, and lines of the file in each."""
ARMS = (0, 1, 2)
TOKENS = 512


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="jsonl file with text and label")
    parser.add_argument("--batches", type=int, default=60, help="micro-batches of an arm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step", type=float, default=0.02, help="seconds between two micro-batches")
    options = parser.parse_args()
    print("| micro-batch | workers | ms | lowest to highest | of the first | identical |\n|---|---|---|---|---|---|")
    for task, (rows, lines) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            job, paths = (
                written(Path(folder), options.data, task, rows * options.batches, lines),
                JobPaths(Path(folder)),
            )
            prepare(job, paths, NoProgress())
            compare(job, paths, rows, options.batches, options.rounds, options.step)


def written(folder: Path, source: Path, task: str, count: int, lines: int) -> TrainerJob:
    """Write `count` rows, each of some lines of the file, and return the job that reads them."""
    given = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for at in range(count + count // 4):  # some are split off for validation
            some = [given[(at * lines + each) % len(given)] for each in range(lines)]
            file.write(json.dumps({"text": " ".join(row["text"] for row in some), "label": some[0]["label"]}) + "\n")
    body = a_job(folder / "rows.jsonl", 1).model_dump(mode="json")
    if task == "masked-lm":
        body["dataset"]["columns"] = {"text": "text"}
    return TrainerJob.model_validate({**body, "task": task, "preparation": {"max_length": TOKENS}})


def compare(job: TrainerJob, paths: JobPaths, rows: int, batches: int, rounds: int, step: float) -> None:
    """Print a line for each number of workers."""
    prepared, task = PreparedData.open(paths), task_of(job)
    sizes = {"global_batch_size": rows, "micro_batch_size": rows, "gradient_accumulation": 1, "data_parallel": 1}
    seen: dict[int, list[float]] = {arm: [] for arm in ARMS}
    first: dict[int, list[float]] = {arm: [] for arm in ARMS}
    digests: dict[int, str] = {}
    for _ in range(rounds):
        for arm in ARMS:
            order = EpochOrder(prepared.lengths("train"), Batch(**sizes), 0, 1, grouped=False)
            collate = Collate(task.encoding, prepared.pad_token_id)
            loader = DataLoader(TrainRows(prepared), batch_sampler=order, collate_fn=collate, num_workers=arm)
            took, digest = [], hashlib.sha256()
            taken = iter(loader)
            for _ in islice(range(batches), len(order)):
                began = time.perf_counter()
                batch = next(taken)
                took.append(time.perf_counter() - began)
                digest.update(b"".join(each.numpy().tobytes() for each in batch.values()))
                time.sleep(step)
            first[arm].append(took[0])
            seen[arm] += took[1:]
            digests[arm] = digest.hexdigest()
    tokens = int(prepared.lengths("train").mean())
    for arm in ARMS:
        times = [each * 1e3 for each in seen[arm]]
        name = f"{job.task}, {rows} rows of {tokens} tokens"
        print(
            f"| {name} | {arm}{'' if arm else ' (baseline)'} | {statistics.median(times):.2f} "
            f"| {min(times):.2f} to {max(times):.1f} | {statistics.median(first[arm]) * 1e3:.1f} "
            f"| {digests[arm] == digests[0]} |"
        )


if __name__ == "__main__":
    main()

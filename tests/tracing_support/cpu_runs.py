"""Trainings on a CPU whose peak memory is compared with the plan's: a developers' tool.

    python -m tracing_support.cpu_runs [--measure FOLDER] [NAME ...]

prints the table from the kept runs; `--measure` trains the cases again, one at a time with models and workspaces in
FOLDER, and keeps them (`make measure-cpu-memory`: half an hour or more). A case is a whole `finetune run`: most of a
few steps with rows of one length, some of hundreds of steps with rows of many lengths. Models are random, and rows are
words.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from finetune_contract.choices import Task
from finetune_contract.facts import ModelFacts
from finetune_contract.trainer_job import Training
from finetune_operator.plan.memory.memory_workload import Workload
from finetune_operator.plan.memory.process_memory import estimate
from finetune_operator.plan.types.plan_types import MemoryEstimate

KEPT = Path(__file__).parents[1] / "tracing" / "cpu_memory_runs.json"
LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets")
STEPS = 2
LONG_STEPS = 320
_MAIN = "from finetune_operator.cli.main import main; main()"
MIB = 1 << 20
GIB = 1 << 30

_BERT: dict[str, Any] = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512}
_LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 2048}
_SMALL: dict[str, Any] = {"vocab_size": 2000, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "bert 1M": {**_BERT, **_SMALL, "intermediate_size": 512},
    "llama 1M": {**_LLAMA, **_SMALL, "intermediate_size": 352},
    "bert 11M": {
        **_BERT, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024
    },
    "bert 41M": {
        **_BERT, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048
    },
    "bert 109M": {
        **_BERT, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072
    },
    "gpt2 30M": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 384, "n_layer": 6, "n_head": 6},
    "llama 22M": {
        **_LLAMA,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "intermediate_size": 704,
    },
    "llama 58M": {
        **_LLAMA,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 1408,
    },
}  # fmt: skip
"""Name -> config of a model, named by its family and parameters."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    **{f"ZeRO-{stage}": {"strategy": "deepspeed", "zeroStage": stage} for stage in (1, 2, 3)},
}


@dataclass(frozen=True)
class CpuCase:
    """One training on a CPU: a process for `single`, else two."""

    model: str
    strategy: str
    rows: int
    """Rows of a micro-batch."""
    tokens: int
    """Tokens of each row."""
    precision: str = "fp32"
    accumulation: int = 1
    lora: bool = False
    checkpointing: str = "none"
    held: bool = False
    """True if no constant of the plan was fitted to this run."""
    long: bool = False
    """True for `LONG_STEPS` steps with rows of 4 tokens up to `tokens`."""
    adapter: Mapping[str, Any] = field(default_factory=lambda: {"method": "lora", "rank": 8}, hash=False)

    @property
    def name(self) -> str:
        """Return the settings in words."""
        settings = [self.model, self.strategy, *(["LoRA"] if self.lora else []), f"{self.rows} x {self.tokens}"]
        settings += [self.precision] if self.precision != "fp32" else []
        settings += [self.checkpointing] if self.checkpointing != "none" else []
        settings += [f"{LONG_STEPS} steps"] if self.long else []
        return " ".join(settings)

    @property
    def task(self) -> Task:
        """Return classification for encoders, generation for decoders."""
        return "text-classification" if self.model.startswith("bert") else "text-generation"

    def job(self, model: Path, data: Path) -> dict[str, Any]:
        """Return the job of the case."""
        processes = 1 if self.strategy == "single" else 2
        source: dict[str, Any] = {"uri": f"file://{model}"}
        if self.lora:
            source["adapter"] = dict(self.adapter)
        return {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJob",
            "metadata": {"name": "measured"},
            "spec": {
                "task": self.task,
                "model": source,
                "dataset": {"uri": f"file://{data}"},
                "preparation": {"maxLength": self.tokens},
                "training": {
                    "maxSteps": LONG_STEPS if self.long else STEPS,
                    "globalBatchSize": self.rows * self.accumulation * processes,
                    "microBatchSize": self.rows,
                    "precision": self.precision,
                },
                "parallelism": {**STRATEGIES[self.strategy], "activationCheckpointing": self.checkpointing},
            },
        }


CASES = (
    CpuCase("bert 11M", "single", 16, 128),
    CpuCase("bert 11M", "ddp", 16, 128, held=True),
    CpuCase("bert 11M", "ZeRO-2", 32, 64),
    CpuCase("bert 41M", "single", 8, 256, held=True),
    CpuCase("bert 41M", "ddp", 8, 128),
    CpuCase("bert 41M", "fsdp", 16, 128, held=True),
    CpuCase("bert 41M", "ZeRO-1", 16, 64),
    CpuCase("bert 41M", "ZeRO-3", 8, 128, held=True),
    CpuCase("bert 109M", "single", 4, 128),
    CpuCase("bert 109M", "ddp", 8, 128, held=True),
    CpuCase("bert 41M", "fsdp", 4, 64),
    CpuCase("bert 41M", "ZeRO-2", 8, 64, held=True),
    CpuCase("bert 41M", "ddp", 8, 64, lora=True),
    CpuCase("bert 41M", "ZeRO-1", 4, 128, precision="bf16", held=True),
    CpuCase("gpt2 30M", "single", 4, 128),
    CpuCase("gpt2 30M", "fsdp", 4, 128, held=True),
    CpuCase("gpt2 30M", "ZeRO-3", 4, 64),
    CpuCase("llama 22M", "single", 4, 128, lora=True, held=True),
    CpuCase("llama 22M", "ddp", 4, 128, accumulation=2),
    CpuCase("llama 22M", "ZeRO-2", 4, 128, held=True),
    CpuCase("llama 22M", "fsdp", 4, 128, checkpointing="full"),
    CpuCase("llama 58M", "single", 2, 64, precision="bf16", held=True),
    CpuCase("llama 58M", "ZeRO-1", 2, 64),
    CpuCase("llama 58M", "ddp", 2, 64, accumulation=2, held=True),
)
LONG_CASES = (
    CpuCase("bert 1M", "single", 32, 128, held=True, long=True),
    CpuCase("bert 1M", "fsdp", 32, 128, held=True, long=True),
    CpuCase("llama 1M", "ddp", 16, 128, held=True, long=True),
)
"""Cases that are measured only by their names (`320 steps` for all), as each takes many minutes."""


def write_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a random model with a tokenizer of words, unless it is there."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    from trainer_support.tasks import word_tokenizer

    tokenizer = word_tokenizer([f"w{number}" for number in range(1000)])
    torch.manual_seed(0)
    ends = {name: getattr(tokenizer, name) or 0 for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    whole = AutoConfig.for_model(**config, **ends)
    kind: Any = AutoModelForMaskedLM if config["model_type"] == "bert" else AutoModelForCausalLM
    kind.from_config(whole).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(folder: Path, tokens: int, count: int = 160, *, varied: bool = False) -> Path:
    """Write rows of `tokens` words, with a label each; `varied`: of 2 words up to `tokens`, most of them short."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(1)
    lengths = [round(2 * (tokens / 2) ** draws.random()) if varied else tokens for _ in range(count)]
    texts = [" ".join(f"w{(row + at) % 1000}" for at in range(lengths[row] + 2)) for row in range(count)]
    lines = [json.dumps({"text": text, "label": at % 2}) for at, text in enumerate(texts)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@dataclass(frozen=True)
class KeptRun:
    """Peak memory of one measured training, beside what the plan knew of it."""

    name: str
    held: bool
    facts: ModelFacts
    training: Training
    longest: int
    """Tokens of the longest row."""
    peak: int
    """Largest resident set of a process, in bytes."""

    @property
    def planned(self) -> MemoryEstimate:
        """Return the plan's memory of one process."""
        training = self.training
        work = Workload(
            model=self.facts,
            task=next(case.task for case in (*CASES, *LONG_CASES) if case.name == self.name),
            strategy=training.strategy,
            precision=training.precision,
            optimizer=training.optimizer,
            world=training.world,
            micro_batch=training.batch.micro_batch_size,
            length=self.longest,
            adapter=training.adapter,
            accumulates=training.batch.gradient_accumulation > 1,
        )
        return estimate(work, 8 * GIB)


def runs() -> dict[str, KeptRun]:
    """Return the kept runs by their cases' names."""
    return {
        name: KeptRun(
            name,
            each["held"],
            ModelFacts.model_validate(each["facts"]),
            Training.model_validate(each["training"]),
            each["longest"],
            max(each["peaks"]),
        )
        for name, each in kept_runs().items()
    }


def table() -> str:
    """Return the comparison as Markdown."""
    lines = ["| run on a CPU | planned MiB | measured MiB | fitted | held |", "|---|---|---|---|---|"]
    for run in runs().values():
        ours = run.planned.total_bytes
        ratio = f"{ours / run.peak:.2f}"
        columns = f"| {ratio}" if run.held else f"{ratio} |"
        lines.append(f"| {run.name} | {ours // MIB:,} | {run.peak // MIB:,} | {columns} |")
    return "\n".join(lines) + "\n"


def measure(case: CpuCase, folder: Path) -> dict[str, Any]:
    """Train the case, and return its record."""
    model = write_model(folder / "models" / case.model.replace(" ", "-"), MODELS[case.model])
    data = write_rows(
        folder / "rows" / case.name.replace(" ", "-"), case.tokens, 3200 if case.long else 160, varied=case.long
    )
    file, workspace = folder / "job.yaml", folder / "workspace"
    file.write_text(yaml.safe_dump(case.job(model, data)), encoding="utf-8")
    command = [sys.executable, "-c", _MAIN, "run", str(file), "--workspace", str(workspace)]
    given = {**os.environ, "DS_ACCELERATOR": "cpu"}
    ran = subprocess.run([*command, "--restart"], capture_output=True, text=True, env=given, check=False)
    if ran.returncode:
        raise SystemExit(f"{case.name}:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    job = workspace / "measured"
    plan = json.loads((job / "plan.json").read_text(encoding="utf-8"))
    train = json.loads((job / "metrics.json").read_text(encoding="utf-8"))["train"]
    return _record(case, plan, train)


def _record(case: CpuCase, plan: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "held": case.held,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"system": platform.platform(terse=True), "processor": _processor()},
        "libraries": {name: version(name) for name in LIBRARIES},
        "facts": plan["model"],
        "training": plan["trainer"]["training"],
        "longest": plan["data"]["splits"]["train"]["longest"],
        "peaks": train["peak_memory_bytes_by_rank"],
        "steps": train["steps"],
        "seconds": round(train["seconds"], 1),
    }


def _processor() -> str:
    """Return the processor's name and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{len(os.sched_getaffinity(0))} cores of {name}"


def main() -> None:
    """Measure and print, as the module's text says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--missing", action="store_true", help="measure only cases without a kept run")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    cases = list(CASES)
    if options.names:
        cases = [case for case in (*CASES, *LONG_CASES) if any(name in case.name for name in options.names)]
    if options.measure is not None:
        there = kept_runs() if options.missing else {}
        for case in (each for each in cases if each.name not in there):
            keep(case, measure(case, options.measure.resolve()))
            print(case.name, flush=True)
    print(table())


def kept_runs() -> dict[str, Any]:
    """Return the kept records by their cases' names."""
    return dict(json.loads(KEPT.read_text(encoding="utf-8"))) if KEPT.exists() else {}


def keep(case: CpuCase, record: Mapping[str, Any]) -> None:
    """Write the record beside those of other cases, in the order of the cases."""
    found = {**kept_runs(), case.name: record}
    kept = {each.name: found[each.name] for each in (*CASES, *LONG_CASES) if each.name in found}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

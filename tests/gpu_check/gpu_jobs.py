"""A short training with each strategy by `finetune run`: memory and time beside the plan's, and the losses of all
strategies beside those of the first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from gpu_check.gpu_report import SkippedError
from trainer_support.tasks import WORDS, word_tokenizer, write_lines

FINETUNE = str(Path(sys.executable).parent / "finetune")
WARMUP_STEPS = 4
LOSS_TOLERANCE = 0.05
"""Relative difference of losses between strategies: precisions round at different places."""
LORA = {"method": "lora", "rank": 16}


@dataclass(frozen=True)
class Size:
    """Model and work of a training."""

    width: int
    layers: int
    vocabulary: int
    length: int
    rows: int
    """Rows of a step for each GPU."""
    steps: int = 14
    precision: str = "bf16"


SMALL = Size(width=64, layers=2, vocabulary=512, length=32, rows=2, steps=6)
BY_MEMORY = (
    (70, Size(width=2048, layers=4, vocabulary=32_000, length=1024, rows=8, steps=24)),
    (20, Size(width=2048, layers=8, vocabulary=32_000, length=1024, rows=2)),
    (0, Size(width=1024, layers=8, vocabulary=32_000, length=512, rows=2)),
)
"""Least GiB of a GPU, and the size that fits all strategies there."""
WAYS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"parallelism": {"strategy": "single"}}),
    "ddp": (2, {"parallelism": {"strategy": "ddp"}}),
    "fsdp": (2, {"parallelism": {"strategy": "fsdp"}}),
    "ZeRO-2": (1, {"parallelism": {"strategy": "deepspeed", "zeroStage": 2}}),
    "ZeRO-3": (1, {"parallelism": {"strategy": "deepspeed", "zeroStage": 3}}),
    "ZeRO-3, optimizer in host memory": (
        1,
        {"parallelism": {"strategy": "deepspeed", "zeroStage": 3, "offload": {"optimizer": "cpu"}}},
    ),
    "tensor 2": (2, {"parallelism": {"strategy": "ddp", "tensor": 2}}),
    "pipeline 2": (2, {"parallelism": {"strategy": "ddp", "pipeline": {"degree": 2}}}),
    "sequence 2": (2, {"parallelism": {"strategy": "fsdp", "sequence": 2}}),
    "activations recomputed": (1, {"parallelism": {"strategy": "single", "activationCheckpointing": "full"}}),
    "activations in host memory": (1, {"parallelism": {"strategy": "single", "offload": {"activations": "cpu"}}}),
    "compiled": (1, {"parallelism": {"strategy": "single"}, "arguments": {"torch_compile": True}}),
    "Liger": (1, {"parallelism": {"strategy": "single"}, "arguments": {"use_liger_kernel": True}}),
    "LoRA": (1, {"parallelism": {"strategy": "single"}, "adapter": LORA}),
    "QLoRA": (1, {"parallelism": {"strategy": "single"}, "adapter": {**LORA, "method": "qlora"}}),
    "QLoRA with fsdp 2": (2, {"parallelism": {"strategy": "fsdp"}, "adapter": {**LORA, "method": "qlora"}}),
    "fp8": (1, {"parallelism": {"strategy": "single"}, "precision": "fp8"}),
    "compiled with fsdp 2": (2, {"parallelism": {"strategy": "fsdp"}, "arguments": {"torch_compile": True}}),
    "fp8 with fsdp 2, compiled": (
        2,
        {"parallelism": {"strategy": "fsdp"}, "precision": "fp8", "arguments": {"torch_compile": True}},
    ),
}
"""Name -> GPUs that it needs, and fields of the job."""
SAME_LOSSES = frozenset(
    {name for name, (_, fields) in WAYS.items() if "adapter" not in fields and "precision" not in fields}
)
"""Ways that train all weights in bf16."""


def size_of(gibibytes: float | None) -> Size:
    """Return the size for GPUs of so much memory; the small one for None, a machine without GPUs."""
    if gibibytes is None:
        return SMALL
    return next(size for least, size in BY_MEMORY if gibibytes >= least)


def write_inputs(folder: Path, size: Size) -> None:
    """Write a random Llama-like model in bf16 and rows of random words."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = [*WORDS, *(f"word{number}" for number in range(size.vocabulary - len(WORDS) - 8))]
    tokenizer = word_tokenizer(words)
    tokenizer.save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(4, size.width // 128),
        max_position_embeddings=2 * size.length,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    draws = torch.Generator().manual_seed(1)
    for split, count in {"train": 512, "validation": 16}.items():
        picks = torch.randint(len(words), (count, size.length), generator=draws).tolist()
        write_lines(
            folder / "data" / f"{split}.jsonl", [{"text": " ".join(words[each] for each in row)} for row in picks]
        )


def job(name: str, folder: Path, size: Size, gpus: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job of a way to train; all of a size have the same rows in each step. `gpus`: those of the machine, 0
    without.
    """
    model: dict[str, Any] = {"uri": f"file://{(folder / 'model').resolve()}"}
    if "adapter" in fields:
        model["adapter"] = fields["adapter"]
    training: dict[str, Any] = {
        "maxSteps": size.steps,
        "globalBatchSize": size.rows * max(gpus, 1),
        "learningRate": 1e-4,
        "scheduler": "linear",
        "warmupSteps": 0,
        "precision": fields.get("precision", size.precision),
    }
    if "arguments" in fields:
        training["arguments"] = fields["arguments"]
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name.lower().replace(", ", "-").replace(" ", "-")},
        "spec": {
            "task": "text-generation",
            "model": model,
            "dataset": {"uri": f"file://{(folder / 'data').resolve()}"},
            "preparation": {"maxLength": size.length, "packing": "always"},
            "training": training,
            "parallelism": fields["parallelism"],
            "resources": {"gpusPerNode": min(gpus, 1) if fields["parallelism"]["strategy"] == "single" else gpus},
            "checkpoints": {"every": {"steps": size.steps}},
        },
    }


def figures_of(root: Path, size: Size) -> dict[str, Any]:
    """Return the measured figures of the training in the folder `root`, and the losses."""
    history = [json.loads(line) for line in (root / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in history if "loss" in line]
    metrics = json.loads((root / "metrics.json").read_text(encoding="utf-8"))["train"]
    later = steps[WARMUP_STEPS:]
    seconds = sum(line["tokens"] / line["tokens_per_second"] for line in later) / len(later)
    return {
        "strategy": metrics["strategy"],
        "peak GiB": metrics["peak_memory_bytes"] / 2**30,
        "s a step": seconds,
        "tokens/s": sum(line["tokens"] for line in later) / (seconds * len(later)),
        "first and last loss": [steps[0]["loss"], steps[-1]["loss"]],
        "losses": [line["loss"] for line in steps],
    }


def train(
    name: str, folder: Path, size: Size, gpus: int, reference: list[float] | None, limit: float
) -> dict[str, Any]:
    """Train in the way `name`; return measured and planned figures, and the losses.

    `gpus`: those of the machine, 0 without. `reference`: losses to compare with. `limit`: seconds. Raise SkippedError
    for a way that this machine cannot take, and RuntimeError for a run that failed or learnt something else.
    """
    needed, fields = WAYS[name]
    if needed > max(gpus, 1):
        raise SkippedError(f"needs {needed} GPUs")
    if gpus == 0 and name in ("fp8", "compiled", "Liger"):
        raise SkippedError("needs a GPU")
    if name == "Liger" and find_spec("liger_kernel") is None:
        raise SkippedError("liger-kernel is not installed (finetune-trainer[liger])")
    content = job(name, folder, size, gpus, fields)
    file = folder / f"{content['metadata']['name']}.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    command = [FINETUNE, "run", str(file), "--workspace", str(folder / "runs"), "--restart"]
    command += ["--stage", "prepare", "--stage", "train"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    if run.returncode:
        raise RuntimeError((run.stderr.strip() or run.stdout.strip())[-500:].replace("\n", " "))
    root = folder / "runs" / content["metadata"]["name"]
    figures = figures_of(root, size)
    plan = json.loads((root / "plan.json").read_text(encoding="utf-8"))
    shutil.rmtree(root / "model")  # gigabytes for each way
    device = plan["trainer"]["training"]["world"]["device"]
    if device != ("cuda" if gpus else "cpu"):
        raise RuntimeError(f"the training ran on {device}")
    estimate = (plan.get("estimate") or {}).get("stepSeconds")
    figures["planned GiB"] = plan["memory"]["totalBytes"] / 2**30
    figures["planned s a step"] = estimate or "none"
    if reference is not None and name in SAME_LOSSES:
        off = max(abs(mine / theirs - 1) for mine, theirs in zip(figures["losses"], reference, strict=True))
        figures["largest difference of losses"] = off
        if off > LOSS_TOLERANCE:
            raise RuntimeError(f"losses differ from those of single by {off:.1%}: {figures['losses']}")
    return figures

"""Full fine-tuning of large shapes on one machine: each strategy of `finetune run` against Hugging Face's Trainer as it
is used plainly.

Models are random ones of the real shapes (GPT-2 XL, Llama 3 8B), which learn as fast as others and cost the same. Rows
are packed to one length for both, so that no token is padding; length, batch, micro-batch, precision (bf16), optimizer,
learning rate and activation checkpointing are the same. Each arm is a process of its own, as its peak memory counts.

Tokens a second are those of the steps after the first five. MFU is the share of the device's dense bf16 peak, from the
maker's data sheet, that the useful operations are: 6 for each weight that multiplies and token, and 12 x layers x width
x length for the attention (Chowdhery et al., "PaLM", 2022, appendix B); what checkpointing computes twice counts once.
On a CPU the peak is measured. Quality: the means of the first and the last fifth of the losses.

    python tests/benchmarks/large.py --shape gpt2-xl --length 1024 --batch 16 --micro 8
    python tests/benchmarks/large.py --shape tiny --length 128 --steps 20    # without a GPU, to try the script
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from reference import words_of
from strategies import FINETUNE, PARALLELISM
from train import peak
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig

from finetune_operator.plan.hardware.devices import find_gpu

WARMUP_STEPS = 5
LEARNING_RATE = 1e-4
BASELINE = "Trainer"
SHAPES: dict[str, Any] = {
    "gpt2-xl": lambda: GPT2Config(n_embd=1600, n_layer=48, n_head=25, bos_token_id=1, eos_token_id=1, pad_token_id=0),
    "llama-8b": lambda: llama(4096, 14336, 32, heads=32, shared=4, vocabulary=128_256, rope_theta=500_000.0),
    "tiny": lambda: llama(128, 384, 4, heads=4, shared=2, vocabulary=4096),
}


@dataclass(frozen=True)
class Arm:
    """Figures of one run."""

    tokens_per_second: float
    peak_bytes: int
    losses: list[float]


def llama(width: int, inner: int, layers: int, *, heads: int, shared: int, vocabulary: int, **more: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // shared,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        **more,
    )


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def write_inputs(folder: Path, shape: str, text: Path) -> None:
    """Write a model of the shape in bf16, a tokenizer trained on the text, and the text's paragraphs."""
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    paragraphs = [line.strip() for line in text.read_text(encoding="utf-8").splitlines() if len(line.split()) > 5]
    (folder / "train.txt").write_text("\n".join(paragraphs) + "\n", encoding="utf-8")
    (folder / "validation.txt").write_text("\n".join(paragraphs[:32]) + "\n", encoding="utf-8")
    words_of({"train": [{"text": each} for each in paragraphs]}, folder / "model", ["text"], ends=False)
    transformers.set_seed(3)
    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    (folder / "done").write_text("")


def blocks(folder: Path, length: int) -> list[dict[str, list[int]]]:
    """Return all paragraphs, each with its end token, concatenated and cut to `length`."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "train.txt").read_text(encoding="utf-8").splitlines()
    tokens = [token for ids in tokenizer(lines)["input_ids"] for token in [*ids, tokenizer.eos_token_id]]
    whole = range(0, len(tokens) - length + 1, length)
    return [{"input_ids": tokens[at : at + length], "labels": tokens[at : at + length]} for at in whole]


def baseline(options: argparse.Namespace, folder: Path) -> Arm:
    """Run the baseline in this process."""
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if device() == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    transformers.set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro,
        gradient_accumulation_steps=options.batch // options.micro,
        gradient_checkpointing=options.checkpointing == "full",
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        bf16=True,
        use_cpu=device() == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=blocks(folder, options.length),
        data_collator=transformers.default_data_collator,
        callbacks=[Clock()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    steps = len(ends) - WARMUP_STEPS
    rate = steps * options.batch * options.length / (ends[-1] - ends[WARMUP_STEPS - 1])
    most = (
        torch.cuda.max_memory_allocated()
        if device() == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return Arm(rate, most, [line["loss"] for line in trainer.state.log_history if "loss" in line])


def ours(options: argparse.Namespace, folder: Path, strategy: str) -> Arm:
    """Run our arm by `finetune run`."""
    spec = {
        "task": "text-generation",
        "model": {"uri": f"file://{(folder / 'model').resolve()}"},
        "dataset": {
            "uri": f"file://{folder.resolve()}/*.txt",
            "splits": {"train": "train", "validation": "validation"},
        },
        "preparation": {"maxLength": options.length, "packing": "always"},
        "training": {
            "maxSteps": options.steps,
            "globalBatchSize": options.batch,
            "microBatchSize": options.micro,
            "learningRate": LEARNING_RATE,
            "scheduler": "linear",
            "warmupSteps": 0,
            "weightDecay": 0.0,
            "precision": "bf16",
        },
        "parallelism": {**PARALLELISM[strategy], "activationCheckpointing": options.checkpointing},
        "checkpoints": {"every": {"steps": 10 * options.steps}},
    }
    file = folder / f"{strategy}.yaml"
    head = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": strategy}}
    file.write_text(yaml.safe_dump({**head, "spec": spec}), encoding="utf-8")
    ran = subprocess.run(
        [FINETUNE, "run", str(file), "--workspace", str(folder / "runs"), "--restart"], capture_output=True, text=True
    )
    if ran.returncode:
        raise RuntimeError(f"{strategy} failed:\n{ran.stdout[-1500:]}\n{ran.stderr[-3000:]}")
    root = folder / "runs" / strategy
    lines = [json.loads(line) for line in (root / "history.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = [line for line in lines if "loss" in line]
    later = timed[WARMUP_STEPS:]
    rate = sum(line["tokens"] for line in later) / sum(line["tokens"] / line["tokens_per_second"] for line in later)
    most = json.loads((root / "metrics.json").read_text(encoding="utf-8"))["train"]["peak_memory_bytes"]
    return Arm(rate, most, [line["loss"] for line in timed])


def operations_of_token(shape: str, length: int) -> float:
    """Return the useful operations of training per token."""
    config = SHAPES[shape]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(each.numel() for name, each in model.named_parameters() if each.dim() == 2 and "emb" not in name)
    weights -= sum(
        each.numel() for name, each in model.named_parameters() if name.endswith(("wte.weight", "wpe.weight"))
    )
    output = model.get_output_embeddings().weight
    if all(each is not output for name, each in model.named_parameters() if name.endswith("lm_head.weight")):
        weights += output.numel()  # tied: counted neither as the embedding nor as the head
    attention = 12 * config.num_hidden_layers * config.hidden_size * length
    return 6.0 * weights + attention


def peak_of_device() -> float:
    """Return the operations per second in bf16, of all devices."""
    if device() == "cpu":
        return peak("bf16")
    name = torch.cuda.get_device_name()
    model = find_gpu(name)
    if model is None:
        sys.exit(f"The peak of {name} is not known: add it to finetune_operator.plan.hardware.devices.")
    return model.half_tflops * 1e12 * torch.cuda.device_count()


def shown(name: str, arm: Arm, operations: float, most: float, base: Arm | None) -> str:
    fifth = max(1, len(arm.losses) // 5)
    first, last = statistics.mean(arm.losses[:fifth]), statistics.mean(arm.losses[-fifth:])
    ratio = "" if base is None else f"{arm.tokens_per_second / base.tokens_per_second:.2f}"
    mfu = arm.tokens_per_second * operations / most
    return (
        f"{name:26}{arm.tokens_per_second:>10.0f}{ratio:>7}{mfu:>7.2f}{arm.peak_bytes / 2**30:>10.2f}"
        f"{first:>9.3f}{last:>8.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2-xl")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("FINETUNE_TEST_SHARED", "../shared")) / "data/lm/wikitext2_train.txt",
    )
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--micro", type=int, default=4, help="rows of a forward pass of a process")
    parser.add_argument("--steps", type=int, default=30, help="of one run, the first five not timed")
    parser.add_argument("--checkpointing", choices=["none", "full"], default="full", help="of activations, in all arms")
    parser.add_argument("--strategies", nargs="+", choices=list(PARALLELISM), default=list(PARALLELISM))
    parser.add_argument("--workspace", type=Path, default=Path("runs/large"))
    parser.add_argument("--baseline-only", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = options.workspace / options.shape
    if options.baseline_only is not None:
        options.baseline_only.write_text(json.dumps(vars(baseline(options, folder))))
        return
    write_inputs(folder, options.shape, options.data)
    where = torch.cuda.get_device_name() if device() == "cuda" else "CPU"
    operations, most = operations_of_token(options.shape, options.length), peak_of_device()
    print(f"{options.shape} on {where}, torch {torch.__version__}; {operations / 1e9:.2f} GFLOP a token")
    print(f"steps of {options.batch} rows of {options.length} tokens, {options.micro} a forward pass, bf16, ", end="")
    print(f"activations recomputed: {options.checkpointing}; peak {most / 1e12:.1f} TFLOP/s\n")
    print(f"{'arm':26}{'tokens/s':>10}{'ratio':>7}{'MFU':>7}{'peak GiB':>10}{'first':>9}{'last':>8}")
    baseline_file = folder.resolve() / "baseline.json"
    again = subprocess.run(
        [sys.executable, *sys.argv, "--baseline-only", str(baseline_file)], capture_output=True, text=True
    )
    base = None
    if again.returncode:
        print(f"{BASELINE}: failed: {again.stderr.strip().splitlines()[-1]}")
    else:
        base = Arm(**json.loads(baseline_file.read_text()))
        print(shown(f"{BASELINE} (baseline)", base, operations, most, base), flush=True)
    for strategy in options.strategies:
        try:
            print(shown(strategy, ours(options, folder, strategy), operations, most, base), flush=True)
        except RuntimeError as error:  # for example too large for this machine: go on with the others
            print(error, flush=True)


if __name__ == "__main__":
    main()

"""Throughput of two other training loops on the model and the rows of the trainings here: transformers' Trainer as it
is used plainly, and a loop in plain torch as torchtitan's (FSDP2 by block, torch.compile by block, fused AdamW).

torchrun --nproc-per-node N -m gpu_check.gpu_baselines NAME FOLDER SIZE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from gpu_check.gpu_jobs import WARMUP_STEPS, Size

LEARNING_RATE = 1e-4
_FIGURES = "figures: "
"""Begin of the line that rank 0 prints."""


def train(name: str, folder: Path, size: Size, gpus: int, limit: float) -> Mapping[str, Any]:
    """Return the figures of the loop `name` with a process for each GPU; on a machine without, one process.

    `folder`: with the inputs of `gpu_jobs.write_inputs`. `limit`: seconds until it has failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={max(gpus, 1)}"]
    arguments = [name, str(folder), json.dumps(asdict(size))]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    run = subprocess.run(
        [*command, "-m", "gpu_check.gpu_baselines", *arguments],
        capture_output=True,
        text=True,
        timeout=limit,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path},
        check=False,
    )
    if run.returncode:
        raise RuntimeError((run.stderr.strip() or f"exit code {run.returncode}")[-2000:])
    # The Trainer prints losses beside it.
    line = next(line for line in run.stdout.splitlines() if line.startswith(_FIGURES))
    figures: dict[str, Any] = json.loads(line.removeprefix(_FIGURES))
    return figures


def rows_of(folder: Path, size: Size) -> list[dict[str, list[int]]]:
    """Return the training's tokens, joined and cut into rows of `size.length`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    tokens = [token for ids in tokenizer(texts)["input_ids"] for token in [*ids, tokenizer.eos_token_id]]
    starts = range(0, len(tokens) - size.length + 1, size.length)
    return [{"input_ids": tokens[at : at + size.length], "labels": tokens[at : at + size.length]} for at in starts]


def transformers_trainer(folder: Path, size: Size, ended: Callable[[float], None]) -> None:
    """Train with transformers' Trainer, which uses DDP over several processes; call `ended` with each step's loss."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, logs: Mapping[str, float] | None = None, **__: Any) -> None:
            if logs and "loss" in logs:
                ended(logs["loss"])

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=size.steps,
        per_device_train_batch_size=size.rows,
        learning_rate=LEARNING_RATE,
        weight_decay=0.0,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows: Any = rows_of(folder, size)
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[Clock()]
    )
    trainer.train()


def plain_torch(folder: Path, size: Size, ended: Callable[[float], None]) -> None:
    """Train with FSDP2 and torch.compile by block (compiled on GPUs only); call `ended` with each step's loss."""
    import torch
    from torch import distributed
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    cuda, rank, count = torch.cuda.is_available(), distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda" if cuda else "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        if cuda:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=cuda)
    rows = rows_of(folder, size)
    model.train()
    for step in range(size.steps):
        first = (step * count + rank) * size.rows
        ids = [rows[(first + each) % len(rows)]["input_ids"] for each in range(size.rows)]
        batch = torch.tensor(ids, device=device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ended(float(loss.detach()))


BASELINES: Mapping[str, Callable[[Path, Size, Callable[[float], None]], None]] = {
    "transformers' Trainer": transformers_trainer,
    "plain torch, FSDP2, compiled": plain_torch,
}


def main(name: str, folder: Path, size: Size) -> None:
    """Run one process of the loop; rank 0 prints the figures as JSON."""
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    losses: list[float] = []
    ends: list[float] = []

    def ended(loss: float) -> None:
        if cuda:
            torch.cuda.synchronize()
        losses.append(loss)
        ends.append(perf_counter())

    BASELINES[name](folder, size, ended)
    rank, count = distributed.get_rank(), distributed.get_world_size()
    if rank == 0:
        seconds = (ends[-1] - ends[WARMUP_STEPS - 1]) / (len(ends) - WARMUP_STEPS)
        figures = {
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else "not measured",
            "s a step": seconds,
            "tokens/s": size.rows * size.length * count / seconds,
            "first and last loss": [losses[0], losses[-1]],
        }
        print(f"{_FIGURES}{json.dumps(figures)}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Size(**json.loads(sys.argv[3])))

"""Runs stages in processes forked from one that has imported everything, as start-up is the expensive part.

    python -m process_support.forked

reads cases from standard input, one JSON object a line: {"processes": N, "arguments": [arguments of finetune_trainer],
"environment": {...}, "log": FILE, "port": N}, with a free port for the rendezvous; or "call": "module:function" with
"arguments" as its keyword arguments. "ranks": FILE receives the process ids as soon as they run, a JSON list in the
order of the ranks. Cases run one after the other; each is answered with a line: the exit codes of its processes, a
list.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

MODELS = ("bert", "gpt2", "llama", "mistral", "qwen3", "roberta", "t5")
"""Families of the tests' tiny models."""
LIBRARIES = (
    "accelerate",
    "deepspeed",
    "deepspeed.ops.adam",
    "deepspeed.ops.op_builder",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "peft",
    "scipy.stats",
    "seqeval.metrics",
    "setuptools",
    "sklearn.metrics",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "transformers.distributed.tensor_parallel",
    *(f"transformers.models.{family}.modeling_{family}" for family in MODELS),
    "transformers.models.bert.tokenization_bert",
)
PARTS = (
    "models.adapters", "prepare.prepare", "predict.evaluate", "predict.predict", "stage.rank", "report.reporting",
    "training.run",
)  # fmt: skip


def preload() -> None:
    """Import the modules that stages import, then exempt them from garbage collection.

    A full collection writes to each object's header: after a fork that copies the whole heap, page by page, which takes
    longer than a tiny model's training. Imports leave nothing to collect.
    """
    gc.disable()
    if _has_part("strategies.deepspeed_import"):
        # Before others import DeepSpeed, and with it mlflow and torch's compiler.
        importlib.import_module("finetune_trainer.strategies.deepspeed_import").import_deepspeed()
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        PreTrainedTokenizerFast,
        Trainer,
        TrainingArguments,
    )

    # The names above are imported lazily: accessing them loads their modules.
    del AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast
    del Trainer, TrainingArguments
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in PARTS:
        if _has_part(name):
            importlib.import_module(f"finetune_trainer.{name}")
    gc.collect()
    gc.freeze()
    gc.enable()


def _has_part(name: str) -> bool:
    """Return whether the trainer has the module: an earlier release, whose checkpoints tests continue, lacks some.

    Python would find the installed one.
    """
    package = importlib.import_module("finetune_trainer")
    return (Path(str(package.__file__)).parent / f"{name.replace('.', '/')}.py").exists()


def child(case: dict[str, Any], rank: int, port: int) -> int:
    """Run one process of a case and return its exit code."""
    log = os.open(case["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    size = case["processes"]
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(case["environment"])
    try:
        if "call" in case:
            module, _, function = case["call"].partition(":")
            getattr(importlib.import_module(module), function)(**case["arguments"])
            return 0
        from finetune_trainer.__main__ import run

        return run(case["arguments"])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def run(case: dict[str, Any]) -> list[int]:
    """Run a case and return the exit codes of its processes."""
    started = []
    for rank in range(case["processes"]):
        process = os.fork()
        if process == 0:
            code = child(case, rank, case["port"])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        started.append(process)
    if "ranks" in case:
        partial = Path(case["ranks"]).with_suffix(".partial")
        partial.write_text(json.dumps(started), encoding="utf-8")
        partial.rename(case["ranks"])
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in started]


if __name__ == "__main__":
    # Output of the imports is no answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    preload()
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)

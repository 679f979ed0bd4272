"""A tiny model, tiny data and the `finetune` command as a process, for whole runs on this machine."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.forking import start_server

WORDS = (
    "bright",
    "solid",
    "warm",
    "broken",
    "sour",
    "stale",
    "the",
    "lamp",
    "soup",
    "chair",
    "was",
    "and",
    "very",
    "we",
)
FINETUNE = str(Path(sys.executable).with_name("finetune"))


def write_rows(file: Path, count: int, seed: int) -> None:
    """Write rows whose first word determines the label."""
    draw = random.Random(seed)
    with file.open("w") as stream:
        for _ in range(count):
            label = draw.randrange(2)
            words = [WORDS[3 * label + draw.randrange(3)], *draw.choices(WORDS[6:], k=draw.randint(2, 12))]
            stream.write(json.dumps({"text": " ".join(words), "label": ("good", "bad")[label]}) + "\n")


@pytest.fixture(scope="session")
def tiny_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/ (BERT, 2 layers, 32 wide, no dropout) and data/ (256, 32 and 32 rows)."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("inputs")
    model, data = folder / "model", folder / "data"
    model.mkdir()
    data.mkdir()
    for name, count, seed in (("train", 256, 1), ("validation", 32, 2), ("test", 32, 3)):
        write_rows(data / f"{name}.jsonl", count, seed)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (model / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(model)
    BertTokenizerFast(str(model / "vocab.txt")).save_pretrained(model)
    return folder


def tiny_job(name: str, **training: Any) -> dict[str, Any]:
    """Return a job over `tiny_inputs`, as a user would write it beside them: relative URIs count from the file."""
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": name},
        "spec": {
            "task": "text-classification",
            "model": {"uri": "file://model"},
            "dataset": {"uri": "file://data"},
            "training": {"epochs": 1, "globalBatchSize": 16, "learningRate": 0.002, "precision": "fp32", **training},
            "parallelism": {"strategy": "single"},
            "evaluation": {},
            "predict": {"columns": ["text"]},
        },
    }


def _restore_ctrl_c() -> None:
    """Restore SIGINT: a suite that a script starts in the background ignores it, and so, rightly, do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Started:
    """A running `finetune` process."""

    process: subprocess.Popen[str]

    def wait_until(self, true: Callable[[], object], seconds: float = 300) -> None:
        """Return as soon as `true()` is; fail if the command ends before, or if it takes too long."""

        def look() -> object:
            if found := true():
                return found
            assert self.process.poll() is None, self.process.communicate()
            return None

        wait_until(look, "what the command is to do", seconds)

    def descendants(self) -> list[psutil.Process]:
        """Return all processes that it has started, and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, seconds: float = 300) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=patient(seconds))
        return self.process.returncode, out, err


class Command:
    """The installed command, run in a folder of its own; `program`: its command line's start."""

    def __init__(self, folder: Path, program: Sequence[str] = (FINETUNE,)) -> None:
        self.folder = folder
        self._program = program

    def write(self, name: str, *objects: dict[str, Any]) -> Path:
        """Write a job file to that folder."""
        file = self.folder / name
        file.write_text(yaml.safe_dump_all(objects, sort_keys=False))
        return file

    def job(self, name: str, **training: Any) -> dict[str, Any]:
        """Return a job over the tiny model and data, which lie in the folder."""
        return tiny_job(name, **training)

    def start(self, *arguments: str) -> Started:
        """Start `finetune`, without the variables of the suite's own launcher in its environment."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return Started(
            subprocess.Popen(
                [*self._program, *arguments],
                cwd=self.folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=_restore_ctrl_c,
            )
        )

    def __call__(self, *arguments: str, seconds: float = 500) -> tuple[int, str, str]:
        """Run it to its end."""
        return self.start(*arguments).end(seconds)


@pytest.fixture(scope="module")
def finetune(tiny_inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The command in a folder with the tiny model and data."""
    folder = tmp_path_factory.mktemp("local")
    shutil.copytree(tiny_inputs, folder, dirs_exist_ok=True)
    return Command(folder)


@pytest.fixture(scope="module")
def quick(finetune: Command) -> Command:
    """The same command in the same folder, whose stages are forked; for runs that are not interrupted."""
    return Command(finetune.folder, start_server().finetune)

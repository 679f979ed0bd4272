"""Memory and first output of predict over a million short rows.

There is no other arm: the question is whether memory grows with the data. A text classifier with random weights, 2
layers and 128 wide, answers `--rows` short texts from one JSON Lines file in a single process, through the stage
`predict`, from raw text to the written file. Every tenth of the rows the resident memory of the process is printed
(without its page cache), with the rows a second so far; before that, the seconds until the first rows were answered,
from the start of the stage: the model is loaded within them.

Quality: the output has one line for each row in order, and 1,000 of them drawn at random have the label of a plain
transformers loop over the same texts.

    python tests/benchmarks/million_rows.py --rows 1000000
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from finetune_contract.layout import JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.predict import predict

WORDS = [f"{begin}{end}" for begin in ("ba", "co", "de", "fu", "gi", "ho") for end in "abcdefghijklmnopqrstuvwxyz"]
LABELS = ("bad", "good")
MEBIBYTE = 1 << 20


class MemoryProgress(NoProgress):
    """Progress that prints memory every `every` rows."""

    def __init__(self, every: int) -> None:
        self._every = self._next = every
        self._process = psutil.Process()
        self._began = time.perf_counter()
        self.first: float | None = None
        self.memory: list[float] = []

    def update(self, step: int, total: int, **values: float) -> None:
        """Report `step` answered rows of about `total`."""
        seconds = time.perf_counter() - self._began
        if step and self.first is None:
            self.first = seconds
            print(f"first rows answered after {seconds:.1f} s")
        if step >= self._next:
            self._next = step - step % self._every + self._every
            self.memory.append(self._process.memory_info().rss / MEBIBYTE)
            print(f"{step:>9,} rows  {self.memory[-1]:7.0f} MiB  {step / seconds:7,.0f} rows/s", flush=True)


def write_model(folder: Path) -> None:
    """Write a classifier with random weights, and a tokenizer that knows WORDS."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {word: at for at, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", words["[CLS]"]), ("[SEP]", words["[SEP]"])]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    fast(tokenizer_object=tokenizer, model_max_length=128, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        max_position_embeddings=128, id2label=dict(enumerate(LABELS)), label2id={n: i for i, n in enumerate(LABELS)},
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)


def write_rows(path: Path, count: int) -> None:
    """Write rows of 3 to 12 words, drawn with a seed."""
    draw = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))}) + "\n")


def agreement(model: Path, rows: Path, answers: Path, count: int) -> float:
    """Return the share of 1,000 rows with the label of a plain loop; fail if a line is missing or out of order."""
    chosen = set(random.Random(2).sample(range(count), min(1000, count)))
    classifier = BertForSequenceClassification.from_pretrained(model)  # in evaluation mode
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    equal = at = 0
    with rows.open(encoding="utf-8") as texts, answers.open(encoding="utf-8") as predicted, torch.inference_mode():
        for at, (row, answer) in enumerate(zip(texts, predicted, strict=True)):
            if at in chosen:
                found = json.loads(answer)
                if found["row"] != at:
                    raise SystemExit(f"line {at} has row {found['row']}")
                logits = classifier(**tokenizer(json.loads(row)["text"], return_tensors="pt")).logits
                equal += found["label"] == LABELS[int(logits.argmax())]
    if at + 1 != count:
        raise SystemExit(f"{at + 1} lines instead of {count}")
    return equal / len(chosen)


def main() -> None:
    """Print a line every tenth of the rows, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, rows, answers = folder / "model", folder / "rows.jsonl", folder / "answers.jsonl"
        write_model(model)
        write_rows(rows, options.rows)
        job = TrainerJob.model_validate(
            {
                "name": "rows",
                "task": "text-classification",
                "model": {"uri": f"file://{model}"},
                "preparation": {"max_length": 128},
                "predict": {
                    "device": "cpu",
                    "batchTokens": 8192,
                    "dataset": {"uri": f"file://{rows}", "columns": {"text": "text"}},
                    "output": f"file://{answers}",
                },
            }
        )
        progress = MemoryProgress(max(1, options.rows // 10))
        began = time.perf_counter()
        predict(job, JobPaths(folder / "job"), progress)
        seconds = time.perf_counter() - began
        share = agreement(model, rows, answers, options.rows)
        grown = progress.memory[-1] - progress.memory[0] if progress.memory else 0.0
        print(f"{options.rows:,} rows in {seconds:.0f} s, joined and written: {options.rows / seconds:,.0f} rows/s")
        print(f"memory at the last tenth less that at the first: {grown:+.0f} MiB")
        print(f"labels equal to a plain loop's: {share:.1%}")


if __name__ == "__main__":
    main()

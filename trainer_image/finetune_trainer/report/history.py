"""`history.jsonl`: one line for each optimizer step, over all attempts of a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, get_args

from finetune_contract.report import TimePart
from finetune_trainer.core.files import write_atomically

log = logging.getLogger(__name__)


class History:
    """Lines of one run. Rank 0 writes; a resumed run drops the lines after the step from which it resumes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, step: int) -> None:
        """Keep the lines up to `step` (0: none) and drop the others, also a truncated last line."""
        kept = [line for line in self.read() if line["step"] <= step]
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append one step."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines."""
        if not self._path.exists():
            return []
        lines: list[dict[str, Any]] = []
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break  # The process ended while it wrote this one; nothing can follow.
        return lines


BETWEEN_STEPS: frozenset[TimePart] = frozenset({"start", "evaluation", "checkpoint", "finish"})
"""Parts of a training's time that are no part of a step."""


@dataclass(frozen=True)
class MedianStep:
    """Median time of steps, and of each part of them."""

    steps: int = 0
    seconds: float | None = None
    parts: dict[TimePart, float] = field(default_factory=dict)


class RunFigures:
    """Summary figures of a history.

    Lines of an older image, from an earlier attempt, may lack fields. A figure covers the steps whose lines have its
    fields; a warning is logged when these are not all steps, and without any the figure is left out.
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._lines = lines
        self._steps = [line for line in lines if "loss" in line]

    def losses(self) -> dict[str, float]:
        """Return `loss_first` and `loss_last`: means of the training loss over the first and the last 5 % of the steps,
        of at least one step; empty when there are no lines of steps.
        """
        losses = [line["loss"] for line in self._steps]
        if not losses:
            log.warning("The history has no step, so no training loss is reported.")
            return {}
        count = max(1, len(losses) // 20)
        return {"loss_first": sum(losses[:count]) / count, "loss_last": sum(losses[-count:]) / count}

    def rates(self) -> dict[str, float]:
        """Return `samples_per_second` over all steps: these have equally many samples, so it is the harmonic mean of
        their rates; `tokens` of all steps and `tokens_per_second` without padding, and `padding_share`: the padding's
        part of all computed tokens.
        """
        rates: dict[str, float] = {}
        if counted := self._steps_with("samples_per_second"):
            seconds = sum(1 / line["samples_per_second"] for line in counted)
            rates["samples_per_second"] = len(counted) / seconds
        if counted := self._steps_with("tokens", "tokens_per_second", "computed_tokens"):
            tokens = sum(line["tokens"] for line in counted)
            rates["tokens"] = tokens
            rates["tokens_per_second"] = tokens / sum(line["tokens"] / line["tokens_per_second"] for line in counted)
            rates["padding_share"] = 1 - tokens / sum(line["computed_tokens"] for line in counted)
        return rates

    def _steps_with(self, *fields: str) -> list[Mapping[str, Any]]:
        """Return the steps whose lines have all of the fields."""
        having = [line for line in self._steps if all(field in line for field in fields)]
        if len(having) < len(self._steps):
            log.warning(
                "The history lacks %s of %d steps, which an older image wrote; figures from them cover the other %d "
                "steps only.",
                ", ".join(fields),
                len(self._steps) - len(having),
                len(having),
            )
        return having

    def seconds(self) -> dict[TimePart, float]:
        """Return the seconds of each part, over all steps and the time between them."""
        parts: dict[TimePart, float] = {}
        for line in self._lines:
            for part, seconds in line.get("seconds", {}).items():
                parts[part] = parts.get(part, 0.0) + seconds
        return parts

    def median_step(self) -> MedianStep:
        """Return the median seconds of a step and of its parts; a part that a step lacks took no time in it."""
        steps = [
            {part: seconds for part, seconds in line["seconds"].items() if part not in BETWEEN_STEPS}
            for line in self._steps_with("seconds")
        ]
        if not steps:
            return MedianStep()
        known = [part for part in get_args(TimePart) if any(part in step for step in steps)]
        parts = {part: round(median(step.get(part, 0.0) for step in steps), 6) for part in known}
        return MedianStep(len(steps), round(median(sum(step.values()) for step in steps), 6), parts)

    def validation(self, step: int | None = None) -> dict[str, float]:
        """Return the evaluation during training after `step`, None: the last one, with the names of the history
        (`eval_loss`); empty without one.
        """
        evaluations = [line for line in self._lines if "eval_loss" in line and step in (None, line["step"])]
        return {name: value for name, value in evaluations[-1].items() if name != "step"} if evaluations else {}

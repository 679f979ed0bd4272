"""Rate of generated tokens of a stage, for its progress and for its figures in metrics.json."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from finetune_trainer.core.progress import ProgressSink
from finetune_trainer.tasks.writing import TOKENS

log = logging.getLogger(__name__)

RATE = "tokens_per_second"
"""Key of the rate, in generated tokens per second over all workers, in progress and figures."""


class TokenRate:
    """Progress that adds the rate of the generated tokens, in tokens per second."""

    def __init__(self, progress: ProgressSink, models: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """`models`: models that share the rows equally, of which this process reports one."""
        self._progress = progress
        self._models = models
        self._clock = clock
        self._since = clock()

    def update(self, step: int, total: int, **values: float) -> None:
        """Report rows, with the rate once there are generated tokens (`TOKENS` in `values`)."""
        tokens = values.pop(TOKENS, 0.0)
        now = self._clock()
        if not tokens:
            self._since = now  # rows are judged, or nothing is generated yet
        elif now > self._since:
            values[RATE] = self._models * tokens / (now - self._since)
        self._progress.update(step, total, **values)

    def close(self) -> None:
        """Close the progress."""
        self._progress.close()

    def figures(self, tokens: int) -> dict[str, float]:
        """Return the tokens of all models and their rate; empty without tokens."""
        return token_throughput(tokens, tokens, self._clock() - self._since)


def token_throughput(tokens: int, timed: int, seconds: float) -> dict[str, float]:
    """Return the number of generated tokens, and the rate of those `timed` ones that took `seconds`; empty without
    tokens.
    """
    if not tokens:
        return {}
    return {TOKENS: tokens, **({RATE: timed / seconds} if timed and seconds > 0 else {})}


def log_tokens(figures: Mapping[str, float]) -> None:
    """Log the figures of `token_throughput`, if there are any."""
    if RATE in figures:
        log.info("Generated %s tokens, %.1f tokens/s.", f"{figures[TOKENS]:,}", figures[RATE])

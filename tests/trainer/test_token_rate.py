"""The rate of generated tokens is over all models, and leaves out the time before the first text."""

from __future__ import annotations

import pytest

from finetune_trainer.core.progress import NoProgress
from finetune_trainer.predict.token_rate import TokenRate, token_throughput


class Updates(NoProgress):
    """Records updates."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, dict[str, float]]] = []

    def update(self, step: int, total: int, **values: float) -> None:
        self.found.append((step, total, values))


def test_rate_counts_the_tokens_of_all_models_from_the_first_text_on():
    times, progress = iter([0.0, 10.0, 14.0, 18.0]), Updates()
    rate = TokenRate(progress, models=3, clock=lambda: next(times))
    rate.update(5, 10)
    rate.update(8, 10, generated_tokens=20.0)
    assert progress.found == [(5, 10, {}), (8, 10, {"tokens_per_second": 15.0})]
    assert rate.figures(120) == {"generated_tokens": 120, "tokens_per_second": pytest.approx(15.0)}


def test_tokens_of_an_earlier_attempt_count_without_a_rate():
    assert token_throughput(50, 0, 3.0) == {"generated_tokens": 50}
    assert token_throughput(50, 30, 3.0) == {"generated_tokens": 50, "tokens_per_second": 10.0}
    assert token_throughput(0, 0, 3.0) == {}

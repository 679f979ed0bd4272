"""Choice of the rows of a served batch."""

from __future__ import annotations

import math

import pytest

from finetune_trainer.serving.batch_choice import BatchCost, rows_of_batch


def cost_of(fixed: float, slope: float, sizes: list[int]) -> BatchCost:
    cost = BatchCost()
    for tokens in sizes:
        cost.add(tokens, fixed + slope * tokens)
    return cost


def test_parts_of_the_time_are_those_of_the_batches() -> None:
    cost = cost_of(0.004, 0.00025, [20, 40, 200, 30, 90])
    assert cost.parts == pytest.approx((0.004, 0.00025))
    assert cost.worth == pytest.approx(16 / 3)
    assert cost.seconds(100) == pytest.approx(0.029)
    assert cost.tokens_within(0.029) == pytest.approx(100)


def test_batches_of_one_size_leave_the_parts_to_the_warm_up() -> None:
    cost = BatchCost([(10, 0.003), (40, 0.006)])
    assert cost.parts == pytest.approx((0.002, 0.0001))
    for _ in range(100):
        cost.add(40, 0.006)
    assert cost.parts == pytest.approx((0.002, 0.0001))


def test_new_speed_replaces_the_old_one() -> None:
    cost = cost_of(0.004, 0.00025, [20, 200] * 20)
    for tokens in [20, 200] * 100:
        cost.add(tokens, 0.001 + 0.001 * tokens)
    assert cost.parts == pytest.approx((0.001, 0.001), rel=0.05)


@pytest.mark.parametrize(
    ("batches", "parts"),
    [
        pytest.param([], (0, 0), id="none"),
        pytest.param([(20, 0.01), (20, 0.02)], (0, 0.00075), id="one size"),
        pytest.param([(20, 0.02), (200, 0.01)], (0.015, 0), id="large ones are faster"),
        pytest.param([(100, 0.01), (200, 0.04)], (0, 0.00018), id="small ones cost less than nothing"),
    ],
)
def test_no_part_is_negative(batches: list[tuple[int, float]], parts: tuple[float, float]) -> None:
    assert BatchCost(batches).parts == pytest.approx(parts)


def test_batch_without_measurements_takes_every_row() -> None:
    cost = BatchCost()
    assert rows_of_batch([5, 500, 50], cost.tokens_within(0.05), cost.worth) == [0, 2, 1]


@pytest.mark.parametrize(
    ("worth", "rows"),
    [
        pytest.param(0, [0, 2], id="only rows of the same length"),
        pytest.param(3, [0, 2, 1], id="padding that takes less than another batch"),
        pytest.param(40, [0, 2, 1, 4], id="one row of more than that"),
        pytest.param(math.inf, [0, 2, 1, 4, 3], id="padding is free"),
    ],
)
def test_row_joins_if_its_padding_is_worth_it(worth: float, rows: list[int]) -> None:
    assert rows_of_batch([20, 17, 20, 65, 28], 4096, worth) == rows


def test_first_row_is_computed_in_any_room() -> None:
    assert rows_of_batch([20, 20, 20, 20], 70, math.inf) == [0, 1, 2]
    assert rows_of_batch([20, 20], -5.0, math.inf) == [0]

"""The order of batches: pure functions of lengths, checked by properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_trainer.data.batches import inference_batches, training_order
from suite_plugins.shared_folder import DATA, missing

ROTTEN_TOMATOES = DATA / "rotten_tomatoes" / "train.jsonl"

lengths = st.lists(st.integers(1, 512), min_size=1, max_size=400).map(lambda values: np.asarray(values, np.int64))
worlds = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
"""micro-batch, ranks, accumulation"""


@settings(max_examples=60, deadline=None)
@given(lengths, worlds, st.integers(0, 2**31), st.integers(0, 9), st.booleans())
def test_each_step_has_the_global_batch_and_an_epoch_repeats_no_row(lengths, world, seed, epoch, grouped):
    micro, ranks, accumulation = world
    batch = micro * ranks * accumulation
    sizes = {"global_batch": batch, "micro_batch": micro, "ranks": ranks}
    order = training_order(lengths, **sizes, seed=seed, epoch=epoch, grouped=grouped)
    assert order.shape == (len(lengths) // batch, accumulation, ranks, micro)
    assert len(set(order.ravel().tolist())) == order.size
    assert order.size == 0 or (order.min() >= 0 and order.max() < len(lengths))


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(0, 2**31), st.integers(0, 9), st.booleans())
def test_the_rows_of_a_step_do_not_depend_on_ranks_or_micro_batch(lengths, seed, epoch, grouped):
    def rows_by_step(micro: int, ranks: int) -> list[set[int]]:
        sizes = {"global_batch": 24, "micro_batch": micro, "ranks": ranks}
        order = training_order(lengths, **sizes, seed=seed, epoch=epoch, grouped=grouped)
        return [set(step.ravel().tolist()) for step in order]

    alone = rows_by_step(24, 1)
    assert all(rows_by_step(micro, ranks) == alone for micro, ranks in [(12, 2), (6, 2), (3, 4), (1, 8), (1, 1)])


def test_epochs_and_seeds_give_different_steps_and_the_same_ones_repeat():
    lengths = np.random.default_rng(0).integers(5, 100, 1000)

    def first_step(seed: int, epoch: int) -> set[int]:
        order = training_order(lengths, global_batch=32, micro_batch=8, ranks=2, seed=seed, epoch=epoch, grouped=True)
        return set(order[0].ravel().tolist())

    assert first_step(1, 0) == first_step(1, 0)
    assert len({frozenset(first_step(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_steps_are_not_sorted_by_length():
    lengths = np.random.default_rng(0).integers(5, 100, 4000)
    order = training_order(lengths, global_batch=32, micro_batch=32, ranks=1, seed=0, epoch=0, grouped=True)
    longest = lengths[order].max(axis=(1, 2, 3))
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 0.3


def padded_tokens(lengths: np.ndarray, order: np.ndarray) -> int:
    return int((lengths[order].max(axis=3) * order.shape[3]).sum())


def test_padding_of_real_reviews_is_a_small_part_of_the_batches():
    if not ROTTEN_TOMATOES.exists():
        pytest.skip(missing(ROTTEN_TOMATOES))
    lengths = np.asarray([line.count(" ") + 2 for line in ROTTEN_TOMATOES.open(encoding="utf-8")], np.int64)
    order = training_order(lengths, global_batch=32, micro_batch=8, ranks=2, seed=0, epoch=0, grouped=True)
    real = int(lengths[order].sum())
    random_order = np.random.default_rng(0).permutation(order.ravel()).reshape(order.shape)
    assert real / padded_tokens(lengths, order) > 0.93
    assert padded_tokens(lengths, order) < 0.75 * padded_tokens(lengths, random_order)
    assert padded_tokens(lengths, order) < 0.5 * order.size * 128


def test_steps_are_like_the_data_and_micro_batches_have_similar_lengths():
    lengths = np.random.default_rng(3).geometric(0.03, 20_000).astype(np.int64)

    def order(grouped: bool) -> np.ndarray:
        return training_order(lengths, global_batch=64, micro_batch=8, ranks=1, seed=0, epoch=0, grouped=grouped)

    grouped, mixed = order(True), order(False)
    means = [lengths[each].mean(axis=(1, 2, 3)) for each in (grouped, mixed)]
    # The mean of 64 rows drawn from all deviates as chance has it.
    assert means[1].std() < 1.2 * lengths.std() / 8 < means[0].std() / 4
    padded = [padded_tokens(lengths, each) for each in (grouped, mixed)]
    whole_steps = int((lengths[mixed].max(axis=(1, 2, 3)) * 64).sum())
    assert padded[0] < padded[1] < 0.45 * whole_steps


def test_ranks_get_work_of_equal_size():
    lengths = np.random.default_rng(3).geometric(0.03, 20_000).astype(np.int64)
    order = training_order(lengths, global_batch=64, micro_batch=8, ranks=4, seed=0, epoch=0, grouped=True)
    work = lengths[order].sum(axis=(0, 1, 3))
    assert work.max() / work.min() < 1.02


def test_a_global_batch_that_the_ranks_cannot_share_is_refused():
    with pytest.raises(ValueError, match="global batch 30 is not a multiple of micro-batch 8 x ranks 2"):
        training_order(np.ones(100, np.int64), global_batch=30, micro_batch=8, ranks=2, seed=0, epoch=0, grouped=True)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 4096))
def test_inference_takes_every_row_once_within_the_budget_longest_first(lengths, budget):
    batches = inference_batches(lengths, batch_tokens=budget)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert all(len(rows) == 1 or lengths[rows].max() * len(rows) <= budget for rows in batches)
    longest = [int(lengths[rows].max()) for rows in batches]
    assert longest == sorted(longest, reverse=True)


def test_no_rows_give_no_batches():
    nothing = np.empty(0, np.int64)
    assert inference_batches(nothing, batch_tokens=10) == []
    assert training_order(nothing, global_batch=4, micro_batch=2, ranks=2, seed=0, epoch=0, grouped=True).shape == (
        0,
        1,
        2,
        2,
    )

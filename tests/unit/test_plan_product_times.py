"""Efficiency of matrix products by shape."""

from __future__ import annotations

import pytest

from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.models.known_models import known_config
from finetune_operator.plan.time.product_times import Product, ProductSpeed, efficiency, products_of

A100 = ProductSpeed(rate=200e12, memory=1.6e12, multiprocessors=108)


def reached(width: int, tokens: float, on: ProductSpeed = A100, bytes_of_element: int = 2, split: int = 1) -> float:
    return efficiency((Product(width, width, 1),), tokens, on, bytes_of_element, split).passing


def test_large_products_reach_the_rate_of_the_gpu():
    assert reached(8192, 16_384) == pytest.approx(1, abs=0.01)


def test_few_tokens_and_small_widths_reach_less():
    by_tokens = [reached(4096, tokens) for tokens in (64, 256, 512, 2048, 8192)]
    by_width = [reached(width, 4096) for width in (256, 768, 2048, 8192)]
    assert by_tokens == sorted(by_tokens)
    assert by_width == sorted(by_width)
    assert by_tokens[0] < 0.3
    assert by_width[0] < 0.6


def test_half_a_wave_of_tiles_is_idle_on_average():
    # 512 x 4,096 are 4 x 32 tiles: 1.185 waves of 108, of 1.685 that are waited for.
    fast = ProductSpeed(rate=200e12, memory=0, multiprocessors=108)
    assert fast.seconds(512, 4096, 4096, 2) == pytest.approx(2 * 512 * 4096**2 / 200e12 * 1.685 / 1.185, rel=0.001)


def test_a_product_takes_no_less_than_reading_its_weights():
    # One token: all time is that of 4,096 x 4,096 weights of two bytes.
    slow = ProductSpeed(rate=200e12, memory=1.6e12, multiprocessors=0)
    assert slow.seconds(1, 4096, 4096, 2) == pytest.approx(2 * 4096**2 / 1.6e12, rel=0.001)
    assert slow.seconds(1, 4096, 4096, 4) == pytest.approx(2 * slow.seconds(1, 4096, 4096, 2))


def test_unknown_multiprocessors_and_memory_count_operations_alone():
    unknown = ProductSpeed(rate=200e12, memory=0, multiprocessors=0)
    assert reached(64, 16, unknown) == 1


def test_tensor_ranks_have_smaller_products():
    assert reached(4096, 1024, split=8) < reached(4096, 1024)


def test_products_of_a_decoder_have_all_weights_of_its_blocks():
    model = model_facts(known_config("llama-3.1-8b"), "text-generation")
    weights = sum(each.inputs * each.outputs * each.count for each in products_of(model))
    norms = 2 * model.hidden_size
    assert weights == model.layers * (model.block_parameters - norms)


def test_experts_of_a_mixture_see_the_tokens_that_are_sent_to_them():
    model = model_facts(known_config("mixtral-8x7b"), "text-generation")
    of_experts = [each for each in products_of(model) if each.share < 1]
    assert [each.share for each in of_experts] == pytest.approx([2 / 8, 2 / 8])
    assert {(each.inputs, each.outputs) for each in of_experts} == {(4096, 14336), (14336, 4096)}
    assert sum(each.count for each in of_experts) == 3 * 8 * model.layers

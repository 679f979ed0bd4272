"""Attention over packed rows: each row by itself gives what a mask gives, without one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from finetune_contract.layout import FailureClass
from finetune_contract.packed_rows import PACKED_ROWS_FAMILIES
from finetune_contract.trainer_job import Training
from finetune_trainer.core.failures import StageError
from process_support.sliced import decoder
from trainer_support.tasks import training_of

PACKS = [[5, 1, 7, 3], [9, 2]]
"""Tokens of the rows of two packs of 16 tokens; the second is padded."""
WIDTH = 16


def packed_batch() -> dict[str, Any]:
    import torch

    from finetune_trainer.tasks.text_generation import _positions

    ids = torch.arange(2 * WIDTH).remainder(37).add(1).reshape(2, WIDTH)
    labels = ids.clone()
    labels[1, 11:] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": _positions(PACKS, WIDTH)}


def by_row(model: Any, **changes: Any) -> Any:
    """Return the attention that a training of `model` over packs has."""
    import torch

    from finetune_trainer.training.passes.packed_attention import pack_attention

    training = training_of(steps=1, **changes)
    return pack_attention(model, Training.model_validate(training), torch.device("cpu"), packing=True)


def computed(model: Any, batch: Mapping[str, Any]) -> tuple[float, list[Any]]:
    """Return loss and gradients of a batch."""
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), [each.grad.clone() for each in model.parameters() if each.grad is not None]


def assert_equal(found: tuple[float, list[Any]], expected: tuple[float, list[Any]]) -> None:
    import torch

    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert len(found[1]) == len(expected[1]) > 0
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", PACKED_ROWS_FAMILIES)
def test_rows_by_themselves_give_the_loss_and_gradients_of_a_mask(family: str) -> None:
    model, batch = decoder(family).eval(), packed_batch()
    expected = computed(model, batch)
    packs = by_row(model)
    with packs.over(batch):
        found = computed(model, batch)
    packs.assert_in_effect()
    assert_equal(found, expected)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_a_sliding_window_ends_at_the_border_of_a_row(family: str) -> None:
    window = {
        "sliding_window": 4,
        **({"use_sliding_window": True, "max_window_layers": 1} if family == "qwen2" else {}),
    }
    model, batch = decoder(family, **window).eval(), packed_batch()
    expected = computed(model, batch)
    assert expected[0] != computed(decoder(family).eval(), batch)[0], "the window hides nothing"
    packs = by_row(model)
    with packs.over(batch):
        assert_equal(computed(model, batch), expected)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_layers_keep_the_rows_apart(mode: Any) -> None:
    from finetune_trainer.training.passes.activations import checkpointing_arguments

    model, batch = decoder("llama").train(), packed_batch()
    expected = computed(model, batch)
    how: Any = checkpointing_arguments(mode)["activation_checkpointing_kwargs"]
    model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    with by_row(model).over(batch):
        loss = model(**batch, use_cache=False).loss
    model.zero_grad()
    loss.backward()  # outside, as in the loop
    found = [each.grad.clone() for each in model.parameters()]
    assert_equal((float(loss.detach()), found), expected)


def test_autocast_computes_rows_in_16_bits() -> None:
    import torch

    from finetune_trainer.training.passes.packed_attention import attend_rows, packed_rows

    rows = packed_rows(packed_batch()["position_ids"], torch.device("cpu"))
    query, key = torch.randn(2, 4, WIDTH, 8), torch.randn(2, 2, WIDTH, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_rows(rows, query, key, key.bfloat16())
    assert (found.dtype, found.shape) == (torch.bfloat16, (2, WIDTH, 4, 8))
    assert torch.allclose(found.float(), attend_rows(rows, query, key, key), atol=0.05)


def test_rows_of_packs_follow_from_their_positions() -> None:
    import torch

    from finetune_trainer.training.passes.packed_attention import packed_rows

    rows = packed_rows(packed_batch()["position_ids"], torch.device("cpu"))
    assert (rows.shape, rows.sizes) == ((2, WIDTH), (5, 1, 7, 3, 9, 2, 5))
    assert rows.starts.tolist() == [0, 5, 6, 13, 16, 25, 27, 32]
    assert rows.starts.dtype == torch.int32


def test_no_memory_of_tokens_times_tokens_is_kept() -> None:
    import torch

    model, batch = decoder("llama").train(), packed_batch()
    packs, kept = by_row(model), {True: 0, False: 0}
    for by_mask in kept:

        def keep(tensor: torch.Tensor, by_mask: bool = by_mask) -> torch.Tensor:
            kept[by_mask] += tensor.shape[-2:] == (WIDTH, WIDTH)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            if by_mask:
                model(**batch, use_cache=False)
            else:
                with packs.over(batch):
                    model(**batch, use_cache=False)
    assert kept[False] == 0 < kept[True]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        pytest.param("falcon", {}, "models of type falcon are not known to work without one", id="family"),
        pytest.param(
            "llama", {"arguments": {"torch_compile": True}}, "torch.compile would compile again", id="compiled"
        ),
        pytest.param(
            "llama",
            {"strategy": {"name": "ddp", "pipeline": {"degree": 2, "micro_batches": 2}}},
            "the stages of a pipeline get masks",
            id="pipeline",
        ),
    ],
)
def test_packs_that_need_a_mask_are_announced(family: str, changes: Any, reason: str, caplog) -> None:
    from finetune_trainer.training.passes.packed_attention import WithMasks

    caplog.set_level(logging.INFO)
    assert isinstance(by_row(decoder("llama" if family == "llama" else "falcon"), **changes), WithMasks)
    assert f"Packed rows: attention with a mask of tokens x tokens, as {reason}" in caplog.text


def test_calls_for_each_row_are_announced_with_their_reason(caplog) -> None:
    caplog.set_level(logging.INFO)
    by_row(decoder("llama"))
    expected = (
        "attention of each row by itself, without a mask; a call for each row, as flash attention computes in 16 bits"
    )
    assert expected in caplog.text


@pytest.mark.parametrize(
    ("capability", "head", "dropout", "reason"),
    [
        ((9, 0), 128, 0.0, ""),
        ((8, 0), 256, 0.0, ""),
        ((8, 9), 192, 0.0, ""),
        ((8, 9), 256, 0.0, "at most 192 elements"),
        ((9, 0), 100, 0.0, "a multiple of 8"),
        ((7, 5), 64, 0.0, "compute capability 8.0, and the GPU has 7.5"),
        ((9, 0), 64, 0.1, "drops no scores"),
    ],
)
def test_one_call_for_all_rows_needs_a_gpu_and_heads_for_it(capability, head, dropout, reason, monkeypatch) -> None:
    import torch

    from finetune_trainer.training.passes.packed_attention import why_not_varlen

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = why_not_varlen(torch.device("cuda"), head, dropout)
    assert (reason in found) if reason else found == ""


def test_a_pass_over_packs_without_attention_by_row_is_an_error() -> None:
    model, batch = decoder("llama").eval(), packed_batch()
    packs = by_row(model)
    with pytest.raises(StageError) as caught:
        packs.assert_in_effect()
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.STRATEGY_NOT_IN_EFFECT, "PacksHaveMasks")
    with packs.over(batch), pytest.raises(StageError, match="a mask was requested for"):
        model(**{name: value[:, :8] for name, value in batch.items()}, use_cache=False)


def test_passes_outside_packs_have_their_masks_again() -> None:
    import torch

    model, batch = decoder("llama").eval(), packed_batch()
    mask = torch.ones(2, WIDTH, dtype=torch.int64)
    mask[1, 11:] = 0
    padded = {"input_ids": batch["input_ids"], "attention_mask": mask}
    with torch.no_grad():
        expected = model(**padded).logits[mask.bool()]
        with by_row(model).over(batch):
            model(**batch, use_cache=False)
        assert torch.allclose(model(**padded).logits[mask.bool()], expected, atol=1e-6)

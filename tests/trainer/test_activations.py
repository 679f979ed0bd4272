"""Activations kept for the backward pass: recomputed in part, or offloaded without the weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError


def tiny(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(3)  # the head is drawn
    return AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").train()


def loss_of(model: Any) -> Any:
    import torch

    ids = torch.randint(5, 20, (4, 16), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, labels=torch.tensor([0, 1, 0, 1])).loss


def recomputing(model: Any, mode: Any) -> Any:
    from finetune_trainer.training.passes.activations import checkpointing_arguments

    how = checkpointing_arguments(mode)
    if how["activation_checkpointing"]:
        model.activation_checkpointing_enable(how["activation_checkpointing_kwargs"])
    return model


def operations(model: Any) -> Counter[str]:
    """Return the operations of a backward pass, with its recomputations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    loss, counting = loss_of(model), Counting()
    with counting:
        loss.backward()
    return counting.seen


def test_selective_checkpointing_repeats_all_but_products_with_weights(tiny_model: Path):
    none, full, selective = (operations(recomputing(tiny(tiny_model), mode)) for mode in ("none", "full", "selective"))
    assert none["addmm"] == selective["addmm"] == 0
    assert full["addmm"] > 0
    for name in ("gelu", "native_layer_norm", "_softmax"):
        assert (none[name], selective[name] > 0, full[name] > 0) == (0, True, True), name


def test_selective_repetition_may_gather_weights_prefetched_before():
    import torch
    from torch.utils.checkpoint import checkpoint

    from finetune_trainer.training.passes.activations import selective_contexts

    weight, passes = torch.randn(4, 4, requires_grad=True), []

    def block(inputs: Any) -> Any:
        passes.append(inputs)
        if len(passes) > 1:  # as ZeRO-3 does where a layer is larger than its prefetch bucket
            torch.cat([weight.detach()[:2], weight.detach()[2:]])
        return torch.sigmoid(torch.mm(inputs, weight))

    inputs = torch.randn(3, 4)
    checkpoint(block, inputs, use_reentrant=False, context_fn=selective_contexts).sum().backward()
    found, weight.grad = weight.grad, None
    assert len(passes) == 2
    block(inputs).sum().backward()
    assert torch.equal(found, weight.grad)


def test_gradients_do_not_depend_on_recomputation(tiny_model: Path):
    import torch

    found = []
    for mode in ("none", "full", "selective"):
        model = recomputing(tiny(tiny_model), mode)
        loss_of(model).backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.allclose(other[name], found[0][name], atol=1e-7) for name in other)


@pytest.mark.parametrize(
    ("requested", "found"), [("selective", "full"), ("full", "selective"), ("none", "full"), ("selective", "none")]
)
def test_recomputation_other_than_the_requested_one_is_an_error(tiny_model: Path, requested, found):
    from finetune_trainer.training.passes.activations import assert_checkpointing_in_effect

    model = recomputing(tiny(tiny_model), found)
    assert_checkpointing_in_effect(found, model, "ddp")
    with pytest.raises(StageError) as caught:
        assert_checkpointing_in_effect(requested, model, "ddp")
    assert (caught.value.failure_class, caught.value.reason) == (
        FailureClass.STRATEGY_NOT_IN_EFFECT,
        "WrongActivationCheckpointing",
    )


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_weights_that_autograd_saves_are_not_taken_for_activations(tiny_model: Path, monkeypatch, mode):
    import torch

    from finetune_trainer.training.passes import activations

    monkeypatch.setattr(activations, "_LEAST_BYTES", 0)
    model = recomputing(tiny(tiny_model), mode)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    moving = activations.InHostMemory()
    moving.watch(model)
    seen: list[tuple[bool, bool]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((tensor.untyped_storage().data_ptr() in weights, moving.is_activation(tensor)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model)
    assert {weight for weight, _ in seen} == {True, False}
    assert all(weight != activation for weight, activation in seen)
    loss.backward()
    assert not +moving._weights


def test_activations_without_the_requested_offload_are_an_error(tiny_model: Path):
    from finetune_trainer.training.passes.activations import InHostMemory

    model, moving = tiny(tiny_model), InHostMemory()
    moving.watch(model)
    with pytest.raises(StageError) as caught:
        moving.assert_in_effect("ddp")
    assert caught.value.reason == "ActivationsNotOffloaded"
    with moving.forward():
        loss_of(model).backward()
    moving.assert_in_effect("ddp")
    # The device is the host, so nothing moves.
    assert moving.moved_bytes == 0


def test_copies_of_weights_under_autocast_are_not_moved(monkeypatch):
    import torch

    from finetune_trainer.training.passes import activations

    monkeypatch.setattr(activations, "_LEAST_BYTES", 0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))
    model[1].requires_grad_(False)  # as beside an adapter: the backward pass goes through it
    rows = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        model(rows).sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    moving = activations.InHostMemory()
    moving.watch(model)
    seen: dict[tuple[int, ...], bool] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        seen[tuple(tensor.shape)] = moving.is_activation(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with moving.forward(), hooks, torch.autocast("cpu", torch.bfloat16):
        loss = model(rows).sum()
    loss.backward()
    assert seen == {(3, 8): True, (16, 4): False}
    assert torch.equal(model[0].weight.grad, expected)

"""Copies of activations beside the computation: what leaves is held until it is copied, what comes back comes early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune_trainer.training.passes.activation_copies import IN_FLIGHT, ActivationLane, MovedActivation


class Recorded:
    """Copies within host memory; remembers what was started and what was waited for, by the first element."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.log.append(f"out {tensor.flatten()[0]:g}")
        return tensor.clone(), f"left {tensor.flatten()[0]:g}"

    def back(self, host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Any]:
        self.log.append(f"back {host.flatten()[0]:g}")
        return host.clone(), f"came {host.flatten()[0]:g}"

    def wait(self, event: Any) -> None:
        self.log.append(str(event))

    def since(self) -> list[str]:
        """Return the records since the last call."""
        found, self.log = self.log, []
        return found


def moved(count: int) -> tuple[Recorded, ActivationLane, list[MovedActivation]]:
    """Return `count` activations that left in one forward pass."""
    copies = Recorded()
    lane = ActivationLane(copies)
    lane.begin_forward()
    return copies, lane, [lane.out(torch.tensor([float(number)])) for number in range(1, count + 1)]


def test_computation_waits_for_the_third_copy_but_last() -> None:
    copies, lane, _ = moved(4)
    assert IN_FLIGHT == 2
    assert copies.since() == ["out 1", "out 2", "out 3", "left 1", "out 4", "left 2"]
    lane.end_forward()
    assert copies.since() == ["left 3", "left 4"]


def test_next_activations_come_back_while_one_is_used() -> None:
    copies, lane, activations = moved(4)
    lane.end_forward()
    copies.since()
    assert lane.back(activations[3]).item() == 4
    assert copies.since() == ["back 4", "came 4", "back 3", "back 2"]
    assert lane.back(activations[2]).item() == 3
    assert copies.since() == ["came 3", "back 1"]
    assert [lane.back(each).item() for each in (activations[1], activations[0])] == [2, 1]
    assert copies.since() == ["came 2", "came 1"]


def test_unused_activation_is_awaited_before_its_memory_is_free() -> None:
    copies, lane, activations = moved(5)
    lane.end_forward()
    lane.back(activations[4])
    copies.since()
    lane.back(activations[1])  # the graph does not use 4 and 3
    assert copies.since() == ["back 2", "came 2", "back 1", "came 4"]
    assert lane.back(activations[3]).item() == 4, "it comes once more"
    lane.begin_forward()
    assert lane._coming == {}


def test_released_activations_do_not_come_back() -> None:
    copies, lane, activations = moved(3)
    lane.end_forward()
    del activations[0]
    copies.since()
    lane.back(activations.pop())
    assert copies.since() == ["back 3", "came 3", "back 2"]


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_activations_that_stay(recompute: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(5)]
    rows, copies = torch.randn(3, 8), Recorded()

    def gradients() -> list[torch.Tensor]:
        hidden = rows
        for layer in layers:
            step: Any = lambda given, layer=layer: torch.tanh(layer(given))  # noqa: E731
            hidden = checkpoint(step, hidden, use_reentrant=False) if recompute else step(hidden)
        return list(torch.autograd.grad(hidden.sum(), [layer.weight for layer in layers]))

    expected, lane = gradients(), ActivationLane(copies)
    hooks = torch.autograd.graph.saved_tensors_hooks(lane.out, lane.back)
    with hooks:
        found = gradients()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert any(entry.startswith("back") for entry in copies.log)


# -------------------------------------------------------------------------------------------------- staging memory


def test_copies_of_a_state_share_one_block_of_memory() -> None:
    from finetune_trainer.strategies.staging_memory import StagingMemory

    memory = StagingMemory()
    state = [torch.randn(3, 5), torch.tensor(7.0), torch.arange(9), torch.randn(4, 4, dtype=torch.bfloat16).t()]
    first = memory.copies(state)
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(first, state, strict=True))
    state[0].add_(1)
    assert not torch.equal(first[0], state[0])
    second = memory.copies(state)
    assert torch.equal(second[0], state[0])
    assert [each.data_ptr() for each in second] == [each.data_ptr() for each in first]
    assert len({each.untyped_storage().data_ptr() for each in second}) == 1
    assert torch.equal(memory.copies([torch.ones(1000)])[0], torch.ones(1000)), "a larger state"

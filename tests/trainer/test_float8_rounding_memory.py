"""Memory that rounding to fp8 takes, compared with the plan's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from finetune_operator.plan.memory.exchange_memory import FP8_ROUNDING_BYTES


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(64, 32, 128), (64, 128, 32), (6, 32, 128)])
def test_rounding_to_fp8_takes_the_counted_memory_and_keeps_nothing(tokens, inputs, outputs):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("torchao", reason="torchao is not installed (finetune-trainer[fp8])")
    from finetune_trainer.models.float8 import convert

    taken, kept = {}, {}
    for precision in ("bf16", "fp8"):
        model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(inputs, outputs, bias=False)])})
        if precision == "fp8":
            convert(model)
        layer, given = model["blocks"][0], torch.randn(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)
        held: dict[int, int] = {}

        def keep(tensor: Any, held: dict[int, int] = held, layer: Any = layer) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() != layer.weight.untyped_storage().data_ptr():
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autocast("cpu", torch.bfloat16):
            forward, answer = peak_bytes(lambda layer=layer, given=given: layer(given))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                answer = layer(given)
        backward, _ = peak_bytes(lambda answer=answer: answer.backward(torch.ones_like(answer)))
        taken[precision], kept[precision] = max(forward, backward), sum(held.values())
    more = taken["fp8"] - taken["bf16"]
    largest = max(tokens * inputs, tokens * outputs, inputs * outputs)
    assert 5 * largest < more <= FP8_ROUNDING_BYTES * largest
    # The input, and in bf16 autocast's copy of the weight.
    assert kept == {"bf16": 2 * (tokens * inputs + inputs * outputs), "fp8": 2 * tokens * inputs}


def peak_bytes(compute: Callable[[], Any]) -> tuple[int, Any]:
    """Return the peak bytes of tensors created by `compute`, and its result."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.live: dict[int, int] = {}
            self.most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(kind.__name__ == "Float8TrainingTensor" for kind in types):
                return NotImplemented  # its inner tensors are dispatched again
            made = func(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, list | tuple) else [made]:
                if isinstance(tensor, torch.Tensor):
                    self.count(tensor.untyped_storage())
            return made

        def count(self, storage: Any) -> None:
            at = storage.data_ptr()
            if at not in self.live:
                self.live[at] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, at, None)
            self.most = max(self.most, sum(self.live.values()))

    with Counting() as counting:
        made = compute()
    return counting.most, made

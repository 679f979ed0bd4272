"""Backends that quantize layers, on a CPU: their answers beside the model's own, and why they are missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from finetune_trainer.predict.backends import quantized_backends
from finetune_trainer.predict.backends.backend_protocol import Backend, Machine, NotAvailable
from finetune_trainer.predict.backends.quantized_backends import EIGHT_BIT, FOUR_BIT, FP8

MACHINE = Machine()


def classifier(family: str = "bert", **config: Any) -> Any:
    """Return a classifier with random weights, 64 wide with 2 blocks."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    if family == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2}
    torch.manual_seed(3)
    whole = {"vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.05, **sizes, **config}
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **whole)).eval()


def batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 40, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def needs(backend: Backend) -> None:
    package = "torchao" if backend is FP8 else "bitsandbytes"
    pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize(
    ("backend", "bound"), [(EIGHT_BIT, 0.05), (FOUR_BIT, 0.3), (FP8, 0.2)], ids=["int8", "nf4", "fp8"]
)
def test_quantized_copy_answers_like_the_model(backend: Backend, bound: float, family: str) -> None:
    needs(backend)
    if backend is FP8 and family == "gpt2":
        pytest.skip("torchao has no form for GPT-2's Conv1D")
    model = classifier(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    forward = backend.prepare(model, [], Path())
    for given in (batch(3, 7), batch(1, 16), batch(8, 1)):
        with torch.inference_mode():
            wanted, found = model(**given).logits, forward(**given).logits.float()
        error = (found - wanted).norm() / wanted.norm()
        assert 0 < error < bound
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_layers_of_the_blocks_alone_are_quantized() -> None:
    needs(EIGHT_BIT)
    model = classifier()
    kinds: dict[str, Callable[[Any], bool]] = {
        "bnb-int8": lambda layer: layer.weight.dtype == torch.int8,
        "bnb-nf4": lambda layer: 8 * layer.weight.numel() == layer.in_features * layer.out_features,
    }
    for backend in (EIGHT_BIT, FOUR_BIT):
        made: Any = backend.prepare(model, [], Path())
        quantized = {name for name, each in made.named_modules() if type(each) not in _kinds_of(model)}
        assert len(quantized) == 12
        assert all(".layer." in name for name in quantized)
        assert all(kinds[backend.name](made.get_submodule(name)) for name in quantized)


def _kinds_of(model: nn.Module) -> set[type]:
    return {type(each) for each in model.modules()}


def test_missing_parts_are_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    needs(EIGHT_BIT)
    model = classifier()
    assert EIGHT_BIT.unavailable(model, MACHINE) is None
    assert FOUR_BIT.unavailable(model, MACHINE) is None
    why = FP8.unavailable(model, MACHINE)
    assert why is not None
    assert why.startswith("a CPU has no fp8 units; GPUs have them from compute capability 8.9 on")
    model.hf_device_map = {"bert": 0, "classifier": 1}
    assert EIGHT_BIT.unavailable(model, MACHINE) == "the model's layers are on several GPUs"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert FOUR_BIT.unavailable(model, MACHINE) == (
        "the package bitsandbytes is not installed (pip install 'finetune-trainer[qlora]')"
    )


def test_model_without_blocks_or_with_odd_layers_is_refused() -> None:
    needs(FOUR_BIT)
    head: Any = SimpleNamespace(named_modules=list, hf_device_map=None)
    assert quantized_backends.EIGHT_BIT.unavailable(head, MACHINE) == "the model has no linear layers in blocks"
    with pytest.raises(NotAvailable, match="cannot be packed"):
        FOUR_BIT.prepare(classifier(hidden_size=6, num_attention_heads=1, intermediate_size=7), [], Path())

"""DistributedDataParallel looks for weights without a gradient where a model may have some, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def tiny(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder).train()


def loss_of(model: Any) -> Any:
    import torch

    return model(input_ids=torch.arange(5, 21).reshape(2, 8), labels=torch.tensor([0, 1])).loss


def test_model_that_uses_all_weights_needs_no_look(tiny_model: Path):
    from finetune_trainer.training.passes.unused_weights import may_leave_weights_unused

    model = tiny(tiny_model)
    assert not may_leave_weights_unused(model, loss_of)
    assert model.training
    assert all(each.grad is None for each in model.parameters())


def test_weight_that_no_loss_depends_on_counts_unless_it_is_frozen(tiny_model: Path):
    import torch

    from finetune_trainer.training.passes.unused_weights import may_leave_weights_unused

    model = tiny(tiny_model)
    model.spare = torch.nn.Linear(2, 2)
    assert may_leave_weights_unused(model, loss_of)
    model.spare.requires_grad_(False)
    assert not may_leave_weights_unused(model, loss_of)


@pytest.mark.parametrize(("name", "value"), [("layerdrop", 0.1), ("num_local_experts", 4)])
def test_model_that_chooses_layers_or_experts_counts(name: str, value: float, tiny_model: Path):
    from finetune_trainer.training.passes.unused_weights import may_leave_weights_unused

    model = tiny(tiny_model)
    setattr(model.config, name, value)
    assert may_leave_weights_unused(model, loss_of)
    setattr(model.config, name, 0)
    assert not may_leave_weights_unused(model, loss_of)


def test_random_numbers_of_the_training_are_not_drawn(tiny_model_with_dropout: Path):
    import torch

    from finetune_trainer.training.passes.unused_weights import may_leave_weights_unused

    model = tiny(tiny_model_with_dropout)
    before = torch.random.get_rng_state()
    may_leave_weights_unused(model, loss_of)
    assert torch.equal(torch.random.get_rng_state(), before)

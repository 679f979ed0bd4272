"""Gradients of replicas are averaged in fixed buckets while the backward pass runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from finetune_trainer.strategies.parallel import gradient_reducer
from finetune_trainer.strategies.parallel.gradient_reducer import GradientReducer, in_buckets
from finetune_trainer.strategies.parallel.model_parallel import local_gradient


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Make this process a group of one."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    earlier = {name: os.environ.get(name) for name in names}
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
    for name, value in earlier.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """Three layers whose matrices are buckets of their own, and one that nothing uses."""
    monkeypatch.setattr(gradient_reducer, "ALONE_ELEMENTS", 16)
    torch.manual_seed(1)
    made = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    made.unused = torch.nn.Linear(2, 2, bias=False)
    return made


def output(model: torch.nn.Module) -> torch.Tensor:
    states = torch.ones(2, 4)
    for number in range(3):
        states = model[number](states)  # type: ignore[index]
    return states.sum()


def reducer(model: torch.nn.Module, group: Any, **settings: Any) -> GradientReducer:
    given: dict[str, Any] = {"ranks": 2, "passes": 1, **settings}
    return GradientReducer(list(model.parameters()), group, local_gradient=local_gradient, **given)


def test_buckets_follow_the_backward_pass(model: torch.nn.Module):
    names = {id(value): name for name, value in model.named_parameters()}
    found = [
        [names[id(each)] for each in bucket.weights] for bucket in in_buckets(list(model.parameters()), [None] * 7)
    ]
    small = ["unused.weight", "2.bias", "1.bias", "0.bias"]
    assert found == [["2.weight"], ["1.weight"], small, ["0.weight"]]


def test_buckets_have_one_owner_each(model: torch.nn.Module):
    weights, owners = list(model.parameters()), [0, 1, 0, 1, 0, 1, 0]
    of_weight = {id(each): owner for each, owner in zip(weights, owners, strict=True)}
    made = in_buckets(weights, owners)
    assert [{of_weight[id(each)] for each in bucket.weights} for bucket in made] == [{each.owner} for each in made]


def test_gradients_are_reduced_during_the_last_backward_pass_only(model: torch.nn.Module, group):
    mine = reducer(model, group)
    output(model).backward()
    mine.finish()
    assert mine.early == 2, "buckets behind the one with an unused weight wait in the first step"
    alone = {name: value.grad for name, value in model.named_parameters()}
    model.zero_grad()
    with mine.held():
        output(model).backward()
        assert not mine._on_its_way
    output(model).backward()
    assert len(mine._on_its_way) == 4, "all but the weight that the first step has not used"
    mine.finish()
    assert mine.early == 4
    for name, value in model.named_parameters():
        if name == "unused.weight":
            assert value.grad is None, "no rank has used it"
        else:
            assert value.grad is not None
            assert alone[name] is not None
            torch.testing.assert_close(value.grad, 2 * alone[name])  # type: ignore[operator]


def test_micro_batches_of_a_pass_are_counted(model: torch.nn.Module, group):
    mine = reducer(model, group, passes=2)
    output(model).backward()
    assert not mine._on_its_way
    output(model).backward()
    assert len(mine._on_its_way) == 2
    with pytest.raises(RuntimeError, match="adds more than 2 gradients"):
        output(model).backward()


def test_sums_inside_a_replica_come_before_the_average(model: torch.nn.Module, group):
    late = frozenset({id(model[2].weight)})  # type: ignore[index]
    mine = reducer(model, group, late=late)
    output(model).backward()
    mine_of_sum = model[2].weight.grad.clone()  # type: ignore[index]
    model[2].weight.grad.mul_(3)  # type: ignore[index]
    mine.finish()
    torch.testing.assert_close(model[2].weight.grad, 3 * mine_of_sum / 2)  # type: ignore[index]

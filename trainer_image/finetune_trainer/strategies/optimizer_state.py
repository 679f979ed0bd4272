"""State of an optimizer by the names of its parameters, so that it does not depend on their grouping and division."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class NamedState:
    """State of an optimizer."""

    tensors: Mapping[tuple[str, str], torch.Tensor]
    """(Parameter, key of the state) -> tensor, which is divided as its parameter is."""
    numbers: Mapping[tuple[str, str], Any]
    """(Parameter, key of the state) -> value that is not a tensor."""
    groups: Sequence[Mapping[str, Any]]
    """Settings of the groups; `params` are names."""


def parameter_names(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of `model` by their first names, which are the same with compiled layers."""
    return {name.replace("_orig_mod.", ""): parameter for name, parameter in model.named_parameters()}


def named_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> NamedState:
    """Return the state of `optimizer`; its tensors are not copied."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    values = {
        (names[id(parameter)], key): value
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    groups = [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    return NamedState(tensors, {key: value for key, value in values.items() if key not in tensors}, groups)


def load_named_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], state: NamedState
) -> None:
    """Load the state of the parameters, of which the optimizer keeps the tensors where types are right, and the
    settings of their groups, which may be grouped otherwise.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    entries: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for (name, key), value in (*state.numbers.items(), *state.tensors.items()):
        if name in entries:
            entries[name][key] = value
    settings = {name: group for group in state.groups for name in group["params"]}
    packed: dict[str, Any] = {"state": {}, "param_groups": []}
    number = 0
    for group in optimizer.param_groups:
        group_names = [names[id(parameter)] for parameter in group["params"]]
        theirs = _like(settings[group_names[0]], group) if group_names else group
        numbers = list(range(number, number + len(group_names)))
        packed["param_groups"].append({**group, **theirs, "params": numbers})
        packed["state"] |= {at: entries[name] for at, name in zip(numbers, group_names, strict=True) if entries[name]}
        number += len(group_names)
    optimizer.load_state_dict(packed)


def _like(stored: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings with tuples where `group` has them: JSON knows lists only."""
    return {
        key: tuple(value) if isinstance(value, list) and isinstance(group.get(key), tuple) else value
        for key, value in stored.items()
    }


def merged_groups(everyone: Sequence[Sequence[Mapping[str, Any]]], tied: Mapping[str, str]) -> list[dict[str, Any]]:
    """Merge the parameter groups of all processes: one group for equal settings, each name once.

    `tied`: the second names of tied weights.
    """
    merged: list[dict[str, Any]] = []
    seen: set[str] = set()
    for group in (group for groups in everyone for group in groups):
        names = [name for name in group["params"] if name not in tied and name not in seen]
        seen.update(names)
        settings = {key: value for key, value in group.items() if key != "params"}
        for other in merged:
            if all(other.get(key) == value for key, value in settings.items()):
                other["params"] += names
                break
        else:
            merged.append({**settings, "params": names})
    return [group for group in merged if group["params"]]

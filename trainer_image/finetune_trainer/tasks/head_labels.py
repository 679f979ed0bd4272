"""Labels of a head that is trained already: data name them in an order of their own, and the head's outputs stay."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_trainer.core.failures import first_of
from finetune_trainer.tasks.task_protocol import Labels, Targets

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UNNAMED = re.compile(r"LABEL_[0-9]+")


def unnamed(names: Sequence[str]) -> bool:
    """Return whether the names are those of transformers for labels without names."""
    return all(_UNNAMED.fullmatch(name) for name in names)


def are_ids(names: Sequence[str]) -> bool:
    """Return whether the names are class ids as text, in their order."""
    return list(names) == [str(i) for i in range(len(names))]


def spelled(head: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Return the labels of a head with the capitals of `names`, those of the data, where the two differ in them."""
    of_data = {name.casefold(): name for name in names}
    if len(of_data) < len(set(names)) or len({name.casefold() for name in head}) < len(head):
        return tuple(head)
    return tuple(of_data.get(name.casefold(), name) for name in head)


def is_new(head: Labels, labels: Labels) -> bool:
    """Return whether training on `labels` begins with other outputs than those of `head`, the checkpoint's."""
    return _places(head, labels) != list(range(len(labels.names)))


def in_head_order(targets: Targets, head: Labels) -> Targets:
    """Return the targets of a training by the ids of the checkpoint's `head`; as they are, with a note, if it is for
    other labels.
    """
    labels, order = targets.labels, _places(head, targets.labels)
    if order is None:
        return replace(targets, notes=(*targets.notes, _new_head_note(head, labels)))
    if {*labels.names} == {*spelled(head.names, labels.names)}:
        names = dict(zip(order, labels.names, strict=True))
        labels = replace(labels, names=tuple(names[i] for i in range(len(names))))
        return replace(targets, labels=labels, of={role: _moved(ids, order) for role, ids in targets.of.items()})
    if unnamed(head.names):
        return targets
    notes = (*targets.notes, assumed_note(head.names))
    return replace(targets, labels=replace(labels, names=head.names), notes=notes)


def assumed_note(head: Sequence[str], names: Sequence[str] = ()) -> str:
    """Return a note that class ids, of these `names` in the data, are read as those of a head."""
    pairs = [f"{ours} is {theirs}" for ours, theirs in zip(names or range(len(head)), head, strict=False)]
    return f"The class ids of the data are read in the order of the model's labels: {first_of(pairs, 8)}."


def _places(head: Labels, labels: Labels) -> list[int] | None:
    """Return for each of `labels` its output of the head, class ids in the head's order; None for other labels."""
    if len(head.names) != len(labels.names) or (head.form == "regression") != (labels.form == "regression"):
        return None
    place = {name: i for i, name in enumerate(spelled(head.names, labels.names))}
    if place.keys() == {*labels.names}:
        return [place[name] for name in labels.names]
    return list(range(len(labels.names))) if are_ids(labels.names) else None


def _moved(ids: NDArray[Any], order: Sequence[int]) -> NDArray[Any]:
    """Return the targets with the id `order[i]` for i: one a row, a flag for each, or an array of them a row."""
    if list(order) == list(range(len(order))):
        return ids
    moved = np.empty_like(ids)
    if ids.ndim == 2:
        moved[:, order] = ids
    elif ids.dtype == object:
        for row, of_row in enumerate(ids):
            moved[row] = np.asarray(order, of_row.dtype)[of_row]
    else:
        moved[:] = np.asarray(order)[ids]
    return moved


def _new_head_note(head: Labels, labels: Labels) -> str:
    theirs, ours = (first_of(each.names, 8) if each.form != "regression" else "a number" for each in (head, labels))
    return (
        f"The model's head is for {theirs}, and the data have {ours}: training begins with a new head. To keep the "
        f"trained one, use {'class ids' if unnamed(head.names) else 'its labels'} in the data."
    )

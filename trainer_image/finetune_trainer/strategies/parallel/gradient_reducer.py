"""Average of gradients over the replicas of a split model, while the backward pass still computes others.

A hook on each weight counts its gradients of the last micro-batch. Weights are in buckets in the reverse order of the
model, in which their gradients become complete; a complete bucket is reduced at once, after those before it. The order
is fixed, as the calls of all replicas have to match: where a replica has no gradient for a weight, its bucket and those
behind it are reduced after the backward pass, with zeros. Gradients of a MiB or more are reduced in place, smaller ones
through a copy of a bucket (Li et al., "PyTorch Distributed", 2020, section 3.2, which the order is from).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from finetune_contract.plans import AVERAGED_ELEMENTS
from finetune_trainer.strategies.parallel.sharded_tensors import local_part

ALONE_ELEMENTS = 1 << 18
"""Elements of a gradient, a MiB in fp32, from which it is reduced by itself: large enough to fill a link."""
BUCKET_ELEMENTS = AVERAGED_ELEMENTS // 4
"""Most elements of a bucket of small gradients. Those on their way have AVERAGED_ELEMENTS at most."""


@dataclass
class Bucket:
    """Gradients that are reduced in one message."""

    weights: list[torch.nn.Parameter]
    owner: int | None
    """Rank of the group that needs the average; None: all do."""
    last: int = 0
    """Position of its last weight in the reverse order of the model."""
    elements: int = 0
    missing: int = 0
    """Gradients that the last micro-batch has still to add."""


@dataclass
class _OnItsWay:
    """A bucket that is being reduced."""

    bucket: Bucket
    flat: torch.Tensor
    parts: list[torch.Tensor]
    """Gradients that `flat` is a copy of; empty where it is the gradient."""
    work: Any


@dataclass
class GradientReducer:
    """Averages the gradients of `weights` (in the model's order) over the ranks of a group."""

    weights: Sequence[torch.nn.Parameter]
    group: Any
    ranks: int
    passes: int
    """Backward passes of the last batch of a step: the micro-batches of a pass through a pipeline, or 1."""
    local_gradient: Callable[[torch.Tensor], torch.Tensor]
    """Function that returns this process's part of a weight's gradient, zeros if there is none."""
    owners: Sequence[int] | None = None
    """Rank that needs the average of each weight; None: all ranks need all."""
    late: frozenset[int] = frozenset()
    """Ids of the weights whose gradients are changed between the backward pass and `finish`."""
    early: int = field(default=0, init=False)
    """Buckets of the last step whose reduction began during the backward pass."""

    def __post_init__(self) -> None:
        self._arrange(self.late)
        self._arranged = False
        self._held = False
        self._next = 0
        self._on_its_way: list[_OnItsWay] = []
        for weight in self.weights:
            if id(weight) not in self.late:
                weight.register_post_accumulate_grad_hook(self._added)  # type: ignore[no-untyped-call]

    def _arrange(self, late: frozenset[int]) -> None:
        """Put the weights in buckets, those with the ids `late` behind all others."""
        owners = [None] * len(self.weights) if self.owners is None else list(self.owners)
        pairs = list(zip(self.weights, owners, strict=True))
        self.buckets = [
            bucket
            for is_late in (False, True)
            for part in [[pair for pair in pairs if (id(pair[0]) in late) == is_late]]
            for bucket in in_buckets([weight for weight, _ in part], [owner for _, owner in part])
        ]
        self._bucket_of = {id(weight): bucket for bucket in self.buckets for weight in bucket.weights}
        self._reset()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Reduce nothing: further micro-batches of the step follow."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def finish(self) -> None:
        """Reduce what is left, and wait for all. Every rank must call it, once a step.

        A weight that no rank has used keeps no gradient, as in one process: a gradient of 0 would decay it. Ranks that
        do not own a weight keep no gradient of it. The flags are reduced in host memory, where reading them does not
        wait for the device.
        """
        self.early = self._next
        used = torch.tensor([weight.grad is not None for weight in self.weights], dtype=torch.int32)
        while self._next < len(self.buckets):
            self._launch()
        distributed.all_reduce(used, op=distributed.ReduceOp.MAX, group=self.group)
        while self._on_its_way:
            self._complete()
        for weight, is_used in zip(self.weights, used.tolist(), strict=True):
            if not is_used:
                weight.grad = None
        if self._arranged:
            self._reset()
            return
        # From the second step on, weights that no rank has used do not keep others from being reduced early.
        self._arranged = True
        unused = (id(weight) for weight, is_used in zip(self.weights, used.tolist(), strict=True) if not is_used)
        self._arrange(self.late.union(unused))

    def _reset(self) -> None:
        """Expect the gradients of the next step."""
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = self.passes * len(bucket.weights)

    def _added(self, weight: torch.Tensor) -> None:
        """Count a gradient, and reduce the buckets that are complete."""
        if self._held:
            return
        bucket = self._bucket_of[id(weight)]
        bucket.missing -= 1
        if bucket.missing < 0:
            raise RuntimeError(f"a backward pass adds more than {self.passes} gradients to a weight that was reduced")
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._launch()

    def _launch(self) -> None:
        """Begin to reduce the next bucket."""
        bucket = self.buckets[self._next]
        self._next += 1
        gradients = [self.local_gradient(weight) for weight in bucket.weights]
        if len(gradients) == 1 and gradients[0].is_contiguous():
            flat, parts = gradients[0], []
        else:
            while self._on_its_way and self._copied + bucket.elements > AVERAGED_ELEMENTS:
                self._complete()
            flat, parts = torch.cat([gradient.flatten() for gradient in gradients]), gradients
        flat /= self.ranks
        work: Any
        if bucket.owner is None:
            work = distributed.all_reduce(flat, group=self.group, async_op=True)
        else:
            work = distributed.reduce(flat, group=self.group, group_dst=bucket.owner, async_op=True)
        self._on_its_way.append(_OnItsWay(bucket, flat, parts, work))

    @property
    def _copied(self) -> int:
        return sum(launched.bucket.elements for launched in self._on_its_way if launched.parts)

    def _complete(self) -> None:
        """Wait for the oldest bucket: on a GPU its stream does, not the host."""
        one = self._on_its_way.pop(0)
        one.work.wait()
        if one.bucket.owner not in (None, distributed.get_group_rank(self.group, distributed.get_rank())):
            for weight in one.bucket.weights:
                weight.grad = None
        elif one.parts:
            copy_parts(one.flat, one.parts)


def in_buckets(weights: Sequence[torch.nn.Parameter], owners: Sequence[int | None]) -> list[Bucket]:
    """Return the weights in buckets of one owner each, in the order in which their gradients become complete."""
    made: list[Bucket] = []
    open_ones: dict[int | None, Bucket] = {}
    backwards = list(zip(reversed(weights), reversed(owners), strict=True))
    for position, (weight, owner) in enumerate(backwards):
        size = local_part(weight).numel()
        bucket = open_ones.get(owner)
        if size >= ALONE_ELEMENTS or bucket is None or bucket.elements + size > BUCKET_ELEMENTS:
            bucket = Bucket([], owner)
            made.append(bucket)
            if size < ALONE_ELEMENTS:
                open_ones[owner] = bucket
        bucket.weights.append(weight)
        bucket.last, bucket.elements = position, bucket.elements + size
    return sorted(made, key=lambda bucket: bucket.last)


def pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in order, in lists of at most AVERAGED_ELEMENTS elements; a larger one comes alone."""
    piece: list[torch.Tensor] = []
    elements = 0
    for tensor in tensors:
        if piece and elements + tensor.numel() > AVERAGED_ELEMENTS:
            yield piece
            piece, elements = [], 0
        piece.append(tensor)
        elements += tensor.numel()
    if piece:
        yield piece


def copy_parts(flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy consecutive parts of a flat tensor into tensors of any shapes."""
    parts = torch.split(flat, [target.numel() for target in targets])
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.view_as(target))

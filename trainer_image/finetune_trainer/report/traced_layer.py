"""One transformer block on fake tensors: the bytes that it saves for its backward pass, without weights or memory.

Plans count the blocks of common families by formula (`finetune_contract.plans.COUNTED_FAMILIES`). Of others they know
the widths of linear layers only, so `prepare` traces one block.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

ROWS = 2
LENGTHS = (64, 128)
"""Tokens of the traced rows: bytes that grow with the length are those of attention's scores."""


@dataclass(frozen=True)
class TracedBlock:
    """Bytes that one block saves in fp32 on a CPU."""

    per_token: int = 0
    """For one token, without attention's scores; 0: the block cannot be traced."""
    per_score: int = 0
    """For one token, for each token of its row."""


class _BlockDoneError(Exception):
    """Ends the forward pass behind the traced block."""


class _Saved:
    """Storages that autograd saves inside a block, each counted once; weights are not counted."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {_place(parameter) for parameter in (*model.parameters(), *model.buffers())}
        self._held: list[torch.Tensor] = []
        """Saved tensors, so that no other storage gets the place of one."""
        self._bytes: dict[int, int] = {}
        self._inside = False

    def enter(self, *_: Any) -> None:
        """Begin to count, as a hook before a block."""
        self._inside = True

    def leave(self, *_: Any) -> None:
        """End the pass, as a hook behind a block."""
        raise _BlockDoneError

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves."""
        place = _place(tensor)
        if self._inside and place not in self._weights:
            self._held.append(tensor)
            self._bytes[place] = tensor.untyped_storage().nbytes()
        return tensor

    @property
    def total(self) -> int:
        """Return the bytes of all counted storages."""
        return sum(self._bytes.values())


def traced_block(model: PreTrainedModel) -> TracedBlock:
    """Trace one block of `model`, which is on the meta device and has fake weights afterwards. Of a model with encoder
    and decoder, whose blocks differ, none is traced, nor one whose code reads values; the log has a line then.
    """
    try:
        if model.config.is_encoder_decoder:
            raise ValueError("its encoder and its decoder have different ones")
        short, long = _traced(model)
    except Exception as error:  # the code of a model may end in any error
        log.info("plans count each block of %s as one of BERT: %s", model.config.model_type, error)
        return TracedBlock()
    per_score = max(0.0, (long / LENGTHS[1] - short / LENGTHS[0]) / (LENGTHS[1] - LENGTHS[0]) / ROWS)
    return TracedBlock(int(short / LENGTHS[0] / ROWS - per_score * LENGTHS[0]), round(per_score))


def _traced(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the bytes that a block saves for ROWS rows of each length."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    block, totals = _block(model), []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        for length in LENGTHS:
            saved = _Saved(model)
            hooks = block.register_forward_pre_hook(saved.enter), block.register_forward_hook(saved.leave)
            try:
                with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
                    model(input_ids=torch.zeros((ROWS, length), dtype=torch.long))
            except _BlockDoneError:
                totals.append(saved.total)
            finally:
                for hook in hooks:
                    hook.remove()
    return tuple(totals)


def _block(model: PreTrainedModel) -> nn.Module:
    """Return the first block of the most frequent kind."""
    from finetune_trainer.strategies.fsdp_groups import transformer_blocks

    blocks = transformer_blocks(model)
    kind, _ = Counter(type(block) for block in blocks).most_common(1)[0]
    return next(block for block in blocks if type(block) is kind)


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

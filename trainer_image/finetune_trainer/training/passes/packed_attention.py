"""Attention over packed rows without a mask: each row of a pack is computed by itself.

transformers keeps the rows of a pack apart by a mask of tokens x tokens. Each layer keeps one for its backward pass,
attention computes all the scores that it hides, and shared (grouped-query) keys are repeated for each query head. Here
the layers get `PackedRows` in place of the mask, and the attention that transformers calls computes row by row:

- by torch's flash attention for sequences of several lengths (`varlen_attn`), in one call, on NVIDIA GPUs from compute
  capability 8.0 on and in 16 bits;
- elsewhere by one call of `scaled_dot_product_attention` for each row.

The model must be of a family that uses nothing but the mask (`finetune_contract.packed_rows`). Activation checkpointing
repeats a layer with the same `PackedRows`, as they are an argument of the layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from finetune_contract.choices import StrategyName
from finetune_contract.facts import BF16_FROM
from finetune_contract.packed_rows import why_packs_have_masks
from finetune_contract.trainer_job import Training
from finetune_trainer.core.library_patches import attention_by_row, rows_for_masks
from finetune_trainer.core.token_shards import ROW_POSITIONS
from finetune_trainer.strategies.strategy_protocol import expect

log = logging.getLogger(__name__)

_SHARED_KEYS = "enable_gqa"
_CHECKS_SHARED_KEYS = _SHARED_KEYS in signature(varlen_attn).parameters
"""False for torch 2.11, whose `varlen_attn` passes shared keys unchecked to the kernel, which takes them."""
_LARGEST_HEAD, _LARGEST_HEAD_OF_SMALL_CHIPS = 256, 192
"""Widest heads that flash attention has a backward pass for; the chips of workstations have less memory inside."""
_LARGE_CHIPS = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities of the chips of A100, H100, B200 and B300."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of a micro-batch of packs, all packs one after the other; the padding of a pack is a row of its own."""

    shape: tuple[int, int]
    """Packs, and tokens of each."""
    sizes: tuple[int, ...]
    """Tokens of each row."""
    starts: torch.Tensor
    """First token of each row, and the number of all tokens: shape (rows + 1,), int32, on the device."""
    window: int | None = None
    """Tokens that a token sees, with itself; None: all before it in its row."""


class PackAttention(Protocol):
    """Attention of a training over its packs."""

    def over(self, batch: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return the context of the forward pass of `batch`, which is in host memory."""

    def assert_in_effect(self) -> None:
        """Raise StageError STRATEGY_NOT_IN_EFFECT if no layer computed a pack in a forward pass inside `over`."""


class WithMasks:
    """Attention as transformers computes it."""

    def over(self, batch: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def assert_in_effect(self) -> None:
        """Do nothing: it always is."""


class ByRow:
    """Attention of each row by itself, in the forward passes inside `over`. Others are as before."""

    def __init__(self, device: torch.device, positions: str, strategy: StrategyName) -> None:
        """Become fused attention of transformers. `positions`: key of a batch, positions that count from 0 in each
        row.
        """
        self._device = device
        self._positions = positions
        self._strategy: StrategyName = strategy
        self._rows: PackedRows | None = None
        self._attended = 0
        """Layers that computed a pack, in all passes."""
        attention_by_row.until_end(self.attend)

    @contextmanager
    def over(self, batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Make the rows of `batch` those of the forward passes inside the context."""
        with rows_for_masks(self.mask):
            self._rows = packed_rows(batch[self._positions], self._device)
            try:
                yield
            finally:
                self._rows = None

    def mask(self, **arguments: Any) -> PackedRows | torch.Tensor | None:
        """Return the rows in place of the mask that transformers requests; outside `over` the mask. Raise StageError
        STRATEGY_NOT_IN_EFFECT for a mask of other tokens.
        """
        rows = self._rows
        if rows is None:
            made: torch.Tensor | None = masking_utils.sdpa_mask(**arguments)
            return made
        asked = arguments["batch_size"], arguments["q_length"], arguments["kv_length"]
        # `use_vmap` is set for models that hide or show more than rows and windows do.
        others = arguments.get("attention_mask") is not None or bool(arguments.get("use_vmap"))
        problem = f"a mask was requested for {asked}{' and more' * others}, and the packs are {rows.shape}"
        expect(asked == (*rows.shape, rows.shape[1]) and not others, self._strategy, "PacksHaveMasks", problem)
        return replace(rows, window=arguments.get("local_size"))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: PackedRows | torch.Tensor | None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention from queries, keys and values of shape (packs, heads, tokens, width), as transformers
        passes them; the output has (packs, tokens, heads, width).
        """
        if not isinstance(attention_mask, PackedRows):
            return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        self._attended += 1
        dropout, scale = float(settings.get("dropout") or 0.0), settings.get("scaling")
        return attend_rows(attention_mask, query, key, value, dropout=dropout, scale=scale), None

    def assert_in_effect(self) -> None:
        """Check after the first forward pass over packs."""
        expect(
            self._attended > 0, self._strategy, "PacksHaveMasks", "no layer computed the rows of packs by themselves"
        )


def pack_attention(model: PreTrainedModel, training: Training, device: torch.device, *, packing: bool) -> PackAttention:
    """Return the attention over packs, and log which one it is. Without `packing` there are none."""
    if not packing:
        return WithMasks()
    why = why_packs_have_masks(
        model.config.model_type, training.arguments, pipeline=training.strategy.pipeline is not None
    )
    if not why and not type(model).__module__.startswith("transformers."):
        why = "the model has code of its own"
    if not why and model.config._attn_implementation == "eager":
        why = "the model's attention is eager"
    if why:
        log.info("Packed rows: attention with a mask of tokens x tokens, as %s.", why)
        return WithMasks()
    slow = _why_not_varlen(model, training, device)
    how = f"a call for each row, as {slow}" if slow else "one call for all rows, by flash attention"
    log.info("Packed rows: attention of each row by itself, without a mask; %s.", how)
    return ByRow(device, "position_ids" if training.strategy.sequence == 1 else ROW_POSITIONS, training.strategy.name)


def _why_not_varlen(model: PreTrainedModel, training: Training, device: torch.device) -> str:
    if training.precision == "fp32":
        return "flash attention computes in 16 bits, and training.precision is fp32"
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = ("attention_dropout", "attn_pdrop")
    dropout = max(float(getattr(config, name, None) or 0.0) for name in names)
    return why_not_varlen(device, head, dropout)


def why_not_varlen(device: torch.device, head: int, dropout: float) -> str:
    """Return the reason why flash attention cannot compute rows of several lengths on `device`; empty: it can.

    `head`: elements of a token's query in one head. `dropout`: probability with which scores are dropped.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return "flash attention for rows of several lengths needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    largest = _LARGEST_HEAD if capability in _LARGE_CHIPS else _LARGEST_HEAD_OF_SMALL_CHIPS
    if capability < BF16_FROM:
        return f"flash attention needs compute capability 8.0, and the GPU has {capability[0]}.{capability[1]}"
    if head % 8 or head > largest:
        return f"flash attention needs heads of a multiple of 8 and at most {largest} elements, and these have {head}"
    return "flash attention for rows of several lengths drops no scores, and the model does" if dropout else ""


def packed_rows(positions: torch.Tensor, device: torch.device) -> PackedRows:
    """Return the rows of packs by their `positions` in host memory, shape (packs, tokens), which count from 0 in each
    row. The host does not wait for the copy to the device.
    """
    packs, tokens = positions.shape
    borders = row_borders(positions)
    starts = torch.from_numpy(borders)
    if device.type == "cuda":
        starts = starts.pin_memory().to(device, non_blocking=True)
    return PackedRows((packs, tokens), tuple(np.diff(borders).tolist()), starts)


def row_borders(positions: torch.Tensor) -> NDArray[np.int32]:
    """Return the first token of each row, counted over all packs, and the number of all tokens."""
    flat = positions.numpy().ravel()
    return np.append(np.flatnonzero(flat == 0), flat.size).astype(np.int32)


def attend_rows(
    rows: PackedRows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Return causal attention of each row, shape (packs, tokens, heads, width), of queries, keys and values of shape
    (packs, heads, tokens, width). Keys and values may have fewer heads, each for as many query heads.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        # Rotary embeddings leave queries and keys in fp32. Autocast knows SDPA, and not the other kernel.
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    packs, heads, tokens, width = query.shape
    # All packs one after the other. Projections have this order in memory, so that nothing is copied.
    flat = [tensor.transpose(1, 2).reshape(packs * tokens, tensor.shape[1], width) for tensor in (query, key, value)]
    if query.dtype != torch.float32 and not why_not_varlen(query.device, width, dropout):
        outputs = _by_one_call(rows, *flat, scale=scale)
    else:
        outputs = _by_call_for_each_row(rows, *flat, dropout=dropout, scale=scale)
    return outputs.view(packs, tokens, heads, width)


def _by_one_call(
    rows: PackedRows, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None
) -> torch.Tensor:
    longest = max(rows.sizes)
    seen = -1 if rows.window is None or rows.window >= longest else rows.window - 1  # before the token itself
    shared = key.shape[1] != query.shape[1]
    checked: dict[str, Any] = {_SHARED_KEYS: shared} if _CHECKS_SHARED_KEYS else {}
    # Not by cuDNN, which torch would prefer on some GPUs: it builds a plan for each number of rows.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        made: Any = varlen_attn(
            query,
            key,
            value,
            rows.starts,
            rows.starts,
            longest,
            longest,
            scale=scale,
            window_size=(seen, 0),
            **checked,
        )
    return made  # type: ignore[no-any-return]


def _by_call_for_each_row(
    rows: PackedRows,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    shared = key.shape[1] != query.shape[1]
    # By `split`, whose backward pass joins all gradients at once.
    parts = zip(*(torch.split(tensor, list(rows.sizes)) for tensor in (query, key, value)), strict=True)
    outputs = []
    for row in parts:
        size, mask = row[0].shape[0], None
        queries, keys, values = (tensor.transpose(0, 1)[None] for tensor in row)
        if rows.window is not None and size > rows.window:
            mask = torch.ones(size, size, dtype=torch.bool, device=query.device).tril().triu(1 - rows.window)
            # With a mask torch's fused kernels take as many heads of keys as of queries.
            keys, values = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (keys, values))
        made = torch.nn.functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=shared and mask is None,
        )
        outputs.append(made[0].transpose(0, 1))
    return torch.cat(outputs)

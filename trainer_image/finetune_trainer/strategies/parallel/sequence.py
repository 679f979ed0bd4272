"""Sequence parallelism: neighbouring processes read the same rows, and each computes a slice of their tokens. For
attention, which looks at whole rows, they exchange tokens for heads and back (Jacobs et al., "DeepSpeed Ulysses", 2023,
section 3).

The strategy around it treats all processes as replicas, and rightly: each has a part of the loss, and the gradients of
all are averaged.

The exchange is our own. DeepSpeed's (0.19, `runtime/sequence_parallel/ulysses_sp.py`) drops masks, so that SDPA would
mix the rows of a pack and see past a sliding window; it needs micro-batches of one size, and key-value heads in the
config, which GPT-2 lacks. torch's `context_parallel` takes no mask with SDPA either, and has kernels for GPUs only.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from finetune_contract.choices import StrategyName
from finetune_contract.layout import FailureClass
from finetune_contract.plans import SEQUENCE_FAMILIES
from finetune_contract.report import TimePart
from finetune_contract.trainer_job import Training
from finetune_trainer.checkpoint.checkpoints import CheckpointPart
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import FileEntry
from finetune_trainer.core.library_patches import attention_over_token_shards
from finetune_trainer.core.token_shards import NOT_LEARNT, ROW_POSITIONS
from finetune_trainer.models.stored_weights import place_on
from finetune_trainer.strategies.parallel.mesh import SEQUENCE, MeshShape
from finetune_trainer.strategies.parallel.whole_answers import fp32_by_block, shared_from_first
from finetune_trainer.strategies.strategy_protocol import (
    HEADS,
    Placed,
    ReplicaStep,
    Strategy,
    WeightsPlace,
    expect,
    refuse_uneven,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

    from finetune_trainer.strategies.shard_files import StagedState

ATTENTION = "sequence_parallel"
"""Name of our attention in a model's config."""
_PROBE_TOKENS = 4
"""Tokens in each slice."""
_PROBE_TOLERANCE = 1e-3
"""Relative and absolute: other kernels round otherwise; a token that is not seen differs by far more."""


class SequenceParallel:
    """A strategy whose processes have slices of rows."""

    def __init__(self, inner: Strategy, training: Training) -> None:
        self.name: StrategyName = inner.name
        self.shards_itself = inner.shards_itself
        self.scales_loss = inner.scales_loss
        self.takes_weights: WeightsPlace = "files"
        self._inner = inner
        self._label = training.strategy.label
        self._device = training.world.device
        self._precision = training.precision
        self.shape = MeshShape.of(training.strategy, training.batch.data_parallel)
        self.attention: ShardedAttention | None = None

    @property
    def communicates_in(self) -> tuple[TimePart, ...]:
        """Both passes, in which attention exchanges tokens, and the parts of the strategy around it."""
        return tuple(dict.fromkeys(("forward", "backward", *self._inner.communicates_in)))

    @property
    def replica_step(self) -> ReplicaStep | None:
        """Replica step of the strategy around it."""
        return self._inner.replica_step

    def arguments(self) -> Mapping[str, object]:
        """Return the arguments of the strategy around it."""
        return self._inner.arguments()

    def prepare_model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Replace attention by one that exchanges tokens for heads; the model's output must stay the same.

        Rank 0 computes that of whole rows. All processes compute that of slices, each with a block at a time in fp32,
        as they all need all weights.
        """
        degree = self.shape.sequence
        refuse_model(model, degree)
        probes = _probes(model, degree)
        expected = shared_from_first(lambda: [_read(model, probe) for probe in probes])
        mesh = self.shape.build(self._device)
        self.attention = ShardedAttention(mesh[SEQUENCE].get_group())
        self.attention.take_over(model)
        mine = self.shape.token_shard(distributed.get_rank())
        for probe, (logits, loss) in zip(probes, expected, strict=True):
            probe_slice = mine.of(probe)
            outputs, own_loss = _read(model, probe_slice)
            tokens, items = probe_slice["input_ids"].shape[1], probe_slice["labels"].ne(NOT_LEARNT).sum()
            wanted = logits[:, mine.index * tokens :][:, :tokens]
            shares = torch.stack([own_loss * items, items.float()])
            distributed.all_reduce(shares, group=mesh[SEQUENCE].get_group())
            same = _close(outputs[:, : wanted.shape[1]], wanted) and _close(shares[0] / shares[1], loss)
            everywhere = torch.tensor([same], dtype=torch.int32)
            distributed.all_reduce(everywhere, op=distributed.ReduceOp.MIN)
            # Fails for a model that mixes tokens outside attention, for example.
            problem = f"the {type(model).__name__} computes different logits when its rows are cut into slices"
            expect(bool(everywhere), self._label, "OtherAnswers", problem)
        if self._inner.takes_weights == "device":
            place_on(self._device, model, self._precision)
        return self._inner.prepare_model(model)

    def assert_in_effect(self, placed: Placed) -> None:
        """Expect the strategy around it in effect, and attention that exchanges slices for whole rows."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._inner.assert_in_effect(placed)
        size = self.shape.size
        problem = f"the mesh has {size} of {placed.world_size} processes"
        expect(size == placed.world_size, self._label, "WrongMesh", problem)
        named = placed.model.config.get_text_config()._attn_implementation
        known: Mapping[str, object] = ALL_ATTENTION_FUNCTIONS
        ours = self.attention is not None and known.get(named) == self.attention.attend
        expect(ours, self._label, "NotSequenceParallel", f"the model's attention is {named}")
        assert self.attention is not None
        degree, own, whole = self.attention.degree, self.attention.own_tokens, self.attention.whole_tokens
        problem = f"attention saw {own} tokens of a row of {whole} in each of {degree} processes"
        right = degree == self.shape.sequence and 0 < own * degree == whole
        expect(right, self._label, "NotSliced", f"{problem}, planned are {self.shape.sequence}")

    def accumulating(self, placed: Placed) -> AbstractContextManager[Any]:
        """Return the context of the strategy around it."""
        return self._inner.accumulating(placed)

    def write_weights(self, placed: Placed, path: Path) -> FileEntry | None:
        """Write as the strategy around it."""
        return self._inner.write_weights(placed, path)

    def save(self, placed: Placed, folder: Path) -> Mapping[str, FileEntry]:
        """Save as the strategy around it: the state does not depend on the slices."""
        return self._inner.save(placed, folder)

    def stage(self, placed: Placed) -> StagedState:
        """Copy the state of the inner strategy."""
        return self._inner.stage(placed)

    def load(self, placed: Placed, part: CheckpointPart) -> None:
        """Load as the strategy around it."""
        self._inner.load(placed, part)

    def why_not_from(self, manifest_strategy: str, manifest_world_size: int, world_size: int) -> str | None:
        """Decide as the strategy around it."""
        return self._inner.why_not_from(manifest_strategy, manifest_world_size, world_size)


# ------------------------------------------------------------------------------------------------------------ attention


class ShardedAttention:
    """Attention over whole rows of which each process of a group has a slice: SDPA for some of the heads."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.degree = distributed.get_world_size(group)
        self.own_tokens = 0
        """Tokens of a row on this process in the last call."""
        self.whole_tokens = 0
        """Tokens of the row after the exchange."""
        self._row_positions: torch.Tensor | None = None
        """Positions in whole rows of the current pass; None: no row is a pack."""

    def take_over(self, model: PreTrainedModel) -> None:
        """Become the attention of `model`, whose inputs are slices from then on."""
        attention_over_token_shards.until_end(self.attend, self.mask)
        model.set_attn_implementation(ATTENTION)
        model.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._row_positions = kwargs.get(ROW_POSITIONS)
        given = {name: value for name, value in kwargs.items() if name != ROW_POSITIONS}
        # Without a mask transformers searches for the borders of packs, and would miss some in a slice.
        return args, {**given, "attention_mask": torch.ones_like(given["input_ids"])}

    def mask(
        self,
        batch_size: int,
        q_length: int,
        mask_function: Callable[..., Any],
        allow_is_causal_skip: bool = True,
        local_size: int | None = None,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        **rest: Any,
    ) -> torch.Tensor | None:
        """Return the mask of whole rows, where transformers requests that of a slice of `q_length` tokens; None: a
        token sees itself and all before it.

        `mask_function` is the model's own, of causal and sliding attention.
        """
        from transformers import AttentionMaskInterface
        from transformers.masking_utils import find_packed_sequence_indices, packed_sequence_compatibility_function

        length, positions = q_length * self.degree, self._row_positions
        if positions is not None and (packs := find_packed_sequence_indices(positions)) is not None:
            mask_function = packed_sequence_compatibility_function(mask_function, positions, packs)
            allow_is_causal_skip = False
        # As registered, because rows of a pack may be computed by themselves (`training/passes/packed_attention.py`).
        masks: Any = AttentionMaskInterface
        made: torch.Tensor | None = masks()["sdpa"](
            batch_size=batch_size,
            q_length=length,
            kv_length=length,
            mask_function=mask_function,
            allow_is_causal_skip=allow_is_causal_skip,
            local_size=local_size,
            use_vmap=use_vmap,
            device=device,
        )
        return made

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention from queries, keys and values of shape (rows, heads, tokens, width), as transformers passes
        them; the output has (rows, tokens, heads, width).
        """
        from transformers import AttentionInterface

        queries, keys, values = (self._whole_rows(tensor) for tensor in (query, key, value))
        self.own_tokens, self.whole_tokens = query.shape[2], queries.shape[2]
        attentions: Any = AttentionInterface
        outputs, _ = attentions()["sdpa"](module, queries, keys, values, attention_mask, **settings)
        return self._own_tokens(outputs), None

    def _whole_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Exchange (rows, all heads, own tokens, width) -> (rows, own heads, all tokens, width)."""
        rows, heads, tokens, width = values.shape
        sent = values.reshape(rows, self.degree, heads // self.degree, tokens, width).movedim(1, 0)
        received: torch.Tensor = _Exchange.apply(self._group, sent)
        return received.movedim(0, 2).reshape(rows, heads // self.degree, self.degree * tokens, width)

    def _own_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Exchange (rows, all tokens, own heads, width) -> (rows, own tokens, all heads, width)."""
        rows, tokens, heads, width = values.shape
        sent = values.reshape(rows, self.degree, tokens // self.degree, heads, width).movedim(1, 0)
        received: torch.Tensor = _Exchange.apply(self._group, sent)
        return received.movedim(0, 2).reshape(rows, tokens // self.degree, self.degree * heads, width)


class _Exchange(torch.autograd.Function):
    """All-to-all: sends the n-th part of the first dimension to the n-th process, and receives theirs in order.
    Gradients go back in the same way.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, sent: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _Exchange.apply(ctx.group, *gradients)


# -------------------------------------------------------------------------------------------------------------- refusal


def refuse_model(model: PreTrainedModel, degree: int) -> None:
    """Raise StageError CONFIG for a model whose attention cannot get whole rows, or whose heads cannot be split."""
    kind = type(model)
    why = ""
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        why = "it accepts no positions, and would count those of a slice from 0"
    elif not hasattr(sys.modules[kind.__module__], "create_causal_mask") or not kind._supports_attention_backend:
        why = "transformers cannot replace its attention"
    elif model.config._attn_implementation != "sdpa":
        why = f"its attention is {model.config._attn_implementation}, and sdpa is needed"
    if why:
        raise StageError(
            FailureClass.CONFIG,
            "NoSlicedAttention",
            f"parallelism.sequence is {degree}, and {kind.__name__} cannot read slices of rows: {why}. "
            f"Models of type {', '.join(SEQUENCE_FAMILIES)} can.",
            "Set parallelism.sequence to 1, and strategy fsdp or deepspeed or a shorter preparation.maxLength.",
        )
    config = model.config.get_text_config()
    refuse_uneven("parallelism.sequence", degree, {name: getattr(config, name, None) for name in HEADS})


# ---------------------------------------------------------------------------------------------------------------- probe


def _probes(model: PreTrainedModel, slices: int) -> list[dict[str, torch.Tensor]]:
    """Return a row and a packed row, whose tokens fill all slices but one place."""
    tokens, vocabulary = slices * _PROBE_TOKENS - 1, model.config.get_text_config().vocab_size
    ids = torch.arange(1, tokens + 1, device=model.device).remainder(vocabulary).unsqueeze(0)
    row = {"input_ids": ids, "labels": ids}
    first = _PROBE_TOKENS - 1
    positions = torch.cat([torch.arange(first), torch.arange(tokens - first)]).to(model.device)
    return [row, {**row, "position_ids": positions.unsqueeze(0)}]


def _read(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and loss, computed in fp32 without dropout."""
    training = model.training
    model.train(False)
    with fp32_by_block(model):
        outputs = model(**batch, use_cache=False)
    model.train(training)
    return outputs.logits.float(), outputs.loss.float()


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE)

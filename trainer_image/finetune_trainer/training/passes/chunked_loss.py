"""Loss of a decoder without the logits of all tokens: they are computed for some tokens at a time, in the forward
pass and again in the backward pass.

The head computes the loss where it would compute logits. So it runs inside the module that owns its weights, and
strategies that gather weights by a module's hooks (ZeRO-3, FSDP) have them there in both passes. Where tensor ranks
divide the head over the vocabulary, each has the logits of its part only, and the cross-entropy is computed from all
parts (torch's `loss_parallel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from finetune_contract.arguments import needs_whole_logits
from finetune_contract.plans import CHUNKED_LOSS_FAMILIES, chunks_loss, loss_tokens
from finetune_contract.trainer_job import Training
from finetune_trainer.core.library_patches import sharded_cross_entropy
from finetune_trainer.core.token_shards import NOT_LEARNT
from finetune_trainer.training.passes.objective import following, smoothed


def chunk_loss(model: PreTrainedModel, training: Training, *, of_rows: bool = False) -> ChunkedLoss | None:
    """Have `model` compute its loss in chunks, if it can: a decoder of a known family whose layers are not divided into
    stages, nor split for smoothed labels or the loss of rows. `of_rows`: return the loss of each row, for objectives
    that compare rows. None: it computes all logits at once.
    """
    others, smoothing = needs_whole_logits(training.arguments), training.label_smoothing
    strategy = training.strategy
    staged, plain = strategy.pipeline is not None, not smoothing and not of_rows
    chunks = chunks_loss(tensor=strategy.tensor, staged=staged, plain=plain)
    if not chunks or others or not _is_known_decoder(model):
        return None
    return ChunkedLoss(model, smoothing, of_rows=of_rows)


def _is_known_decoder(model: PreTrainedModel) -> bool:
    """Return whether `model` is a decoder whose loss is known; code that comes with a model may compute another one."""
    kind = type(model)
    known = kind.__module__.startswith("transformers.") and kind.__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return known and model.config.model_type in CHUNKED_LOSS_FAMILIES and model.loss_function is ForCausalLMLoss


class ChunkedLoss:
    """Cross-entropy of the following token, inside the head of a decoder."""

    def __init__(self, model: PreTrainedModel, smoothing: float = 0.0, *, of_rows: bool = False) -> None:
        """Replace the head's forward pass and the loss function of `model`. The loss is the mean over labels that are
        smoothed by `smoothing`, shape (), or with `of_rows` the sum of each row, shape (rows,).
        """
        self._smoothing = smoothing
        self._of_rows = of_rows
        head = cast(nn.Module, cast(Any, model).get_output_embeddings())
        self._given_head = head.forward
        self._given_loss = model.loss_function
        self._labels: torch.Tensor | None = None
        self._loss: torch.Tensor | None = None
        self.chunks = 0
        """Chunks of the last loss; 0: it was computed from all logits."""
        head.forward = self._head
        model.loss_function = self._loss_function
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after, always_call=True)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        labels = kwargs.get("labels") if torch.is_grad_enabled() else None
        if labels is not None:
            self._labels = following(kwargs)

    def _after(self, *_: Any) -> None:
        self._labels = self._loss = None

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the loss in place of logits if there are labels and more than one chunk of logits."""
        labels = self._labels
        tokens = loss_tokens(self._vocabulary)
        self.chunks = 0
        if labels is None or labels.numel() <= tokens or hidden.shape[:-1].numel() != labels.numel():
            return cast(torch.Tensor, self._given_head(hidden))
        parts = list(zip(torch.split(hidden.flatten(0, 1), tokens), torch.split(labels.flatten(), tokens), strict=True))
        self.chunks = len(parts)
        losses = [checkpoint(self._judge, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        loss = self._reduced(losses, labels)
        if isinstance(hidden, DTensor):
            # Around a head divided over the vocabulary, transformers expects a DTensor, and returns its local part.
            loss = DTensor.from_local(loss, hidden.device_mesh, hidden.placements)
        self._loss = loss
        return loss

    @property
    def _vocabulary(self) -> int:
        return int(cast(Any, self._given_head).__self__.out_features)

    def _judge(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of a chunk, from shapes (tokens, width) and (tokens,): see `_of_logits`."""
        return self._of_logits(cast(torch.Tensor, self._given_head(hidden)), labels)

    def _of_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum over tokens, shape (); for losses of rows that of each token, 0 where nothing is learnt."""
        if isinstance(logits, DTensor):
            sharded_cross_entropy.until_end()
        loss = smoothed(logits, labels, self._smoothing, "none" if self._of_rows else "sum")
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def _reduced(self, losses: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        if self._of_rows:
            return torch.cat(losses).view(labels.shape).sum(1)
        return torch.stack(losses).sum() / labels.ne(NOT_LEARNT).sum()

    def _loss_function(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._loss is not None:
            return logits  # what the head returned, behind the hooks of a strategy
        if self._labels is not None and (self._smoothing or self._of_rows):
            return self._reduced([self._of_logits(logits, self._labels)], self._labels)
        return cast(torch.Tensor, self._given_loss(logits, labels, *args, **kwargs))

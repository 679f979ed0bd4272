"""The loss of a decoder without the logits of all tokens: they are computed for some tokens at a time, in the forward
pass and again in the backward pass.

The head computes the loss where it would compute logits. So it runs inside the module that owns its weights, and
strategies that gather weights by a module's hooks (ZeRO-3, FSDP) have them there in both passes. Where tensor ranks
divide the head over the vocabulary, each has the logits of its part only, and the cross-entropy is computed from all
parts (torch's `loss_parallel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from finetune_contract.arguments import needs_whole_logits
from finetune_contract.plans import CHUNKED_LOSS_FAMILIES, loss_tokens
from finetune_contract.trainer_job import Training
from finetune_trainer.data.slices import FOLLOWING, NOT_LEARNT


def chunk_loss(model: PreTrainedModel, training: Training) -> ChunkedLoss | None:
    """Have `model` compute its loss in chunks, if it can: a decoder of a known family whose own loss is minimised and
    whose layers are not divided into stages. None: it computes all logits at once.
    """
    others = needs_whole_logits(training.arguments)
    whole = training.strategy.pipeline is None
    return ChunkedLoss(model) if whole and not others and _is_known_decoder(model) else None


def _is_known_decoder(model: PreTrainedModel) -> bool:
    """Return whether `model` is a decoder whose loss is known; code that comes with a model may compute another one."""
    kind = type(model)
    known = kind.__module__.startswith("transformers.") and kind.__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return known and model.config.model_type in CHUNKED_LOSS_FAMILIES and model.loss_function is ForCausalLMLoss


class ChunkedLoss:
    """Cross-entropy of the following token, inside the head of a decoder."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Replace the head's forward pass and the loss function of `model`."""
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
            following = kwargs.get(FOLLOWING)
            shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=NOT_LEARNT)
            self._labels = (shifted if following is None else following).flatten()

    def _after(self, *_: Any) -> None:
        self._labels = self._loss = None

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the loss, shape (), in place of logits if there are labels and more than one chunk of logits."""
        labels = self._labels
        tokens = loss_tokens(self._vocabulary)
        self.chunks = 0
        if labels is None or labels.numel() <= tokens or hidden.shape[:-1].numel() != labels.numel():
            return cast(torch.Tensor, self._given_head(hidden))
        parts = list(zip(torch.split(hidden.flatten(0, 1), tokens), torch.split(labels, tokens), strict=True))
        self.chunks = len(parts)
        sums = [checkpoint(self._sum, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        loss = torch.stack(sums).sum() / labels.ne(NOT_LEARNT).sum()
        # Around a head that is divided over the vocabulary, transformers expects a DTensor, and returns its local part.
        divided = isinstance(hidden, DTensor)
        self._loss = DTensor.from_local(loss, hidden.device_mesh, hidden.placements) if divided else loss
        return self._loss

    @property
    def _vocabulary(self) -> int:
        return int(cast(Any, self._given_head).__self__.out_features)

    def _sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy summed over tokens, each of shape (tokens, width) and (tokens,)."""
        logits = cast(torch.Tensor, self._given_head(hidden)).float()
        if isinstance(logits, DTensor):
            _divide_cross_entropy()
        found = nn.functional.cross_entropy(logits, labels, ignore_index=NOT_LEARNT, reduction="sum")
        return found.to_local() if isinstance(found, DTensor) else found

    def _loss_function(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._loss is not None:
            return logits  # what the head returned, behind the hooks of a strategy
        return cast(torch.Tensor, self._given_loss(logits, labels, *args, **kwargs))


@cache
def _divide_cross_entropy() -> AbstractContextManager[None]:
    """Have torch compute cross-entropies of logits that are divided over the vocabulary without gathering them, for the
    rest of this process: the context must be entered in the backward pass, too, which a checkpoint resumes anywhere.
    """
    context = loss_parallel()
    context.__enter__()
    return context

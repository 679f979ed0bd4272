"""Slices of a batch's tokens for several processes: each has equally many of every row, the first process the first
ones.

For models that read from left to right. The label of a token is learnt at the token before it, which another process
may have: so labels are shifted before rows are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FOLLOWING = "shift_labels"
"""Key of a batch, named as in the losses of transformers: for each token the label of the next one."""
LABELS = ("labels", FOLLOWING)
ROW_POSITIONS = "row_positions"
"""Key of a batch with packs: `position_ids` of whole rows, which keep the features of a pack apart."""
NOT_LEARNT = -100
"""Label that the losses of transformers ignore."""


@dataclass(frozen=True)
class TokenShard:
    """Slice of each row's tokens that this process has."""

    index: int = 0
    count: int = 1
    """Slices of a row; with 1 batches stay as they are."""

    def of(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this process's part of a batch that is padded on the right: shape (rows, tokens / count). Rows are
        padded further where `count` does not divide their tokens.

        It has no mask: the padding follows the tokens of the row, which do not look ahead.
        """
        import torch

        if self.count == 1:
            return dict(batch)
        ids = batch["input_ids"]
        rows, width = ids.shape
        more = -width % self.count
        part = slice(self.index * (width + more) // self.count, (self.index + 1) * (width + more) // self.count)

        def cut(values: torch.Tensor, fill: int) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, more), value=fill)[:, part].contiguous()

        sliced = {"input_ids": cut(ids, 0)}
        if "position_ids" in batch:
            whole = torch.nn.functional.pad(batch["position_ids"], (0, more))
            sliced |= {"position_ids": whole[:, part].contiguous(), ROW_POSITIONS: whole}
        else:
            # The model may have no position behind those of its longest row.
            positions = torch.arange(width, device=ids.device).expand(rows, width)
            sliced["position_ids"] = cut(positions, width - 1)
        if "labels" in batch:
            following = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=NOT_LEARNT)
            # The losses use the latter, but require the former.
            sliced |= dict.fromkeys(LABELS, cut(following, NOT_LEARNT))
        return sliced


WHOLE = TokenShard()

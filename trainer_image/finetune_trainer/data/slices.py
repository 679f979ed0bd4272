"""The tokens of a batch, dealt out to several processes: each has as many of every row, the first process the first
ones.

For models that read from left to right. The label of a token is learnt at the token before it, which another process
may have: so labels move to where they are learnt before rows are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FOLLOWING = "shift_labels"
"""Of a batch, as the losses of transformers call it: for each token the label of the one that follows it."""
LABELS = ("labels", FOLLOWING)
ROW_POSITIONS = "row_positions"
"""Of a batch with packs: `position_ids` of whole rows, by which a model tells the features of a pack apart."""
NOT_LEARNT = -100
"""Of labels: what the losses of transformers leave out."""


@dataclass(frozen=True)
class TokenSlice:
    """Which tokens of each row this process has."""

    index: int = 0
    count: int = 1
    """Slices of a row; with 1 batches stay as they are."""

    def of(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This process's part of a batch that is filled up on the right: shape (rows, tokens / count). Rows are filled
        up further where `count` does not divide their tokens.

        There is no mask in it: what is filled up follows the tokens of the row, which do not look ahead.
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

        own = {"input_ids": cut(ids, 0)}
        if "position_ids" in batch:
            whole = torch.nn.functional.pad(batch["position_ids"], (0, more))
            own |= {"position_ids": whole[:, part].contiguous(), ROW_POSITIONS: whole}
        else:
            # The model may have no position behind those of its longest row.
            positions = torch.arange(width, device=ids.device).expand(rows, width)
            own["position_ids"] = cut(positions, width - 1)
        if "labels" in batch:
            following = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=NOT_LEARNT)
            # The losses take the latter and ask for the former.
            own |= dict.fromkeys(LABELS, cut(following, NOT_LEARNT))
        return own


WHOLE = TokenSlice()

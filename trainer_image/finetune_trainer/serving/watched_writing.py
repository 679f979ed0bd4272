"""One batch that a model writes for requests: it makes room for others, ends early, and tells how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_trainer.serving.turns import Turns
from finetune_trainer.tasks.task_protocol import Answer

if TYPE_CHECKING:
    import torch

_TOKENS, _ENDED = "written_tokens", "ended"


@dataclass(frozen=True)
class Finish:
    """How the text of a row ended."""

    tokens: int
    """Tokens written, the one that ends the text among them."""
    ended: bool
    """True: the model ended it. False: it reached the largest length."""

    @property
    def reason(self) -> str:
        """As OpenAI's API calls it."""
        return "stop" if self.ended else "length"


@dataclass
class WatchedWriting:
    """See `writing.Watch`."""

    turns: Turns
    stopped: Callable[[], bool]
    """Returns True when no client waits for the rest."""
    put: Callable[[str], None] | None = None
    """Takes pieces of the text of a single row as they are written."""
    ends: frozenset[int] = frozenset()
    tokenizer: Any = None
    beams: int = 1
    others_seconds: float = 0.0
    """Time in which others computed."""
    finishes: list[Finish] = field(default_factory=list)

    @property
    def streams(self) -> bool:
        """Whether pieces come while the text is written: beams are settled at the end."""
        return self.put is not None and self.beams == 1

    def arguments(self) -> Mapping[str, Any]:
        """See `writing.Watch`."""
        from transformers import StoppingCriteriaList

        found: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([self._between])}
        if self.streams:
            found["streamer"] = self._streamer()
        return found

    def told(self, tokens: torch.Tensor) -> Answer:
        """See `writing.Watch`."""
        for count, token in enumerate(tokens.tolist(), 1):
            if token in self.ends:
                return {_TOKENS: np.array(count), _ENDED: np.array(True)}
        return {_TOKENS: np.array(len(tokens)), _ENDED: np.array(False)}

    def finish(self, answers: Sequence[Answer]) -> None:
        """Keep how the rows ended. `answers`: those of their last features."""
        self.finishes = [Finish(int(answer[_TOKENS]), bool(answer[_ENDED])) for answer in answers]

    def _between(self, tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """After each token: others first; tells for each row whether to stop."""
        import torch

        self.others_seconds += self.turns.hand_on()
        return torch.full((len(tokens),), self.stopped(), device=tokens.device)

    def _streamer(self) -> Any:
        from transformers import TextStreamer

        put = self.put

        class Pieces(TextStreamer):
            """Hands text to the request instead of printing it."""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                if text and put is not None:
                    put(text)

        return Pieces(self.tokenizer, skip_prompt=True, skip_special_tokens=True)

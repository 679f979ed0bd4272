"""One batch that a model writes for requests: yields to others, can end early, and reports its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_trainer.serving.fair_lock import FairLock
from finetune_trainer.serving.stop_texts import StopFilter, first_stop
from finetune_trainer.tasks.task_protocol import Answer

if TYPE_CHECKING:
    import torch

_SPARE_TOKENS = 8
"""Tokens without text that may stand among those of a stop."""
_TOKENS, _ENDED = "written_tokens", "ended"


@dataclass(frozen=True)
class Finish:
    """End of a row's text."""

    tokens: int
    """Tokens written, including the one that ends the text."""
    ended: bool
    """True: the model ended it. False: it reached the largest length."""

    @property
    def reason(self) -> str:
        """Reason as named in OpenAI's API."""
        return "stop" if self.ended else "length"


@dataclass
class WatchedWriting:
    """See `writing.Watch`."""

    turns: FairLock
    stopped: Callable[[], bool]
    """Returns True if no client waits for the rest."""
    resume: Callable[[], None] = lambda: None
    """Called when the turn is back: others may have computed with another adapter."""
    put: Callable[[str], None] | None = None
    """Receives pieces of a single row's text as they are written."""
    ends: frozenset[int] = frozenset()
    tokenizer: Any = None
    beams: int = 1
    others_seconds: float = 0.0
    """Time in which others computed."""
    stops: Sequence[str] = ()
    """See `Form.stop`."""
    finishes: list[Finish] = field(default_factory=list)
    _prompt: int | None = None
    """Tokens before the first written one."""
    _stopped_after: dict[int, int] = field(default_factory=dict)
    """Index of a row in the batch -> tokens after which a stop was found."""
    _rows_seen: int = 0

    @property
    def streams(self) -> bool:
        """True if pieces arrive while the text is written; with beams it is decided at the end."""
        return self.put is not None and self.beams == 1

    def arguments(self) -> Mapping[str, Any]:
        """See `writing.Watch`."""
        from transformers import StoppingCriteriaList

        self._prompt, self._stopped_after, self._rows_seen = None, {}, 0
        arguments: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([self._between])}
        if self.streams:
            arguments["streamer"] = self._streamer()
        return arguments

    def fields_of(self, tokens: torch.Tensor) -> Answer:
        """See `writing.Watch`. Must be called in the order of the rows."""
        stopped_after = self._stopped_after.get(self._rows_seen)
        self._rows_seen += 1
        for count, token in enumerate(tokens.tolist(), 1):
            if token in self.ends or count == stopped_after:
                return {_TOKENS: np.array(count), _ENDED: np.array(True)}
        return {_TOKENS: np.array(len(tokens)), _ENDED: np.array(False)}

    def finish(self, answers: Sequence[Answer]) -> None:
        """Record the ends of the rows. `answers`: those of their last features."""
        self.finishes = [Finish(int(answer[_TOKENS]), bool(answer[_ENDED])) for answer in answers]

    def _between(self, tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Give others a turn after each token; return for each row whether to stop."""
        import torch

        self.others_seconds += self.turns.hand_on()
        self.resume()
        if self.stops and self.beams == 1:
            self._look_for_stops(tokens)
        over = torch.full((len(tokens),), self.stopped(), device=tokens.device)
        if self._stopped_after:
            over[list(self._stopped_after)] = True
        return over

    def _look_for_stops(self, tokens: torch.Tensor) -> None:
        """Search for stops in the end of each row: a token is at least a byte of text, or special."""
        if self._prompt is None:
            self._prompt = tokens.shape[1] - 1
        written = tokens.shape[1] - self._prompt
        tail = min(written, max(len(stop.encode()) for stop in self.stops) + _SPARE_TOKENS)
        texts = self.tokenizer.batch_decode(tokens[:, -tail:], skip_special_tokens=True)
        for row, text in enumerate(texts):
            if row not in self._stopped_after and first_stop(text, self.stops) is not None:
                self._stopped_after[row] = written

    def _streamer(self) -> Any:
        from transformers import TextStreamer

        put, stops = self.put, StopFilter(self.stops)

        class Pieces(TextStreamer):
            """Passes text to the request instead of printing it."""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                if put is not None and (shown := stops.passed(text, last=stream_end)):
                    put(shown)

        return Pieces(self.tokenizer, skip_prompt=True, skip_special_tokens=True)

"""Backend of continuous batching: each text is generated in a slot of the batch, which another row takes when it ends.

A batch of `generate` runs until its longest text ends, and computes the rows that ended before as well. With slots, the
number of passes is about that of the tokens, divided by the slots. Each token is the likeliest one, as in `generate`
without beams and sampling. Which rows share a pass depends on the rows and the budget of tokens alone, never on time.

transformers' own continuous batching (5.23) packs all rows into one sequence. Without flash attention, each row then
multiplies the keys of all others before they are masked. On a CPU, with 32 rows and prompts of 160 tokens, it was 1.08
times as fast as `generate`, and these slots 3.18 times (tests/benchmarks/continuous_batching.py).
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune_trainer.data.batches import inference_batches
from finetune_trainer.predict.backends.backend_protocol import Batch, Machine, TextSettings, with_texts

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import Cache, GenerationConfig, PretrainedConfig, PreTrainedModel

    from finetune_trainer.predict.backends.slot_cache import Slots

log = logging.getLogger(__name__)

REFILL_SHARE = 4
"""Slots are refilled once one of so many is free. A pass over new prompts takes about as long as one over all slots;
the best share is about sqrt(2 / mean length of the texts).
"""
CALL_BATCHES = 64
"""Rows of one call, in batches: slots stay empty at the end of a call, and a call holds all its prompts and texts."""
_WITHOUT_EFFECT = frozenset(
    {
        "_from_model_config", "bos_token_id", "decoder_start_token_id", "do_sample", "early_stopping", "eos_token_id",
        "epsilon_cutoff", "eta_cutoff", "length_penalty", "max_length", "max_new_tokens", "min_p", "num_beams",
        "output_attentions", "output_hidden_states", "output_logits", "output_scores", "pad_token_id", "temperature",
        "top_h", "top_k", "top_p", "transformers_version", "typical_p", "use_cache",
    }
)  # fmt: skip
"""Fields of a generation config that the job overrides, or that concern beams and sampling alone."""
_NEUTRAL = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0}
"""Values that change nothing."""
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass
class SlotGenerator:
    """Generates the likeliest texts in slots, with the part of transformers' interface that generation needs."""

    model: PreTrainedModel
    slot_tokens: int
    """Most tokens of all slots together: slots x (longest prompt + longest text)."""
    refused: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    ended: Callable[[int, int], None] = lambda _rows, _tokens: None
    """Called with the number of a call's rows whose texts have ended, and that of their tokens."""

    @property
    def config(self) -> PretrainedConfig:
        """Config of the model."""
        return self.model.config

    @property
    def generation_config(self) -> GenerationConfig | None:
        """Generation config of the model."""
        return self.model.generation_config

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs."""
        return cast("torch.device", cast(Any, self.model).device)

    def calls(self, tokens: NDArray[np.int64], batch_tokens: int) -> Sequence[NDArray[np.int64]]:
        """See `TextGenerator.calls`."""
        return inference_batches(tokens, batch_tokens=CALL_BATCHES * batch_tokens)

    def generate(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pad_token_id: int,
        eos_token_id: Sequence[int] | None,
        max_new_tokens: int,
        num_beams: int = 1,
        do_sample: bool = False,
    ) -> torch.Tensor:
        """Return prompts and generated tokens, shape (rows, tokens), padded at the end.

        Halves the slots when they exceed the GPU's memory; torch.OutOfMemoryError if a single one does.
        """
        assert num_beams == 1, "slots have no beam search"
        assert not do_sample, "slots do not sample"
        prompts = [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        run = _Run(self, prompts, pad_token_id, frozenset(eos_token_id or ()), max_new_tokens)
        while not run.complete():
            self._halve()
        return with_texts(input_ids, run.texts, pad_token_id)

    def _halve(self) -> None:
        import torch

        torch.cuda.empty_cache()
        self.slot_tokens //= 2
        log.warning("The slots do not fit the GPU's memory: halving their tokens to %d from here on.", self.slot_tokens)


@dataclass
class _Run:
    """Texts of one call."""

    generator: SlotGenerator
    prompts: Sequence[torch.Tensor]
    """Token ids of each row, without padding."""
    pad: int
    ends: frozenset[int]
    most: int
    """Most tokens of a text."""
    texts: list[list[int]] = field(init=False)
    """Generated tokens of each row so far."""
    _waiting: deque[int] = field(init=False)
    """Rows without a slot, longest prompt first: neighbours need little padding, a lack of memory shows at once."""
    _accepts: frozenset[str] = field(init=False)
    """Arguments of the model's forward pass."""
    _ended: int = 0
    """Number of texts that have ended."""
    _ended_tokens: int = 0
    """Number of their tokens."""

    def __post_init__(self) -> None:
        self.texts = [[] for _ in self.prompts]
        self._waiting = deque(sorted(range(len(self.prompts)), key=lambda row: -len(self.prompts[row])))
        self._accepts = frozenset(inspect.signature(self.generator.model.forward).parameters)

    def complete(self) -> bool:
        """Generate all texts; return False if the slots exceed the memory. Rows in progress then wait again."""
        import torch

        slots: Slots | None = None
        try:
            with torch.inference_mode():
                while slots is None or slots.live or self._waiting:
                    slots = self._next(slots)
        except torch.OutOfMemoryError:
            if self._slots_of(max(map(len, self.prompts))) == 1:
                raise
        else:
            return True
        unfinished = [row for row, text in enumerate(self.texts) if not self._has_ended(text)]
        for row in unfinished:
            self.texts[row].clear()
        self._waiting = deque(sorted(unfinished, key=lambda row: -len(self.prompts[row])))
        return False

    def _next(self, slots: Slots | None) -> Slots:
        """Do one pass, over new prompts or over all slots."""
        import torch

        live = [] if slots is None else slots.live
        new = self._rows_to_begin(slots, live)
        if new:
            return self._begun(new, slots, live)
        assert slots is not None
        if len(live) <= len(slots.rows) * (1 - 1 / REFILL_SHARE):
            slots = self._merged([slots])
        slots.mask = torch.cat([slots.mask, torch.ones_like(slots.last)], 1)
        self._passed(slots, slots.last)
        return slots

    def _rows_to_begin(self, slots: Slots | None, live: Sequence[int]) -> list[int]:
        """Take waiting rows for free slots, if enough slots are free."""
        if not self._waiting:
            return []
        lengths = [len(self.prompts[slots.rows[slot]]) for slot in live] if slots is not None else []
        capacity = self._slots_of(max([len(self.prompts[self._waiting[0]]), *lengths]))
        free = capacity - len(live)
        if live and free < max(1, capacity // REFILL_SHARE):
            return []
        return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]

    def _slots_of(self, longest: int) -> int:
        """Return the number of slots for prompts of at most so many tokens."""
        return max(1, self.generator.slot_tokens // (longest + self.most))

    def _begun(self, rows: Sequence[int], slots: Slots | None, live: Sequence[int]) -> Slots:
        """Return slots with the first tokens of `rows` beside the live ones."""
        import torch

        from finetune_trainer.predict.backends.slot_cache import Slots

        prompts = [self.prompts[row] for row in rows]
        longest = max(map(len, prompts))
        ids = prompts[0].new_full((len(prompts), longest), self.pad)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        new = Slots(self._empty_cache(), list(rows), mask, ids[:, -1:])
        self._passed(new, ids)
        if slots is None or not live:
            return new
        return self._merged([slots, new])

    def _merged(self, parts: Sequence[Slots]) -> Slots:
        from finetune_trainer.predict.backends.slot_cache import merged

        return merged(parts, self._empty_cache())

    def _empty_cache(self) -> Cache:
        from finetune_trainer.predict.backends.slot_cache import empty_cache

        return empty_cache(self.generator.model)

    def _passed(self, slots: Slots, ids: torch.Tensor) -> None:
        """Compute `ids`, shape (slots, tokens), whose columns the mask has already, and append the likeliest token to
        each live text.
        """
        from finetune_trainer.predict.backends.slot_cache import ENDED

        positions = (slots.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        further = {"position_ids": positions, "logits_to_keep": 1}
        output = cast(Any, self.generator.model)(
            input_ids=ids,
            attention_mask=slots.mask,
            past_key_values=slots.cache,
            use_cache=True,
            **{name: value for name, value in further.items() if name in self._accepts},
        )
        slots.last = output.logits[:, -1].argmax(-1, keepdim=True).to(ids.device)
        tokens = slots.last[:, 0].tolist()
        before = self._ended
        for slot in slots.live:
            text = self.texts[slots.rows[slot]]
            text.append(tokens[slot])
            if self._has_ended(text):
                slots.rows[slot] = ENDED
                self._ended += 1
                self._ended_tokens += len(text)
        if self._ended > before:
            self.generator.ended(self._ended, self._ended_tokens)

    def _has_ended(self, text: Sequence[int]) -> bool:
        return len(text) == self.most or (bool(text) and text[-1] in self.ends)


@dataclass(frozen=True)
class ContinuousBatchingBackend:
    """Likeliest texts by the job's own model, in slots."""

    settings: TextSettings | None = None
    """None: the answers are no texts."""
    name: str = "continuous-batching"
    lossy: bool = False

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason if the texts would differ from those of `generate`."""
        if self.settings is None:
            return "the answers are no generated texts"
        if self.settings.num_beams > 1:
            return f"generation.numBeams is {self.settings.num_beams}, and a slot has no beams"
        if self.settings.temperature > 0:
            return f"generation.temperature is {self.settings.temperature}, and samples depend on the batch"
        return _unsuitable_model(model) or _unsuitable_settings(model.generation_config)

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> SlotGenerator:
        """Return a generator with as many slots as fit the tokens of a batch."""
        assert self.settings is not None
        return SlotGenerator(model, self.settings.batch_tokens)


CONTINUOUS_BATCHING = ContinuousBatchingBackend()


def _unsuitable_model(model: PreTrainedModel) -> str | None:
    from transformers import GenerationMixin

    from finetune_trainer.predict.backends.slot_cache import unsupported_layers

    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} has an encoder"
    if cast(Any, type(model)).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation:
        return f"{name} prepares the inputs of each pass in its own way"
    if cast(Any, model)._is_stateful:  # as generate checks (5.23, generation/utils.py)
        return f"{name} has a recurrent state"
    if others := unsupported_layers(model):
        return f"the cache of {name} has layers of the kind {', '.join(others)}, whose rows cannot change slots"
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) in _BATCH_DEPENDENT_ROPE:
        return f"the {kind} position embeddings of {name} depend on the longest row of a batch"
    return None


def _unsuitable_settings(config: GenerationConfig | None) -> str | None:
    settings = {} if config is None else config.to_diff_dict()
    used = [name for name in sorted(settings) if name not in _WITHOUT_EFFECT and settings[name] != _NEUTRAL.get(name)]
    return f"the model's generation_config.json sets {', '.join(used)}, which slots do not apply" if used else None

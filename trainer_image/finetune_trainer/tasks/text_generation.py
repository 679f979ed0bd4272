"""Text generation: a decoder learns to continue text. Rows are plain text, a prompt (`source`) with its continuation
(`target`), or a conversation (`messages`); of the latter two only the target and the replies are learnt.

Each token is learnt once: a long text is cut into overlapping windows, and shared tokens count in the first alone.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.layout import FailureClass
from finetune_contract.metrics import METRICS
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.token_shards import FOLLOWING, LABELS, NOT_LEARNT
from finetune_trainer.data.packing import SIZES
from finetune_trainer.data.sources import ColumnNeed, RawSplit
from finetune_trainer.tasks import heads
from finetune_trainer.tasks.chat_template import reply_note, require_template, tokens_of
from finetune_trainer.tasks.conversations import ASSISTANT, BESIDE, conversations, json_of
from finetune_trainer.tasks.encoding import completions, plain_ids, prompts
from finetune_trainer.tasks.language import DecoderDescription, DecoderHead, LanguageEncoding, LanguageScoring
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.prompt_cuts import END, Cut, head_of, leading_special, prompt_cut, talk_cut
from finetune_trainer.tasks.row_checks import (
    beside_needs,
    not_set,
    refuse_not_messages,
    refuse_not_text,
    refuse_other_columns,
    row_error,
    wanted_texts,
)
from finetune_trainer.tasks.task_protocol import Answer, Card, Coding, Encoded, Feature, Labels, Targets, TaskParts
from finetune_trainer.tasks.writing import HEAD, DecoderWriter, logits_at, token_nlls

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel

_COLUMNS = ("text", "source", "target", "messages")
_READS = "text-generation reads text, or source and target, or messages"
_PROBE_TOKENS = 6
_APART = 1e-3
"""Largest difference of logits, relative to the largest logit, that rounding explains when a row is computed alone and
behind another one.
"""


def text_generation(*, chat: bool = False) -> TaskParts:
    """Return the parts of `text-generation`. `chat`: prompts and their continuations are conversations of one turn.

    A feature has `input_ids`, `labels` (the token itself where it is learnt, else -100; never the first token, which
    follows no other) and `prompt`, the number of given tokens when the rest is to be written. An answer has `nll`
    and `hit`, one for each label, or `generated_text`.
    """
    return TaskParts(_Encoding(chat), _Head(), _Scoring(), _Description(), DecoderWriter())


class _Encoding(LanguageEncoding):
    packed = ("input_ids", "labels")

    def __init__(self, chat: bool) -> None:
        self._chat = chat

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Return the columns of the named form; the target is not read where it is to be written."""
        refuse_other_columns(columns, setting, _COLUMNS, _READS)
        named = {name: getattr(columns, name) for name in _COLUMNS if getattr(columns, name) is not None}
        forms = ({"text"}, {"messages"}, {"source"}, {"source", "target"})
        if set(named) not in forms or (labelled and set(named) == {"source"}):
            if not named:
                raise not_set(f"{setting}.columns.text", "the column that holds the text")
            raise StageError(
                FailureClass.CONFIG,
                "ColumnsDisagree",
                f"{setting}.columns names {', '.join(named)}; {_READS}.",
                "Name the columns of one form.",
            )
        needs = tuple(
            ColumnNeed(f"{setting}.columns.{name}", column, labelled or name != "target", nested=name == "messages")
            for name, column in named.items()
        )
        return (*needs, *beside_needs(setting)) if columns.messages is not None else needs

    def inputs(self, columns: Columns) -> dict[str, str]:
        """Return `text`, `source`, or `messages` with the columns of `BESIDE`."""
        named = {"text": columns.text, "source": columns.source, "messages": columns.messages}
        beside = dict(zip(BESIDE, BESIDE, strict=True)) if columns.messages is not None else {}
        return {role: name for role, name in named.items() if name is not None} | beside

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Check that texts are text, that messages have a role and a content each, and that none is missing."""
        table = split.table
        if columns.messages is not None:
            refuse_not_messages(split, f"{setting}.columns.messages", columns.messages)
            return
        if self._chat and columns.text is not None:
            raise StageError(
                FailureClass.CONFIG,
                "NoSides",
                f"preparation.chatTemplate is always, and column {columns.text!r} is plain text without a prompt.",
                "Name dataset.columns.source and target, or leave preparation.chatTemplate out.",
            )
        for role, name in self.inputs(columns).items():
            refuse_not_text(split, f"{setting}.columns.{role}", name, table[name])

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Labels | None) -> Targets:
        """Return the continuation of prompts; for texts and conversations True for each learnt row."""
        targets: dict[str, NDArray[Any]] = {}
        for role, split in raw.items():
            count = len(split.rows)
            if columns.text is not None:
                targets[role] = np.ones(count, bool)
            elif columns.messages is not None:
                cells = split.table[columns.messages].to_pylist()
                replied = [json_of(cell)[-1]["role"] == ASSISTANT for cell in cells]
                if all(replied):
                    targets[role] = np.ones(count, bool)
                elif role != "test":
                    row = replied.index(False)
                    path, value = "dataset.columns.messages", cells[row]
                    rule = "a conversation to learn from ends with a message of the role assistant"
                    raise row_error("NoReply", split, row, path, columns.messages, value, rule)
            elif columns.target in split.rows.column_names:
                assert columns.target is not None
                targets[role] = wanted_texts(split, columns.target)
        return Targets(of=targets)

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Encode texts as windows; of a prompt or a conversation that does not fit, tokens behind the system message
        are left out, down to half of a feature, then its end.
        """
        features: dict[str, list[Any]] = {"input_ids": [], "prompt": []}
        if "text" not in rows or targets is None:
            features[HEAD] = []
        if targets is not None:
            features["labels"] = []
        of_row: list[int] = []
        lost: Counter[str] = Counter()
        truncated = 0
        if self._chat and "source" in rows:
            rows = _as_messages(rows["source"], targets)
        for row, tokens in enumerate(_tokens(rows, targets, coding)):
            truncated += bool(tokens.lost)
            lost.update(tokens.lost)
            for start, end, fresh in tokens.windows:
                ids = tokens.ids[start:end]
                features["input_ids"].append(ids)
                features["prompt"].append(min(tokens.prompt - start, len(ids)))
                if HEAD in features:
                    features[HEAD].append(tokens.head)
                if targets is not None:
                    learnt = tokens.learnt[start:end]
                    features["labels"].append(
                        [
                            token if is_learnt and at and at >= fresh else NOT_LEARNT
                            for at, (token, is_learnt) in enumerate(zip(ids, learnt, strict=True))
                        ]
                    )
                of_row.append(row)
        items = [sum(label != NOT_LEARNT for label in labels) for labels in features.get("labels", ())]
        return Encoded(features, rows=of_row, truncated=truncated, learnt=items or None, lost=lost)

    def remarks(self, columns: Columns, coding: Coding) -> tuple[str, ...]:
        """Return a note on a chat template that puts no token behind a reply."""
        return reply_note(coding.tokenizer) if self._chat or columns.messages is not None else ()

    def in_windows(self, columns: Columns) -> bool:
        """Return True for texts; of prompts and conversations the beginning is lost."""
        return columns.text is not None

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Pad on the right. Positions restart for each feature of a pack, which keeps them apart."""
        batch = padded(features, {"input_ids": pad_token_id, "labels": NOT_LEARNT})
        if SIZES in features[0]:
            del batch["attention_mask"]
            batch["position_ids"] = _positions([feature[SIZES] for feature in features], batch["input_ids"].shape[1])
        return batch


class _Head(DecoderHead):
    label_place = "next"

    def refuse_packing(self, job: TrainerJob, config: PretrainedConfig) -> None:
        """Require positions, which keep the rows of a pack apart: transformers masks by them where a model takes
        positions and creates its mask there.
        """
        from transformers import AutoModelForCausalLM

        mapping: Any = AutoModelForCausalLM._model_mapping
        model = mapping.get(type(config), None)
        takes = model is not None and "position_ids" in inspect.signature(model.forward).parameters
        if not takes or not hasattr(sys.modules[model.__module__], "create_causal_mask"):
            raise heads.packing_error(f"models of type {config.model_type} do not keep the rows of a pack apart")
        if job.training and job.training.arguments.get("use_cache"):
            raise heads.packing_error(
                "with training.arguments.use_cache models do not keep the rows of a pack apart",
                "Leave training.arguments.use_cache out, or set preparation.packing to never.",
            )

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the model; raise StageError STRATEGY_NOT_IN_EFFECT if it mixes the rows of a pack all the same."""
        model = super().build_model(job, facts, dtype=dtype)
        if job.preparation.packing:
            _refuse_mixing(job, model)
        return model


class _Scoring(LanguageScoring):
    metrics = METRICS["text-generation"]

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """Return the loss of each next token."""
        given = {name: value for name, value in batch.items() if name not in LABELS}
        wanted = batch[FOLLOWING] if FOLLOWING in batch else batch["labels"][:, 1:]
        return token_nlls(logits_at(model, given, wanted))


class _Description(DecoderDescription):
    chat_role = "messages"

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Describe use by the pipeline, with a conversation where the training had such."""
        chat = job.preparation.chat_template == "always"
        chat |= job.dataset is not None and job.dataset.columns.messages is not None
        example = '[{"role": "user", "content": "Tell me more."}]' if chat else '"Tell me more."'
        kept = (
            f"Longer texts were cut into windows of {facts.max_length} tokens that overlap."
            if job.dataset is not None and job.dataset.columns.text is not None
            else f"In rows of more than {facts.max_length} tokens the oldest messages, or the beginning of the prompt, "
            "were left out."
        )
        return Card(
            use=f'print(model({example}, max_new_tokens=64)[0]["generated_text"])',
            long_rows=kept,
            counted="rows",
            baseline="nothing",
        )

    def prompt_role(self, columns: Columns) -> str:
        """Return `source` for a model of prompts, else `text`."""
        return "text" if columns.source is None else "source"


# ------------------------------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True)
class _Tokens:
    """Tokens of a row."""

    ids: Sequence[int]
    learnt: Sequence[bool]
    prompt: int
    windows: Sequence[tuple[int, int, int]]
    """First and last token (exclusive) of each feature, and how many of its first tokens the one before has learnt."""
    lost: tuple[str, ...] = ()
    """Names of the parts that were left out."""
    head: int = 0
    """Tokens at the beginning that a prompt keeps wherever it is cut."""


def _tokens(rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Iterator[_Tokens]:
    if "text" in rows and targets is not None:
        return _texts(list(rows["text"]), coding)
    if "messages" not in rows:
        return _completions(list(rows["text" if "text" in rows else "source"]), targets, coding)
    return _conversations(rows, coding, learnt=targets is not None)


def _as_messages(sources: Sequence[str], targets: NDArray[Any] | None) -> dict[str, list[Any]]:
    """Return prompts as messages of a user, followed by their continuations as replies where they are known."""
    talks = [[{"role": "user", "content": source}] for source in sources]
    for talk, target in zip(talks, () if targets is None else targets, strict=False):
        talk.append({"role": ASSISTANT, "content": target})
    return {"messages": talks}


def _texts(texts: list[str], coding: Coding) -> Iterator[_Tokens]:
    """Encode whole texts with the end token, in windows."""
    end = coding.tokenizer.eos_token_id
    for ids in plain_ids(coding, texts, special=True):
        known = ids[:-1] if ids and ids[-1] == end else ids
        whole = [*known, end] if end is not None else known or [coding.tokenizer.pad_token_id]
        yield _Tokens(whole, [True] * len(whole), max(1, len(known)), list(_windows(len(whole), coding)))


def _windows(length: int, coding: Coding) -> Iterator[tuple[int, int, int]]:
    start, learnt = 0, 0
    while True:
        end = min(length, start + coding.max_length)
        yield start, end, learnt - start
        if end == length:
            return
        start, learnt = end - coding.stride, end


def _completions(sources: list[str], targets: NDArray[Any] | None, coding: Coding) -> Iterator[_Tokens]:
    """Encode prompts, and where it is known the continuation, with the end token."""
    given, special = prompts(coding, sources), frozenset(coding.tokenizer.all_special_ids)
    wanted = [[]] * len(given) if targets is None else completions(coding, targets.tolist())
    for prompt, follows in zip(given, wanted, strict=True):
        ids = [*prompt, *follows]
        cut = partial(prompt_cut, coding.tokenizer, ids, prompt=len(prompt))
        head = leading_special(special, prompt)
        yield _fitted(ids, [False] * len(prompt) + [True] * len(follows), len(prompt), head, cut, coding)


def _conversations(rows: Mapping[str, Sequence[Any]], coding: Coding, *, learnt: bool) -> Iterator[_Tokens]:
    """Encode by the chat template, whose special tokens are the only ones."""
    require_template(coding.tokenizer)
    special = frozenset(coding.tokenizer.all_special_ids)
    for talk in conversations(rows, "messages"):
        tokens = tokens_of(coding.tokenizer, talk, learnt=learnt)
        head = head_of(coding.tokenizer, tokens, special)
        cut = partial(talk_cut, coding.tokenizer, tokens)
        yield _fitted(tokens.ids, tokens.replied, tokens.prompt, head, cut, coding)


def _fitted(
    ids: list[int], learnt: list[bool], prompt: int, head: int, cut: Callable[[int], Cut], coding: Coding
) -> _Tokens:
    """Return one feature of at most `max_length` tokens; the prompt keeps at least half of it. `cut`: the cut of a
    prompt by a number of tokens.
    """
    room = coding.max_length
    if not ids:
        ids, learnt = [coding.tokenizer.pad_token_id], [False]
    lost: list[str] = []
    drop = min(max(0, len(ids) - room), max(0, prompt - room // 2))
    if drop:
        made = cut(drop)
        ids, learnt, prompt, head = made.of(ids), made.of(learnt), prompt - made.size, min(head, made.start)
        lost.append(made.lost)
    if len(ids) > room:
        ids, learnt = ids[:room], learnt[:room]
        lost.append(END)
    return _Tokens(ids, learnt, prompt, [(0, len(ids), 0)], tuple(lost), head)


def _positions(sizes: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Return positions of shape (packs, width): counts from 0 for each feature of a pack, and for the padding."""
    import torch

    rows = []
    for pack in sizes:
        parts = [*pack, width - int(np.sum(pack))]
        rows.append(np.concatenate([np.arange(part) for part in parts]))
    return torch.from_numpy(np.stack(rows).astype(np.int64))


# --------------------------------------------------------------------------------------------------------------- checks


def _refuse_mixing(job: TrainerJob, model: PreTrainedModel) -> None:
    """Compute a row alone and behind another one; raise when the logits differ, because then the model mixes rows."""
    import torch

    ids = torch.arange(2 * _PROBE_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(_PROBE_TOKENS, device=model.device).repeat(2)[None]
    was_training = model.training
    cast(torch.nn.Module, model).eval()
    try:
        with torch.no_grad():
            read = partial(model, use_cache=False)
            alone = read(input_ids=ids[:, _PROBE_TOKENS:], position_ids=positions[:, _PROBE_TOKENS:]).logits
            behind = read(input_ids=ids, position_ids=positions).logits[:, _PROBE_TOKENS:]
        mixed = float((alone - behind).abs().max()) > _APART * float(alone.abs().max())
    except TypeError:  # it takes no positions
        mixed = True
    finally:
        model.train(was_training)
    if mixed:
        raise StageError(
            FailureClass.STRATEGY_NOT_IN_EFFECT,
            "PackingNotInEffect",
            f"preparation.packing is on, and {type(model).__name__} of {job.model.uri} does not keep the rows of a "
            "pack apart.",
            "Set preparation.packing to never.",
        )

"""Preference tuning: a decoder learns to prefer the chosen of two answers to a prompt to the rejected one, by direct
preference optimisation (Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward
Model", 2023).

The reward of an answer is its gain in log-likelihood over the reference, the model before training. A prompt is text,
or a conversation that the answers continue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.metrics import METRICS
from finetune_contract.trainer_job import Preference, TrainerJob
from finetune_trainer.core.token_shards import NOT_LEARNT
from finetune_trainer.data.sources import ColumnNeed, RawSplit
from finetune_trainer.tasks.chat_template import require_template, tokens_of
from finetune_trainer.tasks.conversations import ASSISTANT, BESIDE, conversations, messages_of
from finetune_trainer.tasks.encoding import completions, prompts
from finetune_trainer.tasks.language import DecoderDescription, DecoderHead
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.prompt_cuts import END, Cut, head_of, leading_special, prompt_cut, talk_cut
from finetune_trainer.tasks.row_checks import (
    beside_needs,
    is_json,
    not_set,
    refuse_not_messages,
    refuse_not_text,
    refuse_other_columns,
    row_error,
    wanted_texts,
)
from finetune_trainer.tasks.task_protocol import (
    REFERENCE,
    Answer,
    Card,
    Coding,
    Encoded,
    Encoding,
    Feature,
    Labels,
    Scoring,
    Targets,
    TaskParts,
)
from finetune_trainer.tasks.writing import HEAD, DecoderWriter, judged, logits_at

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from finetune_trainer.data.prepared import PreparedData, PreparedSplit

_ANSWERS = ("chosen", "rejected")
_COLUMNS = ("prompt", *_ANSWERS)
_READS = "preference-tuning reads prompt, chosen and rejected"


def preference_tuning(settings: Preference) -> TaskParts:
    """Return the parts of `preference-tuning`.

    A feature is a pair: `input_ids` has the prompt with the chosen answer, followed by the prompt with the rejected
    one, `chosen` the number of tokens of the former, `prompt` the number of tokens of the prompt; `labels` are the
    tokens of the answers, elsewhere -100. Without answers the feature is the prompt. An answer has the log-likelihoods
    of the two, in nats (`chosen`, `rejected`), or `generated_text`.
    """
    beta = settings.beta
    return TaskParts(_Encoding(), _Head(beta), _Scoring(beta), _Description(), DecoderWriter())


class _Encoding(Encoding):
    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Return the columns to read; the answers are not read where they are to be written."""
        refuse_other_columns(columns, setting, _COLUMNS, _READS)
        content = {"prompt": "the prompt", "chosen": "the better answer", "rejected": "the worse answer"}
        needs = []
        for role in _COLUMNS:
            name, needed = getattr(columns, role), labelled or role == "prompt"
            if name is not None:
                needs.append(ColumnNeed(f"{setting}.columns.{role}", name, required=needed, nested=True))
            elif needed:
                raise not_set(f"{setting}.columns.{role}", f"the column that holds {content[role]}")
        return (*needs, *beside_needs(setting))

    def inputs(self, columns: Columns) -> dict[str, str]:
        """Return `prompt`, with the columns of `BESIDE`."""
        assert columns.prompt is not None
        return {"prompt": columns.prompt, **dict(zip(BESIDE, BESIDE, strict=True))}

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Check that prompts are text or conversations, and that none is missing."""
        name = self.inputs(columns)["prompt"]
        values = split.table[name]
        if is_json(values.type):
            refuse_not_messages(split, f"{setting}.columns.prompt", name)
        else:
            refuse_not_text(split, f"{setting}.columns.prompt", name, values)

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Labels | None) -> Targets:
        """Return each row's chosen and rejected answer, in the form of the prompt."""
        targets: dict[str, NDArray[Any]] = {}
        for role, split in raw.items():
            chosen, rejected = columns.chosen, columns.rejected
            if chosen is None or rejected is None or not {chosen, rejected} <= set(split.rows.column_names):
                continue
            talks = is_json(split.table[self.inputs(columns)["prompt"]].type)
            read = _replies if talks else wanted_texts
            pairs = zip(read(split, chosen, "chosen"), read(split, rejected, "rejected"), strict=True)
            targets[role] = np.empty(len(split.rows), object)
            for row, pair in enumerate(pairs):
                targets[role][row] = pair
        return Targets(of=targets)

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Encode pairs. Where a prompt and its longer answer do not fit, both sequences lose the same part of the
        prompt behind its system message, down to half of `max_length`, then their ends.
        """
        talks = bool(rows["prompt"]) and not isinstance(rows["prompt"][0], str)
        features: dict[str, list[Any]] = {"input_ids": [], "prompt": [], HEAD: []}
        if targets is not None:
            features |= {"labels": [], "chosen": []}
        lost: Counter[str] = Counter()
        truncated = 0
        for whole in (_conversations if talks else _texts)(rows, targets, coding):
            sequences, parts = _fitted(whole, coding.max_length)
            truncated += bool(parts)
            lost.update(parts)
            features["input_ids"].append([token for sequence in sequences for token in sequence.ids])
            features["prompt"].append(sequences[0].prompt)
            features[HEAD].append(sequences[0].head)
            if targets is not None:
                features["labels"].append([label for sequence in sequences for label in sequence.labels])
                features["chosen"].append(len(sequences[0].ids))
        return Encoded(features, truncated=truncated, lost=lost)

    def widths(self, prepared: PreparedData, role: str) -> NDArray[np.int64]:
        """Return the widths: both sequences of a pair are padded to the longer one."""
        split, lengths = prepared.of(role), prepared.lengths(role)
        if "chosen" not in split.columns:
            return lengths
        chosen: NDArray[np.int64] = split.numbers("chosen")
        longer: NDArray[np.int64] = np.maximum(chosen, lengths - chosen)
        return 2 * longer

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Return all chosen sequences, then all rejected ones; and the reference's figures, where they are known."""
        import torch

        ends = [int(feature["chosen"]) for feature in features]
        halves = [_part(feature, slice(end)) for feature, end in zip(features, ends, strict=True)]
        halves += [_part(feature, slice(end, None)) for feature, end in zip(features, ends, strict=True)]
        batch = padded(halves, {"input_ids": pad_token_id, "labels": NOT_LEARNT})
        for name in (f"{REFERENCE}{answer}" for answer in _ANSWERS):
            if name in features[0]:
                batch[name] = torch.tensor([float(feature[name]) for feature in features])
        return batch

    def items(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Count the pairs."""
        return len(batch["input_ids"]) // 2


class _Head(DecoderHead):
    def __init__(self, beta: float) -> None:
        self.objective = DirectPreference(beta)

    def identity(self, job: TrainerJob) -> dict[str, Any]:
        """Return `preference`."""
        return {"preference": job.preference.model_dump(mode="json")}

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the model without dropout, whose effect would count as a difference from the reference."""
        import torch

        model = super().build_model(job, facts, dtype=dtype)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(getattr(module, "attention_dropout", None), float):  # of Llama and its kin
                setattr(module, "attention_dropout", 0.0)  # noqa: B010  # mypy takes it for a submodule
        return model


class _Scoring(Scoring):
    metrics = METRICS["preference-tuning"]

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """Return the log-likelihood of each of the two answers."""
        pair = [likelihood.double().cpu().numpy() for likelihood in likelihoods(model, batch)]
        return [dict(zip(_ANSWERS, row, strict=True)) for row in zip(*pair, strict=True)]

    def _rewards(self, answers: Sequence[Answer]) -> list[NDArray[np.float64]]:
        """Return the rewards of each row's chosen and rejected answer."""
        gained = ([float(answer[name] - answer[f"{REFERENCE}{name}"]) for answer in answers] for name in _ANSWERS)
        return [self._beta * np.array(gains, np.float64) for gains in gained]

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """Return the pairs with the least margin, which is their `score`."""
        chosen, rejected = self._rewards(answers)
        worst = np.argsort(chosen - rejected, kind="stable")[:most]
        return [{"row": int(row), "score": float(chosen[row] - rejected[row])} for row in worst]

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """Measure as DPOTrainer of trl does: rewards are log-likelihoods over those of the reference, times beta; the
        margin is that of the chosen over the rejected one, and a row is right where it is above 0.
        """

        chosen, rejected = self._rewards(answers)
        margins = chosen - rejected
        return {
            "loss": float(np.logaddexp(0.0, -margins).mean()),
            "rewards/accuracies": float((margins > 0).mean()),
            "rewards/margins": float(margins.mean()),
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
        }


class _Description(DecoderDescription):
    text_role = chat_role = "prompt"

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Describe use by the pipeline."""
        return Card(
            use='print(model("Tell me more.", max_new_tokens=64)[0]["generated_text"])',
            long_rows=f"Where prompt and answer exceed {facts.max_length} tokens, the oldest messages, or the "
            "beginning of the prompt, were left out.",
            counted="rows",
            baseline="nothing",
            tag="text-generation",
        )


# ------------------------------------------------------------------------------------------------------------ objective


@dataclass(frozen=True)
class DirectPreference:
    """Objective of direct preference optimisation."""

    beta: float
    chunked: bool = False
    """True for a model that computes the log-likelihoods itself, in chunks of tokens."""
    compares: tuple[str, ...] = _ANSWERS

    @property
    def of_rows(self) -> DirectPreference:
        """The same for a model whose loss is the negative log-likelihood of each row."""
        return replace(self, chunked=True)

    def loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute - log sigmoid(beta x (gain of the chosen answer over the reference - gain of the rejected one)):
        Rafailov et al. (2023), equation 7.
        """
        import torch

        log_likelihoods = chunked_likelihoods(model, batch) if self.chunked else likelihoods(model, batch)
        pair = zip(_ANSWERS, log_likelihoods, strict=True)
        chosen, rejected = (likelihood - batch[f"{REFERENCE}{name}"] for name, likelihood in pair)
        loss: torch.Tensor = -torch.nn.functional.logsigmoid(self.beta * (chosen - rejected)).mean()
        return loss


def likelihoods(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-likelihoods in nats of the chosen and of the rejected answers, shape (pairs,) each."""
    import torch

    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    losses: list[list[torch.Tensor]] = [[] for _ in batch["labels"]]
    for parts in logits_at(model, given, batch["labels"][:, 1:]):
        for of_row, *row in zip(losses, *parts, strict=True):
            of_row += [torch.nn.functional.cross_entropy(*pair, reduction="sum") for pair in judged(*row)]
    chosen, rejected = torch.stack([-torch.stack(lost).sum() for lost in losses]).chunk(2)
    return chosen, rejected


def chunked_likelihoods(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `likelihoods` by a model that computes them in chunks, without all logits in memory (`ChunkedLoss`)."""
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    chosen, rejected = (-model(**given, use_cache=False).loss).chunk(2)
    return chosen, rejected


# ------------------------------------------------------------------------------------------------------------- encoding


def _part(feature: Feature, part: slice) -> Feature:
    """Return one sequence of a pair."""
    return {name: feature[name][part] for name in ("input_ids", "labels")}


@dataclass(frozen=True)
class _Sequence:
    """A prompt with or without an answer."""

    ids: list[int]
    prompt: int
    """Number of tokens of the prompt."""
    head: int
    """Tokens at the beginning of the prompt that it keeps wherever it is cut."""
    cut: Callable[[int], Cut]
    """Cut of the prompt by a number of tokens."""

    @property
    def labels(self) -> list[int]:
        """Return the labels of the answer; the first token follows no other, and is not learnt."""
        given = max(1, self.prompt)
        return [NOT_LEARNT] * len(self.ids[:given]) + self.ids[given:]


def _texts(
    rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding
) -> Iterator[list[_Sequence]]:
    """Yield each row's sequences with the chosen and with the rejected answer, or the prompt."""
    tokenizer, prompt_ids = coding.tokenizer, prompts(coding, list(rows["prompt"]))
    special = frozenset(tokenizer.all_special_ids)
    if targets is None:
        answers: list[list[list[int]]] = [[[]] * len(prompt_ids)]
    else:
        answers = [completions(coding, [pair[at] for pair in targets]) for at in range(len(_ANSWERS))]
    for ids, *pair in zip(prompt_ids, *answers, strict=True):
        head, cut = leading_special(special, ids), partial(prompt_cut, tokenizer, ids, prompt=len(ids))
        wholes = [[*ids, *answer] or [tokenizer.pad_token_id] for answer in pair]
        yield [_Sequence(whole, len(ids), head, cut) for whole in wholes]


def _conversations(
    rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding
) -> Iterator[list[_Sequence]]:
    """Yield the same by the chat template."""
    tokenizer, special = coding.tokenizer, frozenset(coding.tokenizer.all_special_ids)
    require_template(tokenizer)
    for row, talk in enumerate(conversations(rows, "prompt")):
        pair = [[]] if targets is None else [[reply] for reply in targets[row]]
        turns = [tokens_of(tokenizer, talk.followed_by(reply), learnt=bool(reply)) for reply in pair]
        yield [
            _Sequence(
                turn.ids or [tokenizer.pad_token_id],
                turn.prompt,
                head_of(tokenizer, turn, special),
                partial(talk_cut, tokenizer, turn),
            )
            for turn in turns
        ]


def _fitted(sequences: Sequence[_Sequence], room: int) -> tuple[list[_Sequence], tuple[str, ...]]:
    """Cut to at most `room` tokens each, and return the names of what is left out. Both lose the same part of the
    prompt: both answer one prompt.
    """
    over = max(0, max(len(sequence.ids) for sequence in sequences) - room)
    drop = min(over, max(0, min(sequence.prompt for sequence in sequences) - room // 2))
    lost: list[str] = []
    if drop:
        made = sequences[0].cut(drop)
        lost.append(made.lost)
        sequences = [
            replace(
                sequence,
                ids=made.of(sequence.ids),
                prompt=sequence.prompt - made.size,
                head=min(sequence.head, made.start),
            )
            for sequence in sequences
        ]
    if any(len(sequence.ids) > room for sequence in sequences):
        lost.append(END)
    return [replace(sequence, ids=sequence.ids[:room]) for sequence in sequences], tuple(lost)


# --------------------------------------------------------------------------------------------------------------- checks


def _replies(split: RawSplit, column: str, role: str) -> list[Mapping[str, Any]]:
    """Return the message of each row's answer; raise StageError DATA for the first answer that is not one message."""
    path = f"dataset.columns.{role}"
    refuse_not_messages(split, path, column)
    cells = split.table[column].to_pylist()
    replies = [messages_of(cell) for cell in cells]
    for row, messages in enumerate(replies):
        if len(messages) != 1 or messages[0]["role"] != ASSISTANT:
            rule = f"after a conversation an answer is one message with role {ASSISTANT}"
            raise row_error("NotOneReply", split, row, path, column, cells[row], rule)
    return [messages[0] for messages in replies]

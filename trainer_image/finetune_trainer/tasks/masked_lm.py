"""Masked language modelling: an encoder learns to fill in masked words.

As in BERT's training (Devlin et al. 2018, section 3.1): 15 % of the tokens are predicted (of a short text at least
one), of which 80 % are masked, 10 % replaced by others and 10 % left. Training draws new tokens in each epoch, from the
job's seed and the tokens themselves, so that all strategies draw alike; evaluation always predicts the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from finetune_contract.choices import Stage
from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.inference_settings import Generation
from finetune_contract.layout import FailureClass
from finetune_contract.metrics import METRICS
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.token_shards import NOT_LEARNT
from finetune_trainer.data.sources import ColumnNeed, RawSplit
from finetune_trainer.tasks.encoding import never_empty
from finetune_trainer.tasks.language import LanguageEncoding, LanguageHead, LanguageScoring
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.row_checks import needed_columns, refuse_not_text
from finetune_trainer.tasks.task_protocol import (
    DRAW,
    Answer,
    Card,
    Coding,
    Description,
    Encoded,
    Feature,
    Labels,
    Targets,
    TaskParts,
    labels_of,
)
from finetune_trainer.tasks.windows import made_ready
from finetune_trainer.tasks.writing import padding_token, token_nlls

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedSplit

SELECTED_SHARE = 0.15
_HIDDEN, _REPLACED = 0.8, 0.1
_CANDIDATES = 5
_CANDIDATE = pa.struct([pa.field("token", pa.string()), pa.field("score", pa.float64())])


class MaskFiller:
    """Candidates for the mask tokens of a text."""

    stages = frozenset({Stage.PREDICT})

    def chosen(self, split: PreparedSplit) -> NDArray[np.int64]:
        """Return all windows."""
        return np.arange(len(split.position))

    def write(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        features: Sequence[Feature],
        generation: Generation,
    ) -> list[Answer]:
        """Return for each mask that this window owns the best `tokens`, as words, and their `scores`."""
        import torch

        batch = padded(features, {"input_ids": padding_token(tokenizer)})
        logits = cast(torch.nn.Module, model)(
            **{name: tensor.to(model.device) for name, tensor in batch.items()}
        ).logits
        answers: list[Answer] = []
        for row, feature in enumerate(features):
            ids = np.asarray(feature["input_ids"])
            places = np.flatnonzero((ids == tokenizer.mask_token_id) & (np.asarray(feature["fresh"]) == 1))
            shares, best = logits[row, places].float().softmax(-1).topk(_CANDIDATES)
            words = [[str(tokenizer.decode([token])).strip() for token in tokens] for tokens in best.tolist()]
            answers.append(
                {"tokens": np.array(words, object).reshape(-1, _CANDIDATES), "scores": shares.double().cpu().numpy()}
            )
        return answers


def masked_lm() -> TaskParts:
    """Return the parts of `masked-lm`.

    A feature has `input_ids`, `fresh` (1 for tokens that may be predicted: no special ones, and none that the window
    before has, too) and, in training, `mask` and `vocabulary`, from which tokens are drawn. An answer has `nll`
    and `hit`, one for each predicted token, or `tokens` and `scores` of masks.
    """
    return TaskParts(_Encoding(), _Head(), _Scoring(), _Description(), MaskFiller())


class _Encoding(LanguageEncoding):
    windows = True

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Return the column of the text."""
        return needed_columns(columns, setting, {"text": "the text"}, "masked-lm reads text")

    def inputs(self, columns: Columns) -> dict[str, str]:
        """Return `text`."""
        assert columns.text is not None
        return {"text": columns.text}

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Check that every text exists and is text."""
        name = self.inputs(columns)["text"]
        refuse_not_text(split, f"{setting}.columns.text", name, split.table[name])

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Labels | None) -> Targets:
        """Mark all texts as learnt, but those to predict."""
        return Targets(of={role: np.ones(len(split.rows), bool) for role, split in raw.items()})

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Cut each text into windows. No text is truncated."""
        made_ready(coding, pair=False)
        tokenizer = coding.tokenizer
        if tokenizer.mask_token_id is None:
            raise StageError(
                FailureClass.MODEL,
                "NoMaskToken",
                f"The tokenizer {type(tokenizer).__name__} has no mask token, so its model cannot fill in words.",
                "Use an encoder such as BERT or RoBERTa, or set task to text-generation.",
            )
        encoded = tokenizer(
            list(rows["text"]),
            truncation=True,
            max_length=coding.max_length,
            stride=coding.stride,
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        of_row = [int(row) for row in encoded["overflow_to_sample_mapping"]]
        fresh = []
        for at, special in enumerate(encoded["special_tokens_mask"]):
            shared = coding.stride if at and of_row[at - 1] == of_row[at] else 0
            mask_is_special = zip(encoded["input_ids"][at], special, strict=True)
            in_text = [int(not is_special or token == tokenizer.mask_token_id) for token, is_special in mask_is_special]
            counts = np.cumsum(in_text)
            of_window = [
                int(is_in_text and count > shared) for is_in_text, count in zip(in_text, counts.tolist(), strict=True)
            ]
            fresh.append(of_window or [0])
        features: dict[str, Sequence[Any]] = {"input_ids": never_empty(encoded["input_ids"], coding), "fresh": fresh}
        if targets is not None:
            features["mask"] = [tokenizer.mask_token_id] * len(of_row)
            features["vocabulary"] = [min(len(tokenizer), coding.embedded or len(tokenizer))] * len(of_row)
        return Encoded(features, rows=of_row, learnt=None if targets is None else list(map(sum, fresh)))

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Mask tokens, and pad on the right."""
        masked = [_masked(feature) for feature in features] if "mask" in features[0] else features
        return padded(masked, {"input_ids": pad_token_id, "labels": NOT_LEARNT})


class _Head(LanguageHead):
    auto = "AutoModelForMaskedLM"
    of_checkpoints = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
    label_place = "same"


class _Scoring(LanguageScoring):
    metrics = METRICS["masked-lm"]
    learnt = "mask"

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """Return the loss of each predicted token."""
        outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
        return token_nlls([(outputs.logits, batch["labels"])])


class _Description(Description):
    def answer_schema(self, labels: Labels) -> pa.Schema:
        """Return the schema of `masks`, whatever the labels."""
        return pa.schema([("masks", pa.list_(pa.list_(_CANDIDATE)))])

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """Return `masks`: for each mask of the text, in order, the best tokens with their probabilities."""
        masks = []
        for windows in split.features_by_row[rows]:
            answered = [answers[at] for at in windows]
            masks.append(
                [
                    [{"token": token, "score": score} for token, score in zip(tokens, scores, strict=True)]
                    for answer in answered
                    for tokens, scores in zip(answer["tokens"].tolist(), answer["scores"].tolist(), strict=True)
                ]
            )
        return pa.table({"masks": masks}, schema=self.answer_schema(labels_of(split.facts)))

    def warm_row(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return a text with a mask token."""
        return {"text": f"The server {tokenizer.mask_token} up."}

    def served_facts(self, labels: Labels, columns: Columns, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the mask token."""
        return {"mask_token": tokenizer.mask_token}

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Describe use by the pipeline."""
        return Card(
            use='print(model(f"This is {model.tokenizer.mask_token}.", '
            f'tokenizer_kwargs={{"truncation": True, "max_length": {facts.max_length}}})[0]["token_str"])',
            long_rows=f"Longer texts were cut into windows of {facts.max_length} tokens that overlap.",
            counted="rows",
            baseline="nothing",
            tag="fill-mask",
        )


def seed_words(draw: Sequence[int], ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the 32-bit words from which numpy makes the seed of the numbers `draw` and `ids`, the low word first.

    numpy converts a list number by number: 2 ms for 500 tokens, many times as long as all the rest of `_masked`.
    """
    words = [number >> shift & 0xFFFFFFFF for number in draw for shift in range(0, max(1, number.bit_length()), 32)]
    return np.concatenate([np.array(words, np.uint32), ids.astype(np.uint32)])


def _masked(feature: Feature) -> Feature:
    """Mask some tokens, and label them: at least one, as in BERT's own preparation of data."""
    ids, fresh = np.array(feature["input_ids"], np.int64), np.asarray(feature["fresh"]) == 1
    draw = np.random.default_rng(seed_words(feature.get(DRAW, ()), ids))
    chance = np.where(fresh, draw.random(len(ids)), 1)
    selected = fresh & ((chance < SELECTED_SHARE) | (chance == chance.min()))
    fate = draw.random(len(ids))
    others = draw.integers(0, int(feature["vocabulary"]), len(ids))
    labels = np.where(selected, ids, NOT_LEARNT)
    ids[selected & (fate < _HIDDEN)] = int(feature["mask"])
    replaced = selected & (fate >= _HIDDEN) & (fate < _HIDDEN + _REPLACED)
    ids[replaced] = others[replaced]
    return {"input_ids": ids, "labels": labels}

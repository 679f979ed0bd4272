"""Text to text: an encoder reads a text, a decoder writes another. Summaries are judged by ROUGE, translations by BLEU
and chrF, on the text that the model generates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_contract.choices import Stage
from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.inference_settings import Generation
from finetune_contract.metrics import METRICS
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.token_shards import NOT_LEARNT
from finetune_trainer.data.sources import ColumnNeed, RawSplit
from finetune_trainer.tasks.class_metrics import informative_rows
from finetune_trainer.tasks.encoding import never_empty
from finetune_trainer.tasks.language import LanguageEncoding, LanguageHead, LanguageScoring, TextDescription
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.row_checks import needed_columns, refuse_not_text, wanted_texts
from finetune_trainer.tasks.task_protocol import Answer, Card, Coding, Encoded, Feature, Labels, Targets, TaskParts
from finetune_trainer.tasks.writing import WRITTEN, generated, padding_token, texts, token_figures, token_nlls, written

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedSplit

_ROUGE = METRICS["summarization"][None]
_TRANSLATED = METRICS["translation"][None]
Judge = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
"""Generated and wanted texts -> metrics."""


class Transforms:
    """Writer for models whose decoder transforms the encoder's text."""

    stages = frozenset({Stage.EVALUATE, Stage.PREDICT})

    def chosen(self, split: PreparedSplit) -> NDArray[np.int64]:
        """Return all features: each row is one."""
        return np.arange(len(split.position))

    def write(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        features: Sequence[Feature],
        generation: Generation,
    ) -> list[Answer]:
        """Call `generate`, from the model's own first token."""
        batch = padded(features, {"input_ids": padding_token(tokenizer)})
        return texts(tokenizer, generated(model, tokenizer, batch, generation))


def summarization() -> TaskParts:
    """Return the parts of `summarization`, which is judged by ROUGE."""
    return _text_to_text(_ROUGE, rouge)


def translation() -> TaskParts:
    """Return the parts of `translation`, which is judged by BLEU and chrF."""
    return _text_to_text(_TRANSLATED, bleu)


def _text_to_text(metrics: tuple[str, ...], judge: Judge) -> TaskParts:
    """Return the parts of both.

    A feature has `input_ids` and the `labels` that the decoder learns. An answer has `nll` and `hit`, one for each
    label, and `generated_text` where the model has generated text.
    """
    return TaskParts(_Encoding(), _Head(), _Scoring(metrics, judge), _Description(), Transforms())


class _Encoding(LanguageEncoding):
    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Return the columns of the source, and of the target when named."""
        contents = {"source": "the source text", "target": "the target text"}
        rule = "summarization and translation read source and target"
        return needed_columns(columns, setting, contents, rule, target="target", labelled=labelled)

    def inputs(self, columns: Columns) -> dict[str, str]:
        """Return `source`."""
        assert columns.source is not None
        return {"source": columns.source}

    def judged(self, columns: Columns) -> dict[str, str]:
        """Return `target`: generated text is compared with it."""
        return {} if columns.target is None else {"target": columns.target}

    def check(self, split: RawSplit, columns: Columns, setting: str) -> None:
        """Check that every source exists and is text."""
        assert columns.source is not None
        refuse_not_text(split, f"{setting}.columns.source", columns.source, split.table[columns.source])

    def targets(self, raw: Mapping[str, RawSplit], columns: Columns, known: Labels | None) -> Targets:
        """Return the wanted texts."""
        targets: dict[str, NDArray[Any]] = {}
        for role, split in raw.items():
            if columns.target is not None and columns.target in split.rows.column_names:
                targets[role] = wanted_texts(split, columns.target)
        return Targets(of=targets)

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Encode; both texts lose their end where they are too long."""
        sources, cut = _cut(coding, text=list(rows["source"]))
        features: dict[str, Sequence[Any]] = {"input_ids": never_empty(sources, coding)}
        if targets is not None:
            features["labels"], short = _cut(coding, text_target=targets.tolist())
            cut = [one or other for one, other in zip(cut, short, strict=True)]
        return Encoded(features, truncated=sum(cut), learnt=list(map(len, features.get("labels", ()))) or None)

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Pad both on the right."""
        batch = padded(features, {"input_ids": pad_token_id})
        if "labels" in features[0]:
            labels = padded([{"input_ids": feature["labels"]} for feature in features], {"input_ids": NOT_LEARNT})
            batch["labels"] = labels["input_ids"]
        return batch


class _Head(LanguageHead):
    auto = "AutoModelForSeq2SeqLM"
    of_checkpoints = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
    label_place = "decoder"


class _Scoring(LanguageScoring):
    def __init__(self, metrics: tuple[str, ...], judge: Judge) -> None:
        self.metrics = {None: metrics}
        self._judge = judge

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """Return the loss of each wanted token after those before it."""
        return token_nlls([(model(**batch).logits, batch["labels"])])

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """See `token_figures`; and the task's own metrics of the generated text, where there is any."""
        figures = token_figures(answers)
        if WRITTEN in answers[0]:
            figures |= self._judge(written(answers, split.features_by_row), _wanted(split))
        return figures

    def samples(self, answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
        """Return the rows least like the wanted text, by the last of the metrics, then the first that equal it."""
        predicted, gold = written(answers, split.features_by_row), _wanted(split)
        name = self.metrics[None][-1]
        whole = self._judge(["a"], ["a"])[name] or 1.0
        rows = list(zip(predicted, gold, strict=True))
        scores = [self._judge([one], [other])[name] / whole for one, other in rows]
        wrong = [0.0 if one == other else 1.0 - score for (one, other), score in zip(rows, scores, strict=True)]
        return [
            {"row": row, "label": gold[row], "predicted": predicted[row], "score": scores[row]}
            for row in informative_rows(np.array(wrong), most)
        ]


class _Description(TextDescription):
    text_role = "source"

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Describe use with the model itself: transformers has no pipeline for these tasks any more."""
        return Card(
            use=_USE.format(max_length=facts.max_length),
            auto=_Head.auto,
            long_rows=f"Texts of more than {facts.max_length} tokens were cut at their end.",
            counted="rows",
            baseline="nothing",
        )


_USE = """options = {{"truncation": True, "max_length": {max_length}}}
inputs = tokenizer("A long text.", return_tensors="pt", **options)
outputs = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(outputs[0], skip_special_tokens=True))"""


def rouge(predicted: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """Return the F-measures of Google's rouge_score with stemming, as shares of 1: the mean over rows."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(_ROUGE), use_stemmer=True)
    rows = [scorer.score(target, text) for text, target in zip(predicted, wanted, strict=True)]
    return {name: float(np.mean([row[name].fmeasure for row in rows])) for name in _ROUGE}


def bleu(predicted: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """Return the scores of the whole split by sacrebleu, between 0 and 100 as it returns them."""
    import sacrebleu

    references = [list(wanted)]
    return {
        "bleu": float(sacrebleu.corpus_bleu(list(predicted), references).score),
        "chrf": float(sacrebleu.corpus_chrf(list(predicted), references).score),
    }


def _wanted(split: PreparedSplit) -> list[str]:
    texts: list[str] = list(split.raw()[split.inputs["target"]])
    return texts


def _cut(coding: Coding, **texts: list[str]) -> tuple[list[list[int]], list[bool]]:
    """Return the tokens of each text with its end token, and True for texts that were cut."""
    encoded = coding.tokenizer(**texts, padding=False, truncation=False, return_attention_mask=False, verbose=False)
    special = coding.tokenizer.num_special_tokens_to_add(pair=False)
    tokens, cut = [], []
    for ids in encoded["input_ids"]:
        long = len(ids) > coding.max_length
        # Keep the token that a tokenizer adds at the end, the end token.
        tokens.append([*ids[: coding.max_length - 1], ids[-1]] if long and special else ids[: coding.max_length])
        cut.append(long)
    return tokens, cut

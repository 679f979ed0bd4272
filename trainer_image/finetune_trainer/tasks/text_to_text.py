"""Text to text: an encoder reads a text, a decoder writes another. Summaries are judged by ROUGE, translations by BLEU
and chrF, on the text that the model generates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune_contract.choices import LabelForm, Stage
from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.inference_settings import Generation
from finetune_contract.metrics import METRICS
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core.slices import NOT_LEARNT
from finetune_trainer.data.sources import ColumnNeed, RawSplit
from finetune_trainer.models.loading import load_config
from finetune_trainer.tasks.class_figures import informative_rows
from finetune_trainer.tasks.encoding import never_empty
from finetune_trainer.tasks.language import LanguageTask
from finetune_trainer.tasks.padding import padded
from finetune_trainer.tasks.row_checks import not_set, refuse_not_text, refuse_other_columns, wanted_texts
from finetune_trainer.tasks.task_protocol import (
    Answer,
    Card,
    Coding,
    Encoded,
    Feature,
    LabelPlace,
    Labels,
    Targets,
    Writer,
)
from finetune_trainer.tasks.writing import (
    TEXT_SCHEMA,
    WRITTEN,
    generated,
    padding_token,
    text_table,
    texts,
    token_figures,
    token_nlls,
    written,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedSplit

_COLUMNS = ("source", "target")
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


class TextToText(LanguageTask):
    """The TaskModule of `summarization` and `translation`.

    A feature has `input_ids` and the `labels` that the decoder learns. An answer has `nll` and `hit`, one for each
    label, and `generated_text` where the model has generated text.
    """

    auto: str = "AutoModelForSeq2SeqLM"
    of_checkpoints: str = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"
    smooths_labels: Mapping[LabelForm | None, LabelPlace] = {None: "decoder"}
    answer_columns: frozenset[str] = frozenset({WRITTEN})
    writer: Writer | None = Transforms()

    def __init__(self, metrics: tuple[str, ...], judge: Judge) -> None:
        self.metrics: Mapping[LabelForm | None, tuple[str, ...]] = {None: metrics}
        self._judge = judge

    # --------------------------------------------------------------------------------------------------------- data

    def columns(self, columns: Columns, setting: str, *, labelled: bool) -> tuple[ColumnNeed, ...]:
        """Return the columns of the source, and of the target when named."""
        if columns.source is None:
            raise not_set(f"{setting}.columns.source", "the column that holds the source text")
        if labelled and columns.target is None:
            raise not_set(f"{setting}.columns.target", "the column that holds the target text")
        refuse_other_columns(columns, setting, _COLUMNS, "summarization and translation read source and target")
        needs = [ColumnNeed(f"{setting}.columns.source", columns.source)]
        if columns.target is not None:
            needs.append(ColumnNeed(f"{setting}.columns.target", columns.target, required=labelled))
        return tuple(needs)

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
        found: dict[str, NDArray[Any]] = {}
        for role, split in raw.items():
            if columns.target is not None and columns.target in split.rows.column_names:
                found[role] = wanted_texts(split, columns.target)
        return Targets(of=found)

    def encode(self, rows: Mapping[str, Sequence[Any]], targets: NDArray[Any] | None, coding: Coding) -> Encoded:
        """Encode; both texts lose their end where they are too long."""
        sources, cut = _cut(coding, text=list(rows["source"]))
        features: dict[str, Sequence[Any]] = {"input_ids": never_empty(sources, coding)}
        if targets is not None:
            features["labels"], short = _cut(coding, text_target=targets.tolist())
            cut = [one or other for one, other in zip(cut, short, strict=True)]
        return Encoded(features, truncated=sum(cut), learnt=sum(map(len, features.get("labels", ()))))

    def collate(self, features: Sequence[Feature], *, pad_token_id: int) -> dict[str, torch.Tensor]:
        """Pad both on the right."""
        batch = padded(features, {"input_ids": pad_token_id})
        if "labels" in features[0]:
            labels = padded([{"input_ids": feature["labels"]} for feature in features], {"input_ids": NOT_LEARNT})
            batch["labels"] = labels["input_ids"]
        return batch

    # ------------------------------------------------------------------------------------------------------- models

    def build_model(self, job: TrainerJob, facts: DataFacts, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Build the model as in the checkpoint."""
        return self.built(job, load_config(job), dtype)

    # ------------------------------------------------------------------------------------------------------ results

    def answer(
        self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor], features: Sequence[Feature]
    ) -> list[Answer]:
        """Return the loss of each wanted token after those before it."""
        return token_nlls([(model(**batch).logits, batch["labels"])])

    def labelled(self, split: PreparedSplit) -> bool:
        """Return whether wanted texts are known."""
        return "labels" in split.columns

    def score(self, answers: Sequence[Answer], split: PreparedSplit) -> dict[str, float]:
        """See `token_figures`; and the task's own metrics of the generated text, where there is any."""
        figures = token_figures(answers)
        if WRITTEN in answers[0]:
            figures |= self._judge(written(answers, split.features_by_row), _wanted(split))
        return figures

    def answer_schema(self, labels: Labels) -> pa.Schema:
        """Return the schema of `generated_text`, whatever the labels."""
        return TEXT_SCHEMA

    def predictions(self, answers: Sequence[Answer], split: PreparedSplit, rows: slice) -> pa.Table:
        """Return `generated_text`."""
        return text_table(written(answers, split.features_by_row[rows]))

    def card(self, job: TrainerJob, facts: DataFacts) -> Card:
        """Describe use with the model itself: transformers has no pipeline for these tasks any more."""
        return Card(
            use=_USE.format(max_length=facts.max_length),
            auto=self.auto,
            long_rows=f"Texts of more than {facts.max_length} tokens were cut at their end.",
            counted="rows",
            baseline="nothing",
        )

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


_USE = """options = {{"truncation": True, "max_length": {max_length}}}
inputs = tokenizer("A long text.", return_tensors="pt", **options)
outputs = model.generate(**inputs, max_new_tokens=64)
print(tokenizer.decode(outputs[0], skip_special_tokens=True))"""


def summarization() -> TextToText:
    """Return the task judged by ROUGE."""
    return TextToText(_ROUGE, rouge)


def translation() -> TextToText:
    """Return the task judged by BLEU and chrF."""
    return TextToText(_TRANSLATED, bleu)


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
    found, cut = [], []
    for ids in encoded["input_ids"]:
        long = len(ids) > coding.max_length
        # Keep the token that a tokenizer adds at the end, the end token.
        found.append([*ids[: coding.max_length - 1], ids[-1]] if long and special else ids[: coding.max_length])
        cut.append(long)
    return found, cut

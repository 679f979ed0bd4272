"""Models that write: what the tasks have in common whose answers are text of their own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pyarrow as pa

from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.plans import ASKED_LOGITS, JUDGED_LOGITS
from finetune_contract.trainer_job import Generation
from finetune_trainer.data.slices import NOT_LEARNT
from finetune_trainer.failures import StageError
from finetune_trainer.models import position_limit
from finetune_trainer.tasks.task_protocol import Answer, Feature

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedSplit

WRITTEN = "generated_text"
"""The column of predictions, as pipelines of transformers call it; and what an answer calls it."""


class Watch(Protocol):
    """Sees what a model writes while it does."""

    def arguments(self) -> Mapping[str, Any]:
        """Further arguments of `generate`."""

    def told(self, tokens: torch.Tensor) -> Answer:
        """What the answer of one row has beside its text. `tokens`: those that were written."""


watch: ContextVar[Watch | None] = ContextVar("watch", default=None)
"""Set by who calls the stages' code and wants to see tokens, as a server does."""


def search(generation: Generation) -> dict[str, Any]:
    """The settings as arguments of `generate`."""
    chosen: dict[str, Any] = {
        "max_new_tokens": generation.max_new_tokens,
        "num_beams": generation.num_beams,
        "do_sample": generation.temperature > 0,
    }
    if generation.temperature > 0:
        chosen |= {"temperature": generation.temperature, "top_p": generation.top_p}
    return chosen


def ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end what is written: the model's own, and the tokenizer's, with which training rows end."""
    own = getattr(model.generation_config, "eos_token_id", None)
    found = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id}
    return sorted(token for token in found if isinstance(token, int))


class Continues:
    """A decoder writes on behind the prompt of a feature, its first `prompt` tokens."""

    stages = frozenset({Stage.PREDICT})

    def chosen(self, split: PreparedSplit) -> NDArray[np.int64]:
        """Of each row the last: there the text ends."""
        return np.array([each[-1] for each in split.features_by_row])

    def write(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        features: Sequence[Feature],
        generation: Generation,
    ) -> list[Answer]:
        """Prompts are filled up on the left, so that all of them end where writing begins; one that leaves too few of
        the model's positions loses its beginning.
        """
        import torch

        most = _prompt_limit(model, generation)
        prompts = [np.asarray(feature["input_ids"][: int(feature["prompt"])])[-most:] for feature in features]
        longest = max(1, *(len(prompt) for prompt in prompts))
        ids = np.full((len(prompts), longest), padding_token(tokenizer), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        return texts(tokenizer, generated(model, tokenizer, batch, generation)[:, longest:])


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Its number, which every tokenizer of ours has."""
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int)
    return pad


def generated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Mapping[str, torch.Tensor],
    generation: Generation,
) -> torch.Tensor:
    """The tokens that the model writes, shape (rows, tokens), behind those of `batch` when it is a decoder alone."""
    watching = watch.get()
    tokens: torch.Tensor = cast(Any, model).generate(
        **{name: tensor.to(model.device) for name, tensor in batch.items()},
        pad_token_id=padding_token(tokenizer),
        eos_token_id=ends(model, tokenizer) or None,
        **search(generation),
        **({} if watching is None else watching.arguments()),
    )
    return tokens


def texts(tokenizer: PreTrainedTokenizerBase, tokens: torch.Tensor) -> list[Answer]:
    """Each row of tokens as an answer."""
    answers: list[Answer] = [
        {WRITTEN: np.array(text)} for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)
    ]
    if (watching := watch.get()) is None:
        return answers
    return [{**answer, **watching.told(row)} for answer, row in zip(answers, tokens, strict=True)]


def written(answers: Sequence[Answer], features: Sequence[range]) -> list[str]:
    """The text for each row, which its last feature has. `features`: those of each row."""
    return [str(answers[each[-1]][WRITTEN]) for each in features]


TEXT_SCHEMA = pa.schema([(WRITTEN, pa.string())])
"""The columns of `text_table`."""


def text_table(said: Sequence[str]) -> pa.Table:
    """The task's columns of the predictions."""
    return pa.table({WRITTEN: said}, schema=TEXT_SCHEMA)


def surprises(said: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Answer]:
    """Of each row the cross-entropy of its labels in nats (`surprise`), and whether they were the likeliest token
    (`hit`). `said`: parts of all rows, one after the other, each as logits, shape (rows, tokens, vocabulary), and the
    labels at the same places, (rows, tokens).
    """
    import torch

    found: list[dict[str, list[torch.Tensor]]] = []
    for logits, labels in said:
        found = found or [{"surprise": [], "hit": []} for _ in labels]
        for of_row, *row in zip(found, logits, labels, strict=True):
            for chosen, right in judged(*row):
                of_row["surprise"].append(torch.nn.functional.cross_entropy(chosen, right, reduction="none"))
                of_row["hit"].append(chosen.argmax(-1) == right)
    return [{name: torch.cat(each).cpu().numpy() for name, each in of_row.items()} for of_row in found]


def logits_at(
    model: torch.nn.Module, given: Mapping[str, torch.Tensor], labels: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a decoder says to `given`, as `surprises` takes it: all at once, but where one process has the whole model,
    which is in inference mode, at most `ASKED_LOGITS` at a time, and those alone at whose place a row has a label.

    The logits of one row of 131,072 tokens are 34 GB in bf16, while the rest of a pass has one layer at a time.
    Processes that share a model would ask it different numbers of times, and wait for each other for ever.
    """
    parts = _parts(model, labels)
    if parts is None:
        yield model(**given, use_cache=False).logits[:, : labels.shape[1]], labels
        return
    with _reading_once(cast(Any, model).base_model):
        for places in parts:
            yield model(**given, use_cache=False, logits_to_keep=places).logits, labels[:, places]


def _parts(model: torch.nn.Module, labels: torch.Tensor) -> Sequence[torch.Tensor] | None:
    """Places of the labels, in parts; None where all are asked for at once."""
    import torch
    from transformers import PreTrainedModel

    if not torch.is_inference_mode_enabled() or not isinstance(model, PreTrainedModel):
        return None
    of_place = len(labels) * model.config.get_text_config().vocab_size
    body, takes = model.base_model, inspect.signature(model.forward).parameters
    if labels.shape[1] * of_place <= ASKED_LOGITS or body is model or "logits_to_keep" not in takes:
        return None
    (places,) = torch.where((labels != NOT_LEARNT).any(0))
    return torch.split(places, max(1, ASKED_LOGITS // of_place))


@contextmanager
def _reading_once(body: torch.nn.Module) -> Iterator[None]:
    """What `body` says to the first call of its `forward` it says to all."""
    own, read = vars(body).get("forward"), body.forward
    said: list[Any] = []

    def forward(*arguments: Any, **named: Any) -> Any:
        if not said:
            said.append(read(*arguments, **named))
        return said[0]

    body.forward = forward
    try:
        yield
    finally:
        del body.forward
        if own is not None:
            body.forward = own


def judged(logits: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits of one row, shape (tokens, vocabulary), in float32 where there is a label, with these labels: at most
    `JUDGED_LOGITS` at a time, but at least those of a token. The logits are by far the largest thing in a pass, and in
    float32 they would be there several times. Where gradients are wanted all of it is kept anyway, and comes at once.
    """
    import torch

    (places,) = torch.where(labels != NOT_LEARNT)
    most = max(1, len(places) if logits.requires_grad else JUDGED_LOGITS // logits.shape[-1])
    for some in torch.split(places, most):
        yield logits[some].float(), labels[some]


def token_figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Mean cross-entropy of a token in nats, its exponential, and the share of tokens that were the likeliest one."""
    surprise: NDArray[np.float64] = np.concatenate([answer["surprise"] for answer in answers]).astype(np.float64)
    if not len(surprise):
        raise StageError(
            FailureClass.DATA,
            "NothingToMeasure",
            "No row of the split has a token to predict.",
            "Give the split longer rows.",
        )
    loss = float(surprise.mean())
    hits = np.concatenate([answer["hit"] for answer in answers])
    return {"loss": loss, "perplexity": float(np.exp(loss)), "accuracy": float(hits.mean())}


def surprising_rows(answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
    """At most so many rows for the report, the least expected first: `row`, and the perplexity of its tokens as
    `score`.
    """
    by_row = [
        np.concatenate([np.empty(0), *(answers[at]["surprise"] for at in windows)]) for windows in split.features_by_row
    ]
    means = np.array([float(row.mean()) if len(row) else -np.inf for row in by_row])
    worst = [int(row) for row in np.argsort(-means, kind="stable")[:most] if np.isfinite(means[row])]
    return [{"row": row, "score": float(np.exp(means[row]))} for row in worst]


def _prompt_limit(model: PreTrainedModel, generation: Generation) -> int:
    """Tokens that a prompt may have; StageError CONFIG when answers would take all of the model's positions."""
    positions = position_limit(model.config)
    if positions is None:
        return 1 << 30
    if positions <= generation.max_new_tokens:
        raise StageError(
            FailureClass.CONFIG,
            "AnswersTooLong",
            f"generation.maxNewTokens is {generation.max_new_tokens}, and the model holds {positions} tokens, the "
            "prompt among them.",
            f"Set generation.maxNewTokens to less than {positions}.",
        )
    return positions - generation.max_new_tokens

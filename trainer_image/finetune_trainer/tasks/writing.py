"""Models that generate text: the shared part of tasks whose answers are generated."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pyarrow as pa

from finetune_contract.choices import Stage
from finetune_contract.inference_settings import Generation
from finetune_contract.layout import FailureClass
from finetune_contract.plans import JUDGED_LOGITS, REQUESTED_LOGITS
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.token_shards import NOT_LEARNT
from finetune_trainer.models.loading import position_limit
from finetune_trainer.tasks.chat_template import reply_end
from finetune_trainer.tasks.prompt_cuts import leading_special
from finetune_trainer.tasks.task_protocol import Answer, Feature

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune_trainer.data.prepared import PreparedSplit

WRITTEN = "generated_text"
"""Column of predictions, by its name in pipelines of transformers; and its key in an answer."""
TOKENS = "generated_tokens"
"""Key of the number of tokens of a generated text, without special ones, in an answer and in figures of a stage."""


HEAD = "head"
"""Column of features: tokens at the beginning of a prompt that it keeps wherever it is cut."""


class Watch(Protocol):
    """Observer of a model's tokens during generation."""

    def arguments(self) -> Mapping[str, Any]:
        """Return further arguments of `generate`."""

    def fields_of(self, tokens: torch.Tensor) -> Answer:
        """Return the fields of one row's answer beside its text. `tokens`: the generated ones."""


watch: ContextVar[Watch | None] = ContextVar("watch", default=None)
"""Set by callers of the stages' code that observe tokens, for example a server."""


LEAST_TEMPERATURE = 1e-5
"""Temperature below which the likeliest token is taken: logits over a smaller one overflow fp32. vLLM has this bound,
too (_SAMPLING_EPS of its v1/sample/sampler.py)."""


def search(generation: Generation) -> dict[str, Any]:
    """Return the settings as arguments of `generate`."""
    sampled = generation.temperature >= LEAST_TEMPERATURE
    arguments: dict[str, Any] = {
        "max_new_tokens": generation.max_new_tokens,
        "num_beams": generation.num_beams,
        "do_sample": sampled,
    }
    if sampled:
        arguments |= {"temperature": generation.temperature, "top_p": generation.top_p}
    return arguments


def ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end generation: the model's own, and those with which training rows end: the tokenizer's,
    and the one that its chat template puts behind a reply.
    """
    model_ends = getattr(model.generation_config, "eos_token_id", None)
    learnt = (tokenizer.eos_token_id, reply_end(tokenizer))
    tokens = {*(model_ends if isinstance(model_ends, list) else [model_ends]), *learnt}
    return sorted(token for token in tokens if isinstance(token, int))


def adopt_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the token with which the chat template ends replies to `generation_config`, for other programs."""
    settings, learnt = getattr(model, "generation_config", None), reply_end(tokenizer)
    if settings is not None and learnt is not None:
        given = settings.eos_token_id
        known = given if isinstance(given, list) else [] if given is None else [given]
        if learnt not in known:
            settings.eos_token_id = [*known, learnt]


class DecoderWriter:
    """Writer for decoders, which continue the prompt of a feature, its first `prompt` tokens."""

    stages = frozenset({Stage.PREDICT})

    def chosen(self, split: PreparedSplit) -> NDArray[np.int64]:
        """Return the last feature of each row: there the text ends."""
        return np.array([features[-1] for features in split.features_by_row])

    def write(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        features: Sequence[Feature],
        generation: Generation,
    ) -> list[Answer]:
        """Pad prompts on the left, so that all of them end where generation begins; a prompt that leaves too few of the
        model's positions loses tokens behind its begin token and its system message.
        """
        import torch

        most = _prompt_limit(model, generation)
        prompts = [_shortened(feature, most, tokenizer) for feature in features]
        longest = max(1, *(len(prompt) for prompt in prompts))
        ids = np.full((len(prompts), longest), padding_token(tokenizer), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        return texts(tokenizer, generated(model, tokenizer, batch, generation)[:, longest:])


def _shortened(feature: Feature, most: int, tokenizer: PreTrainedTokenizerBase) -> NDArray[Any]:
    """Return at most `most` tokens of a feature's prompt: its head, but at most half, and its end."""
    prompt = np.asarray(feature["input_ids"][: int(feature["prompt"])])
    if len(prompt) <= most:
        return prompt
    head = min(int(feature.get(HEAD, leading_special(tokenizer.all_special_ids, prompt.tolist()))), most // 2)
    return np.concatenate([prompt[:head], prompt[len(prompt) - (most - head) :]])


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the padding token, which every tokenizer of ours has."""
    pad = tokenizer.pad_token_id
    assert isinstance(pad, int)
    return pad


def generated(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Mapping[str, torch.Tensor],
    generation: Generation,
) -> torch.Tensor:
    """Return the generated tokens, shape (rows, tokens), behind those of `batch` for a decoder-only model."""
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
    """Decode each row of tokens to an answer with its text and the number of its tokens."""
    counts = (~np.isin(tokens.cpu().numpy(), tokenizer.all_special_ids)).sum(axis=1)
    decoded = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    answers: list[Answer] = [
        {WRITTEN: np.array(text), TOKENS: np.array(count)} for text, count in zip(decoded, counts, strict=True)
    ]
    if (watching := watch.get()) is None:
        return answers
    return [{**answer, **watching.fields_of(row)} for answer, row in zip(answers, tokens, strict=True)]


def generated_tokens(answers: Iterable[Answer]) -> int:
    """Return the number of tokens of all generated texts, without special ones; 0 if the answers are no texts."""
    return sum(int(answer[TOKENS]) for answer in answers if TOKENS in answer)


def written(answers: Sequence[Answer], features: Sequence[range]) -> list[str]:
    """Return the text for each row, from its last feature. `features`: those of each row."""
    return [str(answers[feature[-1]][WRITTEN]) for feature in features]


TEXT_SCHEMA = pa.schema([(WRITTEN, pa.string())])
"""The columns of `text_table`."""


def text_table(texts: Sequence[str]) -> pa.Table:
    """Return the task's columns of the predictions."""
    return pa.table({WRITTEN: texts}, schema=TEXT_SCHEMA)


def token_nlls(scored: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Answer]:
    """Return each row's cross-entropy of its labels in nats (`nll`), and True where they were the likeliest token
    (`hit`). `scored`: parts of all rows in order, each as logits, shape (rows, tokens, vocabulary), and labels at the
    same places, (rows, tokens).
    """
    import torch

    parts_by_row: list[dict[str, list[torch.Tensor]]] = []
    for logits, labels in scored:
        parts_by_row = parts_by_row or [{"nll": [], "hit": []} for _ in labels]
        for of_row, *row in zip(parts_by_row, logits, labels, strict=True):
            for row_logits, right in judged(*row):
                of_row["nll"].append(torch.nn.functional.cross_entropy(row_logits, right, reduction="none"))
                of_row["hit"].append(row_logits.argmax(-1) == right)
    return [{name: torch.cat(parts).cpu().numpy() for name, parts in of_row.items()} for of_row in parts_by_row]


def logits_at(
    model: torch.nn.Module, given: Mapping[str, torch.Tensor], labels: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a decoder's logits for `given`, as `token_nlls` takes them: all at once, unless one process has the whole
    model in inference mode; then at most `REQUESTED_LOGITS` at a time, only for places at which a row has a label.

    The logits of one row of 131,072 tokens are 34 GB in bf16, while the rest of a forward pass holds one layer at a
    time. Processes that share a model would call it different numbers of times, and wait for each other forever.
    """
    parts = _parts(model, labels)
    if parts is None:
        yield model(**given, use_cache=False).logits[:, : labels.shape[1]], labels
        return
    with _reading_once(cast(Any, model).base_model):
        for places in parts:
            keep = kept_places(model, places)
            yield model(**given, use_cache=False, logits_to_keep=keep).logits, labels[:, places]


def _parts(model: torch.nn.Module, labels: torch.Tensor) -> Sequence[torch.Tensor] | None:
    """Return the places of the labels, in parts; None for all at once."""
    import torch
    from transformers import PreTrainedModel

    if not torch.is_inference_mode_enabled() or not isinstance(model, PreTrainedModel):
        return None
    of_place = len(labels) * model.config.get_text_config().vocab_size
    body, takes = model.base_model, inspect.signature(model.forward).parameters
    if labels.shape[1] * of_place <= REQUESTED_LOGITS or body is model or "logits_to_keep" not in takes:
        return None
    (places,) = torch.where((labels != NOT_LEARNT).any(0))
    return torch.split(places, max(1, REQUESTED_LOGITS // of_place))


def kept_places(model: torch.nn.Module, places: torch.Tensor) -> torch.Tensor | list[int]:
    """Return `places` as `logits_to_keep` of `model`: as numbers if its layers are on several GPUs. The model's hook
    moves tensors to its first GPU, also those in host memory, and the hidden states are on its last one.
    """
    placed = len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1
    return places.tolist() if placed else places


@contextmanager
def _reading_once(body: torch.nn.Module) -> Iterator[None]:
    """Cache the output of the first call of `body`'s `forward` for all later calls."""
    instance_forward, read = vars(body).get("forward"), body.forward
    outputs: list[Any] = []

    def forward(*arguments: Any, **named: Any) -> Any:
        if not outputs:
            outputs.append(read(*arguments, **named))
        return outputs[0]

    body.forward = forward
    try:
        yield
    finally:
        del body.forward
        if instance_forward is not None:
            body.forward = instance_forward


def judged(logits: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logits of one row, shape (tokens, vocabulary), in float32 where there is a label, with these labels: at
    most `JUDGED_LOGITS` at a time, but at least those of a token. Logits are by far the largest tensor of a forward
    pass, and float32 would hold them several times. With gradients they are all kept anyway, and yielded at once.
    """
    import torch

    (places,) = torch.where(labels != NOT_LEARNT)
    most = max(1, len(places) if logits.requires_grad else JUDGED_LOGITS // logits.shape[-1])
    for some in torch.split(places, most):
        yield logits[some].float(), labels[some]


def token_figures(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the mean cross-entropy of a token in nats, its exponential, and the share of likeliest tokens."""
    nll: NDArray[np.float64] = np.concatenate([answer["nll"] for answer in answers]).astype(np.float64)
    if not len(nll):
        raise StageError(
            FailureClass.DATA,
            "NothingToMeasure",
            "No row of the split has a token to predict.",
            "Add longer rows to the split.",
        )
    loss = float(nll.mean())
    hits = np.concatenate([answer["hit"] for answer in answers])
    return {"loss": loss, "perplexity": float(np.exp(loss)), "accuracy": float(hits.mean())}


def surprising_rows(answers: Sequence[Answer], split: PreparedSplit, most: int) -> list[dict[str, Any]]:
    """Return at most so many rows for the report, the highest loss first: `row`, and the perplexity of its tokens as
    `score`.
    """
    by_row = [
        np.concatenate([np.empty(0), *(answers[at]["nll"] for at in windows)]) for windows in split.features_by_row
    ]
    means = np.array([float(row.mean()) if len(row) else -np.inf for row in by_row])
    worst = [int(row) for row in np.argsort(-means, kind="stable")[:most] if np.isfinite(means[row])]
    return [{"row": row, "score": float(np.exp(means[row]))} for row in worst]


def _prompt_limit(model: PreTrainedModel, generation: Generation) -> int:
    """Return a prompt's limit in tokens; raise StageError CONFIG when answers would take all of the positions."""
    positions = position_limit(model.config)
    if positions is None:
        return 1 << 30
    if positions <= generation.max_new_tokens:
        raise StageError(
            FailureClass.CONFIG,
            "AnswersTooLong",
            f"generation.maxNewTokens is {generation.max_new_tokens}, and the model holds {positions} tokens, "
            "including the prompt.",
            f"Set generation.maxNewTokens to less than {positions}.",
        )
    return positions - generation.max_new_tokens

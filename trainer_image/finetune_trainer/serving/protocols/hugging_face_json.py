"""The JSON of Hugging Face's inference API for each task: requests to rows, predictions to answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from finetune_contract.inference_settings import Generation
from finetune_trainer.serving.request_rows import MAX_NEW_TOKENS, RequestError, Row, whole_number

_WORD = re.compile(r"\w+|[^\w\s]")


def words_of(text: str) -> list[re.Match[str]]:
    """Return words and punctuation marks of a text, for models that read words."""
    return list(_WORD.finditer(text))


def rows_of(task: str, inputs: Any, writes: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of `inputs`, and the text of each for answers that point into it. `writes`: role of a prompt in
    the model's task.
    """
    items = inputs if isinstance(inputs, list) else [inputs]
    if task == "text-classification":
        return [_pair(one) for one in items], []
    if task == "question-answering":
        return [_question(one) for one in items], []
    texts = [one for one in items if isinstance(one, str)]
    if len(texts) != len(items) or not texts:
        raise RequestError(422, f"inputs must be a text or a list of texts for {task}.")
    if task == "token-classification":
        rows = [{"tokens": [word.group() for word in words_of(text)]} for text in texts]
        if not all(row["tokens"] for row in rows):
            raise RequestError(422, "inputs has a text without words: send texts with at least one.")
        return rows, texts
    return [{writes: text} for text in texts], texts


def _pair(one: Any) -> dict[str, Any]:
    if isinstance(one, dict) and set(one) in ({"text"}, {"text", "text_pair"}):
        return dict(one)
    if not isinstance(one, str):
        raise RequestError(422, 'inputs must be a text, {"text": ..., "text_pair": ...}, or a list of these.')
    return {"text": one}


def _question(one: Any) -> dict[str, Any]:
    if not isinstance(one, dict) or set(one) != {"question", "context"}:
        raise RequestError(422, 'inputs must be {"question": ..., "context": ...}, or a list of these.')
    return dict(one)


def generation_of(base: Generation, parameters: Mapping[str, Any]) -> Generation:
    """Return the generation settings of a request. RequestError 422 names an invalid value."""
    if not parameters:
        return base
    changes: dict[str, Any] = {}
    if parameters.get("do_sample") is False:
        changes["temperature"] = 0.0
    elif parameters.get("do_sample") is True and base.temperature == 0:
        changes["temperature"] = 1.0
    rules: dict[str, tuple[Any, float, float]] = {
        "max_new_tokens": (int, 1, MAX_NEW_TOKENS),
        "num_beams": (int, 1, 16),
        "temperature": ((int, float), 0, 100),
        "top_p": ((int, float), 1e-6, 1),
    }
    for name, (kind, least, most) in rules.items():
        value = whole_number(parameters.get(name)) if kind is int else parameters.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
            raise RequestError(422, f"{name} must be a number from {least:g} to {most:g}; found {str(value)[:40]!r}.")
        changes[name] = value
    return base.model_copy(update=changes)


def answer_of(
    task: str, rows: list[dict[str, Any]], texts: list[str], parameters: Mapping[str, Any], tokenizer: Any, single: bool
) -> Any:
    """Return the answer in the form of the task's pipeline."""
    answers: list[Any]
    if task == "text-classification":
        answers = [classes(row, _top_k(parameters)) for row in rows]
        return answers
    if task == "token-classification":
        answers = [entities(row, text) for row, text in zip(rows, texts, strict=True)]
    elif task == "question-answering":
        answers = [{name: row[name] for name in ("answer", "score", "start", "end")} for row in rows]
    elif task == "masked-lm":
        answers = [fills(row, text, tokenizer, _top_k(parameters)) for row, text in zip(rows, texts, strict=True)]
    else:
        name = {"summarization": "summary_text", "translation": "translation_text"}.get(task, "generated_text")
        whole = name == "generated_text" and parameters.get("return_full_text") is True
        return [{name: (text if whole else "") + row["generated_text"]} for row, text in zip(rows, texts, strict=True)]
    return answers[0] if single else answers


def _top_k(parameters: Mapping[str, Any]) -> int | None:
    top = whole_number(parameters.get("top_k"))
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise RequestError(422, f"top_k must be a whole number from 1; found {str(top)[:40]!r}.")
    return top


def classes(row: Row, top: int | None) -> list[dict[str, Any]]:
    """Return labels with their probabilities, the likeliest first; for a regression its value."""
    if "value" in row:
        return [{"label": "value", "score": row["value"]}]
    scores = row["scores"]
    # Arrow has the labels as fields of a struct, or as pairs.
    pairs = list(scores.items() if isinstance(scores, Mapping) else scores)
    return [{"label": name, "score": score} for name, score in sorted(pairs, key=lambda pair: -pair[1])][:top]


def entities(row: Row, text: str) -> list[dict[str, Any]]:
    """Return entities with the characters where they begin and end."""
    words = words_of(text)
    groups = []
    for entity in row["entities"]:
        start, end = words[entity["first"]].start(), words[entity["last"]].end()
        named = {"entity_group": entity["type"], "score": entity["score"], "word": text[start:end]}
        groups.append({**named, "start": start, "end": end})
    return groups


def fills(row: Row, text: str, tokenizer: Any, top: int | None) -> list[Any]:
    """Return the candidates for the mask; a list of lists if there are several masks."""
    candidates = []
    for mask in row["masks"]:
        fitting = []
        for candidate in mask[: top or len(mask)]:
            word = candidate["token"]
            whole = text.replace(tokenizer.mask_token, word.strip(), 1)
            number = tokenizer.convert_tokens_to_ids(word)
            fitting.append({"score": candidate["score"], "token": number, "token_str": word, "sequence": whole})
        candidates.append(fitting)
    return candidates[0] if len(candidates) == 1 else candidates

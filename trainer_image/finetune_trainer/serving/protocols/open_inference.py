"""The Open Inference Protocol v2 (KServe, Triton): its JSON objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from finetune_trainer.serving.request_rows import RequestError

_JSON_ROLES = ("tokens", "messages")
"""Inputs whose elements are JSON in text."""


def rows_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an infer request: each input is a role, each element of its data a row. RequestError 400."""
    inputs = body.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise RequestError(400, "inputs must be a list of tensors.")
    columns: dict[str, list[Any]] = {}
    for tensor in inputs:
        if not isinstance(tensor, dict) or not isinstance(tensor.get("name"), str):
            raise RequestError(400, "An input must be an object with name, datatype, shape and data.")
        name = tensor["name"]
        if name in columns:
            raise RequestError(400, f"Input {name} is given twice.")
        columns[name] = _values(name, tensor)
    if len({len(values) for values in columns.values()}) != 1:
        raise RequestError(400, "The inputs must have the same number of elements, one for each row.")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _values(name: str, tensor: Mapping[str, Any]) -> list[Any]:
    if tensor.get("datatype") != "BYTES":
        raise RequestError(400, f"Input {name} must have datatype BYTES; found {str(tensor.get('datatype'))[:40]!r}.")
    data = tensor.get("data")
    if not isinstance(data, list) or not data:
        raise RequestError(400, f"Input {name} must have data, a list of texts.")
    if all(isinstance(row, list) for row in data):
        data = [value for row in data for value in row]  # shape [rows, 1]
    shape = tensor.get("shape")
    whole = isinstance(shape, list) and all(
        isinstance(dimension, int) and not isinstance(dimension, bool) for dimension in shape
    )
    size = 1
    for dimension in shape if whole and isinstance(shape, list) else ():
        size *= dimension
    if not whole or not shape or size != len(data) or len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
        raise RequestError(400, f"Input {name} must have shape [{len(data)}] or [{len(data)}, 1] for its data.")
    if not all(isinstance(text, str) for text in data):
        raise RequestError(400, f"Input {name} must have texts as data.")
    return [_parsed(name, text) for text in data] if name in _JSON_ROLES else data


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"Each element of {name} must be a JSON list in text: {error}.") from error


def outputs_of(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the requested outputs; empty: all. RequestError 400."""
    outputs = body.get("outputs")
    if outputs is None:
        return ()
    if not isinstance(outputs, list) or not all(
        isinstance(output, dict) and isinstance(output.get("name"), str) for output in outputs
    ):
        raise RequestError(400, "outputs must be a list of objects with name.")
    return tuple(output["name"] for output in outputs)


def answer_of(
    model: str, version: str, identity: Any, rows: list[dict[str, Any]], requested: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the requested columns of predict's answers as tensors, all if none is requested; values that are no text
    or number become JSON in text. RequestError 400 for a column that the answers do not have.
    """
    unknown = next((name for name in requested if name not in rows[0]), None)
    if unknown is not None:
        raise RequestError(400, f"There is no output {unknown[:80]!r}; the model has {', '.join(rows[0])}.")
    outputs = []
    for name in dict.fromkeys(requested) or rows[0]:
        values = [row[name] for row in rows]
        if all(isinstance(value, float) for value in values):
            kind = "FP64"
        else:
            kind = "BYTES"
            values = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        outputs.append({"name": name, "datatype": kind, "shape": [len(values)], "data": values})
    body = {"model_name": model, "model_version": version, "outputs": outputs}
    return body if identity is None else {**body, "id": identity}

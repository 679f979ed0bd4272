"""OpenAPI document of a server: requests and answers of each path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from finetune_trainer.serving.protocols.binary_tensors import LENGTH_HEADER, MEDIA_TYPE
from finetune_trainer.serving.protocols.openai_json import LONGEST_STOP, MOST_STOPS, ROLES
from finetune_trainer.serving.request_rows import MAX_NEW_TOKENS, MAX_ROWS, input_forms

_TEXT: Mapping[str, Any] = {"type": "string", "minLength": 1}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_DEADLINE = {
    "name": "X-Request-Timeout-Ms",
    "in": "header",
    "description": "Time limit of the request in milliseconds.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
}
_OPEN_ERROR = {
    "type": "object",
    "required": ["message", "type"],
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    },
}
_BINARY: dict[str, Any] = {
    "type": "string",
    "format": "binary",
    "description": f"The JSON object, whose bytes the header {LENGTH_HEADER} counts, and its binary tensors behind it.",
}
_PROBES = ("/v2/health/live", "/v2/health/ready", "/metrics")


def openapi_document(title: str, task: str, routes: Sequence[tuple[str, str, str]], token: bool) -> dict[str, Any]:
    """Describe `routes`: method, path and summary of each. `token`: True if requests need one."""
    documented = [
        APIRoute(
            path,
            _nothing,
            methods=[method],
            summary=summary,
            operation_id=f"{method.lower()}{path.translate(_NO_MARKS)}",
            response_model=None,
            openapi_extra=_extra(task, method, path, token),
        )
        for method, path, summary in routes
    ]
    document: dict[str, Any] = get_openapi(title=title, version="1", routes=documented)
    if token:
        document.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return document


_NO_MARKS = str.maketrans({"/": "_", "{": "", "}": "", ".": "_"})


def _nothing() -> None:
    """Placeholder for a handler: these routes are only described."""


def _extra(task: str, method: str, path: str, token: bool) -> dict[str, Any]:
    openai = path.startswith("/v1/")
    error = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    if openai:
        error = {"type": "object", "required": ["error"], "properties": {"error": _OPEN_ERROR}}
    media = {"/metrics": "text/plain", "/": "text/html", "/page/{name}": "*/*"} if method == "GET" else {}
    answers: dict[str, Any] = {"application/json": {"schema": _answer(task, method, path)}}
    if path in media:
        answers = {media[path]: {"schema": {"type": "string"}}}
    elif openai and method == "POST":
        # A schema here would be that of one event in some readers, and of the whole text in others.
        answers["text/event-stream"] = {}
    elif path.endswith("/infer"):
        answers[MEDIA_TYPE] = {"schema": _BINARY}
    refused = {"description": "The request is refused.", "content": {"application/json": {"schema": error}}}
    parameters: list[Mapping[str, Any]] = [_NAME] if "{name}" in path else []
    extra: dict[str, Any] = {
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            "4XX": refused,
            "5XX": {**refused, "description": "The server is not ready, or has failed."},
        }
    }
    if path == "/v2/health/ready" or path.endswith("/{name}/ready"):
        extra["responses"]["503"] = {**extra["responses"]["200"], "description": "The model is not ready."}
    if method == "POST":
        parameters = [*parameters, _DEADLINE]
        body = {"application/json": {"schema": _body(task, path)}}
        if path.endswith("/infer"):
            body[MEDIA_TYPE] = {"schema": _BINARY}
        extra["requestBody"] = {"required": True, "content": body}
    if parameters:
        extra["parameters"] = parameters
    if token and path not in _PROBES and not (method == "GET" and path in ("/", "/page/{name}")):
        extra["security"] = [{"token": []}]
    return extra


def _answer(task: str, method: str, path: str) -> dict[str, Any]:
    if method == "POST" and (path == "/" or path.startswith("/models/")):
        return {"type": ["array", "object"]}
    if path.endswith("/infer"):
        outputs = {"type": "array", "items": _object({"name": {"type": "string"}, "datatype": {"type": "string"}})}
        return _object({"model_name": {"type": "string"}, "outputs": outputs}, "model_name", "outputs")
    return {"type": "object"}


# ------------------------------------------------------------------------------------------------------------- requests


def _body(task: str, path: str) -> dict[str, Any]:
    if path.endswith("/infer"):
        return _infer(task)
    if path.startswith("/v1/"):
        return _openai(chat=path.endswith("/chat/completions"))
    return _object({"inputs": _inputs(task), "parameters": _parameters(task)}, "inputs")


def _infer(task: str) -> dict[str, Any]:
    tensor = _object(
        {
            "name": {"enum": sorted(frozenset().union(*input_forms(task)))},
            "datatype": {"const": "BYTES"},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 2},
            "data": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_ROWS},
        },
        *("name", "datatype", "shape", "data"),
    )
    inputs = {"type": "array", "items": tensor, "minItems": 1}
    return _object({"id": {"type": "string"}, "inputs": inputs, "parameters": _parameters(task)}, "inputs")


def _inputs(task: str) -> dict[str, Any]:
    one: dict[str, Any] = dict(_TEXT) if task == "token-classification" else {"type": "string"}
    if task == "question-answering":
        one = _object({"question": _TEXT, "context": _TEXT}, "question", "context", closed=True)
    elif task == "text-classification":
        # The rows of a request have the same inputs.
        single = {"anyOf": [one, _object({"text": one}, "text", closed=True)]}
        pair = _object({"text": one, "text_pair": one}, "text", "text_pair", closed=True)
        return {"anyOf": [single, pair, _rows(single), _rows(pair)]}
    return {"anyOf": [one, _rows(one)]}


def _rows(one: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_ROWS}


def _parameters(task: str) -> dict[str, Any]:
    if task in ("text-classification", "masked-lm"):
        return {**_object({"top_k": _number("integer", 1)}), "type": ["object", "null"]}
    if task in ("token-classification", "question-answering"):
        return {"type": ["object", "null"]}
    schema = _object(
        {
            "max_new_tokens": _number("integer", 1, MAX_NEW_TOKENS),
            "num_beams": _number("integer", 1, 16),
            "temperature": _number("number", 0, 100),
            "top_p": _number("number", 1e-6, 1),
            "do_sample": {"type": ["boolean", "null"]},
            "return_full_text": {"type": ["boolean", "null"]},
        }
    )
    return {**schema, "type": ["object", "null"]}


def _openai(*, chat: bool) -> dict[str, Any]:
    stop = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
    input_field: dict[str, Any] = {"prompt": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}}
    if chat:
        part = _object({"type": {"const": "text"}, "text": _TEXT}, "type", "text")
        content = {"anyOf": [_TEXT, {"type": "array", "items": part, "minItems": 1}]}
        message = _object({"role": {"enum": list(ROLES)}, "content": content})
        input_field = {
            "messages": {"type": "array", "items": {**message, "required": ["role", "content"]}, "minItems": 1}
        }
    return _object(
        {
            **input_field,
            "model": {"type": ["string", "null"]},
            "max_tokens": _number("integer", 1, MAX_NEW_TOKENS),
            "max_completion_tokens": _number("integer", 1, MAX_NEW_TOKENS),
            "temperature": _number("number", 0, 100),
            "top_p": _number("number", 1e-6, 1),
            "stop": {"anyOf": [{"type": "null"}, stop, {"type": "array", "items": stop, "maxItems": MOST_STOPS}]},
            "seed": _number("integer", -(2**63), 2**63 - 1),
            "stream": {"type": ["boolean", "null"]},
            "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": "boolean"}}},
        },
        *input_field,
        closed=True,
    )


def _number(kind: str, least: float, most: float | None = None) -> dict[str, Any]:
    return {"type": [kind, "null"], "minimum": least, **({} if most is None else {"maximum": most})}


def _object(properties: Mapping[str, Any], *required: str, closed: bool = False) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    return {**schema, "additionalProperties": False} if closed else schema

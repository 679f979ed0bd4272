"""Binary tensor data extension of the Open Inference Protocol, as clients of Triton send it by default.

A message is a JSON object, and behind it the bytes of its binary tensors, in their order. A header has the length of
the object. Each element of a BYTES tensor is its length in 4 bytes, little-endian, and its UTF-8 text; an FP64 tensor
is its numbers in 8 bytes each, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from finetune_trainer.serving.protocols.http_json import json_bytes, json_response
from finetune_trainer.serving.request_rows import MAX_ROWS, RequestError

EXTENSION = "binary_tensor_data"
"""Name of the extension in the metadata of a server."""
MEDIA_TYPE = "application/octet-stream"
LENGTH_HEADER = "Inference-Header-Content-Length"
_LENGTH = struct.Struct("<I")


def split_message(content: bytes, length: str | None) -> tuple[bytes, bytes]:
    """Return the JSON of a message, and the bytes behind it. `length`: value of the header; None: all is JSON.

    RequestError 400 if the length does not fit the message.
    """
    if length is None:
        return content, b""
    if not (length.isascii() and length.isdigit() and len(length) < 16 and int(length) <= len(content)):
        raise RequestError(
            400, f"{LENGTH_HEADER} must be the bytes of JSON in the body, 0 to {len(content)}; found {length[:40]!r}."
        )
    return content[: int(length)], content[int(length) :]


def with_decoded_inputs(body: Mapping[str, Any], binary: bytes) -> dict[str, Any]:
    """Return the request with the elements of binary inputs as `data`. RequestError 400 if the sizes of the inputs do
    not add up to `binary`, and for bytes that are no elements; 413 for too many rows.
    """
    inputs, at = body.get("inputs"), 0
    if not isinstance(inputs, list):
        return dict(body)
    decoded = []
    for tensor in inputs:
        size = _size(tensor)
        if size is None:
            decoded.append(tensor)
            continue
        if at + size > len(binary):
            raise RequestError(
                400,
                f"The binary inputs take more bytes than the {len(binary)} behind the JSON: send the length of the "
                f'JSON as {LENGTH_HEADER}, or texts in "data".',
            )
        decoded.append({**tensor, "data": _texts(str(tensor.get("name"))[:80], binary[at : at + size])})
        at += size
    if at != len(binary):
        raise RequestError(400, f"The body has {len(binary) - at} bytes behind the JSON that no input describes.")
    return {**body, "inputs": decoded}


def _size(tensor: Any) -> int | None:
    """Return the bytes of a binary input; None for others. RequestError 400 for wrong sizes."""
    parameters = tensor.get("parameters") if isinstance(tensor, dict) else None
    if not isinstance(parameters, dict) or "binary_data_size" not in parameters:
        return None
    size = parameters["binary_data_size"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise RequestError(400, f"binary_data_size must be a number of bytes; found {str(size)[:40]!r}.")
    if "data" in tensor:
        raise RequestError(400, "An input must have either data or binary_data_size.")
    return size


def _texts(name: str, content: bytes) -> list[str]:
    """Return the elements of a BYTES tensor. An input of another datatype is refused later."""
    texts: list[str] = []
    at = 0
    while at < len(content):
        if len(texts) == MAX_ROWS:
            raise RequestError(413, f"Input {name} has more than {MAX_ROWS} rows: split it.")
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(content, at)[0] if begin <= len(content) else len(content) + 1
        if at > len(content):
            raise RequestError(
                400, f"Input {name} ends within an element: each is its length in 4 bytes, and its text."
            )
        try:
            texts.append(content[begin:at].decode())
        except UnicodeDecodeError as error:
            raise RequestError(400, f"Element {len(texts)} of input {name} is not UTF-8: {error.reason}.") from error
    return texts


def wanted_as_bytes(body: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return whether the request wants an output as bytes, by the parameters of the output or else its own.

    RequestError 400 for values other than true and false.
    """
    default = _flag(body, "binary_data_output", False)
    of_output = {output["name"]: _flag(output, "binary_data", default) for output in body.get("outputs") or ()}
    return lambda name: of_output.get(name, default)


def _flag(owner: Mapping[str, Any], name: str, default: bool) -> bool:
    parameters = owner.get("parameters")
    value = parameters.get(name) if isinstance(parameters, dict) else None
    if value is not None and not isinstance(value, bool):
        raise RequestError(400, f"{name} must be true or false; found {str(value)[:40]!r}.")
    return default if value is None else value


def infer_response(answer: Mapping[str, Any], as_bytes: Callable[[str], bool]) -> Response:
    """Return the answer as JSON, with the data of the outputs for which `as_bytes` is true behind it."""
    outputs, parts = [], []
    for output in answer["outputs"]:
        if not as_bytes(output["name"]):
            outputs.append(output)
            continue
        parts.append(_encoded(output["datatype"], output["data"]))
        described = {name: value for name, value in output.items() if name != "data"}
        outputs.append({**described, "parameters": {"binary_data_size": len(parts[-1])}})
    if not parts:
        return json_response(answer)
    content = json_bytes({**answer, "outputs": outputs})
    return Response(b"".join((content, *parts)), 200, {LENGTH_HEADER: str(len(content))}, MEDIA_TYPE)


def _encoded(datatype: str, values: Sequence[Any]) -> bytes:
    if datatype == "FP64":
        return struct.pack(f"<{len(values)}d", *values)
    # A half of a surrogate pair has no UTF-8: it is escaped, as in JSON.
    texts = [value.encode("utf-8", "backslashreplace") for value in values]
    return b"".join(_LENGTH.pack(len(text)) + text for text in texts)

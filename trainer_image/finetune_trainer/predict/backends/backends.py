"""Backends by name, in the order in which they are measured: the cheapest to build first."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import NamedTuple, cast

from finetune_contract.choices import TEXT_BACKENDS
from finetune_trainer.predict.backends.backend_protocol import Backend, TextSettings

_PACKAGE = "finetune_trainer.predict.backends"


class _Place(NamedTuple):
    module: str
    attribute: str


VLLM = "vllm"
_BACKENDS = {
    "none": _Place("torch_backends", "PLAIN"),
    "bf16": _Place("torch_backends", "BF16"),
    # The first of these to be built pays for the export that the others share.
    "openvino": _Place("exported.openvino_backends", "OPENVINO"),
    "openvino-bf16": _Place("exported.openvino_backends", "OPENVINO_BF16"),
    "onnx": _Place("exported.onnxruntime_backends", "ONNX"),
    "onnx-int8": _Place("exported.onnxruntime_backends", "ONNX_INT8"),
    "openvino-int8": _Place("exported.openvino_backends", "OPENVINO_INT8"),
    "onnx-int8-static": _Place("exported.onnxruntime_backends", "ONNX_INT8_STATIC"),
    "compile": _Place("torch_backends", "COMPILE"),
    "bnb-int8": _Place("quantized_backends", "EIGHT_BIT"),
    "bnb-nf4": _Place("quantized_backends", "FOUR_BIT"),
    "fp8": _Place("quantized_backends", "FP8"),
    "continuous-batching": _Place("continuous_batches", "CONTINUOUS_BATCHING"),
    VLLM: _Place("text_server", "VLLM"),
}
FAMILIES = {"int8": ("onnx-int8", "openvino-int8")}
"""Name of a group -> its backends, of which the fastest is taken."""


def backend_by_name(name: str, texts: TextSettings | None = None) -> Backend:
    """Return a backend; KeyError for a name that none has. `texts`: settings, if the answers are generated texts."""
    place = _BACKENDS[name]
    backend = getattr(import_module(f"{_PACKAGE}.{place.module}"), place.attribute)
    if texts is None or name not in TEXT_BACKENDS:
        return cast(Backend, backend)
    return cast(Backend, replace(backend, url=texts.server) if name == VLLM else replace(backend, settings=texts))


def backends_of(requested: str, *, texts: TextSettings | None = None) -> list[Backend]:
    """Return the backends of a value of `predict.optimization`, without the plain model. `texts`: as of
    `backend_by_name`.
    """
    names = (
        [name for name in _BACKENDS if name != "none" and (name in TEXT_BACKENDS) == (texts is not None)]
        if requested == "measured"
        else list(FAMILIES.get(requested, (requested,)))
    )
    return [backend_by_name(name, texts) for name in names]

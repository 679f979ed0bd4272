"""Rungs by name, in the order in which they are measured: the cheapest to build first."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import NamedTuple, cast

from finetune_contract.choices import TEXT_RUNGS
from finetune_trainer.predict.backends.backend_protocol import Rung, TextSettings

_PACKAGE = "finetune_trainer.predict.backends"


class _Place(NamedTuple):
    module: str
    attribute: str


VLLM = "vllm"
_RUNGS = {
    "none": _Place("torch_rungs", "PLAIN"),
    "bf16": _Place("torch_rungs", "BF16"),
    # The first of these to be built pays for the export that the others share.
    "openvino": _Place("exported.openvino_rungs", "OPENVINO"),
    "openvino-bf16": _Place("exported.openvino_rungs", "OPENVINO_BF16"),
    "onnx": _Place("exported.onnxruntime_rungs", "ONNX"),
    "onnx-int8": _Place("exported.onnxruntime_rungs", "ONNX_INT8"),
    "openvino-int8": _Place("exported.openvino_rungs", "OPENVINO_INT8"),
    "onnx-int8-static": _Place("exported.onnxruntime_rungs", "ONNX_INT8_STATIC"),
    "compile": _Place("torch_rungs", "COMPILE"),
    "bnb-int8": _Place("quantized_rungs", "EIGHT_BIT"),
    "bnb-nf4": _Place("quantized_rungs", "FOUR_BIT"),
    "fp8": _Place("quantized_rungs", "FP8"),
    "continuous-batching": _Place("continuous_batches", "CONTINUOUS_BATCHING"),
    VLLM: _Place("text_server", "VLLM"),
}
FAMILIES = {"int8": ("onnx-int8", "openvino-int8")}
"""Name of a group -> its rungs, of which the fastest is taken."""


def rung_by_name(name: str, texts: TextSettings | None = None) -> Rung:
    """Return a rung; KeyError for a name that none has. `texts`: settings, if the answers are generated texts."""
    place = _RUNGS[name]
    found = getattr(import_module(f"{_PACKAGE}.{place.module}"), place.attribute)
    if texts is None or name not in TEXT_RUNGS:
        return cast(Rung, found)
    return cast(Rung, replace(found, url=texts.server) if name == VLLM else replace(found, settings=texts))


def rungs_of(requested: str, *, texts: TextSettings | None = None) -> list[Rung]:
    """Return the rungs of a value of `predict.optimization`, without the plain model. `texts`: as of `rung_by_name`."""
    names = (
        [name for name in _RUNGS if name != "none" and (name in TEXT_RUNGS) == (texts is not None)]
        if requested == "measured"
        else list(FAMILIES.get(requested, (requested,)))
    )
    return [rung_by_name(name, texts) for name in names]

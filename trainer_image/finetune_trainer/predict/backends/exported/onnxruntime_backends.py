"""The graph under ONNX Runtime, in float32 and with 8-bit products.

ONNX Runtime multiplies in bfloat16 on Arm only: on x86 OpenVINO has that precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from finetune_trainer.predict.backends.backend_protocol import Batch, ForwardPass, Machine
from finetune_trainer.predict.backends.exported.onnx_graph import (
    artefact,
    calibration_batches,
    graph,
    outputs_of,
    quiet,
    why_not,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_PRODUCTS = ["MatMul", "Gemm"]
_CONSTANT_WEIGHTS = {"MatMulConstBOnly": True}
"""Products of two activations, as in attention, stay in float32: they are few, and most hurt by 8-bit scales."""


@dataclass(frozen=True)
class OnnxRuntimeBackend:
    """One form of the graph under ONNX Runtime."""

    name: str
    lossy: bool
    convert: Callable[[Path, Path, Sequence[Batch]], None] | None = None
    """Function that writes a converted graph, from a graph and calibration batches."""
    folder: str = ""
    """Folder of the converted graph among the artefacts."""

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason; None if the model can be tried."""
        return why_not(model, ("onnxruntime",))

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        """Export and convert the files that `folder` lacks; raise NotAvailable if the model cannot be exported."""
        path = graph(model, sample, folder)
        convert = self.convert
        if convert is not None:
            whole = path
            path = artefact(folder / self.folder / "model.onnx", lambda made: convert(whole, made, sample), model)
        return OnnxRuntimePass.of(path)


@dataclass(frozen=True)
class OnnxRuntimePass:
    """A session that answers batches."""

    session: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> OnnxRuntimePass:
        """Load a graph; it computes with as many threads as torch."""
        import onnxruntime
        import torch

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning threads would take cores from the tokenizer, which runs ahead.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        inputs, outputs = session.get_inputs(), session.get_outputs()
        return cls(session, tuple(node_arg.name for node_arg in inputs), tuple(output.name for output in outputs))

    def __call__(self, **inputs: torch.Tensor) -> SimpleNamespace:
        """Answer one batch."""
        return outputs_of(self.outputs, self.session.run(None, {name: inputs[name].numpy() for name in self.inputs}))


def _to_dynamic_int8(whole: Path, made: Path, sample: Sequence[Batch]) -> None:
    """Store weights in 8 bits, with a scale per column; activations are scaled per batch."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with quiet("root"):
        quantize_dynamic(
            whole,
            made,
            op_types_to_quantize=_PRODUCTS,
            per_channel=True,
            reduce_range=_saturates(),
            weight_type=QuantType.QInt8,
            extra_options=_CONSTANT_WEIGHTS,
        )


def _to_static_int8(whole: Path, made: Path, sample: Sequence[Batch]) -> None:
    """Store weights in 8 bits, and scales of activations calibrated on the sample."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    inputs = {value_info.name for value_info in onnx.load(whole, load_external_data=False).graph.input}
    batches = iter(calibration_batches(sample))

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # the library has no types
        def get_next(self) -> dict[str, Any] | None:
            batch = next(batches, None)
            return None if batch is None else {name: tensor.numpy() for name, tensor in batch.items() if name in inputs}

    with quiet("root"):
        quantize_static(
            whole,
            made,
            Reader(),
            op_types_to_quantize=_PRODUCTS,
            per_channel=True,
            reduce_range=_saturates(),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            extra_options=_CONSTANT_WEIGHTS,
        )


def _saturates() -> bool:
    """Return whether sums of two 8-bit products overflow 16 bits, as without VNNI: weights have 7 bits there."""
    return not Machine.here().vnni


ONNX = OnnxRuntimeBackend("onnx", lossy=False)
ONNX_INT8 = OnnxRuntimeBackend("onnx-int8", lossy=True, convert=_to_dynamic_int8, folder="model-int8")
ONNX_INT8_STATIC = OnnxRuntimeBackend(
    "onnx-int8-static", lossy=True, convert=_to_static_int8, folder="model-int8-static"
)

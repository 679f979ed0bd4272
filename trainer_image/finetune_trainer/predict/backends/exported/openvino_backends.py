"""The graph under OpenVINO: in float32, in bfloat16, and with 8-bit products that nncf calibrates.

OpenVINO's converter and nncf report their use to Google Analytics by the package openvino-telemetry. They work without
it if it cannot be imported, so its import is blocked here.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from finetune_trainer.core.library_patches import without_telemetry
from finetune_trainer.predict.backends.backend_protocol import NO_BF16, Batch, ForwardPass, Machine
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

_GRAPH = "model.xml"


@dataclass(frozen=True)
class OpenVinoBackend:
    """One form of the graph under OpenVINO."""

    name: str
    lossy: bool
    precision: Literal["f32", "bf16"]
    """Precision of the products that are not int8."""
    int8: bool = False

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason; None if the model can be tried."""
        if self.precision == "bf16" and model.device.type == "cpu" and not machine.multiplies_bf16:
            return NO_BF16
        return why_not(model, ("openvino", "nncf") if self.int8 else ("openvino",))

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> ForwardPass:
        """Export and convert the files that `folder` lacks; raise NotAvailable if the model cannot be exported."""
        openvino = _openvino()
        whole = folder / "openvino" / _GRAPH

        def convert(made: Path) -> None:
            exported = openvino.Core().read_model(graph(model, sample, folder))
            openvino.save_model(exported, made, compress_to_fp16=False)

        def quantize(made: Path) -> None:
            openvino.save_model(_int8(openvino.Core().read_model(whole), sample), made, compress_to_fp16=False)

        path = artefact(whole, convert, model)
        if self.int8:
            path = artefact(folder / "openvino-int8" / _GRAPH, quantize, model)
        return OpenVinoPass.of(path, self.precision)


@dataclass(frozen=True)
class OpenVinoPass:
    """A compiled graph that answers batches."""

    request: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, precision: Literal["f32", "bf16"]) -> OpenVinoPass:
        """Compile a graph; it computes with as many threads as torch."""
        import torch

        settings = {
            "INFERENCE_PRECISION_HINT": precision,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
        }
        compiled = _openvino().Core().compile_model(path, "CPU", settings)
        names = [tuple(port.get_any_name() for port in of) for of in (compiled.inputs, compiled.outputs)]
        return cls(compiled.create_infer_request(), *names)

    def __call__(self, **inputs: torch.Tensor) -> SimpleNamespace:
        """Answer one batch."""
        results = self.request.infer({name: inputs[name].numpy() for name in self.inputs}, share_inputs=True)
        return outputs_of(self.outputs, [results[name] for name in self.outputs])


def _openvino() -> Any:
    """Import OpenVINO with telemetry blocked, also for later imports."""
    without_telemetry.until_end()
    import openvino

    return openvino


def _int8(whole: Any, sample: Sequence[Batch]) -> Any:
    """Return the graph with products in 8 bits, calibrated on the sample."""
    import nncf

    inputs = {port.get_any_name() for port in whole.inputs}
    batches = [
        {name: tensor.numpy() for name, tensor in batch.items() if name in inputs}
        for batch in calibration_batches(sample)
    ]
    with quiet("nncf"), contextlib.redirect_stdout(io.StringIO()):  # progress bars
        return nncf.quantize(
            whole, nncf.Dataset(batches), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(batches)
        )


OPENVINO = OpenVinoBackend("openvino", lossy=False, precision="f32")
OPENVINO_BF16 = OpenVinoBackend("openvino-bf16", lossy=True, precision="bf16")
OPENVINO_INT8 = OpenVinoBackend("openvino-int8", lossy=True, precision="f32", int8=True)

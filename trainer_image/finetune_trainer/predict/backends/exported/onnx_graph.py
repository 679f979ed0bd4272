"""Export of the model as an ONNX graph, on which all backends of this package build."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from finetune_trainer.core.files import temporary_folder
from finetune_trainer.predict.backends.backend_protocol import Batch, NotAvailable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

GRAPH = Path("onnx") / "model.onnx"
_PACKAGES = ("onnx", "onnxscript")
_EXTRA = "it is in the image for CPUs and in finetune-trainer[fast-inference]"
FOR_CPUS = "it is for CPUs, and the model is on a GPU"
_TARGETS = frozenset({"labels", "start_positions", "end_positions"})
_EXAMPLE_ROWS = 3
"""Rows of the example: torch.export treats a size of 0 or 1 as constant, and equal sizes as the same one."""
_REASON_LENGTH = 160
_CALIBRATION_BATCHES, _CALIBRATION_ROWS = 32, 16
_ONE_FILE_BYTES = 1 << 30
"""Size above which weights get a file of their own: one ONNX file holds 2 GB."""


def why_not(model: PreTrainedModel, packages: Sequence[str]) -> str | None:
    """Return the reason why `model` cannot be exported or run as a graph here; None if none is known."""
    if model.device.type != "cpu":
        return FOR_CPUS
    for package in (*_PACKAGES, *packages):
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed: {_EXTRA}"
    if model.can_generate():
        return "the model generates text, and a graph computes one forward pass"
    if getattr(model, "hf_quantizer", None) is not None:
        return "the model's weights are quantized already"
    return None


def graph(model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> Path:
    """Return the file of the graph in `folder`; export it first if it is missing.

    Raise NotAvailable with the exporter's message if the model has an operator that the exporter does not know.
    """
    return artefact(folder / GRAPH, lambda path: _exported(model, sample)(path), model)


def artefact(path: Path, write: Callable[[Path], None], model: PreTrainedModel) -> Path:
    """Return `path`; have its folder written first, with the model's config, if it is missing."""
    if not path.is_file():
        folder = path.parent
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder.parent, f".{folder.name}") as temporary:
            write(temporary / path.name)
            model.config.save_pretrained(temporary)
            with suppress(OSError):  # another worker has written the same meanwhile
                temporary.rename(folder)
        if not path.is_file():
            raise NotAvailable(f"{path} could not be written")
    return path


def calibration_batches(sample: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
    """Return the batches that scales of activations are calibrated on: a few rows of batches of all lengths."""
    step = max(1, len(sample) // _CALIBRATION_BATCHES)
    return [{name: value[:_CALIBRATION_ROWS] for name, value in batch.items()} for batch in sample[::step]]


def _exported(model: PreTrainedModel, sample: Sequence[Batch]) -> Callable[[Path], None]:
    """Export the model in float32; return a function that writes it to a file."""
    import torch

    example = _example(model, sample)
    whole = model if model.dtype == torch.float32 else cast(Any, copy.deepcopy(model)).float()
    with torch.no_grad():
        result = whole(**example)
    outputs = [name for name, value in result.items() if isinstance(value, torch.Tensor)]
    flat = _flat(whole, tuple(example), outputs)
    with quiet("torch.onnx"):
        try:
            program = torch.onnx.export(
                flat,
                tuple(example.values()),
                input_names=list(example),
                output_names=outputs,
                dynamic_shapes=(tuple({0: "batch", 1: "length"} for _ in example),),
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # the exporter raises the errors of the model's own code
            raise NotAvailable(f"the model cannot be exported: {first_line(error)}") from error
    assert program is not None
    apart = sum(parameter.numel() * parameter.element_size() for parameter in whole.parameters()) > _ONE_FILE_BYTES
    return lambda path: program.save(path, external_data=apart)


def _flat(model: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> torch.nn.Module:
    """Return a module that takes tensors in the order of `inputs` and returns those of `outputs`."""
    import torch

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = self.model(**dict(zip(inputs, given, strict=True)))
            return tuple(result[name] for name in outputs)

    return Flat().eval()


def _example(model: PreTrainedModel, sample: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """Return the model's inputs for a few rows of a batch, with a number of tokens other than that of rows."""
    import torch

    takes = inspect.signature(model.forward).parameters
    batch = max(sample, key=lambda candidate: candidate["input_ids"].shape[1])
    inputs = {name: value for name, value in batch.items() if name in takes and name not in _TARGETS}
    rows, tokens = inputs["input_ids"].shape
    row_indices = torch.arange(_EXAMPLE_ROWS + (tokens == _EXAMPLE_ROWS)) % rows
    places = torch.arange(max(tokens, 2)) % tokens
    return {name: value[row_indices][:, places] for name, value in inputs.items()}


def first_line(error: BaseException) -> str:
    """Return the message of an error, or of the one that it was raised from, in one line."""
    cause = error.__cause__ or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = lines[0] if lines else type(cause).__name__
    return text if len(text) <= _REASON_LENGTH else text[:_REASON_LENGTH].rstrip() + " ..."


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Keep a library's warnings that nobody can act on out of the log."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def outputs_of(names: Sequence[str], arrays: Sequence[Any]) -> SimpleNamespace:
    """Return the outputs of a graph's run under the names of the model's own outputs."""
    import torch

    return SimpleNamespace(**{name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)})

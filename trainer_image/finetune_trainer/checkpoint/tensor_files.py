"""Files of tensors in safetensors' format, written piece by piece.

safetensors' own `save_file` needs all tensors of a file in host memory. Here a tensor is copied from its device in
pieces of `SAVED_PIECE_BYTES`, and the file is hashed as it is written, so that nobody has to read it for its hash.
Readers are safetensors' own: they map a file, and copy the parts that are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from finetune_contract.layout import FailureClass
from finetune_contract.plans import SAVED_PIECE_BYTES
from finetune_trainer.checkpoint.checkpoints import CheckpointPart
from finetune_trainer.core.distributed import barrier
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import FileEntry

_TYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' names of types."""
_NAMES = {name: dtype for dtype, name in _TYPES.items()}
_ALIGNMENT = 8
"""Bytes of which the header's size is a multiple, as in safetensors' own files."""


@dataclass(frozen=True)
class TensorForm:
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """Return the form of a tensor; of one in shards, that of the whole."""
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def type_name_of(dtype: torch.dtype) -> str:
    """Return safetensors' name of a type. Raise TypeError for one that it cannot store."""
    if dtype not in _TYPES:
        raise TypeError(f"Tensors of {dtype} cannot be stored.")
    return _TYPES[dtype]


def type_of_name(name: str) -> torch.dtype:
    """Return the type of that name. Raise ValueError for an unknown name."""
    if name not in _NAMES:
        raise ValueError(f"{name!r} is no type of tensors")
    return _NAMES[name]


def storage_order(forms: Mapping[str, TensorForm]) -> list[str]:
    """Return names in the order in which a file holds the tensors: wide elements first, so that all are aligned."""
    return sorted(forms, key=lambda name: -forms[name].dtype.itemsize)


def write_tensors(path: Path, forms: Mapping[str, TensorForm], tensors: Iterable[torch.Tensor]) -> FileEntry:
    """Write the file and wait until it is on the disk. `tensors`: in the `storage_order` of `forms`; each is read when
    the one before it has been written. Raise ValueError for a tensor of another form.
    """
    order = storage_order(forms)
    with _hashed(path) as file:
        file.write(_header(forms, order))
        for name, tensor in zip(order, tensors, strict=True):
            if TensorForm.of(tensor) != forms[name]:
                raise ValueError(f"{name} was announced as {forms[name]} and is {TensorForm.of(tensor)}.")
            for piece in _pieces(tensor):
                file.write(piece)
    return file.entry


def write_gathered(
    path: Path, forms: Mapping[str, TensorForm], tensors: Iterator[torch.Tensor], *, main: bool
) -> FileEntry | None:
    """Write the file on the main process, from tensors that all processes gather one after another: `tensors` is read
    to its end on each, also where writing fails, as no process may wait for others in vain. Return None on the others,
    once the file is written.

    `tensors` has to call `barrier` before each collective operation. Writing a large model takes longer than the
    timeout of a collective, which begins when the first process calls it: on GPUs the others would call all of them at
    once, while the main process writes the first tensor.
    """
    try:
        entry = write_tensors(path, forms, tensors) if main else None
    finally:
        for _ in tensors:
            pass
    barrier()
    return entry


def mapped_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, which stay in it: their memory is the system's, and reclaimable."""
    from safetensors.torch import load_file

    return load_file(path)


def read_pickled(part: CheckpointPart, path: Path, map_location: Any = "cpu", classes: Sequence[Any] = ()) -> Any:
    """Return the content of a file of `part` that `torch.save` wrote: tensors, plain values and objects of `classes`.
    Raise StageError CHECKPOINT if it differs from the manifest or holds anything else; no code in it has run then.
    """
    checked = part.checked(path)
    try:
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(checked, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise StageError(
            FailureClass.CHECKPOINT,
            "CheckpointHoldsCode",
            f"{path} was not read: it holds more than tensors and numbers: {str(error).splitlines()[0]}",
            "Find out who wrote it. Delete this checkpoint to resume from the previous one.",
        ) from error


def _header(forms: Mapping[str, TensorForm], order: Iterable[str]) -> bytes:
    """Return the size of the description and the description, a JSON object: name -> type, shape, range of bytes."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in order:
        form = forms[name]
        end = start + form.size
        described[name] = {
            "dtype": type_name_of(form.dtype),
            "shape": list(form.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in host memory, `SAVED_PIECE_BYTES` at a time."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    for piece in torch.split(flat, SAVED_PIECE_BYTES):
        if piece.numel():
            yield piece.cpu().numpy().data


class _HashedFile:
    """A file that is hashed as it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, content: bytes | memoryview) -> None:
        """Write all of `content`."""
        self._file.write(content)
        self._hash.update(content)
        self._size += len(content)

    @property
    def entry(self) -> FileEntry:
        """Size and hash of the content."""
        return FileEntry(size=self._size, sha256=self._hash.hexdigest())


@contextmanager
def _hashed(path: Path) -> Iterator[_HashedFile]:
    with path.open("wb") as file:
        yield _HashedFile(file)
        file.flush()
        os.fsync(file.fileno())

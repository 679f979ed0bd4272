"""Effects of a run on fake tensors on host and device: places where the host waits, and live memory.

A FakeTensorMode below this mode computes shapes; this one returns values where they are needed (`.item()`), counts each
wait of the host for the device, and sums up live storages.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_BLOCK_BYTES = 512
"""Unit to which torch's caching allocator rounds sizes up."""
_VALUES = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0, torch.bfloat16: 1.0, torch.float16: 1.0}
"""Results of `.item()`; 1 for other types."""
_YES = (_aten.allclose.default, _aten.equal.default, _aten.is_nonzero.default)
"""Comparisons, which return equal."""
_BETWEEN = ("/torch/", "/tracing_support/", "<")
"""Parts of the paths of code between a wait and its cause."""
_FLOAT8 = frozenset({"Float8TrainingTensor", "WeightWithDynamicFloat8CastTensor"})
"""torchao's classes of tensors that wrap others, whose operations are dispatched again on the inner ones."""
EVENT = "event"
"""Kind of a wait for a CUDA event."""
_NEW_PEAK = 1 << 20
"""Bytes by which a peak must exceed the last one before its storages are listed again."""


@dataclass(frozen=True)
class Made:
    """Origin of a storage."""

    serial: int
    phase: str
    """Phase of the training."""
    operator: str
    shape: tuple[int, ...]
    """Shape of the first tensor in it."""
    dtype: torch.dtype
    source: int | None
    """Serial number of the storage that the operator cast."""


class Trace(TorchDispatchMode):
    """Counts waits and live bytes of all fake tensors created within it."""

    def __init__(self, fakes: FakeTensorMode, answered_no: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._fakes = fakes
        self._answered_no = answered_no
        """Functions that read a bool from the device, and whose answer is no."""
        self.waits: Counter[str] = Counter()
        """Place in the code -> number of the host's waits for the device."""
        self.sent: Counter[str] = Counter()
        """Collective operation and type -> bytes that this process sends."""
        self.live: Counter[str] = Counter()
        """Device -> bytes of live storages."""
        self.peaks: dict[str, int] = {}
        """Phase -> most bytes on a GPU."""
        self.phase = "start"
        self.at_peak: list[tuple[Made, int]] = []
        """Storages on the GPU at the highest peak, with their bytes."""
        self.kinds: dict[int, str] = {}
        """Serial number of a storage -> its kind, as marked."""
        self._made: dict[int, Made] = {}
        self._serial = 0
        self._listed = 0
        self._storages: dict[int, tuple[str, int]] = {}
        self._gone: dict[int, weakref.ref[Any]] = {}
        self._pinned: set[int] = set()
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        self._synchronize: Callable[..., Any] = torch.cuda.Event.synchronize

    def __enter__(self) -> Trace:
        resize = self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if storage._cdata in self._storages:
                # FSDP resizes what it gathers, and nothing else does on a GPU.
                self.kinds.setdefault(self._made[storage._cdata].serial, "gathered")
                self._hold(storage._cdata, self._storages[storage._cdata][0], size)
            return storage

        def synchronized(event: torch.cuda.Event) -> None:
            self.waits[f"{EVENT}: {_place()}"] += 1
            self._synchronize(event)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        torch.cuda.Event.synchronize = synchronized  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        torch.cuda.Event.synchronize = self._synchronize  # type: ignore[method-assign]
        super().__exit__(*error)

    def enter(self, phase: str) -> None:
        """Begin a phase of the training."""
        self.phase = phase

    def mark(self, kind: str, tensors: Iterable[Any]) -> None:
        """Set the kind of the storages of `tensors`."""
        for each in tensors:
            each = _inner(each)
            if isinstance(each, FakeTensor) and (made := self._made.get(each.untyped_storage()._cdata)) is not None:
                self.kinds[made.serial] = kind

    # -------------------------------------------------------------------------------------------------------- operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if any(each.__name__ in _FLOAT8 for each in types):
            return NotImplemented
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            self._note(args[0], "item")
            if args[0].constant is not None:
                return args[0].constant.item()
            if args[0].dtype is torch.bool and _place().endswith(self._answered_no):
                return False
            return _VALUES.get(args[0].dtype, 1)
        if func in _YES and isinstance(args[0], FakeTensor):
            self._note(args[0], "comparison")
            return True
        if func is _aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is _aten._pin_memory.default:
            return self._pin(args[0])
        if func is _aten.record_stream.default:
            return None  # no fake form, and nothing to reuse early
        self._note_copies(func, args, given)
        if func is _aten._to_copy.default:
            args = (self._without_value(args[0]), *args[1:])
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_sent(func, args)
        made = func(*args, **given)
        source = args[0] if func is _aten._to_copy.default else None
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._see(each, str(func.overloadpacket), source)
                if given.get("pin_memory"):
                    self._pinned.add(_storage(each)._cdata)
        return made

    def _without_value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it as a fake tensor without a constant value: torch makes real copies of others."""
        if not isinstance(tensor, FakeTensor):
            return self._fakes.from_tensor(tensor)
        tensor.constant = None
        return tensor

    def _note_copies(self, func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        if func is _aten._to_copy.default and given.get("device") is not None:
            source, target = args[0], torch.device(given["device"]).type
        elif func is _aten.copy_.default and isinstance(args[1], torch.Tensor):
            source, target = args[1], args[0].device.type
        else:
            return
        free = bool(given.get("non_blocking", args[2] if len(args) > 2 else False))
        if (source.device.type, target) == ("cuda", "cpu") and not free:
            self._note(source, "copy to the host")
        if (source.device.type, target) == ("cpu", "cuda") and not (free and self._is_pinned(source)):
            self._note(None, "copy to the device")

    def _note_sent(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func.overloadpacket.__name__.strip("_")
        if name.startswith(("recv", "barrier", "wait")):
            return
        if name.startswith("allgather"):
            self.mark("gathered", tree_leaves(args[0]))
        # In operations that take both, the input follows the output; functional ones return it.
        both = func.namespace == "c10d" and name.startswith(("allgather", "reduce_scatter", "alltoall", "gather"))
        given = args[1] if both else args[0]
        for each in tree_leaves(given):
            if isinstance(each, torch.Tensor):
                where = "" if each.device.type == "cuda" else f" on {each.device.type}"
                self.sent[f"{name} {str(each.dtype).removeprefix('torch.')}{where}"] += (
                    each.numel() * each.element_size()
                )

    def _note(self, tensor: torch.Tensor | None, kind: str) -> None:
        if tensor is None or tensor.device.type == "cuda":
            self.waits[f"{kind}: {_place()}"] += 1

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return tensor.untyped_storage()._cdata in self._pinned
        with _disable_current_modes():
            return tensor.is_pinned()

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            self._pinned.add(tensor.untyped_storage()._cdata)
            return tensor
        with _disable_current_modes():
            return tensor.pin_memory()

    # ----------------------------------------------------------------------------------------------------------- memory

    def _see(self, tensor: torch.Tensor, operator: str, source: Any) -> None:
        tensor = _inner(tensor)
        if not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._gone:
            self._gone[key] = weakref.ref(storage, lambda _: self._drop(key))
            self._serial += 1
            cast = self._made.get(_storage(source)._cdata) if isinstance(source, FakeTensor) else None
            self._made[key] = Made(
                self._serial, self.phase, operator, tuple(tensor.shape), tensor.dtype, cast and cast.serial
            )
        self._hold(key, tensor.device.type, size)

    def _hold(self, key: int, device: str, size: int) -> None:
        rounded = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        before = self._storages.get(key, (device, 0))
        if before == (device, rounded):
            return
        self.live[before[0]] -= before[1]
        self.live[device] += rounded
        self._storages[key] = (device, rounded)
        if device == "cuda":
            self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live["cuda"])
            if self.live["cuda"] > self._listed + _NEW_PEAK:
                self._listed = self.live["cuda"]
                self.at_peak = [(self._made[each], held) for each, (on, held) in self._storages.items() if on == "cuda"]

    def _drop(self, key: int) -> None:
        self._gone.pop(key, None)
        self._made.pop(key, None)
        self._pinned.discard(key)
        device, size = self._storages.pop(key, ("cpu", 0))
        self.live[device] -= size


def _storage(tensor: torch.Tensor) -> Any:
    return _inner(tensor).untyped_storage()


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with memory of its own: the shard of a DTensor, and the one that a class of torchao's wraps."""
    local = getattr(tensor, "_local_tensor", tensor)
    if type(local).__name__ in _FLOAT8:
        return local._data if hasattr(local, "_data") else local._tensor
    return local


def _place() -> str:
    """Return the innermost function, and its file in its package, that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in _BETWEEN) and frame.f_code.co_name != "__torch_function__":
            short = path.rpartition("/site-packages/")[2].rpartition("/trainer_image/")[2]
            return f"{short} {frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"

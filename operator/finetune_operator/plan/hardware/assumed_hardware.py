"""Machines that a plan assumes without measuring them: described as text, or by the requests of a job.

Pure: no query of this machine. Each assumption comes with a sentence that the plan lists under its assumptions, so that
an estimate is never mistaken for a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from finetune_contract.byte_text import GIB
from finetune_contract.facts import DeviceFacts, HardwareFacts
from finetune_operator.plan.hardware.devices import GPU_MODELS, Rows, find_gpu
from finetune_operator.spec.quantities import parse_quantity

CORES_PER_GPU = 8
HOST_MEMORY_PER_GPU = 64 * GIB
ASSUMED_NODE_MEMORY = 32 * GIB
"""Bytes of memory of a node without GPUs."""
ASSUMED_CORES = 8
UNKNOWN_GPU = "unknown GPU"
"""Placeholder for a product; no table has it, so that it has no speed and no price."""
LEAST_GPU_MEMORY = 15_360 << 20
"""Bytes of memory of an unknown GPU: that of the smallest in the table, so that a plan for it fits the others."""


class HardwareError(ValueError):
    """Error of an unreadable machine description; the message names the key and a hint."""


def _quantity(key: str, text: str) -> int:
    try:
        value = parse_quantity(text)
    except ValueError as error:
        raise HardwareError(f"{key}={text}: {error}") from error
    if value < GIB:
        raise HardwareError(f"{key}={text}: it has to be at least 1Gi; a number without a unit counts bytes")
    return int(value)


def _count(key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 4096:
        raise HardwareError(f"{key}={text}: it is a whole number from 1 to 4096")
    return int(text)


def _gigabits(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e5:
        raise HardwareError(f"{key}={text}: it is a number of Gbit/s of one node, above 0, e.g. 400")
    return value


def _flag(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise HardwareError(f"{key}={text}: it is true or false")
    return text == "true"


def _product(key: str, text: str) -> str:
    if not text.strip():
        raise HardwareError(f"{key}=: it is a product, e.g. H100")
    if "=" in text:
        raise HardwareError(f"{key}={text}: it is a product, e.g. H100; put a comma before the next key")
    return text


_KEYS: dict[str, Callable[[str, str], Any]] = {
    "gpu": _product,
    "memory": _quantity,
    "gpus": _count,
    "bf16": _flag,
    "cpu": _count,
    "hostMemory": _quantity,
    "cpuBf16": _flag,
    "network": _gigabits,
}


def parse_hardware(text: str, rows: Rows = ()) -> HardwareFacts:
    """Parse the description of one node, e.g. `gpu=H100,memory=80Gi,gpus=8,cpu=96,hostMemory=1Ti`.

    Keys: `gpu` (product), `memory` (of one GPU; needed if the product is not in the table), `gpus` (1 if only `gpu` is
    given), `bf16` (of a GPU that is not in the table; default true), `cpu` (cores; 8 a GPU, 8 without), `hostMemory`
    (64Gi a GPU, 32Gi without), `cpuBf16` (false), `network` (Gbit/s of the node; as in the table of GPUs).
    Raise HardwareError with the wrong key.
    """
    values = _read_pairs(text)
    if "nodes" in values:
        raise HardwareError("nodes: this describes one node; how many there are is spec.resources.nodes")
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        raise HardwareError(f"{unknown[0]}: no such key; known: {', '.join(_KEYS)}")
    parsed: dict[str, Any] = {key: _KEYS[key](key, value) for key, value in values.items()}
    if "gpu" not in parsed:
        for key in ("memory", "gpus", "bf16"):
            if key in parsed:
                hint = "; the node's own memory is hostMemory" if key == "memory" else ""
                raise HardwareError(f"{key}: it describes GPUs, and no gpu is given{hint}")
    gpus: int = parsed.get("gpus", 1) if "gpu" in parsed else 0
    return HardwareFacts(
        cpu_cores=parsed.get("cpu", CORES_PER_GPU * gpus or ASSUMED_CORES),
        memory_bytes=parsed.get("hostMemory", assumed_memory(gpus)),
        gpus_per_node=gpus,
        gpu=_device(parsed, rows) if gpus else None,
        cpu_bf16=parsed.get("cpuBf16", False),
        assumed=True,
        network_gigabits=parsed.get("network"),
    )


def _read_pairs(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for pair in text.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise HardwareError(f"{pair.strip()!r}: write key=value pairs with commas between, e.g. gpu=H100,gpus=8")
        if key in values:
            raise HardwareError(f"{key}: it is given twice")
        values[key] = value
    return values


def _device(parsed: dict[str, Any], rows: Rows) -> DeviceFacts:
    product: str = parsed["gpu"]
    known = find_gpu(product, rows)
    memory: int | None = parsed.get("memory")
    if known is None or not known.memory_mib:
        if memory is None:
            names = ", ".join(gpu.name for gpu in GPU_MODELS)
            raise HardwareError(f"gpu={product}: not in the table ({names}); give its memory too, e.g. memory=80Gi")
        return DeviceFacts(product=product, memory_bytes=memory, bf16=parsed.get("bf16", True))
    if "bf16" in parsed and parsed["bf16"] != known.bf16:
        raise HardwareError(
            f"bf16={str(parsed['bf16']).lower()}: {known.name} {'has' if known.bf16 else 'has no'} bf16"
        )
    facts = known.facts()
    return facts if memory is None else facts.model_copy(update={"memory_bytes": memory})


def assumed_memory(gpus: int) -> int:
    """Return the assumed bytes of memory of a node with `gpus` GPUs."""
    return HOST_MEMORY_PER_GPU * gpus or ASSUMED_NODE_MEMORY


def assumed_device(product: str | None, memory: int | None = None, rows: Rows = ()) -> tuple[DeviceFacts, str | None]:
    """Return the GPU called `product` from the tables, with `memory` bytes if given, and a sentence with the assumption
    (None if there is none).

    A GPU in no table gets the least memory that any GPU has. It is assumed to compute in bf16, as all new GPUs since
    2020 do: plans without it are far slower, and the trainer measures the actual GPU.
    """
    known = None if product is None else find_gpu(product, rows)
    if known is not None and known.memory_mib:
        facts = known.facts()
        return (facts if memory is None else facts.model_copy(update={"memory_bytes": memory})), None
    which = "which GPU the nodes have is not known" if product is None else f"{product} is in no table of GPUs"
    taken = [] if memory is not None else [f"{LEAST_GPU_MEMORY / GIB:.0f} GiB of memory, the least that any has,"]
    facts = DeviceFacts(product=product or UNKNOWN_GPU, memory_bytes=memory or LEAST_GPU_MEMORY, assumed=True)
    return facts, f"hardware: {which}; {' and '.join([*taken, 'units for bf16'])} are assumed"


def assumed_hardware(
    gpus: int, device: DeviceFacts | None, cores: Decimal | None, memory: Decimal | None, *, measured: bool = False
) -> tuple[HardwareFacts, str]:
    """Return one node as the job requests it (None: not requested) with such GPUs, and a sentence with the further
    assumptions. `measured`: an earlier attempt has measured the GPUs.
    """
    cpu_cores = max(1, int(cores)) if cores is not None else (CORES_PER_GPU * gpus or ASSUMED_CORES)
    node_memory = int(memory) if memory is not None else assumed_memory(gpus)
    facts = HardwareFacts(cpu_cores=cpu_cores, memory_bytes=node_memory, assumed=True)
    if gpus:
        facts = facts.model_copy(update={"gpus_per_node": gpus, "gpu": device})
    known = "only the GPUs of the nodes were measured" if measured else "no node was measured"
    return facts, f"hardware: {known}; {node_description(facts)} are taken"


def node_description(node: HardwareFacts) -> str:
    """Describe a node, e.g. `8 x H100 with 79.6 GiB and bf16, 64 cores and 512 GiB of memory`."""
    words = f"{node.cpu_cores} core{'s' * (node.cpu_cores != 1)} and {node.memory_bytes / GIB:.0f} GiB of memory"
    if node.gpu is None:
        return f"{words} and {'' if node.cpu_bf16 else 'no '}bf16 units"
    gpu = f"{node.gpus_per_node} x {node.gpu.product} with {node.gpu.memory_bytes / GIB:.1f} GiB"
    return f"{gpu}{' and bf16' if node.gpu.bf16 else ', without bf16'}, {words}"

"""Folder of compiled kernels, one for each type of processor.

torch finds the kernels of an earlier compilation by the model's graph, and not by the instructions that the processor
has. Kernels for AVX512 that AVX2 code calls, or the reverse, give wrong numbers or end the process; seen with one
folder for both, as nodes of two types have that share TORCHINDUCTOR_CACHE_DIR.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

from finetune_trainer.devices.processor_facts import instructions, processor_facts

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def separate_compile_cache(
    environment: MutableMapping[str, str] = os.environ, processor: Path = Path("/proc/cpuinfo")
) -> Path:
    """Have torch.compile use a folder for this type of processor, and return it: in the folder that the variable names,
    or in torch's own.
    """
    import torch
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    features = " ".join(sorted(instructions(processor_facts(processor.read_text)))) or platform.machine()
    used = torch.backends.cpu.get_cpu_capability()  # ATEN_CPU_CAPABILITY may disable some of them
    name = f"cpu-{used.replace(' ', '-').lower()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
    folder = Path(environment.get(_VARIABLE) or default_cache_dir())
    if folder.name != name:  # set by the process that started this one
        folder = folder / name
        environment[_VARIABLE] = str(folder)
    return folder

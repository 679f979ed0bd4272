"""A CUDA runtime without GPUs, which lets torch run its CUDA paths on fake tensors.

`build` compiles `stub/*.c` and, for each symbol that torch's libraries need and those files do not define, a function
that returns 0. `environment` has a process load the result in place of CUDA's own libraries. It computes nothing and
refuses device memory, so a real CUDA tensor is an error.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "stub"
DEVICES = 8
"""GPUs of a node."""
_RUNTIME, _DRIVER = "libcuda-runtime-stub.so", "libcuda.so.1"
_NAMES = {"runtime": re.compile(r"(__)?cuda[A-Z]\w*"), "driver": re.compile(r"cu[A-Z]\w*")}
_OTHER_LIBRARIES = re.compile(r"cu(File|blas|dnn|fft|rand|solver|sparse|pti|dss)", re.IGNORECASE)
"""Symbols of NVIDIA's libraries, which are loaded and never called."""
# The wheels of CUDA's headers lack this one, which belongs to the compiler.
_HOST_DEFINES = """
#pragma once
#define __host__
#define __device__
#define __global__
#define __inline__ inline
#define __forceinline__ inline
#define __noinline__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __specialization_static static
#define __location__(where)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
"""


def why_not() -> str | None:
    """Return the missing requirements for a dry run on this machine; None if there are none."""
    missing = [program for program in ("gcc", "nm") if shutil.which(program) is None]
    if missing:
        return f"needs {' and '.join(missing)} to compile the CUDA stub"
    if not _headers():
        return "needs CUDA's headers, which come with a torch that is built for CUDA"
    return None


def build(folder: Path) -> None:
    """Compile both libraries into `folder`: about two seconds."""
    wanted = _symbols(sorted((_site() / "torch" / "lib").glob("*.so*")), "--undefined-only")
    (folder / "crt").mkdir(parents=True)
    (folder / "crt" / "host_defines.h").write_text(_HOST_DEFINES, encoding="utf-8")
    for name, library in (("runtime", _RUNTIME), ("driver", _DRIVER)):
        own = folder / f"{name}.o"
        _compile("-c", "-o", own, SOURCES / f"{name}.c", f"-I{folder}", *(f"-I{each}" for each in _headers()))
        wanted_here = {each for each in wanted if _NAMES[name].fullmatch(each) and not _OTHER_LIBRARIES.match(each)}
        others = folder / f"{name}_others.c"
        missing = sorted(wanted_here - _symbols([own], "--defined-only"))
        others.write_text("".join(f"long {each}(void) {{ return 0; }}\n" for each in missing), encoding="utf-8")
        _compile("-shared", f"-Wl,-soname,{library}", "-o", folder / library, own, others, "-ldl", "-lpthread")


def environment(folder: Path) -> Mapping[str, str]:
    """Return the variables with which a process loads the libraries in `folder`."""
    return {
        "LD_PRELOAD": str(folder / _RUNTIME),
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
        "STUB_CUDA_DEVICES": str(DEVICES),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(DEVICES))),
    }


def waits() -> int:
    """Return how often this process, with the stub loaded, would have waited for a stream, an event or a device."""
    count = ctypes.CDLL(None).stub_cuda_waits
    count.restype = ctypes.c_ulong
    return int(count())


def _compile(*arguments: str | Path) -> None:
    subprocess.run(["gcc", "-w", "-O1", "-fPIC", *arguments], check=True)


def _symbols(libraries: Sequence[Path], which: str) -> set[str]:
    output = subprocess.run(["nm", "-D", which, *libraries], capture_output=True, text=True, check=False).stdout
    if not output.strip():
        output = subprocess.run(["nm", which, *libraries], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in output.splitlines() if " " in line.strip()}


def _site() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parents[1]


def _headers() -> list[Path]:
    return [each.parent for each in _site().glob("nvidia/cu*/include/cuda_runtime_api.h")]

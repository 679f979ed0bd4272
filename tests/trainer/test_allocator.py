"""Memory freed by training on a CPU is kept for the next step, and returned between two kinds of work."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from suite_plugins.patience import patient

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

BLOCK_MIB = 64
PROGRAM = f"""
import json, resource, sys
import numpy as np, psutil
from finetune_trainer.core.allocator import give_back_freed_memory, keep_freed_memory

def resident():
    return psutil.Process().memory_info().rss >> 20

kept = keep_freed_memory() if sys.argv[1] == "keep" else None
np.ones({BLOCK_MIB} << 17)  # the first use of the memory has to be paid for either way
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones({BLOCK_MIB} << 17)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
full = resident()
give_back_freed_memory()
print(json.dumps(dict(kept=kept, faults=faults, given_back_mib=full - resident())))
"""


def run(mode: str) -> dict[str, int | bool | None]:
    ran = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=patient(300))
    assert ran.returncode == 0, ran.stderr
    answer: dict[str, int | bool | None] = json.loads(ran.stdout)
    return answer


def test_freed_memory_is_reused_without_page_faults_until_released():
    plain, keeping = run("plain"), run("keep")
    assert keeping["kept"] is True
    # A fresh block of 64 MiB is 16,384 pages (fewer where the kernel hands out huge ones).
    assert keeping["faults"] < plain["faults"] / 4
    assert keeping["given_back_mib"] > BLOCK_MIB / 2

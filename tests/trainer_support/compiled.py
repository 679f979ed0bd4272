"""DeepSpeed's compiled optimizer in host memory for tests: built once for all processes, in a shared folder.

    python -m trainer_support.compiled     (with PYTHONPATH=tests)

compiles it ahead of tests that would otherwise wait for it, and ends at once if it exists. May run in parallel with
itself and with tests: DeepSpeed's build folder has a lock.

Another ninja or another command triggers a rebuild. So all tests share one environment: the ninja beside the
interpreter first, as in the trainer's launcher, and a folder for this installation of DeepSpeed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

FOLDER = "TORCH_EXTENSIONS_DIR"


def settle(environment: MutableMapping[str, str]) -> None:
    """Set PATH and the folder of builds in the environment of a test run."""
    beside, path = str(Path(sys.executable).parent), environment.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != beside:
        environment["PATH"] = os.pathsep.join([beside, path])
    library = find_spec("deepspeed")  # imports nothing
    if library is not None and library.origin is not None:
        cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        installed = sha256(library.origin.encode()).hexdigest()[:12]
        environment.setdefault(FOLDER, str(cache / "finetune-tests" / f"torch-extensions-{installed}"))


def main() -> None:
    """Compile it if it is missing."""
    settle(os.environ)
    os.environ["DS_ACCELERATOR"] = "cpu"  # as in the tests' fork servers
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)


if __name__ == "__main__":
    main()

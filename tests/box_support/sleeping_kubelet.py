"""process-kubelet with the preStop hook `sleep`, which it does not know: it sends SIGTERM at once.

    PROCESS_KUBELET=FILE python sleeping_kubelet.py OPTION...

A program of its own with options alone, as process-kubelet starts itself a second time by its command line.
"""

from __future__ import annotations

import os
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

PROGRAM = "PROCESS_KUBELET"
"""Variable with the file of process-kubelet."""


def with_sleep(file: str) -> Any:
    """Return the module of process-kubelet, with containers that sleep before SIGTERM where their hook says so."""
    loader = SourceFileLoader("process_kubelet", file)
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module: Any = module_from_spec(spec)
    loader.exec_module(module)
    check = module.Container.check

    def check_or_sleep(self: Any, probe: dict[str, Any], timeout: float = 1) -> bool:
        if "sleep" not in probe:
            return bool(check(self, probe, timeout))
        time.sleep(min(probe["sleep"]["seconds"], timeout))
        return True

    module.Container.check = check_or_sleep
    return module


if __name__ == "__main__":
    with_sleep(os.environ[PROGRAM]).main()

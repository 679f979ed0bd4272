"""Processes of a stage without their start-up: see `process_support.forked`."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from process_support.shared_start import StartServer
from suite_plugins.patience import patient

TESTS = Path(__file__).parents[1]


@cache
def fork_server() -> ForkServer:
    """Return the fork server of this process, which ends with it."""
    server = ForkServer()
    atexit.register(server.stop)
    return server


@cache
def start_server() -> StartServer:
    """Return the start server of this process, which ends with it."""
    stack = ExitStack()
    atexit.register(stack.close)
    # Not pytest's folder: a socket's path must be short.
    return stack.enter_context(StartServer(Path(stack.enter_context(tempfile.TemporaryDirectory()))))


class ForkServer:
    """Runs cases one after another; starts with the first of them. `sources`: folders of packages that replace the
    installed ones.
    """

    def __init__(self, *sources: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: variables of its processes besides those of this one."""
        self._sources = sources
        self._environment = environment or {}
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (as long as it)
        self._process: subprocess.Popen[str] | None = None

    def run(self, case: Mapping[str, Any], seconds: float = 540) -> tuple[list[int], str]:
        """Return the processes' exit codes, and their output. TimeoutError after `seconds`, scaled by `patient`."""
        from finetune_trainer.core.distributed import free_port

        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        # By this tree: the server may have the packages of an earlier release.
        process.stdin.write(json.dumps({**case, "port": free_port()}) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], patient(seconds))
        log = Path(case["log"])
        printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if not ready:
            self.stop()
            raise TimeoutError(f"{case} did not end in {patient(seconds):g} s:\n{printed}")
        answer = process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise AssertionError(f"the server has ended:\n{self._log.read()}")
        return json.loads(answer), log.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """Kill the server with all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        paths = os.pathsep.join([*map(str, self._sources), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        free = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "process_support.forked"],
            env={
                **free,
                "PYTHONPATH": paths,
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                **self._environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        return self._process

"""The `finetune` command for tests that call it often: each call is a process forked from one that has imported it.

Starting Python and building the API's models takes most of the time of a short command. A call still has its own
arguments, environment, working directory, standard streams, exit code and end. `own_process=True` starts the installed
program instead, for calls that depend on Python's start.

    python finetune_command.py

reads calls from standard input, one JSON object per line, and answers each with two lines: process id and exit code.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
SECONDS = 300


def finetune(
    *arguments: str,
    folder: Path,
    text: str | None = None,
    program: str = "finetune",
    own_process: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder` to its end; `text`: its standard input, `variables`: added to the environment."""
    from suite_plugins.patience import patient

    command = [str(BIN / program), *arguments]
    environment = {**os.environ, **variables}
    limit = patient(SECONDS)
    if own_process:
        return subprocess.run(
            command, cwd=folder, input=text, env=environment, capture_output=True, text=True, timeout=limit
        )
    with tempfile.TemporaryDirectory() as name:
        streams = [Path(name) / stream for stream in ("in", "out", "err")]
        streams[0].write_text(text or "", encoding="utf-8")
        code = _server().call(
            {"command": command, "folder": str(folder), "environment": environment, "streams": [*map(str, streams)]},
            limit,
        )
        out, err = (stream.read_text(encoding="utf-8") for stream in streams[1:])
    return subprocess.CompletedProcess(command, code, out, err)


class _Server:
    """Process from which calls are forked. It ends with this one, which closes its standard input."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._pid = os.getpid()
        atexit.register(self._end)

    def call(self, request: dict[str, Any], seconds: float) -> int:
        """Return the exit code of a call; kill it after `seconds`."""
        assert self._pid == os.getpid(), "two processes would read each other's answers"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        child = self._answer(None)
        try:
            return self._answer(seconds)
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            self._answer(None)
            raise subprocess.TimeoutExpired(request["command"], seconds) from None

    def _end(self) -> None:
        if self._pid == os.getpid():
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()

    def _answer(self, seconds: float | None) -> int:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise TimeoutError
        line = b""
        while not line.endswith(b"\n"):
            part = self._process.stdout.read(1)
            assert part, f"the process that commands are forked from has ended: {self._process.wait()}"
            line += part
        return int(line)


@functools.cache
def _server() -> _Server:
    return _Server()


def _serve() -> dict[str, Any] | None:
    """Fork a process for each call; return the call in the forked process, None in this one after the last."""
    # Standard streams belong to the calls, and no call inherits these two.
    calls, answers = (os.fdopen(os.dup(stream), mode) for stream, mode in ((0, "rb"), (1, "wb")))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    gc.freeze()
    for line in calls:
        child = os.fork()
        if child == 0:
            return dict(json.loads(line))
        for number in (child, None):
            number = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if number is None else number
            answers.write(b"%d\n" % number)
            answers.flush()
    return None


def _become(request: dict[str, Any]) -> None:
    """Turn this process into the called one."""
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, (file, flag) in enumerate(zip(request["streams"], flags, strict=True)):
        os.dup2(os.open(file, flag), stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["command"]
    sys.path[0] = str(Path(request["command"][0]).parent)


def _preload() -> None:
    """Import the lazy imports of the commands, except kubernetes, which reads the environment at import."""
    for name in COMMANDS:
        load(name)

    import requests
    import yaml

    import finetune_operator.cli.cluster.costs
    import finetune_operator.cli.local.local_run
    import finetune_operator.cli.local.measure
    import finetune_operator.extras.review.reviewing
    import finetune_operator.jobs.launchers.launcher_registry
    import finetune_operator.plan.plan

    del requests, yaml, finetune_operator


if __name__ == "__main__":
    from finetune_operator.cli.main import COMMANDS, load, main

    _preload()
    call = _serve()
    if call is not None:
        _become(call)
        main()

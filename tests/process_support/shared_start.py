"""`finetune` whose trainer processes share one start: each is forked from a process that has imported everything.

Importing torch and transformers is most of the work of a tiny model's stage. The command, its launchers, the elastic
agent's decisions and the stages are the real ones, with their own arguments, environment, working directory, standard
streams and exit codes; only `sys.executable` is replaced by a small program that requests a fork where the trainer or
its elastic agent would start, and is Python for all else.

    with StartServer(folder) as server:
        subprocess.run([*server.finetune, "run", "job.yaml"])

`python -m process_support.shared_start ADDRESS` is the server: it reads a JSON object and three file descriptors from
each connection, answers with the process id, later with the exit code, and kills the process when the connection ends.
"""

from __future__ import annotations

import array
import atexit
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn, Self

TESTS = Path(__file__).parents[1]
CODE = "process_support.shared_start.code"
"""Pseudo module that runs the Python code in the next argument, as -c does."""
MODULES = ("finetune_trainer", "finetune_trainer.launching.elastic", CODE)
PROGRAM = """#!{python} -IS
import array, json, os, signal, socket, sys
arguments = sys.argv[1:]
module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:2] else None
if module not in {modules!r}:
    os.execv({python!r}, [{python!r}, *arguments])
arguments = arguments[arguments.index("-m") + 1:]
request = {{"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "program": sys.argv[0]}}
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
text = json.dumps(request).encode()
connection.sendmsg([b"%16d" % len(text)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
connection.sendall(text)
answers = connection.makefile("r")
child = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(child, number))
code = int(answers.readline() or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
COMMAND = """
import sys, psutil
sys.executable = {program!r}
seen = psutil.virtual_memory
psutil.virtual_memory = lambda: seen()._replace(available=seen().total)
from finetune_operator.cli.main import main
main()
"""
"""Source of the command; its plans are for a machine with all memory free, as other suites take it by chance."""


class StartServer:
    """A start server that runs until the end of the `with` block. `folder` is for its address, so a short path."""

    def __init__(self, folder: Path) -> None:
        self._address = folder / "start"
        self._program = folder / "python"
        python = sys.executable
        program = PROGRAM.format(python=python, modules=MODULES, address=str(self._address))
        self._program.write_text(program, encoding="utf-8")
        self._program.chmod(0o755)
        for beside in Path(python).parent.iterdir():
            if beside.name != "python":  # programs are looked for beside the interpreter
                (folder / beside.name).symlink_to(beside)

    @property
    def python(self) -> str:
        """Return the command that replaces the Python interpreter, without arguments."""
        return str(self._program)

    def code(self, code: str) -> list[str]:
        """Return the command that runs Python code, without the code's arguments."""
        return [self.python, "-m", CODE, code]

    @property
    def finetune(self) -> list[str]:
        """Return the `finetune` command, without arguments."""
        return [sys.executable, "-c", COMMAND.format(program=str(self._program))]

    def __enter__(self) -> Self:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "process_support.shared_start", str(self._address)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def main(address: str) -> None:
    """Fork on request until SIGTERM, or until the tests' process has ended, also if it was killed."""
    from finetune_trainer.launching.child_supervisor import end_with_parent
    from process_support.forked import preload

    end_with_parent()
    preload()
    import torch.distributed.launcher.api

    import finetune_trainer.launching.elastic

    del finetune_trainer, torch
    gc.collect()
    gc.freeze()
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(64)
    print("ready", flush=True)
    running: dict[int, tuple[socket.socket, int]] = {}
    """Connection and process id by the descriptor that signals the process's end."""
    signal.signal(signal.SIGTERM, lambda *_: _end(running))
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is server:
                    connection, _ = server.accept()
                    child = _forked(connection, selector)
                    ending = os.pidfd_open(child)
                    running[ending] = connection, child
                    connection.sendall(b"%d\n" % child)
                    selector.register(ending, selectors.EVENT_READ)
                    selector.register(connection, selectors.EVENT_READ, child)
                elif isinstance(key.fileobj, socket.socket):  # the client was killed
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
                else:
                    assert isinstance(key.fileobj, int)
                    connection, child = running.pop(key.fileobj)
                    selector.unregister(key.fileobj)
                    os.close(key.fileobj)
                    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                    if connection in selector.get_map():
                        selector.unregister(connection)
                        connection.sendall(b"%d\n" % code)
                    connection.close()


def _end(running: dict[int, tuple[socket.socket, int]]) -> NoReturn:
    for _, child in running.values():
        os.kill(child, signal.SIGKILL)
    os._exit(0)


def _forked(connection: socket.socket, selector: selectors.BaseSelector) -> int:
    """Read a request and fork; the child does not return."""
    descriptors = array.array("i")
    length, ancillary, *_ = connection.recvmsg(16, socket.CMSG_LEN(3 * descriptors.itemsize))
    descriptors.frombytes(ancillary[0][2])
    text = b""
    while len(text) < int(length):
        text += connection.recv(1 << 20)
    child = os.fork()
    if child:
        for descriptor in descriptors:
            os.close(descriptor)
        return child
    try:
        selector.close()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for stream, descriptor in enumerate(descriptors):
            os.dup2(descriptor, stream)
        os.closerange(3, 4096)
        _become(json.loads(text))
    finally:
        os._exit(1)


def _become(request: dict[str, Any]) -> None:
    """Turn this process into the requested one, to its end."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    atexit._clear()  # drop the server's handlers
    module, *arguments = request["arguments"]
    sys.argv, sys.executable = [module, *arguments], request["program"]  # torch's launcher starts ranks with it
    code = 0
    try:
        if module == CODE:
            sys.argv = ["-c", *arguments[1:]]
            exec(arguments[0], {"__name__": "__main__"})
            raise SystemExit
        if module == "finetune_trainer":
            from finetune_trainer.__main__ import main
        else:
            from finetune_trainer.launching.elastic import main
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # the exception that is being handled
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])

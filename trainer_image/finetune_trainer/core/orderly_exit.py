"""Orderly exit of a process that took part in collectives.

gloo's threads hold the tensors of a collective until a moment after it is done, and need the interpreter to release
them. A thread that asks for it during interpreter shutdown is ended, and takes the process along: `terminate called
without an active exception`, SIGABRT, after all work succeeded (torch 2.15; discussed in pytorch/pytorch#179291).
destroy_process_group waits for these threads only where nothing else, such as a DistributedDataParallel, holds the
group. Standard library only: every Python process of a user's program imports this.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo"
"""Prefix of the names of torch's gloo threads."""
_LOOK_SECONDS = 0.01
_PATIENCE_SECONDS = 5.0
_BLIND_SECONDS = 0.1
"""Wait where threads cannot be seen: a hundred times as long as releasing the tensors takes."""
_EXIT_SECONDS = 10.0
"""Longest time for exit handlers: a tracker that was left out still waits for its server there."""


def let_collectives_end() -> None:
    """Wait until no thread of a gloo group computes, 5 s at most; return at once where there is none."""
    if not _THREADS.is_dir():
        if "torch.distributed" in sys.modules:
            time.sleep(_BLIND_SECONDS)
        return
    if not _states():
        return
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until:
        # Sleeping gives them the interpreter; a thread that sleeps after that waits for peers or for work.
        time.sleep(_LOOK_SECONDS)
        if all(state == "S" for state in _states()):
            return


def _states() -> list[str]:
    """Return the kernel's state letter of each thread: R runs or is runnable, D waits for a disk, S sleeps."""
    states = []
    for thread in _THREADS.iterdir():
        try:
            stat = (thread / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # ended meanwhile
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if name.startswith(_NAME):
            states.append(rest.split()[0])
    return states


def settle_exit() -> None:
    """Do the first steps of interpreter shutdown, for a process that then leaves by `os._exit`: wait for threads that
    are no daemons, and call the libraries' exit handlers (trackers send their last records). After 10 s leave at once.
    """
    limit = threading.Timer(_EXIT_SECONDS, os._exit, [0])
    limit.daemon = True
    limit.start()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()

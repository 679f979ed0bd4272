"""Evidence that memory ran out: the kernel counts the processes of a cgroup that its out-of-memory killer ended.

SIGKILL by itself has any sender: a person, a watchdog, a launcher. The counter rises for a limit of the container and
for a node without memory alike. As a program, it prints the count of its own cgroup.
"""

from __future__ import annotations

import re
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the count of this process's cgroup; 0 if none can be read.

    Version 2 has it in `memory.events`, version 1 in `memory.oom_control` (Linux 4.13). In a container the mounted root
    is its own cgroup, while /proc may still show the path on the node.
    """
    for root, controller, name in (
        (cgroups, "", "memory.events"),
        (cgroups / "memory", "memory", "memory.oom_control"),
    ):
        for folder in (root / _group(own, controller), root):
            found = _COUNT.search(_text(folder / name))
            if found is not None:
                return int(found[1])
    return 0


def _group(own: Path, controller: str) -> str:
    """Return the path of the process's cgroup below its root; `controller` is empty in version 2."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.strip("/")
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


if __name__ == "__main__":
    print(oom_kills())

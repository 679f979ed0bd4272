"""`requirements.py PYPROJECT... [--extra NAME]`: prints what the distributions need from others, one a line.

An image installs this first, in a layer that only a change of pyproject.toml or constraints.txt makes anew, and our own
packages last. Our own names are left out: they are not to be had from an index.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyprojects: Sequence[Path], extra: str | None) -> list[str]:
    """Requirements of all `pyprojects`, and of their optional dependencies `extra`, without the distributions
    themselves.
    """
    projects = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in pyprojects]
    own = {project["name"] for project in projects}
    wanted: set[str] = set()
    for project in projects:
        wanted.update(project.get("dependencies", []))
        wanted.update(project.get("optional-dependencies", {}).get(extra, []))
    return sorted(line for line in wanted if re.split(r"[^-\w.]", line, maxsplit=1)[0] not in own)


def main() -> None:
    """Prints them."""
    parser = argparse.ArgumentParser(description="Prints what distributions need from others.")
    parser.add_argument("pyproject", type=Path, nargs="+")
    parser.add_argument("--extra", help="optional dependencies that are wanted, too")
    arguments = parser.parse_args()
    print(*requirements(arguments.pyproject, arguments.extra), sep="\n")


if __name__ == "__main__":
    main()

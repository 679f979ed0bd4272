"""Choose the dear test files of a run: those that a change can break, and some of the others.

`tests/areas.toml` has the areas of the product with their paths, and each dear test file with its CPU seconds and
areas. T1 (`make test`) runs all other tests. T2 (`.ci/run`) chooses, in this order and as long as its budget lasts:

1. the core of each suite;
2. changed dear test files, then those of the areas that the change touches, the area with the most changed files first;
3. a quarter of the others, by a hash of the commit.

A changed file without an area concerns all of them. T3 (`make test-everything`) runs everything, in parts of similar
length.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "areas.toml"
QUARTER = 4
"""One of so many other files is chosen."""
HOURS = 6
"""On main itself the change is that of the last hours before its newest commit."""
CHEAP_SECONDS = 900.0
"""CPU seconds of T1 with every case of every grid, which the first part of T3 has besides."""
NOTHING = "make test"
"""Area of files that no dear test reads."""


@dataclass(frozen=True)
class DearFile:
    """A test file that T1 leaves out, wholly or but for its tests without the marker `slow`."""

    path: str
    cpu: float
    """CPU seconds on the reference machine, of the tests that T1 leaves out."""
    areas: tuple[str, ...]
    core: bool = False
    """It is in every T2."""
    slow: bool = False
    """T1 runs its tests without the marker `slow`."""
    programs: tuple[str, ...] = ()
    """Programs that it needs besides those of its suite, as kube-assets/build names them."""

    @property
    def suite(self) -> str:
        """Folder in tests/; all its files belong to the area of this name, that of its shared parts."""
        return self.path.removeprefix("tests/").rpartition("/")[0]


@dataclass(frozen=True)
class Areas:
    """The table."""

    paths: Mapping[str, str]
    """Area -> regular expression for the start of a path."""
    files: Sequence[DearFile]

    def of(self, path: str) -> list[str]:
        """Return the areas of a path."""
        return [area for area, pattern in self.paths.items() if re.match(pattern, path)]

    def in_area(self, area: str) -> list[DearFile]:
        """Return the files of an area, those of few areas first."""
        found = [file for file in self.files if area in (*file.areas, file.suite)]
        return sorted(found, key=lambda file: len(file.areas))


@dataclass(frozen=True)
class Choice:
    """Dear test files of a run, each with the reason, and those that its budget left out."""

    chosen: Mapping[str, str]
    left: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        """Yield the closing lines about the choice: chosen files by reason, and what did not fit."""
        for title, files in (("ran", self.chosen), ("left out by the budget", self.left)):
            reasons: dict[str, list[str]] = {}
            for path, reason in files.items():
                reasons.setdefault(reason, []).append(path.removeprefix("tests/").removesuffix(".py"))
            for reason, paths in reasons.items():
                yield f"{title}: {reason}: {', '.join(paths)}"


def read_areas(file: Path = TABLE) -> Areas:
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    files = [
        DearFile(
            f"tests/{suite}/test_{name}.py",
            row["cpu"],
            tuple(row["areas"].split()),
            core=row.get("core", False),
            slow=row.get("slow", False),
            programs=tuple(row.get("programs", "").split()),
        )
        for suite, rows in table["tests"].items()
        for name, row in rows.items()
    ]
    return Areas(table["areas"], files)


def first_reasons(found: Iterable[tuple[DearFile, str]]) -> dict[DearFile, str]:
    """Return each file with its first reason, in order."""
    reasons: dict[DearFile, str] = {}
    for file, reason in found:
        reasons.setdefault(file, reason)
    return reasons


def touched(table: Areas, changed: Sequence[str]) -> Iterator[tuple[DearFile, str]]:
    """Yield the dear test files that a change can break, each with a reason, nearest first; some come twice."""
    own = {file.path: file for file in table.files if file.path in changed}
    yield from ((file, "changed itself") for file in own.values())
    areas = {path: table.of(path) for path in changed if path not in own}
    counts = Counter(area for found in areas.values() for area in found if area != NOTHING)
    yield from ((file, f"area {area}") for area, _ in counts.most_common() for file in table.in_area(area))
    unknown = next((path for path, found in areas.items() if not found), None)
    yield from ((file, f"{unknown} changed, which has no area") for file in table.files if unknown)


def choose(table: Areas, changed: Sequence[str], commit: str, budget: float) -> Choice:
    """Choose the dear test files of T2 for a change; `commit`: name of the newest one; `budget`: CPU seconds."""
    hashes = {file.path: sha256(f"{commit} {file.path}".encode()).digest()[0] for file in table.files}
    # Where not all fit, other commits get other files.
    table = replace(table, files=sorted(table.files, key=lambda file: hashes[file.path]))
    core = ((file, "core") for file in table.files if file.core)
    others = ((file, "a quarter of the others") for file in table.files if hashes[file.path] % QUARTER == 0)
    chosen: dict[str, str] = {}
    left: dict[str, str] = {}
    for file, reason in first_reasons([*core, *touched(table, changed), *others]).items():
        fits = file.cpu <= budget
        (chosen if fits else left)[file.path] = reason
        budget -= file.cpu if fits else 0
    return Choice(chosen, left)


def part(table: Areas, number: int, count: int) -> Choice:
    """Return the dear test files of one of `count` parts: longest first, each to the part with the least so far; the
    first part has T1, too.
    """
    if not 1 <= number <= count:
        raise ValueError(f"part {number}/{count}: the first number is from 1 to the second, as in 2/6")
    parts: list[tuple[float, list[str]]] = [(0.0 if place else CHEAP_SECONDS, []) for place in range(count)]
    for file in sorted(table.files, key=lambda file: (-file.cpu, file.path)):
        place = min(range(count), key=lambda place: parts[place][0])
        parts[place] = (parts[place][0] + file.cpu, [*parts[place][1], file.path])
    return Choice(dict.fromkeys(parts[number - 1][1], f"part {number} of {count}"), {})


def git(*arguments: str, root: Path = ROOT) -> str:
    """Return the output of a git command; empty if it fails."""
    command = ["git", "-c", "core.quotePath=false", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()


def default_base(root: Path = ROOT) -> str:
    """Return the merge base with main; on main itself the newest commit that is some hours older, or the first one."""
    head = git("rev-parse", "HEAD", root=root)
    for main in ("main", "origin/main"):
        if (base := git("merge-base", "HEAD", main, root=root)) and base != head:
            return base
    seconds = int(git("show", "--no-patch", "--format=%ct", "HEAD", root=root) or 0) - HOURS * 3600
    first = git("rev-list", "--max-parents=0", "HEAD", root=root).split("\n")[0]
    return git("rev-list", "--first-parent", "-1", f"--before={seconds}", "HEAD", root=root) or first


def changed_since(base: str, root: Path = ROOT) -> list[str]:
    """Return files that differ from the base, also those that are not committed. ValueError for an unknown base."""
    if not git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", root=root):
        raise ValueError(f"git knows no commit {base!r}: name one with --base")
    differ = git("diff", "--name-only", "--no-renames", base, root=root)
    new = git("ls-files", "--others", "--exclude-standard", root=root)
    return sorted({*differ.split("\n"), *new.split("\n")} - {""})

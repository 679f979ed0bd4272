"""Graph of the files that tests need, and the choice of test files for a change."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from changed.file_references import HERE, References, Source
from changed.table import PACKAGES, SCRIPTS, Row, Table

DOTTED = re.compile(r"(?<![\w./-])[a-z_]\w*(?:\.\w+)*(?![/-])")
PART = "is in"
"""Kind of need between a definition and its file. Reasons leave it out."""
FAR = 100
"""Distance of tests without a chain of needs."""

Node = str
"""Path of a file, or `PATH::NAME`, a top-level definition of a support module."""


@dataclass
class Graph:
    """Needs: node -> the needed nodes, each with the kind of need."""

    needs: dict[Node, dict[Node, str]] = field(default_factory=dict)

    def add(self, node: Node, target: Node, why: str) -> None:
        if node != target:
            self.needs.setdefault(node, {}).setdefault(target, why)

    def reversed(self) -> dict[Node, dict[Node, str]]:
        users: dict[Node, dict[Node, str]] = {}
        for node, targets in self.needs.items():
            for target, why in targets.items():
                users.setdefault(target, {})[node] = why
        return users


@dataclass(frozen=True)
class Chosen:
    """A test file to run."""

    test: str
    reason: str
    distance: int
    """Steps between the change and the test; the nearest tests run first."""


@dataclass(frozen=True)
class Choice:
    """Tests for a change."""

    tests: tuple[Chosen, ...]
    everything: tuple[str, ...] = ()
    """Reasons to run every test."""


def module_of(path: str) -> str:
    """Return the dotted name of a Python file: `tests/chart_files.py` -> `chart_files`."""
    for folder in (*PACKAGES.values(), "tests"):
        if path.startswith(f"{folder}/"):
            path = path.removeprefix(f"{folder}/")
            break
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def is_test(path: str) -> bool:
    """Return whether pytest collects the file."""
    return path.startswith("tests/") and fnmatchcase(PurePosixPath(path).name, "test_*.py")


def build(
    files: Collection[str], sources: Mapping[str, Source], product: Mapping[str, Iterable[str]], table: Table
) -> Graph:
    """Build the graph of a repository.

    Args:
        files: paths of all files.
        sources: the tests' own Python files by path.
        product: imports among the product's modules: dotted name -> dotted names.
        table: uses that imports do not show. Tests that it runs for any change need nothing more.
    """
    return _Builder(files, sources, product, table).graph


class _Builder:
    def __init__(
        self,
        files: Collection[str],
        sources: Mapping[str, Source],
        product: Mapping[str, Iterable[str]],
        table: Table,
    ) -> None:
        self.graph = Graph()
        self._files, self._sources = sorted(files), sources
        self._modules = {module_of(path): path for path in self._files if path.endswith(".py")}
        self._by_folder: dict[str, list[str]] = {}
        """Files by their own path and by each folder that holds them."""
        for path in self._files:
            if path not in sources:
                for folder in (path, *map(str, PurePosixPath(path).parents)):
                    self._by_folder.setdefault(folder, []).append(path)
        for module, imported in product.items():
            for other in imported:
                self._add_module(self._modules[module], other, "imports")
        for path, source in sources.items():
            if not any(row.matches(path) for row in table.always):
                self._add_source(path, source)
        for link in table.links:
            for user in filter(link.is_user, self._files):
                for target in filter(link.is_needed, self._files):
                    self.graph.add(user, target, link.why)

    def _add_source(self, path: str, source: Source) -> None:
        for conftest in self._conftests(path):
            self.graph.add(path, conftest, "runs with")
            for name in sorted(self._sources[conftest].always):
                self.graph.add(path, f"{conftest}::{name}", "runs with")
        if is_test(path):
            self._add_references(path, path, source.whole)
            return
        self._add_references(path, path, source.rest)
        for name, found in source.definitions.items():
            node = f"{path}::{name}"
            self.graph.add(node, path, PART)
            self._add_references(node, path, found)

    def _add_references(self, node: Node, path: str, found: References) -> None:
        for name in found.modules:
            self._add_module(node, name, "imports")
        for text in found.texts:
            for match in DOTTED.finditer(text):
                if match[0] in PACKAGES or "." in match[0]:
                    self._add_module(node, match[0], "names")
            if "/" in text.strip("/"):
                self._add_path(node, text, "names")
        for place in found.paths:
            self._add_path(node, place, "reads")
        for name in found.programs & SCRIPTS.keys():
            self._add_module(node, SCRIPTS[name], "starts")
        if HERE in found.names:
            self._add_module(node, module_of(path), "starts")
        own = self._sources[path].definitions if not is_test(path) else {}
        for name in found.names:
            if name in own:
                self.graph.add(node, f"{path}::{name}", "uses")
        for conftest in self._conftests(path):
            for name in (found.names | found.texts) & self._sources[conftest].definitions.keys():
                self.graph.add(node, f"{conftest}::{name}", "uses")

    def _conftests(self, path: str) -> Iterator[str]:
        for folder in PurePosixPath(path).parents:
            conftest = str(folder / "conftest.py")
            if conftest in self._sources and conftest != path:
                yield conftest

    def _add_module(self, node: Node, name: str, why: str) -> None:
        """Add the need of a module, or of a definition in it, and of its packages."""
        module, _, rest = name, "", ""
        while module and module not in self._modules:
            module, _, last = module.rpartition(".")
            rest = last
        if not module:
            return
        path = self._modules[module]
        if path not in self._sources:
            self.graph.add(node, path, why)
            if why == "names" and f"{module}.__main__" in self._modules:
                self.graph.add(node, self._modules[f"{module}.__main__"], "starts")
        elif rest in self._sources[path].definitions:
            self.graph.add(node, f"{path}::{rest}", why)
        else:
            self.graph.add(node, path, why)
            for definition in self._sources[path].definitions:
                self.graph.add(node, f"{path}::{definition}", why)
        package, _, _ = module.rpartition(".")
        while package:
            if package in self._modules:
                self.graph.add(node, self._modules[package], "imports")
            package, _, _ = package.rpartition(".")

    def _add_path(self, node: Node, place: str, why: str) -> None:
        """Add the need of a file, or of a folder's files without the tests' own Python files, which are imported."""
        place = place.strip("/")
        if place in self._sources:
            self._add_module(node, module_of(place), why)
        for path in self._by_folder.get(place, ()):
            self.graph.add(node, path, why)


def choose(changed: Sequence[str], tests: Collection[str], graph: Graph, table: Table) -> Choice:
    """Choose the test files that a change of these files can break, nearest first, each with a reason.

    All test files are chosen if a changed file concerns them all, or if neither an import nor a row of the table shows
    its users.
    """
    users = graph.reversed()
    best: dict[str, Chosen] = {}
    everything = []
    for path in changed:
        reached = dict(reach(path, users, tests))
        if why := reason_in(table.everything, path):
            everything.append(f"{path}: {why}")
        elif not (reached or is_test(path) or reason_in(table.nothing, path)):
            everything.append(f"{path}: neither an import nor a row of the table shows the tests that use it")
        for test, chain in reached.items():
            if test not in best or len(chain) < best[test].distance:
                best[test] = Chosen(test, _reason_text(path, chain), len(chain))
    for test in tests if changed else ():
        if why := reason_in(table.always, test):
            best.setdefault(test, Chosen(test, why, FAR))
        if everything:
            best.setdefault(test, Chosen(test, everything[0], FAR))
    ordered = sorted(best.values(), key=lambda each: (each.distance, each.test))
    return Choice(tuple(ordered), tuple(everything))


def reason_in(rows: Sequence[Row], path: str) -> str | None:
    """Return the reason of the first row that the file matches."""
    return next((row.why for row in rows if row.matches(path)), None)


def reach(
    start: str, users: Mapping[Node, Mapping[Node, str]], tests: Collection[str]
) -> Iterator[tuple[str, list[tuple[Node, str]]]]:
    """Yield the tests that need the file, each with the shortest chain from the file to the test."""
    chains: dict[Node, list[tuple[Node, str]]] = {start: []}
    waiting = [start]
    for node in waiting:
        if node in tests:
            yield node, chains[node]
        for user, why in sorted(users.get(node, {}).items()):
            if user not in chains:
                chains[user] = [*chains[node], (user, why)]
                waiting.append(user)


def _reason_text(start: str, chain: Sequence[tuple[Node, str]]) -> str:
    """Return the reason for a test: the chain from the test to the changed file."""
    if not chain:
        return "changed itself"
    targets = [start, *(node for node, _ in chain[:-1])]
    steps = zip(reversed(targets), reversed(chain), strict=True)
    return " > ".join(f"{why} {_short(target)}" for target, (_, why) in steps if why != PART)


def _short(node: Node) -> str:
    """Return the dotted name of a product module, or the path of a test file without its folder."""
    if node.endswith(".py") and not node.startswith("tests/"):
        return module_of(node)
    return node.removeprefix("tests/")

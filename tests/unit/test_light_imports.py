"""Unit, golden, chart and architecture tests import no deep-learning library: that takes each worker half a minute.

Tests that need one are in tests/trainer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("datasets", "deepspeed", "mlflow", "torch", "transformers")
LIGHT_FOLDERS = ("architecture", "chart", "golden", "unit")
OTHERS = ("tests.cluster.", "tests.e2e.", "tests.tracing.", "tests.trainer.")
SOURCES = [ROOT / path for path in ("tests", ".ci", "release", "requirements", "operator", "trainer_image")]
SOURCES.append(ROOT / "trainer_image" / "contract")
_IMPORT = re.compile(r"^([ \t]*)(?:from +([\w.]+) +import +(\([^)]*\)|.*)|import +([\w., ]+))", re.MULTILINE)
_SKIP = re.compile(rf"importorskip\(\s*[\"']({'|'.join(HEAVY)})\b")


def imports(text: str, everywhere: bool) -> set[str]:
    """Return the names of modules that a file imports, and what may be modules; `everywhere`: in functions, too."""
    found: set[str] = set()
    for indent, package, names, modules in _IMPORT.findall(text):
        if indent and not everywhere:
            continue
        if package:
            found |= {package, *(f"{package}.{name}" for name in re.findall(r"(\w+)(?: +as +\w+)?", names))}
        found |= {name.split()[0] for name in modules.split(",") if name.strip()}
    return found


@cache
def file_of(module: str) -> Path | None:
    """Return the file of a module of this repository."""
    path = module.replace(".", "/")
    places = (source / f"{path}{end}" for source in SOURCES for end in (".py", "/__init__.py"))
    return next((place for place in places if place.is_file()), None)


@cache
def imported_by(file: Path) -> frozenset[str]:
    """Return the modules that are imported with a file, and the packages that they are in."""
    found = imports(file.read_text(encoding="utf-8"), everywhere=False)
    parts = [module.split(".") for module in found]
    return frozenset(".".join(names[:count]) for names in parts for count in range(1, len(names) + 1))


def ways_to_heavy(files: Iterable[Path]) -> Iterator[str]:
    """Yield how files import a heavy library when they are imported themselves: the modules on one of the ways."""
    seen, waiting = set(files), [(file, file.stem) for file in files]
    while waiting:
        at, way = waiting.pop()
        for module in imported_by(at):
            if module in HEAVY:
                yield f"{way} > {module}"
            below = file_of(module)
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append((below, f"{way} > {module}"))


def light_files() -> list[Path]:
    return [file for folder in LIGHT_FOLDERS for file in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]


def test_no_test_file_imports_a_heavy_library_with_itself() -> None:
    assert list(ways_to_heavy(light_files())) == []


def test_no_test_imports_a_heavy_library_in_a_function() -> None:
    found = []
    for file in light_files():
        text = file.read_text(encoding="utf-8")
        names = {module.split(".")[0] for module in imports(text, everywhere=True)} | set(_SKIP.findall(text))
        found += [f"{file.name}: {name}" for name in sorted(names & set(HEAVY))]
    assert found == []


def test_imports_in_every_form_are_found() -> None:
    text = "import a, b.c as d\nfrom e.f import (\n    g,\n    h as i,\n)\n\ndef one():\n    from torch import nn\n"
    assert imports(text, everywhere=False) == {"a", "b.c", "e.f", "e.f.g", "e.f.h"}
    assert "torch" in imports(text, everywhere=True)


def test_way_to_a_heavy_library_is_found() -> None:
    ways = list(ways_to_heavy([ROOT / "tests" / "tracing_support" / "trace.py"]))
    assert any(way.endswith("> torch") for way in ways)


def test_this_process_has_imported_no_heavy_library() -> None:
    """It runs among others, and notices what they import in functions of other modules."""
    if any(name.startswith(OTHERS) for name in sys.modules):
        pytest.skip("tests that may import these libraries are in the same run")
    assert [name for name in HEAVY if sys.modules.get(name) is not None] == []

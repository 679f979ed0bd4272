"""Docstrings begin with a noun or a verb, messages fit two lines, and lines of the documentation are wrapped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST_WORDS = re.compile(r"(Of|What|Whether|That|How|Who|Where|Which)\b")


def docstrings(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of modules, classes, functions and attributes."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("folder", ["operator", "trainer_image", "tests", ".ci"])
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str, modules: Mapping[str, Sequence[ast.AST]]) -> None:
    texts = [
        (f"{path}:{line}", text.strip())
        for path, nodes in modules.items()
        if path.startswith(f"{folder}/")
        for line, text in docstrings(nodes)
    ]
    assert len(texts) > 10
    assert [f"{place}: {text.splitlines()[0]}" for place, text in texts if FIRST_WORDS.match(text)] == []


def test_every_module_has_a_docstring(sources: Mapping[str, Sequence[ast.AST]]) -> None:
    silent = [
        path
        for path, (module, *_) in sources.items()
        if not path.endswith("/__init__.py") and isinstance(module, ast.Module) and ast.get_docstring(module) is None
    ]
    assert silent == []


LONGEST_MESSAGE = 240
"""Characters of a message without the values in it: two lines of a wide terminal."""
LONGER = (
    "spec/types/", "spec/settings/", "spec/hints/other_tools.py",
)  # fmt: skip
"""Files with descriptions of fields, which a page of reference shows, and with other tools' whole files translated."""
CODE = re.compile(r"\bself\.|[=!]=|\{\{|<[a-z/]")
"""Parts of rules in CEL, and of templates."""


def messages(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of the sentences in a module's string literals, with {} for each value."""
    inner = {id(value) for node in nodes if isinstance(node, ast.JoinedStr) for value in node.values}
    prose = {line for line, _ in docstrings(nodes)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        else:
            continue
        if text.count(" ") > 2 and node.lineno not in prose:
            yield node.lineno, text


def test_messages_fit_two_lines(sources: Mapping[str, Sequence[ast.AST]]) -> None:
    texts = [
        (f"{path}:{line}", text)
        for path, nodes in sources.items()
        if not any(part in path for part in LONGER)
        for line, text in messages(nodes)
    ]
    assert len(texts) > 1000
    long = [
        f"{place}: {len(text)}: {text[:80]}"
        for place, text in texts
        if len(text) > LONGEST_MESSAGE and "\n" not in text and not CODE.search(text)
    ]
    assert long == []


GENERATED = {"docs/api.md", "docs/names.md", "docs/settings.md", "docs/support.md", "manifests/examples/README.md"}
LONGEST_LINE = 160
"""Characters of a line of prose; tables and code have their own."""


PROSE = ("*.md", "docs/*.md", "charts/**/*.md", "images/**/*.md", "manifests/**/*.md", "tests/benchmarks/*.md")
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)


def test_lines_of_the_documentation_are_wrapped() -> None:
    files = {str(file.relative_to(ROOT)): file for pattern in PROSE for file in ROOT.glob(pattern)}
    assert "README.md" in files
    found = []
    for name in sorted(files.keys() - GENERATED):
        for line in FENCED.sub("", files[name].read_text(encoding="utf-8")).splitlines():
            # A command in a line of its own cannot be wrapped.
            if len(line) > LONGEST_LINE and not line.lstrip().startswith("|") and not re.search(r"`[^`]{100,}`", line):
                found.append(f"{name}: {line[:80]}")
    assert found == []

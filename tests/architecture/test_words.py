"""Docstrings, comments and texts for users name things: they begin with a noun or a verb, do not speak of programs as
of people, and are short.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {
    "operator": ("operator",),
    "trainer": ("trainer_image",),
    "tests": ("tests", ".ci"),
}
FIRST_WORDS = re.compile(r"(Of|What|Whether|That|How|Who|Where|Which)\b")
MOST_WHAT = 10
"""Per 10,000 words."""
TALK = ("told", "said", "heard", "mourn", "bury")
MOST_TALK = 3
"""Per 10,000 words: what an argument or a field of that name needs in backticks."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def comments(source: str) -> Iterator[str]:
    """Yield the comments of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def prose_of(part: str) -> list[tuple[str, list[tuple[int, str]], list[str]]]:
    """Return the modules of a part of the repository with their docstrings and comments."""
    found = []
    for folder in PARTS[part]:
        for file in sorted((ROOT / folder).rglob("*.py")):
            place = file.relative_to(ROOT)
            if not {"build", ".venv"} & set(place.parts):
                source = file.read_text(encoding="utf-8")
                found.append((str(place), list(docstrings(ast.parse(source))), list(comments(source))))
    return found


@pytest.mark.parametrize("part", PARTS)
def test_docstrings_begin_with_a_noun_or_a_verb(part: str) -> None:
    found = [
        f"{place}:{line}: {text.strip().splitlines()[0]}"
        for place, texts, _ in prose_of(part)
        for line, text in texts
        if FIRST_WORDS.match(text.strip())
    ]
    assert found == []


@pytest.mark.parametrize("part", PARTS)
def test_prose_avoids_vague_and_spoken_vocabulary(part: str) -> None:
    words: list[str] = []
    for _, texts, notes in prose_of(part):
        words += re.findall(r"[a-z']+", " ".join([*(text for _, text in texts), *notes]).lower())
    assert words.count("what") * 10_000 / len(words) <= MOST_WHAT
    assert sum(map(words.count, TALK)) * 10_000 / len(words) <= MOST_TALK


TEXTS = ("operator/finetune_operator", "trainer_image/finetune_trainer", "trainer_image/contract/finetune_contract")
DIALECT = re.compile(r"\b(told|tells?|said|says|heard|hears|anew|ways? out|nobody|somebody)\b", re.IGNORECASE)
SPOKEN_TO = ("Tell me more.",)
"""Texts in which somebody does speak: prompts in examples of model cards."""
LONGEST_MESSAGE = 240
"""Characters of a message without the values in it: two lines of a wide terminal."""
LONGER = (
    "api/types/", "api/settings.py", "api/settings_allow.py", "api/settings_nodes.py", "api/network_types.py",
    "api/pod_types.py", "api/foreign_files.py",
)  # fmt: skip
"""Files with descriptions of fields, which a page of reference shows, and with other tools' whole files translated."""
CODE = re.compile(r"\bself\.|[=!]=|\{\{|<[a-z/]")
"""Parts of rules in CEL, and of templates."""


def user_texts() -> Iterator[tuple[str, str]]:
    """Yield place and text of the sentences in the product's string literals, with {} for each value."""
    for folder in TEXTS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            inner = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
            prose = {line for line, _ in docstrings(tree)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    text = "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)  # type: ignore[misc]
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                    text = node.value
                else:
                    continue
                if text.count(" ") > 2 and node.lineno not in prose:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", text


def test_texts_for_users_use_the_standard_terms() -> None:
    found = [
        f"{place}: {text[:100]}"
        for place, text in user_texts()
        if DIALECT.search(text) and not any(spoken in text for spoken in SPOKEN_TO)
    ]
    assert found == []


def test_messages_fit_two_lines() -> None:
    found = [
        f"{place}: {len(text)}: {text[:80]}"
        for place, text in user_texts()
        if len(text) > LONGEST_MESSAGE and "\n" not in text and not CODE.search(text)
        if not any(part in place for part in LONGER)
    ]
    assert found == []


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

"""Source files and functions are short enough to be read at once. Tests are not limited: many are tables of cases."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("operator/finetune_operator", "trainer_image/finetune_trainer", "trainer_image/contract/finetune_contract")
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60
"""After the signature, whose parameters may be the documented options of a command."""


def source_files() -> list[Path]:
    files = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 400
    return files


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_source_files_have_at_most_500_lines():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in source_files()}
    assert {name: count for name, count in lines.items() if count > MOST_LINES_OF_A_FILE} == {}


def test_functions_have_at_most_60_lines_after_their_signature():
    long = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for path in source_files()
        for function in functions(path)
        if (function.end_lineno or 0) - function.body[0].lineno + 1 > MOST_LINES_OF_A_FUNCTION
    ]
    assert long == []

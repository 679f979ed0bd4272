"""Source files and functions are short enough to be read at once. Tests are not limited: many are tables of cases."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60
"""After the signature, whose parameters may be the documented options of a command."""


def test_source_files_have_at_most_500_lines(sources: Mapping[str, Sequence[ast.AST]]) -> None:
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {path: count for path, count in lines.items() if count > MOST_LINES_OF_A_FILE} == {}


def test_functions_have_at_most_60_lines_after_their_signature(sources: Mapping[str, Sequence[ast.AST]]) -> None:
    assert len(sources) > 400
    long = [
        f"{path}:{function.lineno} {function.name}"
        for path, nodes in sources.items()
        for function in nodes
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and (function.end_lineno or 0) - function.body[0].lineno + 1 > MOST_LINES_OF_A_FUNCTION
    ]
    assert long == []

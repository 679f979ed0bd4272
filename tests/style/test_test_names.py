"""The name of a test fits a line."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

LONGEST_NAME = 70
"""Characters of a test function's name: pytest shows it on one line, with its file."""


def long_names(path: str, nodes: Sequence[ast.AST]) -> list[str]:
    """Return the test functions of a module whose names are too long."""
    return [
        f"{path}:{node.lineno}: {len(node.name)}: {node.name}"
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and len(node.name) > LONGEST_NAME
    ]


def test_names_of_tests_fit_a_line(modules: Mapping[str, Sequence[ast.AST]]) -> None:
    tests = {path: nodes for path, nodes in modules.items() if path.startswith("tests/")}
    assert len(tests) > 300
    assert [fault for path, nodes in tests.items() for fault in long_names(path, nodes)] == []


def test_only_names_over_70_characters_are_long() -> None:
    names = [f"test_{'a' * 65}", f"test_{'a' * 66}"]
    tree = ast.parse("".join(f"def {name}(): ...\n" for name in names))
    assert long_names("sample.py", list(ast.walk(tree))) == [f"sample.py:2: 71: {names[1]}"]

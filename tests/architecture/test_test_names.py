"""Names in tests are plain: a test function says the behaviour that holds, and a variable what it holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", ".ci")
LONGEST_NAME = 70
"""Characters of a test function's name: pytest shows it on one line, with its file."""
DIALECT = re.compile(
    "(un)?told|tells?|telling|said|says?|saying|heard|hears?|ask(s|ed|ing)?|words?|what(ever)?|who(m|se)?|wish(es|ed)?|"
    "courses?|anew|aside|mourn|bury|witness(es)?|below|surprise|nobody|somebody"
)
"""Parts of names for which the field has a term: reported, requested, message, case, descendants, again."""
HINT = re.compile("ways?_?out", re.IGNORECASE)
WORDS_OF_TEXT = {
    "architecture/test_words.py",
    "architecture/test_test_names.py",
    "benchmarks/million_rows.py",
    "benchmarks/reference_runs.py",
    "box_support/box_inputs.py",
    "differences.py",
    "e2e/cluster/test_box_examples.py",
    "e2e/cluster/test_box_predict.py",
    "e2e/conftest.py",
    "explained.py",
    "gpu_check/gpu_jobs.py",
    "trainer/conftest.py",
    "trainer/test_families.py",
    "trainer/test_inference.py",
    "trainer/test_label_forms.py",
    "trainer/test_masked_lm.py",
    "trainer/test_prediction_output.py",
    "trainer/test_prediction_spark.py",
    "trainer/test_prediction_workers.py",
    "trainer/test_preference_tuning.py",
    "trainer/test_question_answering.py",
    "trainer/test_rung_in_use.py",
    "trainer/test_serving_connections.py",
    "trainer/test_serving_limits.py",
    "trainer/test_spark_answers.py",
    "trainer/test_text_generation.py",
    "trainer/test_token_classification.py",
    "trainer_support/families.py",
    "trainer_support/tasks.py",
    "unit/test_quickstart_data.py",
}
"""Files in which `word` and `words` are words of a text: a vocabulary, the input of a tokenizer, prose."""
ALLOWED = {"architecture/test_words.py": {"MOST_WHAT"}}
"""Other names, by file: a limit for the word itself."""


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of all definitions: functions, classes, arguments, variables, attributes, aliases."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name


def dialect(name: str) -> set[str]:
    """Return the parts of a name that are dialect."""
    parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
    return {part for part in parts if DIALECT.fullmatch(part)} | set(HINT.findall(name))


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Return the modules of the tests, by their path in tests/ or .ci/."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [(str(Path(*file.relative_to(ROOT).parts[1:])), ast.parse(file.read_text("utf-8"))) for file in files]


def faults(path: str, tree: ast.Module) -> list[str]:
    """Return the definitions of a module, and its own name, that contain dialect and are not allowed."""
    allowed = {"word", "words"} if path in WORDS_OF_TEXT else set()
    names = [(0, Path(path).stem), *defined(tree)]
    return [
        f"{path}:{line}: {name}: {', '.join(sorted(found))}"
        for line, name in names
        if name not in ALLOWED.get(path, ()) and (found := dialect(name) - allowed)
    ]


def long_names(path: str, tree: ast.Module) -> list[str]:
    """Return the test functions of a module whose names are too long."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        f"{path}:{node.lineno}: {len(node.name)}: {node.name}"
        for node in functions
        if node.name.startswith("test_") and len(node.name) > LONGEST_NAME
    ]


def test_names_of_tests_fit_a_line() -> None:
    assert len(modules()) > 300
    assert [fault for path, tree in modules() for fault in long_names(path, tree)] == []


def test_names_in_tests_use_the_standard_terms() -> None:
    assert [fault for path, tree in modules() for fault in faults(path, tree)] == []


def test_exceptions_are_used() -> None:
    used = {path for path, tree in modules() if any(dialect(name) & {"word", "words"} for _, name in defined(tree))}
    assert WORDS_OF_TEXT - used - {"architecture/test_test_names.py"} == set()
    names = {path: {name for _, name in defined(tree)} for path, tree in modules()}
    assert {path: kept - names.get(path, set()) for path, kept in ALLOWED.items()} == {path: set() for path in ALLOWED}


@pytest.mark.parametrize(
    "source",
    [
        "def test_what_is_told(): ...",
        "class Told: ...",
        "def run(asked): ...",
        "said = 1",
        "self.heard = []",
        "for word in line: ...",
        "import a as below",
        "[whose for whose in ()]",
        "def ways_out(): ...",
        "WHAT: int = 1",
        f"def test_{'a' * 66}(): ...",
    ],
)
def test_bad_name_is_found(source: str) -> None:
    tree = ast.parse(source)
    assert [*faults("unit/test_sample.py", tree), *long_names("unit/test_sample.py", tree)]


@pytest.mark.parametrize(
    "source",
    ["def test_expired_token_is_rejected(): ...", "swords = whatsoever = sayings = 1", f"def test_{'a' * 65}(): ..."],
)
def test_plain_name_is_accepted(source: str) -> None:
    tree = ast.parse(source)
    assert [*faults("unit/test_sample.py", tree), *long_names("unit/test_sample.py", tree)] == []

"""`make test-changed` selects the tests that a change can break, with reasons."""

from __future__ import annotations

import ast
import json
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

from changed import __main__ as command
from changed.file_references import Folder, Source, parse
from changed.graph import Choice, Graph, build, choose, is_test, module_of, reason_in
from changed.repository import (
    EMPTY_TREE,
    BaseUnknownError,
    changed_since,
    default_base,
    files_of,
    product_imports,
    sources_of,
)
from changed.table import PACKAGES, SCRIPTS, TABLE, Link, Row, Table

ROOT = Path(__file__).parents[2]


def source(text: str, path: str = "tests/unit/test_x.py", **known: dict[str, Folder]) -> Source:
    return parse(path, ast.parse(text), known)


# ---------------------------------------------------------------------------------------------- references of a file


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import a.b", {"a.b"}),
        ("from a import b, c as d", {"a.b", "a.c"}),
        ("def test():\n    from a import b", {"a.b"}),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", {"b"}),
    ],
)
def test_imports_count_at_any_depth_but_for_type_checkers(text: str, modules: set[str]) -> None:
    assert source(text).whole.modules == modules


def test_docstrings_name_nothing() -> None:
    found = source(
        '"""finetune_trainer.a"""\ndef test():\n    """finetune_trainer.b"""\n    run("finetune_trainer.c")'
    ).whole
    assert found.texts == {"finetune_trainer.c"}


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ('(Path(__file__).parents[2] / "docs" / "tasks.md").read_text()', {"docs/tasks.md"}),
        ('Path(__file__).parent / "jobs"', {"tests/unit/jobs"}),
        ('ROOT = Path(__file__).resolve().parents[2]\nx = ROOT / "docs"\nx / "a.md"', {"docs", "docs/a.md"}),
        ('Path(__file__).parents[2] / "docs" / f"{name}.md"', {"docs"}),
        ('Path(__file__).parents[2] / folder / "a.md"', set()),
        ('Path(__file__).parents[3] / "shared"', set()),
        ('tmp_path / "docs"', set()),
        ("run(cwd=Path(__file__).parents[2])", set()),
    ],
)
def test_path_expressions_give_files_and_folders(text: str, paths: set[str]) -> None:
    assert source(text).whole.paths == paths


@pytest.mark.parametrize(
    "text", ['Path(sys.executable).with_name("finetune")', 'str(Path(sys.executable).parent / "finetune")']
)
def test_programs_are_found_beside_the_interpreter(text: str) -> None:
    assert source(text).whole.programs == {"finetune"}


def test_a_path_may_start_at_a_constant_of_another_module() -> None:
    found = source('from charts import CHART\nCHART / "values.yaml"', charts={"CHART": Folder("charts/x")}).whole
    assert found.paths == {"charts/x/values.yaml"}


# -------------------------------------------------------------------------------------------------- a small project

FILES = {
    "tests/conftest.py": 'pytest_plugins = ["plugins.one"]',
    "tests/plugins/one.py": "import os",
    "tests/support/jobs.py": """
from finetune_contract import trainer_job
def a_job(): return trainer_job.Job()
def b_job(): from finetune_trainer import stages
def run(): start("-m", "finetune_trainer")
""",
    "tests/support/served.py": """
def call(): start([sys.executable, __file__])
if __name__ == "__main__":
    from finetune_trainer import stages
""",
    "tests/unit/test_served.py": "from support.served import call",
    "tests/unit/test_program.py": 'PROGRAM = Path(sys.executable).with_name("finetune-operator")',
    "tests/unit/test_plan.py": "from finetune_operator.planning import plan",
    "tests/unit/test_jobs.py": "from support.jobs import a_job",
    "tests/trainer/conftest.py": """
import pytest
from finetune_trainer import stages
def bench(other_bench): stages.run()
def light(): return 1
def other_bench(): return Path(__file__).parents[2] / "data"
@pytest.fixture(autouse=True)
def seeded():
    from finetune_contract import trainer_job
""",
    "tests/trainer/test_bench.py": "def test(bench): pass",
    "tests/trainer/test_light.py": "def test(light): pass",
    "tests/trainer/test_process.py": "from support.jobs import run",
    "tests/cluster/test_operator.py": 'SETTINGS = "manifests/settings.yaml"',
    "tests/architecture/test_all.py": "import finetune_operator.shell",
}
PRODUCT = {
    "finetune_contract.trainer_job": set(),
    "finetune_contract": set(),
    "finetune_operator": set(),
    "finetune_operator.planning": set(),
    "finetune_operator.planning.plan": {"finetune_operator.planning.memory"},
    "finetune_operator.planning.memory": {"finetune_contract.trainer_job"},
    "finetune_operator.shell": set(),
    "finetune_operator.shell.alone": set(),
    "finetune_operator.shell.command": set(),
    "finetune_trainer": set(),
    "finetune_trainer.stages": {"finetune_contract.trainer_job"},
    "finetune_trainer.__main__": {"finetune_trainer.stages"},
}
SMALL_TABLE = Table(
    links=(Link(("tests/cluster/*",), ("operator/finetune_operator/shell/__init__.py",), "starts"),),
    everything=(Row(("constraints.txt",), "versions"),),
    nothing=(Row(("LICENSE",), "for readers"),),
    always=(Row(("tests/architecture/*",), "reads every file"),),
)


def small_product() -> list[str]:
    """Return the files of PRODUCT."""
    packages = {name.rpartition(".")[0] for name in PRODUCT} - {""} | {"finetune_operator.shell"}
    return [
        f"{PACKAGES[name.split('.')[0]]}/{name.replace('.', '/')}{'/__init__.py' if name in packages else '.py'}"
        for name in PRODUCT
    ]


def small_choice(*changed: str) -> Choice:
    paths = [*FILES, *small_product(), "manifests/settings.yaml", "data/rows/a.jsonl", "constraints.txt", "LICENSE"]
    sources = {path: parse(path, ast.parse(text)) for path, text in FILES.items()}
    graph = build(paths, sources, PRODUCT, SMALL_TABLE)
    return choose(changed, {path for path in FILES if is_test(path)}, graph, SMALL_TABLE)


def reasons(*changed: str) -> dict[str, str]:
    """Return the reason of each test file, without the one that always runs."""
    choice = small_choice(*changed)
    assert choice.everything == ()
    found = {each.test.removeprefix("tests/"): each.reason for each in choice.tests}
    assert found.pop("architecture/test_all.py") == "reads every file"
    return found


def test_changed_module_selects_tests_through_imports_of_the_product() -> None:
    assert reasons("operator/finetune_operator/planning/memory.py") == {
        "unit/test_plan.py": "imports finetune_operator.planning.plan > imports finetune_operator.planning.memory"
    }


def test_importing_a_module_runs_the_packages_that_hold_it() -> None:
    assert reasons("operator/finetune_operator/planning/__init__.py") == {
        "unit/test_plan.py": "imports finetune_operator.planning"
    }


def test_only_imported_names_of_a_support_module_count() -> None:
    assert reasons("trainer_image/finetune_trainer/__main__.py") == {
        "trainer/test_process.py": "imports support/jobs.py::run > starts finetune_trainer.__main__"
    }
    assert "unit/test_jobs.py" in reasons("trainer_image/contract/finetune_contract/trainer_job.py")


def test_fixture_counts_for_the_tests_that_use_it() -> None:
    found = reasons("trainer_image/finetune_trainer/stages.py")
    assert found["trainer/test_bench.py"].startswith("uses trainer/conftest.py::bench > ")
    assert "trainer/test_light.py" not in found
    assert list(reasons("data/rows/a.jsonl")) == ["trainer/test_bench.py"]


def test_conftest_and_autouse_fixtures_count_for_all_tests_in_its_folder() -> None:
    both = {"trainer/test_bench.py", "trainer/test_light.py", "trainer/test_process.py"}
    assert set(reasons("tests/trainer/conftest.py")) == both
    assert both <= set(reasons("trainer_image/contract/finetune_contract/trainer_job.py"))


def test_plugins_count_for_every_test() -> None:
    assert len(reasons("tests/plugins/one.py")) == 8


def test_table_row_adds_a_use_that_no_import_shows() -> None:
    assert reasons("operator/finetune_operator/shell/__init__.py") == {
        "cluster/test_operator.py": "starts finetune_operator.shell",
        "unit/test_program.py": "imports finetune_operator.shell",
    }


def test_a_test_needs_the_module_of_a_program_that_it_starts() -> None:
    assert reasons("operator/finetune_operator/shell/command.py") == {
        "unit/test_program.py": "starts finetune_operator.shell.command"
    }


def test_a_support_module_that_starts_itself_counts_as_a_whole() -> None:
    assert "unit/test_served.py" in reasons("trainer_image/finetune_trainer/stages.py")


def test_a_file_that_a_test_names_by_its_path_counts() -> None:
    assert reasons("manifests/settings.yaml") == {"cluster/test_operator.py": "names manifests/settings.yaml"}


def test_a_changed_test_runs_first() -> None:
    choice = small_choice("operator/finetune_operator/planning/memory.py", "tests/unit/test_jobs.py")
    first, second, _ = choice.tests
    assert (first.test, first.reason) == ("tests/unit/test_jobs.py", "changed itself")
    assert second.test == "tests/unit/test_plan.py"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("constraints.txt", "constraints.txt: versions"),
        ("operator/finetune_operator/shell/alone.py", "neither an import nor a row"),
        ("operator/finetune_operator/removed.py", "neither an import nor a row"),
    ],
)
def test_every_test_runs_where_nothing_explains_a_change(path: str, why: str) -> None:
    choice = small_choice(path)
    assert len(choice.tests) == 9
    assert why in choice.everything[0]


def test_no_test_but_the_one_that_reads_every_file_runs_for_the_license() -> None:
    assert reasons("LICENSE") == {}


def test_nothing_runs_without_a_change() -> None:
    assert small_choice() == Choice(())


# ------------------------------------------------------------------------------------------------- this repository


@cache
def repository() -> tuple[frozenset[str], Graph]:
    try:
        files = files_of(ROOT)
    except BaseUnknownError:
        pytest.skip("not a git checkout")
    return frozenset(files), build(files, sources_of(ROOT, files), product_imports(ROOT), TABLE)


@cache
def reached() -> dict[str, set[str]]:
    """Return the tests that each file of the repository reaches."""
    files, graph = repository()
    found: dict[str, set[str]] = {path: set() for path in files}
    for test in filter(is_test, files):
        needed, waiting = {test}, [test]
        while waiting:
            more = graph.needs.get(waiting.pop(), {}).keys() - needed
            needed |= more
            waiting += more
        for path in needed & found.keys():
            found[path].add(test)
    return found


def is_product(path: str) -> bool:
    return path.endswith(".py") and module_of(path).split(".")[0] in PACKAGES


def test_every_module_of_the_product_reaches_a_test() -> None:
    modules = [path for path in reached() if is_product(path)]
    assert len(modules) > 200
    assert [path for path in modules if not reached()[path]] == []


def test_every_file_reaches_a_test_or_has_a_row() -> None:
    rows = (*TABLE.everything, *TABLE.nothing)
    unexplained = [path for path, tests in reached().items() if not (tests or is_test(path) or reason_in(rows, path))]
    assert unexplained == [], "say in tests/changed/table.py which tests use these files"


def test_every_test_file_needs_more_than_its_companions() -> None:
    """Each needs a module of the product, a document, or the support module that it tests."""
    files, graph = repository()
    tests = [path for path in files if is_test(path) and not reason_in(TABLE.always, path)]
    assert len(tests) > 100
    assert [path for path in tests if set(graph.needs.get(path, {}).values()) <= {"runs with"}] == []


def test_every_pattern_of_the_table_matches_a_file() -> None:
    files, _ = repository()
    patterns = [pattern for link in TABLE.links for pattern in (*link.users, *link.needs)]
    patterns += [pattern for row in (*TABLE.everything, *TABLE.nothing, *TABLE.always) for pattern in row.files]
    assert [each for each in patterns if not any(Row((each,), "").matches(path) for path in files)] == []


def test_the_table_has_the_installed_programs() -> None:
    projects = [
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in PACKAGES.values()
    ]
    installed = {name: target for project in projects for name, target in project.get("scripts", {}).items()}
    assert installed == {name: f"{module}:main" for name, module in SCRIPTS.items()}


def test_every_package_of_the_product_has_a_folder_in_the_table() -> None:
    files, _ = repository()
    assert {module_of(path) for path in files if is_product(path) and "." not in module_of(path)} == set(PACKAGES)


# ------------------------------------------------------------------------------------------------------ the command


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *settings, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with two commits on main."""
    git(tmp_path, "init", "-q", "-b", "main")
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "-q", "-m", name)
    return tmp_path


def test_change_includes_committed_edited_deleted_and_new_files(checkout: Path) -> None:
    (checkout / ".gitignore").write_text("ignored\n")
    for name in ("new", "ignored"):
        (checkout / name).write_text(name)
    (checkout / "second").write_text("edited")
    (checkout / "first").unlink()
    assert changed_since(checkout, "HEAD") == [".gitignore", "first", "new", "second"]
    assert files_of(checkout) == [".gitignore", "new", "second"]


def test_the_base_on_main_is_the_commit_before(checkout: Path) -> None:
    assert default_base(checkout) == git(checkout, "rev-parse", "HEAD~1")
    assert changed_since(checkout, default_base(checkout)) == ["second"]


def test_the_base_on_a_branch_is_where_it_left_main(checkout: Path) -> None:
    left = git(checkout, "rev-parse", "HEAD")
    git(checkout, "checkout", "-q", "-b", "work")
    for name in ("third", "fourth"):
        (checkout / name).write_text(name)
        git(checkout, "add", name)
        git(checkout, "commit", "-q", "-m", name)
    assert default_base(checkout) == left
    assert changed_since(checkout, left) == ["fourth", "third"]


def test_the_base_of_the_first_commit_is_the_empty_tree(checkout: Path) -> None:
    git(checkout, "reset", "-q", "--hard", "HEAD~1")
    assert default_base(checkout) == EMPTY_TREE
    assert changed_since(checkout, EMPTY_TREE) == ["first"]


def test_an_unknown_base_is_refused(checkout: Path) -> None:
    with pytest.raises(BaseUnknownError, match="no commit 'nowhere'"):
        changed_since(checkout, "nowhere")


def test_tests_on_a_cluster_are_named_where_none_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = tuple(command.Suite(each.folder, each.target, lambda: "no cluster here") for each in command.SUITES)
    monkeypatch.setattr(command, "SUITES", lacking)
    choice = small_choice("tests/plugins/one.py")
    parts = command.parts_of(choice)
    assert [(part.suite and part.suite.target, len(part.tests)) for part in parts] == [(None, 8), ("test-cluster", 1)]
    report = command.lines("HEAD", ["tests/plugins/one.py"], choice, parts, 9)
    assert report[0] == "1 changed files since HEAD; 9 of 9 test files can break."
    assert "make test-cluster (not run here: no cluster here)" in report
    document = json.loads(json.dumps(command.document("HEAD", ["tests/plugins/one.py"], choice, parts)))
    assert document["notHere"] == {"test-cluster": "no cluster here"}
    assert len(document["tests"]) == 9


def test_suites_that_cannot_run_here_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def record(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        started.append(arguments[3:])
        return subprocess.CompletedProcess(arguments, {"-x": 1}.get(arguments[3], command.NOTHING_CHOSEN))

    monkeypatch.setattr(command.subprocess, "run", record)
    here, there = command.Suite("here/", "here", lambda: None), command.Suite("there/", "there", lambda: None)
    chosen = small_choice("tests/unit/test_jobs.py").tests[:1]
    parts = [command.Part(None, chosen), command.Part(here, chosen), command.Part(there, chosen, "no cluster")]
    assert command.run(parts, ["-x"]) == 1
    assert command.run(parts[1:2], ["-v"]) == 0
    assert started == [
        ["-x", "tests/unit/test_jobs.py"],
        ["-x", "--numprocesses", "0", "tests/unit/test_jobs.py"],
        ["-v", "--numprocesses", "0", "tests/unit/test_jobs.py"],
    ]

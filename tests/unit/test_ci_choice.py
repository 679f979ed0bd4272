"""The choice of dear tests: its table names every folder and every dear file, and a change finds its tests."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dear_tests import (
    CHEAP_SECONDS,
    NOTHING,
    ROOT,
    TABLE,
    Areas,
    Choice,
    DearFile,
    changed_since,
    choose,
    default_base,
    first_reasons,
    part,
    read_areas,
    touched,
)

AREAS = read_areas()
SUITES = ("cluster", "e2e/cluster", "e2e/local", "tracing", "trainer")
PRODUCT = ("operator", "trainer_image", "charts", "manifests", "images")


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_every_file_of_the_product_has_an_area() -> None:
    files = tracked(*PRODUCT)
    assert len(files) > 500
    unknown = [name for name in files if not AREAS.of(name) and not name.endswith(("/__init__.py", "py.typed"))]
    assert unknown == []
    # Only pages: the dear tests would miss a change of anything else.
    assert {Path(name).suffix for name in files if AREAS.of(name) == [NOTHING]} <= {".md"}


def test_every_area_has_files_and_dear_tests() -> None:
    files = tracked()
    assert [area for area, pattern in AREAS.paths.items() if not any(re.match(pattern, name) for name in files)] == []
    assert [area for area in AREAS.paths if area != NOTHING and not AREAS.in_area(area)] == []
    assert {area for file in AREAS.files for area in file.areas} <= AREAS.paths.keys()


def test_every_dear_file_has_a_row() -> None:
    rows = {file.path: file for file in AREAS.files}
    assert [path for path in rows if not (ROOT / path).is_file()] == []
    found = {name for name in tracked("tests") if re.fullmatch(r"tests/(.*/)?test_\w+\.py", name)}
    processes = {name for name in found if name.startswith(tuple(f"tests/{suite}/" for suite in SUITES[:4]))}
    assert len(processes) > 40
    assert processes - rows.keys() == set()
    marked = {name for name in found if "mark.slow" in (ROOT / name).read_text(encoding="utf-8")}
    texts = {"tests/unit/test_suite_selection.py", f"tests/unit/{Path(__file__).name}"}  # which have it in a string
    assert marked - rows.keys() == texts
    assert {path for path, file in rows.items() if file.slow} <= marked


def test_table_is_short_enough_to_be_read() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 260


# ----------------------------------------------------------------------------------------------------------- the choice

FILES = [
    DearFile("tests/trainer/test_a.py", 50, ("data",)),
    DearFile("tests/trainer/test_b.py", 20, ("data", "tasks")),
    DearFile("tests/trainer/test_c.py", 30, ("tasks",)),
    DearFile("tests/cluster/test_d.py", 40, ("api",), core=True),
    DearFile("tests/cluster/test_e.py", 10, ("api",)),
]
SMALL = Areas(
    {NOTHING: r"docs/", "data": "src/data/", "tasks": "src/tasks/", "api": "api/", "cluster": "tests/x/"}, FILES
)


def names(choice: Choice) -> set[str]:
    return {Path(path).stem[-1] for path in choice.chosen}


def of_change(*changed: str) -> set[str]:
    return {Path(file.path).stem[-1] for file in first_reasons(touched(SMALL, changed))}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["docs/a.md"], ""),
        (["src/data/a.py"], "ab"),
        (["src/data/a.py", "api/b.py"], "abde"),
        (["tests/x/shared.py"], "de"),
        (["tests/trainer/test_c.py"], "c"),
        (["new/file.py"], "abcde"),
    ],
    ids=["pages", "one area", "two areas", "shared parts of a suite", "a test itself", "a file without an area"],
)
def test_change_finds_the_dear_tests_of_its_areas(changed: list[str], expected: str) -> None:
    assert of_change(*changed) == set(expected)


def test_core_comes_first_and_the_nearest_files_of_an_area() -> None:
    choice = choose(SMALL, ["src/data/a.py"], "0", 95)
    assert list(choice.chosen.values())[:2] == ["core", "area data"]
    assert {"d", "a"} <= names(choice)
    assert choice.left["tests/trainer/test_b.py"] == "area data"
    assert "left out by the budget: area data: trainer/test_b" in list(choice.lines())


def test_quarter_of_the_others_differs_by_commit() -> None:
    files = [DearFile(f"tests/trainer/test_{number}.py", 1, ("data",)) for number in range(200)]
    chosen = [set(choose(Areas({}, files), [], commit, 1000).chosen) for commit in ("a", "b", "a")]
    assert all(30 < len(each) < 70 for each in chosen)
    assert chosen[0] == chosen[2] != chosen[1]


def test_parts_have_every_file_once_and_similar_length() -> None:
    parts = [set(part(AREAS, number, 6).chosen) for number in range(1, 7)]
    assert sorted(path for each in parts for path in each) == sorted(file.path for file in AREAS.files)
    cpu = {file.path: file.cpu for file in AREAS.files}
    lengths = [sum(cpu[path] for path in each) for each in parts]
    lengths[0] += CHEAP_SECONDS
    assert max(lengths) <= 1.2 * min(lengths)


@pytest.mark.parametrize("wrong", [(0, 6), (7, 6)])
def test_part_that_does_not_exist_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"as in 2/6"):
        part(AREAS, *wrong)


def test_change_is_that_since_main_or_of_the_last_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{name}_NAME", "a")
        monkeypatch.setenv(f"{name}_EMAIL", "a@example.com")

    def git(*arguments: str, hour: int = 0) -> str:
        environment = {**os.environ, "GIT_COMMITTER_DATE": f"2026-01-01T{hour:02}:00:00Z"}
        ran = subprocess.run(
            ["git", *arguments], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        )
        return ran.stdout.strip()

    git("init", "--quiet", "--initial-branch", "main")
    for hour in (1, 8, 13):
        (tmp_path / f"{hour}.py").touch()
        git("add", "--all")
        git("commit", "--quiet", "--message", "Change", hour=hour)
    assert default_base(tmp_path) == git("rev-parse", "HEAD~2")
    (tmp_path / "ü.py").touch()
    assert changed_since(default_base(tmp_path), tmp_path) == ["13.py", "8.py", "ü.py"]
    git("switch", "--quiet", "--create", "topic")
    git("commit", "--quiet", "--allow-empty", "--message", "More", hour=14)
    assert default_base(tmp_path) == git("rev-parse", "main")
    with pytest.raises(ValueError, match="git knows no commit 'nothing'"):
        changed_since("nothing", tmp_path)

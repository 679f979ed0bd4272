"""The guides in docs stay true: commands of docs/how-to.md run, and names in docs/architecture.md and others exist."""

from __future__ import annotations

import importlib.util
import re
import shlex

import pytest

from chart_files import ROOT
from examples import EXAMPLES
from finetune_command import finetune

SOURCES = ("operator", "trainer_image")
PREFIXES = ("", "operator/finetune_operator/", "trainer_image/finetune_trainer/")
"""Folders from which CONTRIBUTING.md counts paths."""
OF_KUBERNETES = {"ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError", "CrashLoopBackOff"}
"""Reasons of the kubelet."""


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


COMMANDS = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", page("how-to"), re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_how_to_runs(command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "finetune"
    ran = finetune(*arguments, folder=ROOT, HF_HUB_OFFLINE="1")
    assert ran.returncode == 0, ran.stderr


def test_each_how_to_has_a_plan_and_an_example() -> None:
    sections = re.split(r"^## ", page("how-to"), flags=re.MULTILINE)[1:]
    planned = [set(re.findall(r"finetune plan manifests/examples/([\w-]+)\.yaml", section)) for section in sections]
    assert len(sections) >= 10
    assert all(names and names <= set(EXAMPLES) for names in planned)


def test_packages_of_the_architecture_exist() -> None:
    packages = set(re.findall(r"`(finetune_\w+(?:\.\w+)*)`", page("architecture")))
    assert len(packages) > 10
    assert [name for name in sorted(packages) if importlib.util.find_spec(name) is None] == []


def test_reasons_of_the_troubleshooting_page_exist() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)`", page("troubleshooting"))) - OF_KUBERNETES
    code = "\n".join(
        file.read_text(encoding="utf-8") for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))
    )
    assert len(named) > 30
    assert [reason for reason in sorted(named) if f'"{reason}"' not in code] == []


def test_all_pages_begin_with_a_title() -> None:
    files = sorted((ROOT / "docs").glob("*.md"))
    assert [file.name for file in files if not file.read_text(encoding="utf-8").startswith("# ")] == []


def test_paths_of_the_contributing_page_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = sorted(set(re.findall(r"`([\w.-]+(?:/[\w.-]+)*/[\w.-]*)`", text)))
    assert len(paths) > 60
    assert [path for path in paths if not any((ROOT / prefix / path).exists() for prefix in PREFIXES)] == []

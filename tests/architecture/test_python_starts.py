"""No Python process that the product starts looks for modules in the folder in which it happens to start.

A `torch.py` beside a job file, or a volume mounted at `/finetune_trainer`, would otherwise run in the trainer's place.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from finetune_contract.python_command import module_command
from finetune_operator.jobs.render.trainer_pod import CONFIG, trainer_command
from suite_plugins.patience import patient

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"python3?(\.\d+)?")
OTHERWISE = {
    "operator/finetune_operator/endpoints/kinds.py": "vLLM: its middleware is in its working directory, our ConfigMap",
    "trainer_image/contract/finetune_contract/utf8_mode.py": "this process again, with the options that it has",
    "trainer_image/finetune_trainer/scripts/program.py": "the user's own program, which may import what is beside it",
}
"""Files with a command that lacks `-P`, and the reason."""


def is_interpreter(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and PYTHON.fullmatch(node.value) is not None
    if isinstance(node, ast.BoolOp):
        return any(map(is_interpreter, node.values))
    return (isinstance(node, ast.Attribute) and node.attr == "executable") or (
        isinstance(node, ast.Name) and node.id == "executable"
    )


def commands(file: Path) -> Iterator[list[ast.expr]]:
    """Yield the argument vectors in a module that begin with an interpreter."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1 and is_interpreter(node.elts[0]):
            yield node.elts


def is_safe(command: list[ast.expr]) -> bool:
    return isinstance(command[1], ast.Constant) and command[1].value == "-P"


def modules() -> list[Path]:
    return sorted(path for folder in ("operator", "trainer_image") for path in (ROOT / folder).rglob("*.py"))


def test_every_command_of_a_python_has_the_option_for_a_safe_path() -> None:
    starts = {(str(file.relative_to(ROOT)), is_safe(command)) for file in modules() for command in commands(file)}
    assert starts == {
        *((file, False) for file in OTHERWISE),
        ("trainer_image/contract/finetune_contract/python_command.py", True),
    }


def test_the_search_finds_a_start_without_the_option(tmp_path: Path) -> None:
    starts = ('[sys.executable, "-m", "x"]', '("python", *rest)', '["python3", "-c", text]', "[sys.executable, *rest]")
    for text in (*starts, '[python or sys.executable, "x.py"]', "subprocess.run([executable, name])"):
        (tmp_path / "x.py").write_text(text)
        assert [is_safe(command) for command in commands(tmp_path / "x.py")] == [False], text


def containers(value: object) -> Iterator[dict[str, object]]:
    """Yield the containers in a manifest that start a Python by name."""
    if isinstance(value, dict):
        command = value.get("command")
        if isinstance(command, list) and command and PYTHON.fullmatch(str(command[0])):
            yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from containers(inner)


def test_every_container_starts_with_a_safe_path_and_in_a_folder_of_ours() -> None:
    files = sorted((ROOT / "tests/golden/whole").rglob("*.yaml"))
    found = [each for file in files for each in containers(yaml.safe_load(file.read_text(encoding="utf-8")))]
    assert len(found) > 8
    for container in found:
        command, environment = container["command"], container["env"]
        assert isinstance(command, list)
        assert isinstance(environment, list)
        if "vllm.entrypoints.cli.main" not in command:
            assert command[1] == "-P", command
            assert {"name": "PYTHONSAFEPATH", "value": "1"} in environment
        assert container["workingDir"] == CONFIG
    for file in sorted((ROOT / "charts/finetune-operator/templates").rglob("*.yaml")):
        for command in re.findall(r"command: \[(python[^\]]*)\]", file.read_text(encoding="utf-8")):
            assert command.split(", ")[1] == "-P", file


@pytest.mark.parametrize("image", ["operator", "trainer"])
def test_image_has_a_working_directory_and_a_safe_path(image: str) -> None:
    last = (ROOT / "images" / image / "Dockerfile").read_text(encoding="utf-8").rpartition("\nFROM ")[2]
    assert "\nWORKDIR /opt/finetune\n" in last
    assert re.search(r"PYTHONSAFEPATH=1\b", last)
    entry = re.search(r"^ENTRYPOINT \[(.*)\]$", last, re.MULTILINE)
    assert entry is not None
    assert PYTHON.fullmatch(entry[1].split('"')[1]) is None or '"-P"' in entry[1]


def test_a_trainer_ignores_modules_of_its_working_directory(tmp_path: Path) -> None:
    hostile = "import pathlib; pathlib.Path('ran').write_text(__name__)\n"
    (tmp_path / "finetune_trainer").mkdir()
    for name in ("finetune_trainer/__init__", "finetune_trainer/__main__", "finetune_contract", "argparse", "pydantic"):
        (tmp_path / f"{name}.py").write_text(hostile)
    (_, *arguments) = trainer_command("launch", "train", "--help")
    for command in ([sys.executable, *arguments], module_command("finetune_trainer", "launch", "train", "--help")):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(120)
        )
        assert (ran.returncode, ran.stdout.split()[:2]) == (0, ["usage:", "finetune-trainer"]), ran.stderr
        assert not (tmp_path / "ran").exists()

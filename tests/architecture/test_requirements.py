"""Installing takes files by hash, and the hashed files match constraints.txt and the pyproject.toml files."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

from finetune_contract.arguments import Tracker, check_arguments
from finetune_trainer.training.tracking import libraries_of
from lock import FILES, HEADER, direct_requirements, name_of, normalized, pins

ROOT = Path(__file__).parents[2]
PINNED = pins((ROOT / "constraints.txt").read_text())
NOT_IN_THE_SUITE = {"build.txt", "tools.txt"}
"""Files whose distributions are not in the suite's own virtual environment, so that their needs are unknown."""
PINNED_FOR_USERS = {"evaluate"}
"""Pins without an installation of ours: images/README.md adds it to an image."""
ENTRY = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[\w.+!-]+)(?: ; (?P<marker>[^\\]+))? \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}(?: \\)?$")


def text_of(file: str) -> str:
    return (ROOT / "requirements" / file).read_text()


def applying(file: str) -> set[str]:
    """Return the distributions of a file whose markers apply to this machine."""
    entries = [match for line in text_of(file).splitlines() if (match := ENTRY.match(line))]
    return {normalized(entry["name"]) for entry in entries if not entry["marker"] or Marker(entry["marker"]).evaluate()}


def needed(requirements: Iterable[str]) -> set[str]:
    """Return all distributions that requirements lead to, by the installed distributions' metadata."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        key = normalized(requirement.name), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        found.add(key[0])
        for line in distribution(key[0]).requires or []:
            other = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if other.marker is None or any(other.marker.evaluate(environment) for environment in environments):
                waiting.append(other)
    return found


def test_every_hashed_file_has_a_row() -> None:
    assert {path.name for path in (ROOT / "requirements").glob("*.txt")} == set(FILES)


@pytest.mark.parametrize("file", FILES)
def test_hashed_file_holds_versions_and_hashes_and_no_address(file: str) -> None:
    text = text_of(file)
    assert text.startswith(HEADER)
    lines = text.removeprefix(HEADER).splitlines()
    wrong = [line for line in lines if not ENTRY.match(line) and not HASH.match(line)]
    assert wrong == []
    hashed = [ENTRY.match(line) is not None and HASH.match(after) is not None for line, after in pairwise(lines)]
    assert sum(hashed) == len(pins(text)) > 0


@pytest.mark.parametrize("file", FILES)
def test_hashed_file_has_the_versions_of_the_constraints(file: str) -> None:
    assert pins(text_of(file)) == {name: PINNED.get(name) for name in pins(text_of(file))}


@pytest.mark.parametrize("file", FILES)
def test_hashed_file_pins_every_direct_requirement(file: str) -> None:
    wanted = FILES[file]
    before = {name for each in wanted.installed_before for name in pins(text_of(each))}
    required = {name_of(line) for line in direct_requirements(wanted)} - before - set(wanted.built_apart)
    assert required
    assert required <= pins(text_of(file)).keys()


@pytest.mark.parametrize("file", sorted(FILES.keys() - NOT_IN_THE_SUITE))
def test_hashed_file_holds_all_that_its_requirements_need_and_no_more(file: str) -> None:
    wanted = FILES[file]
    direct = direct_requirements(wanted)
    try:
        expected = needed(direct) if wanted.dependencies else {name_of(line) for line in direct}
    except PackageNotFoundError as error:
        pytest.fail(f"{error.name} is needed and not installed: `make requirements`, then `make install`")
    before = {name for each in wanted.installed_before for name in pins(text_of(each))}
    assert applying(file) == expected - before - set(wanted.built_apart)


def test_every_pin_is_in_a_hashed_file() -> None:
    hashed = {name for file in FILES for name in pins(text_of(file))}
    assert PINNED.keys() - hashed == PINNED_FOR_USERS


# Commands that take files from an index without hashes: torch of a user's own index, which has other builds and so
# other hashes. DeepSpeed is installed from the wheel that the image has built.
EXEMPT = ("--constraint /tmp/versions.txt",)
COMMANDS = re.compile(r"pip (?:install|download|wheel)[^;&|\n]*|\$\(PIP_INSTALL\)[^\n]*")


@pytest.mark.parametrize("file", ["Makefile", "images/operator/Dockerfile", "images/trainer/Dockerfile"])
def test_downloads_from_an_index_are_checked_by_hash(file: str) -> None:
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", (ROOT / file).read_text()))
    commands = [found for found in COMMANDS.findall(text) if "PIP_INSTALL =" not in found]
    taking = [command for command in commands if "--no-index" not in command and "pip wheel" not in command]
    taking = [
        command for command in taking if not command.startswith("pip install --quiet --disable-pip-version-check")
    ]
    assert len(taking) >= 2, commands
    without = [command for command in taking if "--require-hashes" not in command]
    assert [command for command in without if not any(exempt in command for exempt in EXEMPT)] == []


@pytest.mark.parametrize("file", ["Makefile", "images/operator/Dockerfile", "images/trainer/Dockerfile"])
def test_sources_are_built_with_the_tools_that_were_taken_by_hash(file: str) -> None:
    """Only the wheels of build.txt, of a whole file, are installed without `--no-build-isolation`: pip would build with
    tools that it downloads without checking hashes.
    """
    text = re.sub(r"\\\n", " ", (ROOT / file).read_text())
    commands = [command for command in COMMANDS.findall(text) if "--require-hashes" in command]
    assert commands
    for command in commands:
        assert "--no-build-isolation" in command or "build.txt" in command or "fp8.txt" in command, command


def test_torch_of_another_index_is_given_the_versions_of_the_hashed_file() -> None:
    """The expression of the trainer's Dockerfile for TORCH_INDEX reads the file of this format."""
    dockerfile = (ROOT / "images" / "trainer" / "Dockerfile").read_text()
    program = re.search(r"sed -n '([^']+)' /opt/finetune/requirements/torch\.txt", dockerfile)
    assert program is not None
    ran = subprocess.run(
        ["sed", "-n", program[1]], input=text_of("torch.txt"), capture_output=True, text=True, check=True
    )
    assert pins(ran.stdout) == pins(text_of("torch.txt"))
    assert "hash" not in ran.stdout


def test_an_audit_that_cannot_be_made_fails() -> None:
    """Without `--strict` pip-audit succeeds when the index has no data of a distribution."""
    assert re.search(r"pip-audit --strict ", (ROOT / "Makefile").read_text())


distributions_by_module = cache(packages_distributions)


def installed_by(module: str) -> str:
    """Return the distribution of an importable module; fail where there is none."""
    assert find_spec(module) is not None, f"{module} cannot be imported: `make install`"
    (name,) = set(distributions_by_module()[module])
    return normalized(name)


@pytest.mark.parametrize("tracker", get_args(Tracker))
def test_image_has_every_tracker_that_validate_lets_pass(tracker: Tracker) -> None:
    locked = pins(text_of("trainer.txt")).keys()
    assert {installed_by(module) for module in libraries_of(tracker, {})} <= locked
    assert check_arguments({"report_to": tracker}) == ()


def test_image_for_gpus_has_the_kernels_that_validate_lets_pass() -> None:
    assert check_arguments({"use_liger_kernel": True}) == ()
    assert installed_by("liger_kernel") in pins(text_of("liger.txt"))
    lines = re.sub(r"\\\n", " ", (ROOT / "images" / "trainer" / "Dockerfile").read_text()).splitlines()
    (line,) = (line for line in lines if "liger.txt" in line and "pip install" in line)
    assert re.search(r'if \[ "\$\{ACCELERATOR\}" = cuda \]; then +pip install [^;]*/liger\.txt;', line)


def test_cpu_image_has_every_package_that_exported_backends_import() -> None:
    for module in ("nncf", "onnx", "onnxruntime", "onnxscript", "openvino"):
        assert installed_by(module) in pins(text_of("fast-inference.txt"))
    lines = re.sub(r"\\\n", " ", (ROOT / "images" / "trainer" / "Dockerfile").read_text()).splitlines()
    (line,) = (line for line in lines if "fast-inference.txt" in line and "pip install" in line)
    assert re.search(r"= cuda \]; then +pip install [^;]*; +else +pip install [^;]*/fast-inference\.txt; +fi", line)


@pytest.mark.parametrize("module", ["google.protobuf", "sentencepiece", "tiktoken"])
def test_image_reads_vocabularies_that_come_without_a_tokenizer_json(module: str) -> None:
    """DeBERTa-v3, T5 and Mistral ship a model of sentencepiece, and transformers needs protobuf beside it."""
    assert find_spec(module) is not None
    assert normalized(module.rpartition(".")[2]) in pins(text_of("trainer.txt"))

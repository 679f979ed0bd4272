"""`make requirements`: write the hashed requirements beside this file, from constraints.txt and each pyproject.toml.

`pip install --require-hashes` takes nothing but the files that these hashes name: a file that somebody has replaced, on
the index or on the way, is refused. constraints.txt stays what a person edits; it holds the versions. The hashes are
those of all files of a version, so that one file of requirements serves every Python from 3.11 on, x86-64 and aarch64,
and an index that has some of the wheels only. No file names an index: the same hashes hold for each mirror.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
CONTRACT, TRAINER, OPERATOR = "trainer_image/contract", "trainer_image", "operator"
HEADER = "# Written by `make requirements`: edit constraints.txt or a pyproject.toml, not this file.\n"


@dataclass(frozen=True)
class Wanted:
    """The requirements that one file is made from."""

    packages: tuple[str, ...] = ()
    """Names of others' distributions."""
    projects: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Folders of our distributions, each with the extras that are wanted."""
    groups: tuple[str, ...] = ()
    """Dependency groups of the pyproject.toml at the root."""
    dependencies: bool = True
    """Whether the requirements of the requirements are in the file as well."""
    installed_before: tuple[str, ...] = ()
    """Files that are installed earlier; their distributions are left out."""
    built_apart: tuple[str, ...] = ()
    """Distributions that are installed by other means, and therefore left out."""


FILES: Mapping[str, Wanted] = MappingProxyType(
    {
        # First of all: a source distribution is built with these, not with tools that pip downloads without hashes.
        # seqeval takes its version from setuptools-scm.
        "build.txt": Wanted(packages=("pip", "setuptools", "setuptools-scm")),
        # `make install`
        "dev.txt": Wanted(projects=((CONTRACT, ()), (TRAINER, ("serve",)), (OPERATOR, ("operator",))), groups=("dev",)),
        # `make tools`: for building images and releases, and for this file
        "tools.txt": Wanted(packages=("cyclonedx-python-lib", "pip-audit", "setuptools", "uv")),
        # The images, a file for each of their layers.
        "operator.txt": Wanted(projects=((CONTRACT, ()), (OPERATOR, ("operator",)))),
        "torch.txt": Wanted(packages=("numpy", "setuptools", "torch")),
        # The sources of DeepSpeed, which are patched before they are built, and the modules that the build imports.
        "deepspeed.txt": Wanted(packages=("deepspeed",), dependencies=False),
        "deepspeed-build.txt": Wanted(
            packages=("einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo", "pydantic", "tqdm")
        ),
        "fp8.txt": Wanted(packages=("torchao",), dependencies=False),
        # For the image for GPUs alone: the other one has no triton, without which it cannot be imported.
        "liger.txt": Wanted(packages=("liger-kernel",), dependencies=False),
        "trainer.txt": Wanted(
            projects=((CONTRACT, ()), (TRAINER, ("qlora", "serve", "tracking", "wandb"))),
            installed_before=("torch.txt",),
            built_apart=("deepspeed",),
        ),
        # For the image for CPUs alone: the backends of predict that it adds compute there.
        "fast-inference.txt": Wanted(
            projects=((CONTRACT, ()), (TRAINER, ("fast-inference",))),
            installed_before=("torch.txt", "trainer.txt"),
            built_apart=("deepspeed",),
        ),
    }
)


def normalized(name: str) -> str:
    """Return the name of a distribution in the form in which indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """Return the normalized name that a requirement begins with."""
    return normalized(re.split(r"[^-\w.]", requirement, maxsplit=1)[0])


def direct_requirements(wanted: Wanted, root: Path = ROOT) -> list[str]:
    """Return the requirements that `wanted` names by itself, sorted, without our own distributions."""
    found = set(wanted.packages)
    own: set[str] = set()
    for folder, extras in wanted.projects:
        project = tomllib.loads((root / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        own.add(normalized(project["name"]))
        found.update(project.get("dependencies", []))
        for extra in extras:
            found.update(project["optional-dependencies"][extra])
    groups = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    found.update(line for group in wanted.groups for line in _group(groups, group))
    return sorted(line for line in found if name_of(line) not in own)


def _group(groups: Mapping[str, Sequence[str | Mapping[str, str]]], name: str) -> Iterator[str]:
    for item in groups[name]:
        if isinstance(item, str):
            yield item
        else:
            yield from _group(groups, item["include-group"])


def pins(text: str) -> dict[str, str]:
    """Return the versions by normalized name, of constraints.txt or of a hashed file."""
    found = re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^\s;\\]+)", text)
    return {normalized(name): version for name, version in found}


def compiled(wanted: Wanted, uv: str) -> str:
    """Return the text of a hashed file; uv asks the index for the hashes.

    Raise CalledProcessError if the constraints cannot be satisfied or the index does not answer.
    """
    left_out = [normalized(name) for name in wanted.built_apart]
    for file in wanted.installed_before:
        left_out += pins((FOLDER / file).read_text(encoding="utf-8"))
    # fmt: off
    command = [
        uv, "pip", "compile", "-", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes",
        "--constraint", "constraints.txt", "--no-header", "--no-annotate", "--no-emit-index-url",
        *([] if wanted.dependencies else ["--no-deps"]),
        *(option for name in left_out for option in ("--no-emit-package", name)),
    ]
    # fmt: on
    lines = "\n".join(direct_requirements(wanted))
    ran = subprocess.run(command, cwd=ROOT, input=lines, text=True, stdout=subprocess.PIPE, check=True)
    return HEADER + ran.stdout


def main() -> int:
    """Write all files; return 1 if constraints.txt lacks the version of something that is needed."""
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    missing: dict[str, str] = {}
    for file, wanted in FILES.items():
        text = compiled(wanted, str(Path(sys.executable).with_name("uv")))
        (FOLDER / file).write_text(text, encoding="utf-8")
        found = pins(text)
        missing |= {name: version for name, version in found.items() if name not in pinned}
        print(f"requirements/{file}: {len(found)} distributions, {text.count('--hash=')} hashes")
    if missing:
        lines = "\n".join(f"{name}=={version}" for name, version in sorted(missing.items()))
        print(
            f"constraints.txt does not pin these; add them and run `make requirements` again:\n{lines}", file=sys.stderr
        )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

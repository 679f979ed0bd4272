"""`make release VERSION=...`: make everything that a release consists of, in one folder, from the last commit.

The folder holds wheels, images as OCI archives, the chart, SBOMs, statements of how the images were built, checksums
and notes. Everything is made from an export of the commit, so that neither uncommitted changes nor leftovers of other
builds get in, and dated with the commit's time: a second release of the commit has the same bytes but for the trainer's
image. Nothing is pushed or signed; docs/release.md describes both.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from archive import ARCHIVE_SUFFIX, deterministic_gzip, opened

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTIONS = ("trainer_image/contract", "trainer_image", "operator")
CHART = "charts/finetune-operator"
CHECKSUMS = "SHA256SUMS"
NOTES = "RELEASE_NOTES.md"


class ReleaseError(Exception):
    """The release cannot be made; the message says why and what to do."""


# ----------------------------------------------------------------------------------------------------------- the commit


def git(root: Path, *arguments: str) -> str:
    """Return the output of git. Raise ReleaseError if it fails."""
    ran = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    if ran.returncode != 0:
        raise ReleaseError(f"git {arguments[0]} failed: {ran.stderr.strip()}. A release is made from a git checkout.")
    return ran.stdout.strip()


def export(root: Path, folder: Path) -> None:
    """Write the files of the last commit to `folder`, with modes that do not depend on the user's umask."""
    packed = subprocess.run(
        ["git", "-C", str(root), "-c", "tar.umask=0022", "archive", "--format=tar", "HEAD"],
        stdout=subprocess.PIPE,
        check=True,
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(folder, filter="tar")
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def versions(root: Path) -> dict[str, str]:
    """Return the version that each file names which names one."""
    found = {
        f"{folder}/pyproject.toml": str(
            tomllib.loads((root / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
        )
        for folder in DISTRIBUTIONS
    }
    chart = (root / CHART / "Chart.yaml").read_text(encoding="utf-8")
    for key in ("version", "appVersion"):
        match = re.search(rf'(?m)^{key}: "?([^"\n]+)"?$', chart)
        found[f"{CHART}/Chart.yaml {key}"] = match[1] if match else ""
    return found


def check_version(root: Path, version: str) -> None:
    """Raise ReleaseError if a file names another version."""
    others = [f"{file} has {found or 'none'}" for file, found in versions(root).items() if found != version]
    if others:
        raise ReleaseError(f"VERSION={version}, but {'; '.join(others)}. Change the files, or VERSION, and commit.")


# ------------------------------------------------------------------------------------------------------------ the parts


def make_wheels(source: Path, out: Path, epoch: int, python: str = sys.executable) -> None:
    """Build the wheels of all distributions with the setuptools of `python`, without an index."""
    command = [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    before = os.umask(0o022)
    try:
        subprocess.run([*command, *(str(source / folder) for folder in DISTRIBUTIONS)], env=environment, check=True)
    finally:
        os.umask(before)


def make_chart(source: Path, out: Path, version: str, epoch: int) -> Path:
    """Pack the chart as `helm package` does, but sorted and dated with `epoch`: Helm takes the time of the call."""
    chart = source / CHART
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        files = [path for path in sorted(chart.rglob("*")) if path.is_file()]
        # Helm looks for Chart.yaml first.
        for path in sorted(files, key=lambda each: (each != chart / "Chart.yaml", each.as_posix())):
            entry = tarfile.TarInfo(f"{chart.name}/{path.relative_to(chart).as_posix()}")
            entry.size = path.stat().st_size
            entry.mode = 0o644
            entry.mtime = epoch
            with path.open("rb") as file:
                tar.addfile(entry, file)
    packed = out / f"{chart.name}-{version}.tgz"
    packed.write_bytes(deterministic_gzip(content.getvalue()))
    return packed


def make_images(source: Path, out: Path, images: Sequence[str], settings: Mapping[str, str]) -> None:
    """Build the images with images/build, with their archives and records in `out`.

    The operator's is built without the layers that the engine keeps, which may have another commit's time.
    """
    for image in images:
        environment = {**os.environ, **settings, "RECORDS": str(out), "ARCHIVES": str(out)}
        if image == "operator":
            environment["BUILD_OPTIONS"] = f"{environment.get('BUILD_OPTIONS', '')} --no-cache".strip()
        subprocess.run([str(source / "images" / "build"), image], env=environment, check=True)


# ------------------------------------------------------------------------------------------------- notes and checksums


def changes(changelog: str, version: str) -> str:
    """Return the section of a version of CHANGELOG.md, or else the section Unreleased."""
    sections: dict[str, str] = dict(re.findall(r"(?ms)^## ([^\n]*)\n(.*?)(?=^## |\Z)", changelog))
    for wanted in (version, "Unreleased"):
        for title, text in sections.items():
            if wanted in re.split(r"[\s\[\]]+", title):
                return text.strip()
    return ""


def bases_by_tag(out: Path) -> list[str]:
    """Return the bases that the statements in `out` call not requested by digest, each with its image."""
    found = []
    for path in sorted(out.glob("*.provenance.json")):
        predicate = json.loads(path.read_text(encoding="utf-8"))["predicate"]["buildDefinition"]
        for material in predicate["resolvedDependencies"]:
            if material.get("annotations", {}).get("requestedByDigest") is False:
                found.append(f"{predicate['externalParameters']['image']}: {material['uri']}")
    return found


def notes(source: Path, out: Path, version: str, commit: str, epoch: int, images: Sequence[str]) -> str:
    """Return the release notes."""
    lines = [f"# {version}", "", f"Made from commit {commit}, SOURCE_DATE_EPOCH={epoch}.", ""]
    archives = sorted(out.glob(f"*{ARCHIVE_SUFFIX}"))
    if archives:
        lines += ["| image | digest |", "|---|---|"]
        for path in archives:
            with opened(path) as archive:
                lines.append(f"| `{path.name}` | `{archive.digest}` |")
        lines.append("")
    absent = [f"finetune-{image}" for image in ("operator", "trainer") if image not in images]
    if absent:
        lines += [f"**Without the image of {' and '.join(absent)}**, which this folder does not hold.", ""]
    for line in bases_by_tag(out):
        lines += [f"**Not by digest**: the base of {line} was taken by its tag.", ""]
    lines += [
        f"Not signed. `sha256sum --check {CHECKSUMS}` checks the files; docs/release.md describes how to sign them and",
        "how to make the release again.",
        "",
        "## Changes",
        "",
        changes((source / "CHANGELOG.md").read_text(encoding="utf-8"), version),
    ]
    return "\n".join(lines) + "\n"


def write_checksums(out: Path) -> None:
    """Write the checksums of all files of the folder, as sha256sum reads them."""
    lines = []
    for path in sorted(out.iterdir()):
        if path.name != CHECKSUMS:
            with path.open("rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (out / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------- the release


def make_release(version: str, out: Path, images: Sequence[str], root: Path = ROOT) -> None:
    """Make the release in the folder `out`, which is replaced once all of it is made."""
    commit, epoch = git(root, "rev-parse", "HEAD"), int(git(root, "log", "-1", "--format=%ct"))
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        source.mkdir()
        export(root, source)
        check_version(source, version)
        if git(root, "status", "--porcelain"):
            print(f"Uncommitted changes are left out: the release is made from {commit[:12]}.")
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        made.chmod(0o755)
        try:
            make_wheels(source, made, epoch)
            make_chart(source, made, version, epoch)
            settings = {"TAG": version, "REVISION": commit, "SOURCE_DATE_EPOCH": str(epoch), "TOOLS": sys.prefix}
            make_images(source, made, images, settings)
            (made / NOTES).write_text(notes(source, made, version, commit, epoch, images), encoding="utf-8")
            write_checksums(made)
            if out.exists():
                shutil.rmtree(out)
            made.rename(out)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    print(f"{out}:")
    for path in sorted(out.iterdir()):
        print(f"  {path.stat().st_size:>12,}  {path.name}")
    for line in bases_by_tag(out):
        print(f"NOT BY DIGEST: the base of {line}. images/renew writes digests into images/bases.lock.")


def main() -> int:
    """Make a release; return 1 if it cannot be made."""
    parser = argparse.ArgumentParser(description="Makes a release in one folder.")
    parser.add_argument("version")
    parser.add_argument("--out", type=Path, help="folder (default: dist/VERSION)")
    parser.add_argument("--images", default="operator trainer", help='"operator trainer", one of them, or ""')
    given = parser.parse_args()
    images = given.images.split()
    if unknown := set(images) - {"operator", "trainer"}:
        parser.error(f"there is no image {', '.join(sorted(unknown))}; there are operator and trainer")
    try:
        make_release(given.version, given.out or ROOT / "dist" / given.version, images)
    except ReleaseError as error:
        print(f"make release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"make release: {Path(error.cmd[0]).name} failed with {error.returncode}; see above.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

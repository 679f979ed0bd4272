"""A release: the same bytes whoever makes it, complete, checked by its checksums, and honest about its images."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import archive
import make_release
import records
from chart_rendering import program
from inventory import debian_packages, python_package
from lock import FILES
from suite_plugins.patience import patient

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "operator/pyproject.toml").read_text())["project"]["version"]
EPOCH = 1_700_000_000
DATES = {"GIT_COMMITTER_DATE": f"{EPOCH} +0000", "GIT_AUTHOR_DATE": f"{EPOCH} +0000"}
GIT_IDENTITY = {
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b",
}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    environment = {**os.environ, **DATES, **GIT_IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout whose only commit has the present files that a release without images needs."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("checkout")
    for name in listed.stdout.splitlines():
        if name.startswith(("operator/", "trainer_image/", "charts/", "CHANGELOG.md")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")
    return folder


@pytest.fixture(scope="module")
def release(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a release without images from a clone, as a user with another umask who has left a file behind."""
    place = tmp_path_factory.mktemp("release")
    other = place / "elsewhere" / "clone"
    git(place, "clone", "--quiet", str(checkout), str(other))
    (other / "operator" / "finetune_operator" / "left_behind.py").write_text("")
    before = os.umask(0o077)
    try:
        make_release.make_release(VERSION, place / "made", (), other)
    finally:
        os.umask(before)
    return place / "made"


@pytest.mark.slow
def test_a_release_that_is_made_twice_has_the_same_bytes(release: Path, checkout: Path, tmp_path: Path) -> None:
    make_release.make_release(VERSION, tmp_path / "again", (), checkout)
    assert archive.compare(release, tmp_path / "again") == []


def test_a_release_holds_wheels_chart_notes_and_checksums(release: Path) -> None:
    assert {path.name for path in release.iterdir()} == {
        f"finetune_contract-{VERSION}-py3-none-any.whl",
        f"finetune_trainer-{VERSION}-py3-none-any.whl",
        f"finetune_operator-{VERSION}-py3-none-any.whl",
        f"finetune-operator-{VERSION}.tgz",
        "RELEASE_NOTES.md",
        "SHA256SUMS",
    }


def test_the_checksums_are_those_of_the_files(release: Path) -> None:
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=release, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count(": OK") == len(list(release.iterdir())) - 1


def test_a_wheel_holds_no_byte_code_and_nothing_uncommitted(release: Path) -> None:
    wheels = list(release.glob("*.whl"))
    assert len(wheels) == 3
    for wheel in wheels:
        names = "\n".join(zipfile.ZipFile(wheel).namelist())
        assert "METADATA" in names
        assert "left_behind" not in names
        assert ".pyc" not in names


def test_the_packed_chart_is_the_chart(release: Path, tmp_path: Path) -> None:
    helm = program("helm")
    with tarfile.open(release / f"finetune-operator-{VERSION}.tgz") as tar:
        assert tar.getnames()[0] == "finetune-operator/Chart.yaml"
    rendered = [
        subprocess.run(
            [helm, "template", "r", str(chart)], capture_output=True, text=True, check=True, timeout=patient(300)
        ).stdout
        for chart in (release / f"finetune-operator-{VERSION}.tgz", ROOT / "charts" / "finetune-operator")
    ]
    assert rendered[0] == rendered[1] != ""


def test_release_notes_list_changes_and_missing_images(release: Path) -> None:
    text = (release / "RELEASE_NOTES.md").read_text()
    assert text.startswith(f"# {VERSION}\n")
    assert "Without the image of finetune-operator and finetune-trainer" in text
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert make_release.changes(changelog, VERSION) in text
    assert "make quickstart" in text


def test_the_notes_have_the_section_of_the_version() -> None:
    changelog = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [1.2.0] - 2026-01-01\n\n- old\n"
    assert make_release.changes(changelog, "1.2.0") == "- old"
    assert make_release.changes(changelog, "1.3.0") == "- new"


def test_a_version_that_files_do_not_have_is_refused(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(make_release.ReleaseError) as refused:
        make_release.make_release("9.9", tmp_path / "out", (), checkout)
    assert f"operator/pyproject.toml has {VERSION}" in str(refused.value)
    assert f"charts/finetune-operator/Chart.yaml appVersion has {VERSION}" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------------------- SBOM

INVENTORY: dict[str, Any] = {
    "os": {"id": "debian", "codename": "bookworm"},
    "debian": [
        {"name": "libc6", "version": "2.36-9+deb12u10", "architecture": "amd64", "source": "glibc"},
        {"name": "bash", "version": "5.2.15-2", "architecture": "amd64", "source": "bash"},
    ],
    "python": [
        {
            "name": "aiohttp",
            "version": "3.14.5",
            "licenses": ["Apache-2.0 AND MIT"],
            "requires": ["Multi.Dict", "gone"],
        },
        {
            "name": "multi_dict",
            "version": "1.0",
            "licenses": ["License :: OSI Approved :: MIT License"],
            "requires": [],
        },
        {"name": "unknown", "version": "2", "licenses": [], "requires": []},
    ],
}


def test_an_sbom_is_valid_and_names_every_package_by_its_purl() -> None:
    text = records.sbom(INVENTORY, "finetune-operator", VERSION, EPOCH)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    assert {component["purl"] for component in bill["components"]} == {
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=bookworm&upstream=glibc",
        "pkg:deb/debian/bash@5.2.15-2?arch=amd64&distro=bookworm",
        "pkg:pypi/aiohttp@3.14.5",
        "pkg:pypi/multi-dict@1.0",
        "pkg:pypi/unknown@2",
    }
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    assert needs["pkg:pypi/aiohttp@3.14.5"] == ["pkg:pypi/multi-dict@1.0"]
    assert len(needs[f"image:finetune-operator@{VERSION}"]) == 5
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"


def test_sbom_is_reproducible_and_its_number_depends_on_the_packages() -> None:
    first = records.sbom(INVENTORY, "finetune-operator", VERSION, EPOCH)
    assert records.sbom(json.loads(json.dumps(INVENTORY)), "finetune-operator", VERSION, EPOCH) == first
    fewer = records.sbom({**INVENTORY, "debian": []}, "finetune-operator", VERSION, EPOCH)
    assert json.loads(fewer)["serialNumber"] != json.loads(first)["serialNumber"]


def test_inventory_lists_installed_packages_only() -> None:
    status = (
        "Package: a\nStatus: install ok installed\nVersion: 1\nArchitecture: all\nSource: b (2)\n\n"
        "Package: removed\nStatus: deinstall ok config-files\nVersion: 1\nArchitecture: all\n"
    )
    assert debian_packages(status) == [{"name": "a", "version": "1", "architecture": "all", "source": "b"}]
    found = python_package(next(iter(__import__("importlib.metadata").metadata.distributions(name="pydantic"))))
    assert (found["name"], found["licenses"]) == ("pydantic", ["MIT"])
    assert "pydantic-core" in str(found["requires"]).replace("_", "-")
    assert "email-validator" not in str(found["requires"])


# --------------------------------------------------------------------------------------------------------- provenance


def statement(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "image": "finetune-trainer",
        "subjects": [("finetune-trainer:1", "b" * 64)],
        "arguments": {"TORCH_INDEX": "https://me:secret@wheels.example.com/cpu", "VERSION": "1"},
        "options": ["--secret", "id=pip,src=/home/me/pip.conf", "--build-arg=http_proxy=http://me:secret@proxy"],
        "base": "debian:bookworm-slim",
        "base_digest": "sha256:" + "c" * 64,
        "by_digest": False,
        "revision": "d" * 40 + "-dirty",
        "engine": "buildah 1",
        "builder": records.LOCAL_BUILDER,
        "epoch": "",
    }
    return records.provenance(**{**given, **changes})


def test_statement_names_source_base_and_every_requirements_file() -> None:
    made = statement()
    assert (made["_type"], made["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    assert made["subject"] == [{"name": "finetune-trainer:1", "digest": {"sha256": "b" * 64}}]
    materials = made["predicate"]["buildDefinition"]["resolvedDependencies"]
    source, base, *files = materials
    assert source == {
        "name": "source",
        "digest": {"gitCommit": "d" * 40},
        "annotations": {"uncommittedChanges": True},
    }
    assert base["annotations"] == {"requestedByDigest": False}
    names = {each["name"] for each in files}
    assert {
        "images/trainer/Dockerfile",
        "images/trainer/deepspeed.patch",
        "images/bases.lock",
        "constraints.txt",
        "requirements/torch.txt",
        "requirements/trainer.txt",
        "requirements/deepspeed.txt",
    } <= names
    assert all((ROOT / name).is_file() for name in names)


def test_a_statement_holds_no_credential_and_no_path_of_the_builder() -> None:
    text = json.dumps(statement())
    assert "secret@" not in text
    assert "/home/me" not in text
    parameters = statement()["predicate"]["buildDefinition"]["externalParameters"]
    assert parameters["arguments"]["TORCH_INDEX"] == "https://wheels.example.com/cpu"
    assert parameters["engineOptions"] == ["--secret", "--build-arg"]


# ----------------------------------------------------------------------------------------------------------- archives


def layout(folder: Path, files: dict[str, tuple[str, int]], created: str = "") -> Path:
    """Write an image of one layer in OCI's layout: content and time by path."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes) -> dict[str, Any]:
        digest = archive.hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    packed = archive.io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, (content, time) in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mtime = len(content), time
            tar.addfile(entry, archive.io.BytesIO(content.encode()))
    layer = blob(archive.deterministic_gzip(packed.getvalue()))
    config = blob(json.dumps({"created": created, "config": {}}).encode())
    manifest = blob(json.dumps({"config": config, "layers": [layer]}).encode())
    blob(os.urandom(16))  # an earlier image's
    (folder / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


def packed(folder: Path, files: dict[str, tuple[str, int]], created: str = "") -> Path:
    target = folder.with_suffix(".oci.tar")
    archive.pack(layout(folder, files, created), target)
    return target


def test_an_image_is_packed_with_the_same_bytes_each_time(tmp_path: Path) -> None:
    first, second = (packed(tmp_path / name, {"a": ("1", 5)}) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as tar:
        assert len(tar.getnames()) == 5  # layout, index, manifest, config, layer


def test_two_images_are_compared_file_by_file(tmp_path: Path) -> None:
    first = packed(tmp_path / "first", {"same": ("1", 5), "time": ("1", 5), "content": ("1", 5), "gone": ("", 0)}, "x")
    second = packed(tmp_path / "second", {"same": ("1", 5), "time": ("1", 6), "content": ("2", 5), "new": ("", 0)}, "y")
    assert archive.compare(first, first) == []
    assert archive.compare(first, second) == [
        "config: created",
        "layer 1: content: content",
        "layer 1: gone: in the first only",
        "layer 1: new: in the second only",
        "layer 1: time: time",
    ]


def test_many_entries_that_differ_in_time_alone_are_counted(tmp_path: Path) -> None:
    names = [f"file{number}" for number in range(archive.MANY_TIMES + 1)]
    first = packed(tmp_path / "first", {**dict.fromkeys(names, ("1", 5)), "content": ("1", 5)})
    second = packed(tmp_path / "second", {**dict.fromkeys(names, ("1", 6)), "content": ("2", 6)})
    assert archive.compare(first, second) == [
        f"layer 1: {len(names)} entries: time",
        "layer 1: content: time, content",
    ]


def test_two_releases_are_compared_down_to_the_files_of_an_image(tmp_path: Path) -> None:
    for name, time in (("first", 5), ("second", 6)):
        (tmp_path / name).mkdir()
        shutil.move(packed(tmp_path / f"image-{name}", {"a": ("1", time)}), tmp_path / name / "image.oci.tar")
        (tmp_path / name / "notes").write_text(name)
    (tmp_path / "first" / "only").touch()
    assert archive.compare(tmp_path / "first", tmp_path / "second") == [
        "image.oci.tar: layer 1: a: time",
        "notes: content",
        f"only: there is no {tmp_path / 'second' / 'only'}",
    ]


# ------------------------------------------------------------------------------------------------------ the workflow

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yaml"


def workflow_commands() -> list[str]:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return [line for job in jobs.values() for step in job["steps"] for line in step["run"].splitlines()]


def test_workflow_runs_lint_tests_and_release_and_is_marked_untried() -> None:
    assert "Untried" in WORKFLOW.read_text().split("\n\n")[0]
    targets = {found for line in workflow_commands() for found in re.findall(r"\bmake ([a-z-]+)", line)}
    known = set(re.findall(r"(?m)^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text()))
    assert {"lint", "test", "release"} <= targets <= known


def test_workflow_uses_no_foreign_action_and_grants_read_access_only() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert [step for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step] == []


def test_the_workflow_refuses_a_base_that_is_not_by_digest() -> None:
    release = yaml.safe_load(WORKFLOW.read_text())["jobs"]["release"]
    assert release["env"]["REQUIRE_DIGESTS"] == "yes"


# ----------------------------------------------------------------------------------------------------- docs/release.md

PAGE = (ROOT / "docs" / "release.md").read_text()
TARGETS = set(re.findall(r"(?m)^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text()))


def test_the_page_links_to_files_and_names_targets_that_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", PAGE) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", PAGE))
    assert {"release", "release-compare", "requirements", "audit", "tools"} <= named <= TARGETS


def test_the_page_lists_every_file_of_hashed_requirements() -> None:
    listed = set(re.findall(r"(?m)^\| (`[a-z0-9-]+\.txt`(?:, `[a-z0-9-]+\.txt`)*) \|", PAGE))
    assert {name for row in listed for name in re.findall(r"`([^`]+)`", row)} == set(FILES)


def test_the_page_names_settings_that_images_build_has() -> None:
    described = set(re.findall(r"(?m)^#   ([A-Z_]+) ", (ROOT / "images" / "build").read_text()))
    [line] = [line for line in PAGE.splitlines() if line.startswith("- Settings of `images/build` pass through")]
    named = set(re.findall(r"`([A-Z_]+)`", line))
    assert len(named) >= 5
    assert named <= described


# ------------------------------------------------------------------------------------------------- the operator's image


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("FINETUNE_TEST_IMAGE_BUILDS" not in os.environ, reason="FINETUNE_TEST_IMAGE_BUILDS is not set")
def test_the_operators_image_has_the_same_digest_when_it_is_built_again(tmp_path: Path) -> None:
    """Build twice without a cache; BUILD_OPTIONS and the base are those of the caller (docs/tests.md)."""
    source = tmp_path / "source"
    source.mkdir()
    make_release.export(ROOT, source)
    settings = {
        "TAG": "twice",
        "REVISION": "",
        "SOURCE_DATE_EPOCH": str(EPOCH),
        "TOOLS": str(Path(make_release.sys.prefix)),
    }
    for name in ("first", "second"):
        make_release.make_images(source, tmp_path / name, ("operator",), settings)
    assert archive.compare(tmp_path / "first", tmp_path / "second") == []
    with archive.opened(tmp_path / "first" / "finetune-operator-twice.oci.tar") as image:
        paths = {path for layer in image.layers[1:] for path in image.members(layer)}
    assert paths
    assert [path for path in paths if "__pycache__" in path or path.startswith("var/log/apt")] == []

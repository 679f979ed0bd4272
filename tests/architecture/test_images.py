"""The images: the Dockerfiles keep the rules, and one name, tag and user holds wherever an image is named."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.jobs.launchers.mpijob.mpijob_launcher import SSH_KEYS
from finetune_operator.jobs.render.pod_parts import USER_ID
from finetune_operator.jobs.render.trainer_pod import HOME
from finetune_operator.spec.settings.settings import OPERATOR_IMAGE, TRAINER_IMAGE
from suite_plugins.patience import patient

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
DOCKERFILES = {path.parent.name: path for path in sorted(IMAGES.glob("*/Dockerfile"))}
VERSION = tomllib.loads((ROOT / "operator/pyproject.toml").read_text())["project"]["version"]


def instructions(image: str) -> list[tuple[str, str]]:
    """Return (instruction, rest) of a Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILES[image].read_text()))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(keyword, rest.strip()) for keyword, _, rest in (line.partition(" ") for line in lines)]


def operator_pod() -> dict[str, object]:
    deployment = yaml.safe_load((ROOT / "manifests/operator/deployment.yaml").read_text())
    return dict(deployment["spec"]["template"]["spec"])


def test_there_is_an_image_of_the_operator_and_one_of_the_trainer() -> None:
    assert set(DOCKERFILES) == {"operator", "trainer"}


def test_linter_reports_a_faulty_dockerfile(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN apt-get update\n")
    found = subprocess.run([str(Path(sys.executable).parent / "hadolint"), str(wrong)], capture_output=True, text=True)
    assert found.returncode == 1
    assert "DL3006" in found.stdout


@pytest.mark.parametrize("image", DOCKERFILES)
def test_an_image_stands_on_debian_alone(image: str) -> None:
    froms = [rest.split() for keyword, rest in instructions(image) if keyword == "FROM"]
    stages = {parts[2] for parts in froms if len(parts) == 3}
    assert {parts[0] for parts in froms} - stages == {"debian:bookworm-slim", "${BASE:-tagged}"}
    assert froms[:2] == [["debian:bookworm-slim", "AS", "tagged"], ["${BASE:-tagged}", "AS", "system"]]
    assert instructions(image)[0] == ("ARG", "BASE")
    assert len(froms) > 1, "what only the build needs stays behind in a stage of its own"


@pytest.mark.parametrize(("image", "user"), [("operator", 65532), ("trainer", USER_ID)])
def test_an_image_runs_as_the_user_that_its_pods_run_as(image: str, user: int) -> None:
    users = [rest for keyword, rest in instructions(image) if keyword == "USER"]
    assert users == [f"{user}:{user}"]
    if image == "operator":
        context = operator_pod()["securityContext"]
        assert isinstance(context, dict)
        assert (context["runAsUser"], context["runAsGroup"]) == (user, user)


def test_the_trainers_user_has_the_home_that_mpi_mounts_its_keys_into() -> None:
    runs = " ".join(rest for keyword, rest in instructions("trainer") if keyword == "RUN")
    made = re.search(r"useradd --uid (\d+) --user-group --create-home --shell /bin/bash (\w+)", runs)
    assert made is not None
    assert int(made[1]) == USER_ID
    assert f"/home/{made[2]}/.ssh" == SSH_KEYS
    assert f"HOME={HOME}" in DOCKERFILES["trainer"].read_text()


def test_one_name_and_version_holds_everywhere() -> None:
    kustomization = yaml.safe_load((ROOT / "manifests/operator/kustomization.yaml").read_text())
    installed = yaml.safe_load((ROOT / "manifests/operator/settings.yaml").read_text())
    containers = operator_pod()["containers"]
    assert isinstance(containers, list)
    versions = {
        path: tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]["version"]
        for path in ("operator", "trainer_image", "trainer_image/contract")
    }
    chart = yaml.safe_load((ROOT / "charts/finetune-operator/Chart.yaml").read_text())
    assert {
        "default": TRAINER_IMAGE,
        "operator": OPERATOR_IMAGE,
        "chart": (chart["version"], chart["appVersion"]),
        "settings": installed["defaults"]["image"],
        "kustomization": [f"{image['name']}:{image['newTag']}" for image in kustomization["images"]],
        "deployment": [container["image"] for container in containers],
        "packages": set(versions.values()),
    } == {
        "default": f"finetune-trainer:{VERSION}",
        "operator": f"finetune-operator:{VERSION}",
        "chart": (VERSION, VERSION),
        "settings": f"finetune-trainer:{VERSION}",
        "kustomization": [f"finetune-operator:{VERSION}"],
        "deployment": ["finetune-operator"],
        "packages": {VERSION},
    }
    for image in DOCKERFILES:
        text = DOCKERFILES[image].read_text()
        assert f"ARG VERSION={VERSION}\n" in text
        assert f"-t finetune-{image}:{VERSION} ." in text, "the command in its first lines"
        assert f'org.opencontainers.image.title="finetune-{image}"' in text


@pytest.mark.parametrize("image", DOCKERFILES)
def test_code_change_rebuilds_only_the_last_layer(image: str) -> None:
    """Other distributions are installed before our packages are copied. They are copied and not mounted: buildah 1.28
    keeps the layer of a RUN whose mounted files have changed.
    """
    last = [rest for keyword, rest in instructions(image) if keyword in ("COPY", "RUN")][-1]
    assert last == "--from=packages /packages /opt/finetune"
    assert "type=bind" not in DOCKERFILES[image].read_text()
    sources = [rest for keyword, rest in instructions(image) if keyword == "COPY" and "--from" not in rest]
    ours = {"operator": ["trainer_image/contract contract", "operator operator"], "trainer": ["trainer_image /src"]}
    assert [rest for rest in sources if "." not in rest] == ours[image]


@pytest.mark.parametrize("image", DOCKERFILES)
def test_copied_paths_exist_and_are_not_ignored(image: str) -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        source
        for keyword, rest in instructions(image)
        if keyword == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == path or source.startswith(f"{path}/") for path in let_in), source


def test_the_image_for_gpus_has_the_libraries_of_rdma() -> None:
    packages = re.search(r"cuda\) set -- ([^;]+) ;;", DOCKERFILES["trainer"].read_text())
    assert packages is not None
    assert {"ibverbs-providers", "libibverbs1", "librdmacm1"} <= set(packages[1].split())


def test_the_installer_of_efa_runs_only_if_given_and_by_its_hash(tmp_path: Path) -> None:
    """The step runs here with a stand-in for AWS' installer; the paths of the image are below a folder of the test."""
    (step,) = [rest for keyword, rest in instructions("trainer") if keyword == "RUN" and "efa_installer" in rest]
    for path in ("/tmp/efa", "/opt/amazon", "/etc/ld.so.conf.d", "/var/lib/apt"):
        step = step.replace(path, f"{tmp_path}{path}")
    for folder in ("bin", "tmp", "etc/ld.so.conf.d", "in/aws-efa-installer"):
        (tmp_path / folder).mkdir(parents=True)
    for program in ("apt-get", "ldconfig"):
        (tmp_path / "bin" / program).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / program).chmod(0o755)
    installer = tmp_path / "in/aws-efa-installer/efa_installer.sh"
    place = tmp_path / "opt/amazon/ofi-nccl/lib"
    installer.write_text(f"#!/bin/sh\nmkdir -p {place} && echo $PWD $* >{place}/libnccl-net.so\n")
    installer.chmod(0o755)
    archive = tmp_path / "efa.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", tmp_path / "in", "aws-efa-installer"], check=True)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    def run(url: str, digest: str) -> int:
        given = {"PATH": path, "EFA_INSTALLER": url, "EFA_INSTALLER_SHA256": digest}
        return subprocess.run(["sh", "-c", step], env=given, capture_output=True, timeout=patient(60)).returncode

    assert run("", "") == 0
    assert not place.exists()
    assert run(f"file://{archive}", "0" * 64) != 0
    assert not place.exists()
    shutil.rmtree(tmp_path / "tmp/efa")
    assert run(f"file://{archive}", hashlib.sha256(archive.read_bytes()).hexdigest()) == 0
    called = (place / "libnccl-net.so").read_text()
    assert called == f"{tmp_path}/tmp/efa --yes --skip-kmod --skip-limit-conf --no-verify\n"
    assert (tmp_path / "etc/ld.so.conf.d/000-ofi-nccl.conf").read_text() == f"{place}\n"
    assert list((tmp_path / "tmp").iterdir()) == []


# --------------------------------------------------------------------------------------------------------- make images

REPORT_CALL = """#!/bin/sh
case "$1" in
info) exit {info} ;;
build) printf "%s\\n" "$*" >>"{log}" ;;
run) cat >/dev/null; printf "%s\\n" '{{"os": {{}}, "debian": [], "python": []}}' ;;
*) echo "{name}" ;;
esac
"""
BASE = "debian:bookworm-slim"
DIGEST = "sha256:" + "a" * 64


SILENT_RECORDS = """#!/bin/sh
[ "$2" != sbom ] || cat >/dev/null
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder for PATH with a build script's programs and no container engine; `make tools` is beside it.

    It writes empty records, except in tests with `recording`: Python needs most of the time of a build here.
    """
    place = tmp_path / "bin"
    place.mkdir()
    for program in ("bash", "cat", "cp", "date", "dirname", "env", "git", "make", "mkdir", "mktemp", "rm", "sed", "sh"):
        found = shutil.which(program)
        if found is None:
            pytest.skip(f"{program} is not installed")
        (place / program).symlink_to(found)
    python = tmp_path / "tools" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(SILENT_RECORDS)
    python.chmod(0o755)
    (tmp_path / "tools" / ".installed").touch()
    return place


@pytest.fixture
def recording(tools: Path) -> None:
    """Write the records of builds."""
    (tools.parent / "tools" / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')


def add_engine(tools: Path, name: str, info: int = 0) -> Path:
    """Add a container engine that only logs its calls; return the log."""
    log = tools / f"{name}.log"
    (tools / name).write_text(REPORT_CALL.format(info=info, log=log, name=name))
    (tools / name).chmod(0o755)
    return log


def environment(tools: Path) -> dict[str, str]:
    return {"PATH": str(tools), "HOME": os.environ.get("HOME", "/"), "RECORDS": str(tools.parent / "records")}


def make_images(tools: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [str(tools / "make"), "--no-print-directory", "images", f"TOOLS={tools.parent / 'tools'}", *settings]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment(tools))


def copied_images(folder: Path, lock: str) -> Path:
    """Copy the inputs of images/build, with another lock file; return the program."""
    for path in ("images", "release", "requirements", "constraints.txt", "operator/pyproject.toml"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy2
        copy(ROOT / path, folder / path)
    (folder / "images" / "bases.lock").write_text(lock)
    return folder / "images" / "build"


def build_images(tools: Path, program: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    settings = {**environment(tools), "TOOLS": str(tools.parent / "tools"), **settings}
    return subprocess.run([str(program)], capture_output=True, text=True, env=settings)


def built(log: Path) -> list[str]:
    """Return the calls, without the revision, which changes."""
    return [re.sub(r"REVISION=\S*", "REVISION=_", line) for line in log.read_text().splitlines()]


def calls(registry: str, tag: str, accelerator: str, options: str = "") -> list[str]:
    labels = f"--build-arg VERSION={VERSION} --build-arg REVISION=_"
    digest = re.search(rf"(?m)^{BASE} (sha256:.*)$", (IMAGES / "bases.lock").read_text())
    labels += f" --build-arg BASE={BASE}@{digest[1]}" if digest else ""
    trainer = f"--build-arg ACCELERATOR={accelerator} --build-arg TORCH_INDEX="
    return [
        f"build {options}{labels} -f images/operator/Dockerfile -t {registry}finetune-operator:{tag} .",
        f"build {options}{labels} {trainer} -f images/trainer/Dockerfile -t {registry}finetune-trainer:{tag} .",
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param([], calls("", VERSION, "cuda"), id="nothing is asked for"),
        pytest.param(
            ["REGISTRY=ghcr.io/acme", "TAG=1.2"], calls("ghcr.io/acme/", "1.2", "cuda"), id="a registry and a tag"
        ),
        pytest.param(["ACCELERATOR=cpu"], calls("", VERSION, "cpu"), id="for CPUs"),
        pytest.param(
            ["BUILD_OPTIONS=--pull --quiet"], calls("", VERSION, "cuda", "--pull --quiet "), id="options of the engine"
        ),
    ],
)
def test_make_images_builds_both_under_one_registry_and_tag(
    tools: Path, settings: list[str], expected: list[str]
) -> None:
    log = add_engine(tools, "docker")
    made = make_images(tools, *settings)
    assert made.returncode == 0, made.stdout + made.stderr
    assert built(log) == expected


@pytest.mark.usefixtures("recording")
def test_make_images_records_registry_accelerator_and_options(tools: Path) -> None:
    add_engine(tools, "docker")
    settings = ("REGISTRY=ghcr.io/acme", "TAG=1.2", "ACCELERATOR=cpu", "BUILD_OPTIONS=--pull --quiet")
    made = make_images(tools, *settings)
    assert made.returncode == 0, made.stdout + made.stderr
    whole = json.loads((tools.parent / "records" / "finetune-trainer-1.2.provenance.json").read_text())
    assert [subject["name"] for subject in whole["subject"]] == ["ghcr.io/acme/finetune-trainer:1.2 (image ID)"]
    parameters = whole["predicate"]["buildDefinition"]["externalParameters"]
    assert (parameters["arguments"]["ACCELERATOR"], parameters["engineOptions"]) == ("cpu", ["--pull", "--quiet"])


def test_make_images_takes_the_first_engine_that_works(tools: Path) -> None:
    docker, podman, buildah = (
        add_engine(tools, "docker", info=1),
        add_engine(tools, "podman"),
        add_engine(tools, "buildah"),
    )
    made = make_images(tools)
    assert made.returncode == 0, made.stdout + made.stderr
    assert (docker.exists(), built(podman), buildah.exists()) == (False, calls("", VERSION, "cuda"), False)


@pytest.mark.usefixtures("recording")
def test_make_images_uses_the_named_engine_and_keeps_buildah_layers(tools: Path) -> None:
    docker, buildah = add_engine(tools, "docker"), add_engine(tools, "buildah")
    made = make_images(tools, "CONTAINER_TOOL=buildah")
    assert made.returncode == 0, made.stdout + made.stderr
    assert (docker.exists(), built(buildah)) == (False, calls("", VERSION, "cuda", "--layers "))
    assert all(statement(tools, image)["resolvedDependencies"] for image in DOCKERFILES)


def test_make_images_lists_engines_to_install_when_none_works(tools: Path) -> None:
    add_engine(tools, "docker", info=1)
    made = make_images(tools)
    assert made.returncode != 0
    assert "none of docker, podman and buildah works here" in made.stderr
    assert "CONTAINER_TOOL" in made.stderr


# --------------------------------------------------------------------------------------------------------------- bases


def statement(tools: Path, image: str) -> dict[str, Any]:
    file = tools.parent / "records" / f"finetune-{image}-{VERSION}.provenance.json"
    return dict(json.loads(file.read_text())["predicate"]["buildDefinition"])


@pytest.mark.usefixtures("recording")
def test_images_are_built_on_the_base_that_is_locked(tools: Path, tmp_path: Path) -> None:
    log = add_engine(tools, "docker")
    ran = build_images(tools, copied_images(tmp_path / "copy", f"# bases\n{BASE} {DIGEST}\n"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [f"--build-arg BASE={BASE}@{DIGEST} " in line for line in built(log)] == [True, True]
    assert "NOT BY DIGEST" not in ran.stdout
    base = {
        "uri": "pkg:docker/debian@bookworm-slim",
        "digest": {"sha256": "a" * 64},
        "annotations": {"requestedByDigest": True},
    }
    assert all(base in statement(tools, image)["resolvedDependencies"] for image in DOCKERFILES)


@pytest.mark.usefixtures("recording")
def test_base_without_a_digest_is_reported_and_recorded(tools: Path, tmp_path: Path) -> None:
    log = add_engine(tools, "docker")
    ran = build_images(tools, copied_images(tmp_path / "copy", f"{BASE}\n"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [line for line in built(log) if "BASE=" in line] == []
    for image in DOCKERFILES:
        assert f"NOT BY DIGEST: the base of finetune-{image}: {BASE}." in ran.stdout
        materials = statement(tools, image)["resolvedDependencies"]
        [base] = [each for each in materials if "pkg:docker" in each.get("uri", "")]
        assert base["annotations"] == {"requestedByDigest": False}


def test_a_base_without_a_digest_is_refused_on_demand(tools: Path, tmp_path: Path) -> None:
    log = add_engine(tools, "docker")
    ran = build_images(tools, copied_images(tmp_path / "copy", f"{BASE}\n"), REQUIRE_DIGESTS="yes")
    assert ran.returncode == 1
    assert "Run images/renew" in ran.stderr
    assert not log.exists()


def test_a_base_that_is_given_takes_the_place_of_the_locked_one(tools: Path, tmp_path: Path) -> None:
    log = add_engine(tools, "docker")
    other = f"registry.example.com/debian:13@{DIGEST}"
    ran = build_images(tools, copied_images(tmp_path / "copy", f"{BASE}\n"), BASE=other, REQUIRE_DIGESTS="yes")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [f"--build-arg BASE={other} " in line for line in built(log)] == [True, True]


def renew(tools: Path, folder: Path, answer: str) -> subprocess.CompletedProcess[str]:
    (tools / "skopeo").write_text(f'#!/bin/sh\necho "$*" >>"{tools}/skopeo.log"\necho "{answer}"\n')
    (tools / "skopeo").chmod(0o755)
    program = copied_images(folder, f"# kept\n{BASE}\n").with_name("renew")
    return subprocess.run([str(program)], capture_output=True, text=True, env=environment(tools))


def test_renewing_writes_the_digest_of_each_base(tools: Path, tmp_path: Path) -> None:
    ran = renew(tools, tmp_path / "copy", DIGEST)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "copy" / "images" / "bases.lock").read_text() == f"# kept\n{BASE} {DIGEST}\n"
    assert f"docker://{BASE}" in (tools / "skopeo.log").read_text()


def test_renewing_changes_nothing_if_the_answer_is_no_digest(tools: Path, tmp_path: Path) -> None:
    ran = renew(tools, tmp_path / "copy", "unauthorized")
    assert ran.returncode == 1
    assert "'unauthorized'" in ran.stderr
    assert (tmp_path / "copy" / "images" / "bases.lock").read_text() == f"# kept\n{BASE}\n"


def test_every_base_has_a_line_in_the_lock_file() -> None:
    lines = [line for line in (IMAGES / "bases.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[^ ]+:[^ @]+( sha256:[0-9a-f]{64})?", line) for line in lines), lines
    bases = {
        rest.split()[0] for image in DOCKERFILES for keyword, rest in instructions(image) if rest.endswith(" AS tagged")
    }
    assert {line.split()[0] for line in lines} == bases


def test_the_operators_image_keeps_nothing_that_two_builds_differ_in() -> None:
    runs = [rest for keyword, rest in instructions("operator") if keyword == "RUN"]
    installing = re.findall(r"pip install [^&]*", " ".join(runs))
    assert len(installing) == 3
    assert [command for command in installing if "--no-compile" not in command] == []
    system = runs[0]
    for path in ("__pycache__", "/var/log", "/var/lib/apt/lists", "/var/cache/apt", "/var/cache/ldconfig"):
        assert path in system


def test_trainer_byte_code_does_not_depend_on_source_times() -> None:
    """With SOURCE_DATE_EPOCH Python writes byte code that is checked by the source's hash, not by its time."""
    runs = [rest for keyword, rest in instructions("trainer") if keyword == "RUN"]
    compiling = [run for run in runs if "pip install" in run or "python3-venv" in run]
    assert len(compiling) == 6
    assert [
        run[:80] for run in compiling if "export SOURCE_DATE_EPOCH=315532800 &&" not in re.sub(" +", " ", run)
    ] == []

"""The images: the Dockerfiles keep the rules, and one name, tag and user holds wherever an image is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from finetune_operator.api.settings import OPERATOR_IMAGE, TRAINER_IMAGE
from finetune_operator.rendering.pods import USER_ID
from finetune_operator.rendering.trainer_pod import HOME, SSH_KEYS
from suite_plugins.patience import patient

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"
DOCKERFILES = {path.parent.name: path for path in sorted(IMAGES.glob("*/Dockerfile"))}
VERSION = tomllib.loads((ROOT / "operator/pyproject.toml").read_text())["project"]["version"]


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, its continued lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILES[image].read_text()))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def operator_pod() -> dict[str, object]:
    deployment = yaml.safe_load((ROOT / "manifests/operator/deployment.yaml").read_text())
    return dict(deployment["spec"]["template"]["spec"])


def test_there_is_an_image_of_the_operator_and_one_of_the_trainer() -> None:
    assert set(DOCKERFILES) == {"operator", "trainer"}


@pytest.mark.parametrize("image", DOCKERFILES)
def test_the_linter_finds_nothing_in_a_dockerfile(image: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    found = subprocess.run(
        [str(hadolint), str(DOCKERFILES[image])], capture_output=True, text=True, timeout=patient(300)
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_the_linter_does_find_what_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN apt-get update\n")
    found = subprocess.run([str(Path(sys.executable).parent / "hadolint"), str(wrong)], capture_output=True, text=True)
    assert found.returncode == 1
    assert "DL3006" in found.stdout


@pytest.mark.parametrize("image", DOCKERFILES)
def test_an_image_stands_on_debian_alone(image: str) -> None:
    froms = [rest.split() for word, rest in instructions(image) if word == "FROM"]
    stages = {words[2] for words in froms if len(words) == 3}
    assert {words[0] for words in froms} - stages == {"debian:bookworm-slim"}
    assert len(froms) > 1, "what only the build needs stays behind in a stage of its own"


@pytest.mark.parametrize(("image", "user"), [("operator", 65532), ("trainer", USER_ID)])
def test_an_image_runs_as_the_user_that_its_pods_run_as(image: str, user: int) -> None:
    users = [rest for word, rest in instructions(image) if word == "USER"]
    assert users == [f"{user}:{user}"]
    if image == "operator":
        context = operator_pod()["securityContext"]
        assert isinstance(context, dict)
        assert (context["runAsUser"], context["runAsGroup"]) == (user, user)


def test_the_trainers_user_has_the_home_that_mpi_mounts_its_keys_into() -> None:
    runs = " ".join(rest for word, rest in instructions("trainer") if word == "RUN")
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
def test_a_change_of_our_code_makes_the_last_layer_anew_and_no_other(image: str) -> None:
    """What comes from others is installed before our packages are copied. They are copied and not mounted: buildah 1.28
    keeps the layer of a RUN whose mounted files have changed.
    """
    last = [rest for word, rest in instructions(image) if word in ("COPY", "RUN")][-1]
    assert last == "--from=packages /packages /opt/finetune"
    assert "type=bind" not in DOCKERFILES[image].read_text()
    sources = [rest for word, rest in instructions(image) if word == "COPY" and "--from" not in rest]
    ours = {"operator": ["trainer_image/contract contract", "operator operator"], "trainer": ["trainer_image /src"]}
    assert [rest for rest in sources if "." not in rest] == ours[image]


@pytest.mark.parametrize("image", DOCKERFILES)
def test_what_a_build_copies_is_there_and_is_not_kept_from_it(image: str) -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        source
        for word, rest in instructions(image)
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == path or source.startswith(f"{path}/") for path in let_in), source


@pytest.mark.parametrize(
    ("arguments", "some"),
    [
        (["operator/pyproject.toml", "--extra", "operator"], {"kubernetes", "pydantic", "aiohttp"}),
        (["trainer_image/pyproject.toml"], {"torch", "deepspeed", "transformers", "pydantic"}),
    ],
)
def test_the_layer_of_requirements_holds_pinned_packages_of_others(arguments: list[str], some: set[str]) -> None:
    command = [sys.executable, "images/requirements.py", "trainer_image/contract/pyproject.toml", *arguments]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = {re.split(r"[^-\w.]", line, maxsplit=1)[0].lower() for line in printed}
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
    assert some <= names
    assert names <= pinned
    assert not {name for name in names if name.startswith("finetune")}


# --------------------------------------------------------------------------------------------------------- make images

REPORT_CALL = '#!/bin/sh\n[ "$1" = info ] && exit {info}\nprintf "%s\\n" "$*" >>"{log}"\n'


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with what a build script needs, and no container engine."""
    place = tmp_path / "bin"
    place.mkdir()
    for program in ("bash", "dirname", "env", "git", "make", "sed"):
        found = shutil.which(program)
        if found is None:
            pytest.skip(f"{program} is not installed")
        (place / program).symlink_to(found)
    return place


def add_engine(tools: Path, name: str, info: int = 0) -> Path:
    """A container engine that only writes down how it was called; returns where."""
    log = tools / f"{name}.log"
    (tools / name).write_text(REPORT_CALL.format(info=info, log=log))
    (tools / name).chmod(0o755)
    return log


def make_images(tools: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    command = [str(tools / "make"), "--no-print-directory", "images", *settings]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={"PATH": str(tools), "HOME": os.environ.get("HOME", "/")}
    )


def built(log: Path) -> list[str]:
    """Calls, without the revision, which changes."""
    return [re.sub(r"REVISION=\S*", "REVISION=_", line) for line in log.read_text().splitlines()]


def calls(registry: str, tag: str, accelerator: str, options: str = "") -> list[str]:
    labels = f"--build-arg VERSION={VERSION} --build-arg REVISION=_"
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


def test_make_images_takes_the_first_engine_that_works(tools: Path) -> None:
    docker, podman, buildah = (
        add_engine(tools, "docker", info=1),
        add_engine(tools, "podman"),
        add_engine(tools, "buildah"),
    )
    made = make_images(tools)
    assert made.returncode == 0, made.stdout + made.stderr
    assert (docker.exists(), built(podman), buildah.exists()) == (False, calls("", VERSION, "cuda"), False)


def test_make_images_takes_the_engine_that_is_named_and_has_buildah_keep_layers(tools: Path) -> None:
    docker, buildah = add_engine(tools, "docker"), add_engine(tools, "buildah")
    made = make_images(tools, "CONTAINER_TOOL=buildah")
    assert made.returncode == 0, made.stdout + made.stderr
    assert (docker.exists(), built(buildah)) == (False, calls("", VERSION, "cuda", "--layers "))


def test_make_images_says_what_to_install_where_no_engine_works(tools: Path) -> None:
    add_engine(tools, "docker", info=1)
    made = make_images(tools)
    assert made.returncode != 0
    assert "none of docker, podman and buildah works here" in made.stderr
    assert "CONTAINER_TOOL" in made.stderr

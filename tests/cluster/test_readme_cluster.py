"""The README's commands for a cluster, run as printed against a real API server with the operator at work.

The tour, whose pods have to be real, runs in tests/e2e/cluster/test_box_tour.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cluster_support.control_plane import ROOT
from cluster_support.kubelet import ON_STAND_IN, STORAGE_CLASS
from cluster_support.plays import RUNS, SUCCEEDS
from cluster_support.world import World

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.search(r"^## In a cluster$(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
assert SECTION is not None
BLOCKS = FENCE.findall(SECTION[1])
CONSOLES = [[line[2:] for line in body.splitlines()] for kind, body in BLOCKS if kind == "console"]
(APPLY,) = re.findall(r"`(kubectl apply [^`]*-k manifests/operator)`", SECTION[1])
(USE,) = (lines for lines in CONSOLES if "job.yaml" in lines[0])
(JOB,) = (body for kind, body in BLOCKS if kind == "yaml")
NAME = yaml.safe_load(JOB)["metadata"]["name"]


@pytest.fixture
def shell(world: World, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Return a function that runs a line as the reader does: in the checkout, with the test's namespace as context."""
    config = yaml.safe_load(world.cluster.kubeconfig.read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = world.namespace
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    programs = f"{Path(sys.executable).parent}:{Path(world.cluster.kubectl_program).parent}"
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "config"), "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(line: str, folder: Path = tmp_path, on_line: Callable[[str], None] = lambda output: None) -> str:
        """Return the command's output; `on_line` gets each line of it when it comes."""
        output, errors = "", tmp_path / "errors"
        with (
            errors.open("w") as file,
            subprocess.Popen(
                shlex.split(line), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=file, text=True
            ) as process,
        ):
            assert process.stdout is not None
            for each in process.stdout:
                output += each
                on_line(each)
        assert process.returncode == 0, f"{line}\n{output}\n{errors.read_text()}\n{world.describe(NAME)}"
        return output

    return run


def test_the_operator_installs_by_kubectl_as_printed(shell) -> None:  # type: ignore[no-untyped-def]
    """A dry run: the operator under test is a process, and its image is not built here. The tour installs by Helm."""
    applied = shell(f"{APPLY} --dry-run=server --force-conflicts", ROOT)
    assert "deployment.apps/finetune-operator serverside-applied" in applied


def test_a_job_goes_from_apply_to_delete_as_printed(shell, world: World, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The README's job, with only the fields added that the stand-in nodes need to accept its pods."""
    manifest = yaml.safe_load(JOB)
    manifest["spec"] |= {"template": ON_STAND_IN, "storage": {"storageClassName": STORAGE_CLASS, "size": "1Gi"}}
    manifest["spec"]["resources"] |= {"gpusPerNode": 0, "accelerator": None}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    log = "epoch 1\nepoch 2\n"
    world.kubelet.playbook.set(NAME, "train", replace(RUNS, log=log))
    shown: list[str] = []

    def on_line(line: str) -> None:
        """End the training once all of its log is shown, however long the command took to begin."""
        if line.startswith("[train-1/"):
            shown.append(line)
            if len(shown) == 4:
                world.kubelet.switch_play(NAME, "train", replace(SUCCEEDS, log=log))

    output = {line: shell(line, on_line=on_line) for line in USE}
    by_start = {" ".join(line.split()[:2]): text for line, text in output.items()}

    assert f"{NAME} is valid" in by_start["finetune validate"]
    assert "Assumptions" in by_start["finetune plan"]
    assert "PyTorchJob" in [each["kind"] for each in yaml.safe_load_all(by_start["finetune render"])]
    logs = by_start["finetune logs"].splitlines()
    assert sorted(logs) == [f"[train-1/{node}] epoch {number}" for node in (0, 1) for number in (1, 2)]
    assert "Succeeded" in by_start["finetune watch"]
    world.wait_gone(NAME)
    kept = world.of_job(NAME, "v1", "persistentvolumeclaims")
    assert [claim["metadata"]["name"] for claim in kept] == [f"{NAME}-workspace"]

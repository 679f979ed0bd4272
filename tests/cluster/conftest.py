"""A real API server for the tests of this folder, or a reason why there is none."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTROL_PLANE = ROOT.parent / "shared" / "tools" / "control-plane"


@dataclass(frozen=True)
class Cluster:
    """A cluster and the kubectl to talk to it."""

    kubectl_program: str
    kubeconfig: Path

    def kubectl(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run kubectl; the caller looks at the exit code."""
        command = [self.kubectl_program, "--kubeconfig", str(self.kubeconfig), *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120)

    def must(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl, which has to succeed, and return its output."""
        ran = self.kubectl(*arguments, stdin=stdin)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of FINETUNE_TEST_KUBECONFIG, or a control plane started from programs in KUBEBUILDER_ASSETS."""
    assets = Path(os.environ.get("KUBEBUILDER_ASSETS", Path.home() / ".cache" / "kube-assets"))
    kubectl = next((str(path) for path in (assets / "kubectl",) if path.is_file()), None) or shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl in PATH, nor in the folder that KUBEBUILDER_ASSETS names")
    if given := os.environ.get("FINETUNE_TEST_KUBECONFIG"):
        yield Cluster(kubectl, Path(given))
        return
    if not CONTROL_PLANE.is_file():
        pytest.skip("FINETUNE_TEST_KUBECONFIG is not set and ../shared/tools/control-plane is not there")
    if not ((assets / "kube-apiserver").is_file() and ((assets / "etcd").is_file() or shutil.which("etcd"))):
        pytest.skip("FINETUNE_TEST_KUBECONFIG is not set and KUBEBUILDER_ASSETS has no kube-apiserver and etcd")
    folder = tmp_path_factory.mktemp("control-plane")
    environment = {
        **os.environ,
        "KUBEBUILDER_ASSETS": str(assets),
        "PATH": f"{assets}:{os.environ['PATH']}",
        "PORT": str(free_port()),
        "EPORT": str(free_port()),
    }
    try:
        # The servers outlive the call and would hold a pipe open: output goes to a file.
        with (folder / "start.log").open("w") as log:
            started = subprocess.run(
                [str(CONTROL_PLANE), "start", str(folder)], env=environment, stdout=log, stderr=log, timeout=180
            )
        assert started.returncode == 0, (folder / "start.log").read_text()
        yield Cluster(kubectl, folder / "admin.kubeconfig")
    finally:
        subprocess.run([str(CONTROL_PLANE), "stop", str(folder)], env=environment, capture_output=True, timeout=60)

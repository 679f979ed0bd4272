"""The operator under test: a real process with only the rights granted by the manifests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from cluster_support.api_access import kubeconfig_text, new_session, wait_until
from cluster_support.control_plane import ROOT, Cluster, free_port
from suite_plugins.patience import patient

NAMESPACE = "finetune-system"
ACCOUNT = "finetune-operator"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
PROGRAM = Path(sys.executable).with_name("finetune-operator")
MANIFESTS = ROOT / "manifests" / "operator"


def install(cluster: Cluster, manifests: Path = MANIFESTS) -> None:
    """Apply the operator's namespace and rights from the manifests that an administrator applies."""
    rendered = yaml.safe_load_all(cluster.must("kustomize", str(manifests)))
    kinds = {"Namespace", "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    documents = [document for document in rendered if document["kind"] in kinds]
    assert {document["kind"] for document in documents} == kinds
    text = "\n---\n".join(json.dumps(document) for document in documents)
    cluster.must("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)


class OperatorProcess:
    """`finetune-operator run` on this machine. It can be restarted like a pod's container."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        settings: dict[str, Any],
        server: str | None = None,
        ca: Path | None = None,
        name: str = "operator-0",
        options: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
        program: Sequence[str] = (str(PROGRAM),),
    ) -> None:
        """`options` go to the command line unchanged; `environment` is set beside ours; `program` runs in place of the
        installed command.
        """
        if not PROGRAM.is_file():
            pytest.skip(f"{PROGRAM.name} is not installed beside {Path(sys.executable).name}")
        self.http_port, self.progress_port = free_port(), free_port()
        self.folder, self._name, self._options = folder, name, tuple(options)
        self._environment = environment
        self._program = tuple(program)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / f"{name}.log"
        progress = {"url": f"https://127.0.0.1:{self.progress_port}", **settings.get("progress", {})}
        self._settings = folder / f"{name}.settings.yaml"
        self._settings.write_text(yaml.safe_dump({**settings, "progress": progress}))
        self._kubeconfig = folder / f"{name}.kubeconfig"
        self._kubeconfig.write_text(_kubeconfig(cluster, server, ca))

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, wait: bool = True) -> None:
        assert not self.running
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "POD_"))},
            "KUBECONFIG": str(self._kubeconfig),
            "POD_NAMESPACE": NAMESPACE,
            "POD_NAME": self._name,
            "POD_IP": "127.0.0.1",
            **self._environment,
        }
        command = [
            *self._program,
            "run",
            "--settings",
            str(self._settings),
            "--http-port",
            str(self.http_port),
            "--progress-port",
            str(self.progress_port),
            *self._options,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder
            )
        if wait:
            self.wait_ready()

    def ready(self) -> bool:
        return self._probe_passes("readyz")

    def healthy(self) -> bool:
        return self._probe_passes("healthz")

    def _probe_passes(self, probe: str) -> bool:
        answer = new_session().get(f"http://127.0.0.1:{self.http_port}/{probe}", timeout=patient(5))
        return answer.status_code == 200

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.running, f"the operator ended: {self.logs()[-4000:]}"
            return self.ready()

        wait_until(ready, "the operator is ready", detail=lambda: self.logs()[-4000:])

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        """Send SIGTERM, like a rollout; return the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)
        code = self._process.wait(patient(60))
        self._process = None
        return code

    def logs(self) -> str:
        return self._log.read_text(errors="replace") if self._log.is_file() else ""

    def metrics(self) -> str:
        return new_session().get(f"http://127.0.0.1:{self.http_port}/metrics", timeout=patient(10)).text


def _kubeconfig(cluster: Cluster, server: str | None, ca: Path | None) -> str:
    """Return a kubeconfig with the account's own token, for `server` if given."""
    token = cluster.must("create", "token", ACCOUNT, "-n", NAMESPACE, "--duration=12h").strip()
    access = cluster.access
    authority = ca or access.ca
    return kubeconfig_text(server or access.host, str(authority) if authority else None, token, NAMESPACE)

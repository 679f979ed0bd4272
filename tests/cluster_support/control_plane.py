"""A real API server: an external one, or our own control plane, which can be restarted and has an audit log."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from cluster_support.api_access import Access, new_session, wait_until
from suite_plugins.patience import patient, raise_to
from suite_plugins.shared_folder import TOOLS, missing

ROOT = Path(__file__).parents[2]
CONTROL_PLANE = TOOLS / "control-plane"

SERVERS = ("etcd", "kube-apiserver", "kubectl")
"""Programs that `control-plane` starts; we start the controllers."""
START_SECONDS = 8.0
"""Start time of etcd and an API server on the reference machine of `patient`, next to other suites."""
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules: [{level: Metadata}]
"""


@dataclass(frozen=True)
class Cluster:
    """A cluster and its kubectl."""

    kubectl_program: str
    kubeconfig: Path
    folder: Path | None = None
    """State of a control plane that these tests started; None: an external cluster."""

    def kubectl(
        self, *arguments: str, stdin: str | None = None, seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl; the caller checks the exit code. `seconds` and a `--timeout=60s` are scaled by `patient`."""
        command = [self.kubectl_program, "--kubeconfig", str(self.kubeconfig), *map(_scaled, arguments)]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=patient(seconds))

    def must(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl, which must succeed, and return its output."""
        ran = self.kubectl(*arguments, stdin=stdin)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    @property
    def access(self) -> Access:
        return Access.of(self.kubeconfig)

    def own(self, need: str) -> Path:
        """Return the control plane's folder; skip a test that needs it on another cluster."""
        if self.folder is None:
            pytest.skip(f"{need} needs an API server of the tests' own; FINETUNE_TEST_KUBECONFIG names another")
        return self.folder

    def wait_served(self, *names: str) -> None:
        """Wait until the kinds of these CustomResourceDefinitions, which were just installed, can be used.

        `kubectl wait` gives up at once on a definition with an empty status, and kubectl finds an established kind only
        a moment later.
        """
        established = ("wait", "--for=condition=Established", "--timeout=120s", *[f"crd/{name}" for name in names])
        errors = ""

        def works(*arguments: str) -> bool:
            nonlocal errors
            ran = self.kubectl(*arguments)
            errors = ran.stderr
            return ran.returncode == 0

        wait_until(lambda: works(*established), f"established: {', '.join(names)}", detail=lambda: errors)
        wait_until(lambda: works("get", ",".join(names), "-n", "default"), "kubectl finds them", detail=lambda: errors)

    def restart_api_server(self) -> None:
        """Kill the API server, restart it with the same command line, and wait until it is ready."""
        self._start_api_server(self._kill_api_server())

    @contextmanager
    def api_server_away(self) -> Iterator[None]:
        """Stop the API server while the block runs; afterwards it is ready again."""
        command = self._kill_api_server()
        try:
            yield
        finally:
            self._start_api_server(command)

    def _kill_api_server(self) -> list[bytes]:
        """Kill the API server and return its command line."""
        pid = int((self.own("killing the API server") / "kube-apiserver.pid").read_text())
        command = self._command(pid)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: _gone(pid), "the API server is dead")
        return command

    @staticmethod
    def _command(pid: int) -> list[bytes]:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")

    def _start_api_server(self, command: list[bytes]) -> None:
        folder = self.own("starting the API server")
        log = folder / "kube-apiserver.log"
        access, session, since = self.access, new_session(), log.stat().st_size

        def start() -> subprocess.Popen[bytes]:
            with log.open("ab") as output:
                return subprocess.Popen(
                    command, cwd=folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
                )

        started = start()

        def ready() -> bool:
            nonlocal started
            if started.poll() is not None:
                log_text = log.read_text(errors="replace")[since:]
                assert "address already in use" in log_text, log_text[-2000:]
                time.sleep(0.5)  # Another process had the port for a moment.
                started = start()
            answer = session.get(f"{access.host}/readyz", headers=access.headers, verify=access.ca, timeout=patient(5))
            return answer.status_code == 200

        wait_until(ready, "the API server is ready again")
        (folder / "kube-apiserver.pid").write_text(str(started.pid))

    def compact(self) -> None:
        """Have etcd forget all versions of objects but the newest."""
        command = self._command(int((self.own("compaction") / "kube-apiserver.pid").read_text()))
        etcd = command[command.index(b"--etcd-servers") + 1].decode()
        version = json.loads(self.must("get", "--raw", "/api/v1/namespaces?limit=1"))["metadata"]["resourceVersion"]
        answer = new_session().post(f"{etcd}/v3/kv/compaction", json={"revision": version, "physical": True})
        assert answer.ok, answer.text

    @contextmanager
    def slow_controllers(self) -> Iterator[None]:
        """Stop the controller manager while the block runs: no garbage is collected, no Job gets pods."""
        pid = int((self.own("stopping the controllers") / "kube-controller-manager.pid").read_text())
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def audit_mark(self) -> int:
        """Return the current position in the audit log."""
        return (self.own("the audit log") / "audit.log").stat().st_size

    def audit(self, mark: int = 0, user: str | None = None) -> list[dict[str, Any]]:
        """Return the requests answered since `mark`, all or those of one user, oldest first."""
        with (self.own("the audit log") / "audit.log").open("rb") as file:
            file.seek(mark)
            whole = file.read().rpartition(b"\n")[0]
        entries = [json.loads(line) for line in whole.split(b"\n") if line.strip()]
        return [entry for entry in entries if user is None or entry["user"].get("username") == user]

    def writes(self, name: str) -> list[str]:
        """Return the writes of objects that begin with `name`, oldest first: time, user agent, verb, object, answer."""
        if self.folder is None:
            return []
        found = []
        for entry in self.audit():
            object_ = entry.get("objectRef", {})
            if entry["verb"] in ("get", "list", "watch") or not str(object_.get("name", "")).startswith(name):
                continue
            kind = "/".join(str(object_[part]) for part in ("resource", "subresource") if part in object_)
            agent = str(entry.get("userAgent", "")).partition("/")[0]
            write = f"{entry['verb']} {kind} {object_['name']}: {entry.get('responseStatus', {}).get('code')}"
            found.append(f"{entry['stageTimestamp']} {agent}: {write}")
        return found

    def controller_lines(self, name: str) -> list[str]:
        """Return the lines of the cluster's own controllers about `name`, and their errors."""
        if self.folder is None:
            return []
        return [
            line
            for program in ("kube-controller-manager", "kube-scheduler")
            if (log := self.folder / f"{program}.log").is_file()
            for line in log.read_text(errors="replace").splitlines()
            if name in line or line.startswith("E")
        ]


def _scaled(argument: str) -> str:
    """Scale the seconds of kubectl's --timeout."""
    return re.sub(r"^--timeout=(\d+)s$", lambda found: f"--timeout={patient(int(found[1])):.0f}s", argument)


def _gone(pid: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


_claims: dict[int, IO[str]] = {}
"""Ports of this process, each with the lock that marks it for other processes; released with the process."""


def free_port() -> int:
    """Return a free port below the kernel's ephemeral range: while a server restarts, a client could otherwise get that
    very port, connect to itself, and keep it taken. Ports that this or another process of the tests got before are not
    returned: their servers may not listen yet, or be about to restart.
    """
    for _ in range(200):
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if _claim(port):
                return port
    raise AssertionError("no free port among 200 between 15000 and 32000")


def _claim(port: int) -> bool:
    """Claim the port for as long as this process lives; False if another process has it."""
    if port in _claims:
        return False
    folder = Path(tempfile.gettempdir()) / f"finetune-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    lock = (folder / str(port)).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return False
    _claims[port] = lock
    return True


def assets_folder() -> Path:
    """Return the folder of etcd, kube-apiserver and kubectl, by envtest's convention."""
    return Path(os.environ.get("KUBEBUILDER_ASSETS", Path.home() / ".cache" / "kube-assets"))


@contextmanager
def running_cluster(folder: Path, flags: str = "") -> Iterator[Cluster]:
    """Yield the cluster of FINETUNE_TEST_KUBECONFIG, or a control plane started from programs in KUBEBUILDER_ASSETS;
    skip if there is neither. `flags`: further flags of our own API server.
    """
    assets = assets_folder()
    kubectl = next((str(path) for path in (assets / "kubectl",) if path.is_file()), None) or shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl in PATH, nor in the folder that KUBEBUILDER_ASSETS names")
    if given := os.environ.get("FINETUNE_TEST_KUBECONFIG"):
        yield Cluster(kubectl, Path(given))
        return
    if not CONTROL_PLANE.is_file():
        pytest.skip(f"FINETUNE_TEST_KUBECONFIG is not set and {missing(CONTROL_PLANE)}")
    if not ((assets / "kube-apiserver").is_file() and ((assets / "etcd").is_file() or shutil.which("etcd"))):
        pytest.skip("FINETUNE_TEST_KUBECONFIG is not set and KUBEBUILDER_ASSETS has no kube-apiserver and etcd")
    servers = folder / "servers"
    servers.mkdir()
    for program in (found for name in SERVERS if (found := shutil.which(name, path=f"{assets}:{os.environ['PATH']}"))):
        (servers / Path(program).name).symlink_to(program)
    environment = {
        **os.environ,
        "KUBEBUILDER_ASSETS": str(servers),
        "PATH": f"{assets}:{os.environ['PATH']}",
        "PORT": str(free_port()),
        "EPORT": str(free_port()),
        "APISERVER_FLAGS": f"{audited(folder, folder / 'audit.log')} {flags}",
    }
    try:
        # The servers outlive the call and would hold a pipe open: output goes to a file.
        began = time.monotonic()
        with (folder / "start.log").open("w") as log:
            started = subprocess.run(
                [str(CONTROL_PLANE), "start", str(folder)],
                env=environment,
                stdout=log,
                stderr=log,
                timeout=patient(180),
            )
        assert started.returncode == 0, (folder / "start.log").read_text()
        raise_to((time.monotonic() - began) / START_SECONDS, "API server")
        _start_controllers(folder, assets)
        yield Cluster(kubectl, folder / "admin.kubeconfig", folder)
    finally:
        command = [str(CONTROL_PLANE), "stop", str(folder)]
        subprocess.run(command, env=environment, capture_output=True, timeout=patient(60))


def audited(folder: Path, log: Path) -> str:
    """Return the API server's flags for an audit log, whose policy is written to `folder`."""
    policy = folder / "audit-policy.yaml"
    policy.write_text(AUDIT_POLICY)
    # The log backend's own mode blocks, so that a line exists before its answer; sizes far above any run's.
    mode = "--audit-log-mode blocking --audit-log-maxsize 10000"
    return f"--audit-policy-file {policy} --audit-log-path {log} {mode}"


def _start_controllers(folder: Path, assets: Path) -> None:
    """Start the available controllers, without their own servers: their fixed ports would prevent parallel runs."""
    common = ["--kubeconfig", "admin.kubeconfig", "--leader-elect=false", "--secure-port=0"]
    brisk = ["--kube-api-qps=200", "--kube-api-burst=400"]
    keys = ["--service-account-private-key-file=pki/sa.key", "--root-ca-file=pki/ca.crt"]
    for name, more in {"kube-controller-manager": [*brisk, *keys], "kube-scheduler": brisk}.items():
        if (assets / name).is_file():
            with (folder / f"{name}.log").open("wb") as log:
                command = [str(assets / name), *common, *more]
                started = subprocess.Popen(
                    command, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
                )
            # `control-plane stop` ends them by these files.
            (folder / f"{name}.pid").write_text(str(started.pid))


def needs_controllers(cluster: Cluster) -> None:
    """Skip if there is no Job controller, garbage collector and scheduler."""
    if (folder := cluster.folder) is None:
        return
    programs = ("kube-controller-manager", "kube-scheduler")
    missing = [name for name in programs if not (folder / f"{name}.pid").is_file()]
    if missing:
        pytest.skip(f"KUBEBUILDER_ASSETS has no {' and no '.join(missing)}")
    # The controllers are up once they have created the service account of the first namespace.
    wait_until(
        lambda: cluster.kubectl("get", "serviceaccount", "default", "-n", "default").returncode == 0,
        "the controllers have made the service account `default`",
        detail=lambda: (folder / "kube-controller-manager.log").read_text()[-2000:],
    )

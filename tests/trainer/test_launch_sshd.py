"""The SSH server of waiting MPI workers: keys only, a usable environment, and an end that reaches every process."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from finetune_trainer.core.distributed import free_port
from finetune_trainer.core.failures import StageError
from finetune_trainer.launching.mpi import has_oom_kills
from finetune_trainer.launching.sshd import _session_variables
from process_support.left import left
from process_support.memory_group import EATS_MEMORY, memory_group
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until

TIMEOUT_SECONDS = patient(180)
TOOLS = ("ssh", "ssh-keygen")
PYTHON_PATH = os.pathsep.join(filter(None, ('/some where/"x"', os.environ.get("PYTHONPATH"))))
Client = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()):
        pytest.skip(f"OpenSSH is not installed ({', '.join(missing) or 'sshd'})")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "id")], check=True)
    return tmp_path / "id"


@pytest.fixture
def privilege_folder() -> Iterator[None]:
    """Create the folder of sshd's unprivileged half, which root's sshd needs and another user's does not."""
    folder = Path("/run/sshd")
    made = os.geteuid() == 0 and not folder.exists()
    if made:
        folder.mkdir(mode=0o755)
    yield
    if made:
        folder.rmdir()


@pytest.fixture
def server(key: Path, privilege_folder: None, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Client]]:
    """Start the server; yield it and a function that runs a command through it."""
    port = free_port()
    command = [sys.executable, "-m", "finetune_trainer", "sshd", "--port", str(port)]
    environment = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "FINETUNE_GRACE_SECONDS": f"{patient(20):.0f}",
        "SECRET": "canary",
    }
    process = subprocess.Popen([*command, "--authorized-keys", str(key) + ".pub"], env=environment)

    def run(remote_command: str, identity: Path = key) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ssh", *_ssh_options(process, identity), "127.0.0.1", remote_command],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def listens() -> bool:
        assert process.poll() is None
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, f"the server listens on port {port}")
    yield process, run
    if process.poll() is None:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)


def _ssh_options(server: subprocess.Popen[bytes], identity: Path) -> list[str]:
    assert isinstance(server.args, list)
    port = server.args[server.args.index("--port") + 1]
    options = ["-F", "none", "-i", str(identity), "-p", port, "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes"]
    return [*options, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]


def test_a_session_finds_the_programs_of_the_image_and_no_secret(server, key: Path, tmp_path: Path):
    _, run = server
    output, errors = run("printenv PATH PYTHONPATH; printenv SECRET").communicate(timeout=TIMEOUT_SECONDS)
    path, python_path = output.splitlines()
    assert errors == ""
    assert str(Path(sys.executable).parent) in path.split(":")  # bash may read a .bashrc that puts others first
    assert python_path == PYTHON_PATH

    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    client = run("true", stranger)
    _, errors = client.communicate(timeout=TIMEOUT_SECONDS)
    assert client.returncode == 255
    assert "Permission denied (publickey)" in errors


def test_worker_tells_the_launcher_that_the_kernel_killed_for_memory(server, key: Path):
    process, run = server
    environment = {"OMPI_MCA_plm_rsh_args": shlex.join(_ssh_options(process, key))}
    with memory_group(200 << 20) as group:
        for member in (process, *psutil.Process(process.pid).children(recursive=True)):
            with suppress(ProcessLookupError):  # a connection that has ended
                (group.folder / "cgroup.procs").write_text(str(member.pid))
        assert not has_oom_kills("127.0.0.1", environment)
        rank = run(f"python -c {shlex.quote(EATS_MEMORY)}")
        rank.communicate(timeout=TIMEOUT_SECONDS)
        assert has_oom_kills("127.0.0.1", environment)
        process.terminate()
        process.wait(TIMEOUT_SECONDS)
    assert not has_oom_kills("127.0.0.1", environment), "no answer is no evidence"


def test_ranks_are_stopped_first_and_no_process_is_left(server, tmp_path: Path):
    process, run = server
    saved, started = tmp_path / "saved", tmp_path / "started"
    program = f"import pathlib, signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(pathlib.Path({str(saved)!r})"
    program += f".touch()))\npathlib.Path({str(started)!r}).touch()\ntime.sleep(600)"
    script = tmp_path / "rank.py"
    script.write_text(program)
    # The rank leaves its session, as mpirun's daemon does.
    client = run(f"OMPI_COMM_WORLD_RANK=0 setsid python {script} & sleep 600")
    wait_until(started.exists, "the rank has started")
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_SECONDS) == 0
    client.communicate(timeout=TIMEOUT_SECONDS)
    assert saved.exists()
    assert descendants
    assert not left(descendants)


def test_line_break_in_a_variable_is_refused_before_sshd_reads_it():
    with pytest.raises(StageError, match="LD_LIBRARY_PATH holds a line break"):
        _session_variables({"LD_LIBRARY_PATH": "/lib\nPermitRootLogin yes"})

"""`python -m finetune_trainer sshd`: the ssh server of an MPI worker's pod, as a user without privileges.

mpirun starts its daemon in here by ssh. The host key is new at each start; the keys that the MPI operator mounts into
the home in passwd decide who may log in. An ssh session does not inherit the pod's variables; those by which programs
and devices are found are set for it, and the ranks' own come with mpirun.

If this pod alone is deleted, mpirun is not notified. So SIGTERM is passed on to the ranks here: training agrees over
all ranks to save and stop, and mpirun ends in order.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from finetune_contract.layout import EXIT_OK, SSH_PORT, FailureClass
from finetune_trainer.core.failures import StageError, classify
from finetune_trainer.core.stage_console import settle_console
from finetune_trainer.launching.child_supervisor import ChildSupervisor, grace_seconds

_SESSION_VARIABLES = frozenset({"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "HF_HOME"})
_SESSION_PREFIXES = ("NVIDIA_",)
_RANK_VARIABLES = frozenset({"OMPI_COMM_WORLD_RANK", "PMIX_RANK"})
_POLL_SECONDS = 0.2
_DAEMON_SECONDS = 3.0
"""Time for mpirun's daemon to end after its last rank."""

_CONFIG = """\
Port {port}
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {keys}
SetEnv {variables}
StrictModes no
UsePAM no
UseDNS no
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
AllowTcpForwarding no
AllowAgentForwarding no
AllowStreamLocalForwarding no
PermitTunnel no
X11Forwarding no
PrintMotd no
PrintLastLog no
MaxStartups 1000
LogLevel ERROR
"""
# StrictModes: a mounted secret belongs to root and its group may read it. UsePAM: needs root. MaxStartups: mpirun
# connects once for each node of a tree, and a random refusal would look like a lost worker.


def serve(argv: Sequence[str]) -> int:
    """Serve until SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser(prog="finetune-trainer sshd", description="Wait for mpirun in an MPI worker.")
    parser.add_argument("--port", type=int, default=SSH_PORT)
    parser.add_argument("--authorized-keys", type=Path, help="default: .ssh/authorized_keys in the home of passwd")
    arguments = parser.parse_args(argv)
    settle_console(0)
    try:
        grace = grace_seconds()
        with tempfile.TemporaryDirectory(prefix="finetune-sshd-") as folder:
            command = _command(Path(folder), arguments)
            end = ChildSupervisor(lambda pid: _stop(pid, grace), grace + 2).run(command, os.environ)
    except (StageError, OSError, subprocess.SubprocessError) as error:
        failure = classify(error)
        sys.stderr.write(f"{failure.failure_class} ({failure.reason}): {failure.message} {failure.hint}\n")
        return failure.exit_code
    if end.stop_requested_at is not None:
        return EXIT_OK
    return 128 - end.code if end.code < 0 else end.code or 1  # sshd ends by itself only on errors


def _command(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Create host key and settings in `folder`; return the command. StageError CONFIG without sshd or a home."""
    # sshd must be called by its absolute path, and is often outside a user's PATH.
    sshd = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"]))
    keygen = shutil.which("ssh-keygen")
    if sshd is None or keygen is None:
        raise StageError(
            FailureClass.CONFIG,
            "SshdMissing",
            f"{'sshd' if sshd is None else 'ssh-keygen'} is not installed here.",
            "Use an image with an OpenSSH server.",
        )
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise StageError(
            FailureClass.CONFIG,
            "NoPasswdEntry",
            f"User {os.getuid()} has no entry in passwd, so ssh finds neither its name nor its keys.",
            "Run the pod as a user that exists in the image (1000).",
        ) from None
    subprocess.run(
        [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host_key")], check=True, capture_output=True
    )
    keys = arguments.authorized_keys or home / ".ssh" / "authorized_keys"
    text = _CONFIG.format(
        port=arguments.port, folder=folder, keys=_quoted("path", str(keys)), variables=_session_variables(os.environ)
    )
    (folder / "sshd_config").write_text(text, encoding="utf-8")
    return [str(Path(sshd).absolute()), "-D", "-e", "-f", str(folder / "sshd_config")]


def _session_variables(environment: Mapping[str, str]) -> str:
    variables = {
        name: value
        for name, value in environment.items()
        if name in _SESSION_VARIABLES or name.startswith(_SESSION_PREFIXES)
    }
    # The interpreter's folder first: orted starts the program that mpirun names, which may be `python` alone.
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    return " ".join(_quoted(name, f"{name}={value}") for name, value in sorted(variables.items()))


def _quoted(name: str, text: str) -> str:
    """Quote for sshd_config, where a backslash escapes a quote or a backslash, and nothing escapes a line break."""
    if "\n" in text or "\r" in text:
        raise StageError(
            FailureClass.CONFIG,
            "BadProcessVariable",
            f"The environment variable {name} holds a line break, which ssh cannot pass to its sessions.",
            "Correct it.",
        )
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# ----------------------------------------------------------------------------------------------------------- the end


def _stop(sshd: int, grace: float) -> None:
    """Stop the ranks in here, wait for them and for mpirun's daemon, which has to report their ends to mpirun, then
    stop the server; `ChildSupervisor` kills remaining processes.
    """
    ranks = _ranks()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.terminate()
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(map(_runs, ranks)):
        time.sleep(_POLL_SECONDS)
    deadline = min(deadline, time.monotonic() + _DAEMON_SECONDS)
    while ranks and time.monotonic() < deadline and psutil.Process(sshd).children(recursive=True):
        time.sleep(_POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.kill(sshd, signal.SIGTERM)


def _ranks() -> list[psutil.Process]:
    """Return the descendants started by mpirun's daemon, without their own children."""
    of_ranks = [process for process in psutil.Process().children(recursive=True) if _is_of_a_rank(process)]
    ids = {process.pid for process in of_ranks}
    return [process for process in of_ranks if _parent(process) not in ids]


def _is_of_a_rank(process: psutil.Process) -> bool:
    try:
        return bool(_RANK_VARIABLES & process.environ().keys())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

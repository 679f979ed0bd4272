"""mpirun's command line, the variables that it forwards to the other pods, and the ranks' ends read from its output.

mpirun without a host file, or with too short a one, starts everything on this node without an error: both are refused
here. The command line has names of variables only, never a value. Open MPI 4.1 and 5 both accept its form.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from finetune_contract.layout import ENV_FORWARD, MPI_HOSTFILE, SSH_PORT, FailureClass
from finetune_contract.python_command import module_command
from finetune_contract.report import FailureReport
from finetune_contract.trainer_job import World
from finetune_trainer.core.failures import StageError

ENV_HOSTFILE = "OMPI_MCA_orte_default_hostfile"
NAMES_SECONDS = 120.0
"""Time for a name to resolve. DNS servers cache for up to 30 s that there was none."""
_MASTER_PORT = "29500"
_ANSWER_SECONDS = 10
_FORWARDED = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "DS_ACCELERATOR",
        "LD_LIBRARY_PATH",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "PATH",
        "TOKENIZERS_PARALLELISM",
    }
)
_FORWARDED_PREFIXES = (
    "AWS_",
    "AZURE_",
    "FINETUNE_",
    "FI_",
    "GOOGLE_",
    "HF_",
    "KUBEFLOW_TRAINER_",
    "NCCL_",
    "PYTHON",
    "TORCH_FR_",
    "TORCH_NCCL_",
)
_SSH_OPTIONS = (
    f"-p {SSH_PORT} -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
    "-o ConnectionAttempts=10 -o LogLevel=ERROR"
)
"""The workers' host keys are created at their start, so they cannot be checked; the client's key decides."""

_KILLED = re.compile(
    r"noticed that process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<signal>\d+)"
)
_EXITED = re.compile(r"Process name: \[\[\d+,\d+\],\s*(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)")
_UNREACHED = re.compile(
    r"unable to reliably start one or more daemons|lost communication with a remote daemon|"
    r"does not know how to route",
    re.IGNORECASE,
)


def hosts_of(hostfile: Path | None, environment: Mapping[str, str], world: World) -> tuple[Path, list[str]]:
    """Return the host file and its hosts, in order. StageError CONFIG without one, WORLD_SIZE for a wrong number."""
    file = hostfile or Path(environment.get(ENV_HOSTFILE) or MPI_HOSTFILE)
    try:
        lines = [line.partition("#")[0].split() for line in file.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise StageError(
            FailureClass.CONFIG,
            "HostfileMissing",
            f"The host file {file} cannot be read: {error.strerror}. mpirun would start all processes on this node.",
            "Mount the one that the MPI operator creates, or set another one with --hostfile.",
        ) from error
    hosts = list(dict.fromkeys(words[0] for words in lines if words))
    if len(hosts) != world.nodes:
        raise StageError(
            FailureClass.WORLD_SIZE,
            "WorldSizeMismatch",
            f"The host file {file} lists {len(hosts)} hosts, and the plan has {world.nodes} nodes.",
            "Check the number of workers.",
        )
    return file, hosts


def wait_for_names(
    hosts: Sequence[str],
    resolve: Callable[[str, int], object] = socket.getaddrinfo,
    seconds: float = NAMES_SECONDS,
    pause: float = 0.5,
) -> None:
    """Wait until every host name resolves. StageError COLLECTIVE.

    The MPI operator waits until the workers are ready, and their names are in the DNS a while later. ssh resolves each
    once, and mpirun gives up at the first failure.
    """
    deadline = time.monotonic() + seconds
    for host in hosts:
        while True:
            try:
                resolve(host, SSH_PORT)
                break
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise StageError(
                        FailureClass.COLLECTIVE,
                        "WorkerUnreachable",
                        f"The host name of worker {host} was not resolved within {seconds:g} s: {error}.",
                        "Check the workers' pods, their headless Service and the cluster's DNS.",
                    ) from error
                time.sleep(pause)


def mpirun_command(file: Path, world: World, environment: Mapping[str, str], program: Sequence[str]) -> list[str]:
    """Return the argument vector. StageError CONFIG if there is no mpirun."""
    mpirun = shutil.which("mpirun", path=environment.get("PATH"))
    if mpirun is None:
        raise StageError(
            FailureClass.CONFIG, "MpirunMissing", "mpirun is not installed here.", "Use an image with Open MPI."
        )
    command = [mpirun, "--hostfile", str(file), "-np", str(world.size)]
    # Threads of torch and of the data loaders would all share the one core that mpirun binds a process to.
    command += ["--map-by", f"ppr:{world.processes_per_node}:node", "--bind-to", "none"]
    for name in forwarded(environment):
        command += ["-x", name]
    return [*command, *program]


def forwarded(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables for ranks in other pods: ours, and those of the user's that are set, as an
    optional reference may be unresolved.
    """
    requested = [name.strip() for name in environment.get(ENV_FORWARD, "").split(",")]
    ours = [name for name in environment if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)]
    return sorted({*ours, *(name for name in requested if name in environment)})


def mpirun_environment(environment: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """Return mpirun's environment: the ranks' meeting place, and options that keep ssh from prompting.

    Options that are set already come first: ssh takes the first that it sees.
    """
    settled = dict(environment)
    settled.setdefault("MASTER_ADDR", hosts[0])
    settled.setdefault("MASTER_PORT", _MASTER_PORT)
    for name in ("OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args"):  # Open MPI 4, Open MPI 5
        settled[name] = f"{environment.get(name, '')} {_SSH_OPTIONS}".strip()
    return settled


def ends_of_ranks(output: str) -> dict[int, int]:
    """Return rank -> exit code (minus the signal if killed) of the processes that mpirun reports as first to fail."""
    ends = {int(match["rank"]): -int(match["signal"]) for match in _KILLED.finditer(output)}
    return ends | {int(match["rank"]): int(match["code"]) for match in _EXITED.finditer(output)}


def has_oom_kills(host: str, environment: Mapping[str, str]) -> bool:
    """Ask a worker whether the kernel's out-of-memory killer ended a process in its container; False if it does not
    answer. The container is new with each attempt, so any such end belongs to this one.
    """
    options = [*shlex.split(environment["OMPI_MCA_plm_rsh_args"]), "-o", f"ConnectTimeout={_ANSWER_SECONDS}"]
    command = ["ssh", *options, host, shlex.join(module_command("finetune_trainer.core.oom_kills"))]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=2 * _ANSWER_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return answer.stdout.strip() not in ("", "0")


def launcher_failure(output: str) -> FailureReport | None:
    """Return the failure in mpirun's output: a worker that it could not reach or has lost; None without one."""
    line = next((line.strip() for line in output.splitlines() if _UNREACHED.search(line)), None)
    if line is None:
        return None
    return FailureReport(
        failure_class=FailureClass.COLLECTIVE,
        reason="WorkerUnreachable",
        message=f"mpirun could not reach a worker, or lost it: {line}",
        hint=f"Check the workers' pods; each must run `finetune_trainer sshd` and answer on port {SSH_PORT} before "
        "mpirun starts.",
        time=time.time(),
    )


def signal_to_stop(pid: int) -> None:
    """Send SIGUSR1, which mpirun passes on to all ranks. On SIGTERM it would kill them a second later, in the middle of
    their checkpoint.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)

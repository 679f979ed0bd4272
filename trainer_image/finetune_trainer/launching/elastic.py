"""torch's elastic agent for one pod or this machine, as a program of its own below `launch`.

It agrees with the agents of the other pods on the ranks (the rendezvous), starts this pod's ranks, and passes SIGTERM
on to them. There are no restarts here: the operator restarts the whole gang. The ends of ranks that could not report,
and a failed rendezvous, are known to the agent alone: it writes them to a file for `launch`.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune_contract.contract_models import Message
from finetune_contract.layout import EXIT_CODES, EXIT_OK, FailureClass
from finetune_contract.report import FailureReport
from finetune_trainer.core import garbage_collection
from finetune_trainer.core.distributed import LOOPBACK, START_SECONDS, free_port
from finetune_trainer.core.failures import StageError, classify
from finetune_trainer.core.files import write_atomically
from finetune_trainer.core.job_file import read_job, world_of

_DEFAULT_PORT = 29400
_POLL_SECONDS = 1.0
_TIME_TO_END = "shutdown_timeout"
"""Field of torch's LaunchConfig; 2.11 has none."""
_OLDER_TORCH_GRACE = 30
"""Seconds that torch without that field waits."""


class AgentReport(Message):
    """Report of the agent to `launch`."""

    ends: dict[int, int] = {}  # noqa: RUF012  # a pydantic field, copied for each value
    """Rank -> exit code of the ranks of this pod that failed, minus the signal for a killed one."""
    failure: FailureReport | None = None
    """Reason why no rank was started, or why the agent gave up."""

    @classmethod
    def read(cls, file: Path) -> AgentReport:
        """Return the agent's report; an empty one if the agent was killed, which its exit code shows."""
        try:
            return cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return cls()


@dataclass(frozen=True)
class Rendezvous:
    """Place and settings with which the pods of one gang meet."""

    backend: str
    endpoint: str
    run_id: str
    timeout_seconds: int

    @classmethod
    def of(cls, environment: Mapping[str, str], nodes: int) -> Rendezvous:
        """Read torchrun's own variables; without them, this machine alone. StageError CONFIG."""
        timeout = environment.get("PET_RDZV_TIMEOUT", str(START_SECONDS))
        if not timeout.isdecimal() or int(timeout) == 0:
            raise StageError(
                FailureClass.CONFIG,
                "BadProcessVariable",
                f"The environment variable PET_RDZV_TIMEOUT is {timeout!r}; it must be a number of seconds.",
                "Correct it, or leave it out.",
            )
        endpoint = environment.get("PET_RDZV_ENDPOINT")
        if not endpoint and nodes > 1:
            raise StageError(
                FailureClass.CONFIG,
                "RendezvousMissing",
                f"The job runs on {nodes} nodes and PET_RDZV_ENDPOINT is not set, so they cannot find each other.",
                "Set it to host:port of the first pod.",
            )
        return cls(
            backend=environment.get("PET_RDZV_BACKEND") or "c10d",
            endpoint=endpoint or f"{LOOPBACK}:{free_port()}",
            run_id=environment.get("PET_RDZV_ID") or "finetune",
            timeout_seconds=int(timeout),
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the endpoint. StageError CONFIG."""
        host, _, port = self.endpoint.rpartition(":")
        if not host:
            return self.endpoint, _DEFAULT_PORT
        if not port.isdecimal():
            raise StageError(
                FailureClass.CONFIG,
                "BadProcessVariable",
                f"The environment variable PET_RDZV_ENDPOINT is {self.endpoint!r}; it must be host:port.",
                "Correct it.",
            )
        return host.strip("[]"), int(port)


def is_own_name(host: str) -> bool:
    """Return whether `host` is this pod, by its short name: the full one may not be in the DNS yet."""
    return host.partition(".")[0] == socket.gethostname().partition(".")[0]


def _is_own_address(host: str) -> bool:
    """Return whether `host` resolves to an address of this machine: only those can be bound to."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with closing(socket.socket(family, kind, protocol)) as probe:
                probe.bind(address)
                return True
    except OSError:
        return False
    return False


def _is_loopback(host: str) -> bool:
    """Return whether `host`, which resolves, is the loopback interface."""
    addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return any(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in addresses)


def wait_for_host(rendezvous: Rendezvous) -> bool:
    """Return True in the first pod; elsewhere wait until that one listens: torch itself would give up after a minute.

    In the network of its node, a pod has the node's host name, and its own name is resolved only after a while. On the
    loopback interface several launchers may be first, of which torch takes the one that binds. StageError COLLECTIVE.
    """
    host, port = rendezvous.address
    deadline = time.monotonic() + rendezvous.timeout_seconds
    while True:
        if is_own_name(host) or _is_own_address(host):
            return is_own_name(host) or not _is_loopback(host)
        try:
            socket.create_connection((host, port), timeout=5).close()
            return False
        except OSError as error:
            if time.monotonic() >= deadline:
                raise StageError(
                    FailureClass.COLLECTIVE,
                    "RendezvousTimeout",
                    f"The first pod ({rendezvous.endpoint}) did not respond within {rendezvous.timeout_seconds} s: "
                    f"{error}.",
                    "Check why that pod does not start; pods of one gang must run at the same time.",
                ) from error
        time.sleep(_POLL_SECONDS)


def run(arguments: argparse.Namespace) -> int:
    """Run this pod's ranks to their end; write the AgentReport and return the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    garbage_collection.begin()
    try:
        _launch(arguments)
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda entry: entry[1].timestamp)
        ends = {rank: failure.exitcode for rank, failure in failures}
        return _write_report(arguments.report, AgentReport(ends=ends), 1)
    except SignalException:
        return _write_report(arguments.report, AgentReport(), EXIT_CODES[FailureClass.PREEMPTED])
    except RendezvousError as error:
        failure = FailureReport(
            failure_class=FailureClass.COLLECTIVE,
            reason="RendezvousFailed",
            message=f"The rendezvous of the gang failed: {type(error).__name__}: {error}",
            hint="Check the other pods: they must all run at the same time and reach the first one.",
            time=time.time(),
        )
        return _write_report(arguments.report, AgentReport(failure=failure), failure.exit_code)
    except Exception as error:
        failure = classify(error)
        return _write_report(arguments.report, AgentReport(failure=failure), failure.exit_code)
    return _write_report(arguments.report, AgentReport(), EXIT_OK)


def _launch(arguments: argparse.Namespace) -> None:
    world = world_of(read_job(arguments.job), arguments.stage)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    rendezvous = Rendezvous.of(os.environ, world.nodes)
    settings: dict[str, object] = {"join_timeout": rendezvous.timeout_seconds}
    if wait_for_host(rendezvous):
        settings["is_host"] = True
    config = LaunchConfig(
        min_nodes=world.nodes,
        max_nodes=world.nodes,
        nproc_per_node=world.processes_per_node,
        run_id=rendezvous.run_id,
        rdzv_backend=rendezvous.backend,
        rdzv_endpoint=rendezvous.endpoint,
        rdzv_configs=settings,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(arguments.logs)),
        **_time_to_end(LaunchConfig, arguments.grace),
    )
    launch_agent(config, arguments.program[0], arguments.program[1:])


def _time_to_end(config: type[Any], grace: int) -> dict[str, Any]:
    """Return the argument of torch's `config` for the seconds between SIGTERM and SIGKILL, if this torch has one."""
    if _TIME_TO_END in {field.name for field in fields(config)}:
        return {_TIME_TO_END: grace}
    if grace > _OLDER_TORCH_GRACE:
        print(
            f"torch {version('torch')} kills processes {_OLDER_TORCH_GRACE} s after SIGTERM, not {grace} s: a "
            "checkpoint that takes longer to save is lost. Newer versions wait.",
            file=sys.stderr,
        )
    return {}


def _write_report(path: Path, report: AgentReport, code: int) -> int:
    write_atomically(path, report.to_json())
    return code


def main() -> None:
    """Run the program and exit at once: torch's threads may hold up an orderly end after a failure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--grace", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    arguments.program = arguments.program[1:]  # behind the "--" that ends our own options
    garbage_collection.put_off()
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

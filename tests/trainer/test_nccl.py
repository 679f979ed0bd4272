"""NCCL: transports read from its log, trainings that refuse sockets, defaults, and the remains of a hang."""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from finetune_contract.layout import ENV_NCCL, FailureClass
from finetune_contract.report import Communication, TrainerReport
from finetune_contract.trainer_job import World
from finetune_trainer.core.distributed import free_port
from finetune_trainer.core.failures import StageError
from finetune_trainer.devices.nccl import (
    DEFAULTS,
    DUMP_PREFIX,
    LOG_SUFFIX,
    nccl_log,
    refuse_sockets,
    settle_nccl,
    unusable_network,
    warn_of_locked_memory,
)
from finetune_trainer.devices.nccl_log import chosen, merged, network_of, warnings
from finetune_trainer.launching.elastic import Rendezvous, wait_for_host
from finetune_trainer.launching.nccl_remains import remains
from finetune_trainer.report.reporting import write_pages
from suite_plugins.patience import patient
from trainer_support.tasks import train_here

# The forms of these lines are those of published logs, with other hosts, addresses and processes.
TOPOLOGY = """
node-0:41:52 [0] NCCL INFO === System : maxBw 48.0 totalBw 480.0 ===
node-0:41:52 [0] NCCL INFO CPU/0-0 (1/1/2)
node-0:41:52 [0] NCCL INFO + PCI[48.0] - GPU/0-1b000 (0)
node-0:41:52 [0] NCCL INFO                + NVL[480.0] - NVS/0
"""
INFINIBAND = """
node-0:41:41 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
node-0:41:41 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.7<0>
NCCL version 2.30.7+cuda13.3
node-0:41:52 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.7<0>
node-0:41:52 [0] NCCL INFO Using network IB
node-0:41:52 [0] NCCL INFO 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels
node-0:41:52 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
node-0:41:52 [0] NCCL INFO Channel 08/0 : 0[0] -> 8[0] [send] via NET/IB/1/GDRDMA/Shared
node-0:41:52 [0] NCCL INFO Channel 00/0 : 0[0] -> 7[7] via P2P/CUMEM/read
node-0:41:52 [0] NCCL INFO Connected all rings
"""
ROCE = """
node-0:41:52 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE ; OOB eth0:10.0.0.7<0>
node-0:41:52 [0] NCCL INFO Using network IB
node-0:41:52 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0
"""
EFA = """
node-0:41:52 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 32 nics)
node-0:41:52 [0] NCCL INFO Using network Libfabric
node-0:41:52 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0(0)/GDRDMA
node-0:41:52 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/IPC
"""
OLD_EFA = """
[1,0]<stdout>:node-0:14:20 [0] NCCL INFO NET/OFI Selected Provider is efa
[1,0]<stdout>:node-0:14:20 [0] NCCL INFO Using network AWS Libfabric
[1,0]<stdout>:node-0:14:20 [0] NCCL INFO Ring 01 : 0[160] -> 8[160] [send] via NET/AWS Libfabric/0
"""
TCP_BY_LIBFABRIC = OLD_EFA.replace("is efa", "is tcp")
SOCKETS = """
node-0:41:52 [0] NCCL INFO NET/IB : No device found.
node-0:41:52 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.0.7<0>
node-0:41:52 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0> [1]eth1:fe80::1%eth1<0>
node-0:41:52 [0] NCCL INFO Using network Socket
node-0:41:52 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0
node-0:41:52 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
node-0:41:52 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/direct pointer
"""
PLUGIN = """
node-0:41:52 [0] NCCL INFO NET/IB : Using [0]ibp0:1/IB/SHARP [1]ibp1:1/IB/SHARP [RO]; OOB eth0:10.0.0.7<0>
node-0:41:52 [0] NCCL INFO Using network IBext_v8
node-0:41:52 [0] NCCL INFO Channel 01/0 : 6[6] -> 14[6] [send] via NET/IBext_v8/1
"""
NO_CROSSING = """
node-0:43:54 [2] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.7<0>
node-0:43:54 [2] NCCL INFO Using network IB
node-0:43:54 [2] NCCL INFO Channel 00/0 : 2[2] -> 3[3] via P2P/CUMEM
"""
RACK = """
node-0:43:54 [2] NCCL INFO Using network IB
node-0:43:54 [2] NCCL INFO Channel 00/0 : 7[7] -> 8[0] via P2P/CUMEM
"""
RCCL = """
node-0:9:12 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.7<0>
node-0:9:12 [0] NCCL INFO comm:0x5, nRanks:16, nNodes:2, coll channels:8 collnet channels:8, nvls channels:0
node-0:9:12 [0] NCCL INFO Channel 00/0 : 8[d6000] -> 0[d6000] [receive] via NET/IB/2/GDRDMA comm 0x9bb nRanks 16
"""


@pytest.mark.parametrize(
    ("log", "between", "gpudirect"),
    [
        (INFINIBAND, "ib", True),
        (ROCE, "roce", False),
        (EFA, "efa", True),
        (SOCKETS, "socket", None),
        (NO_CROSSING, "ib", None),
        (TCP_BY_LIBFABRIC, "socket", None),
    ],
)
def test_network_of_any_communicator_is_read_from_a_log(log: str, between: str, gpudirect: bool | None):
    found = network_of(log)
    assert found is not None
    assert (found.between, found.gpudirect, found.inside) == (between, gpudirect, None)
    # Nothing is claimed before NCCL has selected a network.
    assert network_of(TOPOLOGY) is None


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            TOPOLOGY + INFINIBAND,
            Communication(
                inside="nvlink",
                between="ib",
                gpudirect=True,
                nvls=True,
                adapters=("mlx5_0:1/IB", "mlx5_1:1/IB"),
                library="2.30.7+cuda13.3",
            ),
        ),
        (ROCE, Communication(between="roce", gpudirect=False, adapters=("mlx5_0:1/RoCE",))),
        (EFA, Communication(inside="p2p", between="efa", gpudirect=True)),
        (OLD_EFA, Communication(between="efa", gpudirect=False)),
        (TCP_BY_LIBFABRIC, Communication(between="socket")),
        (SOCKETS, Communication(inside="shm", between="socket", adapters=("eth0", "eth1"))),
        (
            PLUGIN,
            Communication(between="ib", gpudirect=False, adapters=("ibp0:1/IB/SHARP", "ibp1:1/IB/SHARP")),
        ),
        (NO_CROSSING, Communication(inside="p2p", between="ib", adapters=("mlx5_0:1/IB",))),
        (RACK, Communication(between="nvlink")),
        (RCCL, Communication(between="roce", gpudirect=True, adapters=("mlx5_0:1/RoCE",))),
        ("", None),
        ("node-0:1:1 [0] NCCL INFO cudaDriverVersion 13000\nsomething else via NET/IB/0\n", None),
    ],
    ids=[
        *("ib", "roce", "efa", "old-efa", "tcp-by-libfabric", "sockets", "plugin", "no-crossing", "rack", "rccl"),
        *("empty", "unknown"),
    ],
)
def test_transports_are_read_from_the_lines_of_nccl(log: str, expected: Communication | None) -> None:
    found = chosen(log, ranks_per_node=8, nodes=2)
    assert found == expected


def test_one_node_has_no_transport_between_nodes() -> None:
    found = chosen(TOPOLOGY + NO_CROSSING, ranks_per_node=8, nodes=1)
    assert found == Communication(inside="nvlink")


def test_the_slowest_transport_of_all_ranks_counts() -> None:
    ib, sockets = (chosen(log, 8, 2) for log in (TOPOLOGY + INFINIBAND, SOCKETS))
    both = merged([ib, None, sockets])
    assert both == Communication(
        inside="shm", between="socket", nvls=True, adapters=("eth0", "eth1"), library="2.30.7+cuda13.3"
    )
    assert merged([ib, ib]) == ib
    assert merged([None, None]) is None
    assert ib is not None
    assert ib.words == "nvlink (NVLS) in a node, ib (GPUDirect) between nodes"


# ------------------------------------------------------------------------------------------------------------ in effect


@pytest.mark.parametrize("planned", ["rdma", "efa"])
def test_a_planned_network_that_came_out_as_sockets_fails(planned) -> None:
    with pytest.raises(StageError) as refused:
        refuse_sockets(chosen(SOCKETS, 8, 2), planned)
    assert refused.value.failure_class is FailureClass.STRATEGY_NOT_IN_EFFECT
    assert refused.value.reason == "NetworkNotInEffect"
    assert refused.value.message == f"The plan has {planned} between nodes, and NCCL uses TCP sockets over eth0, eth1."
    assert "resources.network to tcp" in refused.value.hint
    assert len(refused.value.message) + len(refused.value.hint) <= 240


@pytest.mark.parametrize(
    ("log", "planned"), [(SOCKETS, None), (INFINIBAND, "rdma"), (EFA, "efa"), (RACK, "rdma"), ("", "rdma")]
)
def test_nothing_is_claimed_without_sockets_or_without_a_plan_for_more(log, planned) -> None:
    refuse_sockets(chosen(log, 8, 2), planned)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("node-0:1:2 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
         "LockedMemory"),
        ("node-0:1:2 [0] NCCL INFO NET/IB : No device found.", "NetworkNotInEffect"),
        ("node-0:1:2 [0] net.cc:71 NCCL WARN Error: network IB not found.", "NetworkNotInEffect"),
        ("node-0:1:2 [0] NCCL WARN socketProgress: Connection closed by remote peer", None),
    ],
)  # fmt: skip
def test_communicator_without_the_planned_network_gives_the_reason(line: str, reason: str | None) -> None:
    error = unusable_network("rdma", line)
    assert (None if error is None else error.reason) == reason
    if error is not None:
        assert error.failure_class is FailureClass.STRATEGY_NOT_IN_EFFECT
        assert len(error.message) + len(error.hint) <= 240
    assert unusable_network(None, line) is None


def test_a_limit_of_locked_memory_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = 64 << 10 if before[1] == resource.RLIM_INFINITY else min(64 << 10, before[1])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (low, before[1]))
    try:
        with caplog.at_level(logging.WARNING):
            warn_of_locked_memory("rdma")
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)
    assert f"limit {low >> 10} KiB" in caplog.text


# ------------------------------------------------------------------------------------------------------------- defaults


def test_nccl_and_the_flight_recorder_write_into_the_launchers_folder(tmp_path: Path) -> None:
    environment = {ENV_NCCL: str(tmp_path)}
    settle_nccl(environment, rank=3)
    assert environment == {
        ENV_NCCL: str(tmp_path),
        **DEFAULTS,
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / DUMP_PREFIX),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH",
        "NCCL_DEBUG_FILE": str(tmp_path / f"rank-3{LOG_SUFFIX}"),
    }


def test_defaults_reach_the_environment_of_a_process(tmp_path: Path) -> None:
    # Unlike a dictionary, it takes nothing but text, also as a name.
    with patch.dict(os.environ, {ENV_NCCL: str(tmp_path)}):
        settle_nccl(os.environ, rank=0)
        assert {name: os.environ[name] for name in DEFAULTS} == DEFAULTS


def test_variables_of_the_user_stay(tmp_path: Path) -> None:
    own = {
        ENV_NCCL: str(tmp_path),
        "NCCL_DEBUG": "WARN",
        "NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "50",
        "TORCH_FR_DUMP_ON_TIMEOUT": "0",
    }
    environment = dict(own)
    settle_nccl(environment, rank=0)
    assert environment == {**own, "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / DUMP_PREFIX)}
    assert nccl_log(environment) == ""


def test_a_log_of_the_user_s_own_place_is_read(tmp_path: Path) -> None:
    (tmp_path / f"{socket.gethostname()}-{os.getpid()}").write_text("mine")
    assert nccl_log({"NCCL_DEBUG_FILE": str(tmp_path / "%h-%p")}) == "mine"
    assert nccl_log({"NCCL_DEBUG_FILE": str(tmp_path / "absent")}) == ""


def test_a_log_that_goes_to_a_pipe_is_left_to_its_reader() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"theirs")
    os.close(writing)
    try:
        assert nccl_log({"NCCL_DEBUG_FILE": f"/dev/fd/{reading}"}) == ""
        assert os.read(reading, 6) == b"theirs"
    finally:
        os.close(reading)


# -------------------------------------------------------------------------------------------------------------- remains

RECORD = """
import os, sys, torch, torch.distributed as dist
os.environ |= {"TORCH_FR_BUFFER_SIZE": "10", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
store = dist.TCPStore("127.0.0.1", 0, 1, True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
def my_step():
    dist.all_reduce(torch.ones(3))
my_step()
from torch._C import _distributed_c10d as c10d
open(sys.argv[1], "wb").write(c10d._dump_fr_trace(True, True, False))
"""


def recorded(folder: Path) -> bytes:
    """Return a dump of torch's flight recorder, of one process that sums three numbers."""
    program, file = folder / "record.py", folder / "dump"
    program.write_text(RECORD)
    done = subprocess.run(
        [sys.executable, str(program), str(file)], capture_output=True, text=True, timeout=patient(120)
    )
    assert done.returncode == 0, done.stderr
    return file.read_bytes()


def test_launcher_names_the_collective_that_each_rank_waits_in(tmp_path: Path) -> None:
    whole = recorded(tmp_path)
    folder = tmp_path / "ranks"
    folder.mkdir()
    (entry,) = pickle.loads(whole)["entries"]
    for rank in range(4):
        state = "scheduled" if rank < 3 else "started"
        hung = pickle.dumps({"entries": [{**entry, "state": "completed"}, {**entry, "state": state}]})
        (folder / f"{DUMP_PREFIX}{rank}").write_bytes(hung)
    (folder / f"{DUMP_PREFIX}9").write_bytes(pickle.dumps({"entries": [{**entry, "state": "completed"}]}))
    (folder / f"{DUMP_PREFIX}11").write_bytes(b"half of a dump")
    (folder / f"rank-0{LOG_SUFFIX}").write_text("node:1:2 [0] NCCL INFO fine\nnode:1:2 [0] NCCL WARN Timeout\n" * 2)
    lines = remains(folder)
    assert lines[0] == "NCCL warning: Timeout"
    assert len([line for line in lines if "NCCL warning" in line]) == 1
    assert lines[1].startswith("Flight recorder, ranks 0 to 2: not completed: gloo:all_reduce number 1 of group ")
    assert lines[1].endswith("scheduled, shapes [[3]], from my_step (record.py:7)")
    assert lines[2].startswith("Flight recorder, rank 3: not completed: gloo:all_reduce")
    assert lines[3].startswith("Flight recorder, rank 9: all collectives completed, the last one gloo:all_reduce")
    assert lines[4] == "Flight recorder, rank 11: the dump cannot be read (UnpicklingError)"


@dataclass(frozen=True)
class Touching:
    """Value whose pickle creates a file when it is read without care."""

    file: Path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mknod, (str(self.file),)


def test_a_dump_with_code_in_it_is_not_executed(tmp_path: Path) -> None:
    (tmp_path / f"{DUMP_PREFIX}0").write_bytes(pickle.dumps({"entries": [Touching(tmp_path / "touched")]}))
    assert remains(tmp_path) == ["Flight recorder, rank 0: the dump cannot be read (UnpicklingError)"]
    assert not (tmp_path / "touched").exists()


def test_files_of_unknown_forms_do_not_hide_the_reports_of_ranks(tmp_path: Path) -> None:
    entry = {"state": "started", "process_group": (), "collective_seq_id": 1}
    (tmp_path / f"{DUMP_PREFIX}0").write_bytes(pickle.dumps({"entries": [entry]}))
    assert remains(tmp_path) == ["Flight recorder, rank 0: the dump cannot be read (IndexError)"]
    (tmp_path / f"rank-0{LOG_SUFFIX}").mkdir()
    (line,) = remains(tmp_path)
    assert line.startswith("The files of NCCL cannot be read: IsADirectoryError")


def test_the_warnings_of_a_failed_training_reach_the_pod_s_log(tmp_path: Path) -> None:
    """A rank that dies by a signal reports nothing: the launcher finds what NCCL wrote."""
    job = tmp_path / "job.json"
    job.write_text("{}")
    program = (
        "import os, pathlib, sys; from finetune_trainer.launching import launch as l; "
        "l._program = lambda arguments: [sys.executable, '-c', "
        "\"import os, pathlib; f = pathlib.Path(os.environ['FINETUNE_NCCL'], 'rank-0.nccl.log'); "
        "f.write_text('n:1:2 [0] NCCL WARN Cuda failure 719'); os.abort()\"]; "
        f"sys.exit(l.launch(['train', '--job', {str(job)!r}, '--workspace', {str(tmp_path)!r}, '--with', 'process']))"
    )
    environment = {**os.environ, "FINETUNE_REPORT": str(tmp_path / "report.json")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=patient(120)
    )
    assert "NCCL warning: Cuda failure 719" in done.stderr
    assert done.returncode != 0


RANK = """
import os, sys, torch.distributed as dist
from finetune_contract.trainer_job import World
from finetune_trainer.devices.nccl import measured_transports
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
world = World(nodes=2, processes_per_node=1, device="cpu", threads_per_process=1)
found = measured_transports(world, rank, device="cpu")
print(found.model_dump_json())
"""


def test_every_rank_knows_the_transports_of_all(tmp_path: Path) -> None:
    """The processes sum a number by gloo; the logs are those that NCCL would have written."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    ranks = []
    port = free_port()
    for rank, log in enumerate((INFINIBAND, SOCKETS)):
        file = tmp_path / f"{rank}{LOG_SUFFIX}"
        file.write_text(log)
        meeting = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **meeting, "NCCL_DEBUG_FILE": str(file)}
        ranks.append(
            subprocess.Popen([sys.executable, str(program)], env=environment, stdout=subprocess.PIPE, text=True)
        )
    found = [json.loads(each.communicate(timeout=patient(120))[0]) for each in ranks]
    assert [(each["between"], each["gpudirect"], each["adapters"]) for each in found] == [
        ("socket", None, ["eth0", "eth1"])
    ] * 2


def test_transports_are_in_metrics_and_report(bench: Any, tmp_path: Path) -> None:
    other = bench.at(tmp_path / "w").with_training(max_steps=1)
    train_here(other.job, other.paths, communication=chosen(TOPOLOGY + INFINIBAND, 8, 2))
    metrics = json.loads(other.paths.metrics.read_text())
    assert metrics["train"]["communication"]["between"] == "ib"
    write_pages(other.job, other.paths)
    assert "nvlink (NVLS) in a node, ib (GPUDirect) between nodes" in other.paths.report.read_text()


def test_a_report_holds_the_transports() -> None:
    found = chosen(TOPOLOGY + INFINIBAND, 8, 2)
    report = TrainerReport(job="j", stage="train", outcome="succeeded", communication=found, metrics={"a": 1})  # type: ignore[arg-type]
    assert json.loads(report.to_termination_message())["communication"]["between"] == "ib"
    assert TrainerReport.model_validate_json(report.to_termination_message()).communication == found
    assert "communication" not in TrainerReport(job="j", stage="train", outcome="succeeded").to_termination_message()  # type: ignore[arg-type]


def test_a_contract_without_network_devices_is_that_of_older_images() -> None:
    world = World(nodes=2, processes_per_node=8, device="cuda", threads_per_process=4)
    assert "network" not in world.model_dump(mode="json")
    assert warnings("") == []


# ------------------------------------------------------------------------------------ pods in the network of their node


def own_address() -> str:
    """Return this machine's address towards others; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but the loopback interface's")
        return str(probe.getsockname()[0])


def test_the_first_pod_knows_itself_by_its_address_too() -> None:
    """In the network of its node, a pod has the node's host name."""
    assert wait_for_host(Rendezvous("c10d", f"{own_address()}:{free_port()}", "run", 5)) is True
    assert wait_for_host(Rendezvous("c10d", f"{socket.gethostname()}:{free_port()}", "run", 5)) is True
    # torch decides which of several launchers on one machine is first.
    assert wait_for_host(Rendezvous("c10d", f"127.0.0.1:{free_port()}", "run", 5)) is False

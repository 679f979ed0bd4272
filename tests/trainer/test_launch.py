"""The first process of a pod: it starts the ranks, forwards signals, leaves no process behind, and makes one report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune_contract.choices import Stage
from finetune_contract.data_settings import Preparation
from finetune_contract.layout import ENV_GRACE_SECONDS, ENV_STACKS_SECONDS, FailureClass, JobPaths
from finetune_contract.report import TrainerReport
from finetune_trainer.core.distributed import free_port
from finetune_trainer.core.oom_kills import oom_kills
from finetune_trainer.data.prepared import PreparedData
from process_support.command_lines import command_of, trainer_arguments
from process_support.left import left
from process_support.memory_group import EATS_MEMORY, memory_group
from process_support.signals import blocks
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until
from trainer_support.forking import start_server

TIMEOUT_SECONDS = patient(280)


@dataclass
class Pod:
    """A running `launch`."""

    process: subprocess.Popen[str]
    message: Path
    """Path of its termination message."""

    def end(self) -> tuple[int, TrainerReport, str]:
        output, _ = self.process.communicate(timeout=TIMEOUT_SECONDS)
        assert self.message.exists(), output
        return self.process.returncode, TrainerReport.model_validate_json(self.message.read_bytes()), output

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the stage itself."""
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in descendants if trainer_arguments(command_of(process))]


@dataclass
class Cluster:
    """Starts pods on one job file, as processes of this machine, and ends those that are left."""

    folder: Path
    job: Any
    pods: list[Pod]
    python: str = sys.executable

    def quick(self) -> Cluster:
        """Fork processes from a server that has imported everything, for tests of other things than their start."""
        self.python = start_server().python
        return self

    def start(self, stage: Stage, *how: str, **environment: str) -> Pod:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "job.json"
        file.write_text(self.job.to_json(), encoding="utf-8")
        message = self.folder / f"termination-{len(self.pods)}.json"
        command = [self.python, "-m", "finetune_trainer", "launch", str(stage), "--job", str(file)]
        command += ["--workspace", str(self.folder / "w"), *how]
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
        settled = {**outside, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FINETUNE_REPORT": str(message)}
        process = subprocess.Popen(
            command, env=settled | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.pods.append(Pod(process, message))
        return self.pods[-1]

    def run(self, stage: Stage, *how: str, **environment: str) -> tuple[int, TrainerReport, str]:
        return self.start(stage, *how, **environment).end()

    @property
    def paths(self) -> JobPaths:
        return JobPaths.of(self.folder / "w", self.job.name)

    def steps(self) -> list[int]:
        """Return the logged steps of training."""
        if not self.paths.history.exists():
            return []
        lines = self.paths.history.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["step"] for line in lines if "loss" in line]

    def wait_for_steps(self, more_than: int) -> None:
        def trained() -> bool:
            ended = [pod for pod in self.pods if pod.process.poll() is not None]
            assert not ended, ended[0].process.communicate()[0]
            return len(self.steps()) > more_than

        wait_until(trained, f"more than {more_than} steps")


@pytest.fixture
def cluster_of(tmp_path: Path):
    """Return a function: bench -> a cluster for its job, with a copy of its prepared data."""
    made: list[Cluster] = []

    def make(bench) -> Cluster:
        bench.at(tmp_path / "w")
        made.append(Cluster(tmp_path, bench.job, []))
        return made[-1]

    yield make
    for cluster in made:
        for pod in cluster.pods:
            if pod.process.poll() is None:
                for process in psutil.Process(pod.process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                pod.process.kill()
                pod.process.wait()


def spread_over_nodes(bench, steps: int):
    """Return the bench's training by DDP on 2 nodes with a process each."""
    run = bench.spread("ddp", 2)
    world = run.job.training.world.model_copy(update={"nodes": 2, "processes_per_node": 1})
    return run.with_training(world=world, max_steps=steps)


def two_pods(cluster: Cluster, **environment: str) -> list[Pod]:
    endpoint = f"127.0.0.1:{free_port()}"
    meeting = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": endpoint, "PET_RDZV_ID": "tiny-train-1"}
    return [cluster.start(Stage.TRAIN, "--with", "torchrun", **meeting, **environment) for _ in range(2)]


def test_two_stopped_pods_save_and_the_next_two_resume(bench, cluster_of):
    cluster = cluster_of(spread_over_nodes(bench, steps=200))
    pods = two_pods(cluster)
    cluster.wait_for_steps(2)
    for pod in pods:
        pod.process.send_signal(signal.SIGTERM)
    ended = [pod.end() for pod in pods]
    assert [code for code, _, _ in ended] == [143, 143], ended[0][2] + ended[1][2]
    assert {report.failure.failure_class for _, report, _ in ended} == {FailureClass.PREEMPTED}
    assert sorted(report.rank for _, report, _ in ended) == [0, 1]
    saved = int((cluster.paths.checkpoints / "latest").read_text().removeprefix("step-"))
    assert 0 < saved < 200

    ended = [pod.end() for pod in two_pods(cluster.quick())]
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    assert sorted((report.rank, report.world_size, report.outcome) for _, report, _ in ended) == [
        (0, 2, "succeeded"),
        (1, 2, "succeeded"),
    ]
    assert sorted(set(cluster.steps())) == list(range(1, 201))
    assert (cluster.paths.model / "model.safetensors").is_file()
    assert f"(step {saved})" in ended[0][2] + ended[1][2]


def test_killed_rank_is_the_cause_and_the_other_pod_reports_a_lost_peer(bench, cluster_of):
    cluster = cluster_of(spread_over_nodes(bench, steps=100_000))
    pods = two_pods(cluster)
    cluster.wait_for_steps(2)
    (victim,) = pods[0].ranks()
    victim.kill()
    (code, report, output), (other_code, other, other_output) = [pod.end() for pod in pods]
    assert (code, report.failure.failure_class, report.failure.reason) == (137, FailureClass.KILLED, "Killed"), output
    assert (other_code, other.failure.failure_class) == (150, FailureClass.COLLECTIVE), other_output
    assert {report.rank, other.rank} == {0, 1}
    assert report.failure.time > 0


HANGS = """
import signal, time

def hangs_in_a_library(number, frame):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    time.sleep(600)

signal.signal(signal.SIGUSR2, hangs_in_a_library)
"""


def read_until(pod: Pod, holds: Callable[[str], bool]) -> list[str]:
    """Read lines of the pod's log up to the first for which `holds` is true."""
    assert pod.process.stdout is not None
    lines: list[str] = []
    for line in pod.process.stdout:
        lines.append(line.rstrip())
        if holds(lines[-1]):
            return lines
    raise AssertionError("\n".join(lines))


def test_hanging_rank_shows_in_stacks_and_ends_with_the_grace_period(bench, cluster_of, tmp_path: Path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HANGS)
    cluster = cluster_of(spread_over_nodes(bench, steps=100_000))
    environment = {
        ENV_STACKS_SECONDS: f"{patient(1):.0f}",
        ENV_GRACE_SECONDS: "13",
        "PYTHONPATH": str(tmp_path / "site"),
    }
    pods = two_pods(cluster, **environment)
    cluster.wait_for_steps(2)
    (victim,) = pods[1].ranks()
    victim.send_signal(signal.SIGUSR2)
    read_until(pods[1], lambda line: line.endswith(" in hangs_in_a_library"))
    stack = read_until(pods[1], lambda line: " in rank_" in line)
    assert all(line.startswith("  File ") for line in stack), "another process wrote between them"
    assert any(line.endswith((" in rank_0_of_2", " in rank_1_of_2")) for line in stack)
    read_until(pods[0], lambda line: " in rank_" in line)
    descendants = [process for pod in pods for process in psutil.Process(pod.process.pid).children(recursive=True)]
    assert len(descendants) >= 4
    for pod in pods:
        pod.process.send_signal(signal.SIGTERM)
    ended = [pod.end() for pod in pods]
    assert [code for code, _, _ in ended] == [143, 143], ended[0][2] + ended[1][2]
    assert {report.failure.failure_class for _, report, _ in ended} == {FailureClass.PREEMPTED}
    assert left(descendants) == []


def test_failed_rendezvous_ends_with_a_retried_failure_class(bench, cluster_of):
    cluster = cluster_of(spread_over_nodes(bench, steps=10))
    away = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"192.0.2.1:{free_port()}", "PET_RDZV_TIMEOUT": "1"}
    code, report, output = cluster.run(Stage.TRAIN, "--with", "torchrun", **away)
    assert (code, report.failure.reason) == (150, "RendezvousTimeout"), output
    assert "192.0.2.1" in report.failure.message


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI (mpirun) is not installed")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture
def hostfile(tmp_path: Path) -> list[str]:
    """Return the options of two ranks on this machine."""
    file = tmp_path / "hostfile"
    file.write_text("localhost slots=2\n")
    return ["--hostfile", str(file)]


@needs_mpirun
def test_mpirun_starts_a_run_like_torchrun(whole_run, spread_of, bench, cluster_of, hostfile: list[str]):
    expected, _ = whole_run(spread_of("ddp"))
    cluster = cluster_of(bench.spread("ddp", 2)).quick()
    environment = {"MASTER_PORT": str(free_port()), **AS_ROOT}
    code, report, output = cluster.run(Stage.TRAIN, "--with", "mpirun", *hostfile, **environment)
    assert (code, report.outcome, report.rank, report.world_size) == (0, "succeeded", 0, 2), output
    assert type(expected)(cluster.folder / "w", cluster.job).losses() == pytest.approx(expected.losses(), rel=1e-6)
    assert not list(cluster.paths.reports.iterdir())


@needs_mpirun
def test_ranks_of_mpirun_save_when_the_launcher_is_stopped(bench, cluster_of, hostfile: list[str]):
    cluster = cluster_of(bench.spread("ddp", 2).with_training(max_steps=200))
    pod = cluster.start(Stage.TRAIN, "--with", "mpirun", *hostfile, MASTER_PORT=str(free_port()), **AS_ROOT)
    cluster.wait_for_steps(2)
    pod.process.send_signal(signal.SIGTERM)
    code, report, output = pod.end()
    assert (code, report.failure.reason, report.world_size) == (143, "Interrupted", 2), output
    assert 0 < int((cluster.paths.checkpoints / "latest").read_text().removeprefix("step-")) < 200


@pytest.mark.parametrize(
    ("content", "failure_class", "reason"),
    [
        pytest.param(None, FailureClass.CONFIG, "HostfileMissing", id="there is none"),
        pytest.param("", FailureClass.WORLD_SIZE, "WorldSizeMismatch", id="it is empty"),
        pytest.param("a slots=1\n# b\n", FailureClass.WORLD_SIZE, "WorldSizeMismatch", id="it is too short"),
    ],
)
def test_mpirun_is_never_started_without_its_hosts(content, failure_class, reason, bench, tmp_path: Path):
    from finetune_trainer.core.failures import StageError
    from finetune_trainer.launching.mpi import hosts_of

    file = tmp_path / "hostfile"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StageError) as caught:
        hosts_of(None, {"OMPI_MCA_orte_default_hostfile": str(file)}, spread_over_nodes(bench, 1).job.training.world)
    assert (caught.value.failure_class, caught.value.reason) == (failure_class, reason)
    assert str(file) in caught.value.message


def test_mpirun_is_started_when_all_workers_have_names():
    from finetune_trainer.launching.mpi import wait_for_names

    requested = []

    def resolve(host: str, port: int) -> None:
        requested.append(host)
        if len(requested) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    wait_for_names(["w-0", "w-1"], resolve, pause=0)
    assert requested == ["w-0", "w-0", "w-0", "w-1"]


def test_worker_without_a_name_fails_after_the_time_limit():
    from finetune_trainer.core.failures import StageError
    from finetune_trainer.launching.mpi import wait_for_names

    with pytest.raises(StageError) as caught:
        wait_for_names(["localhost", "w-1.invalid"], seconds=0)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.COLLECTIVE, "WorkerUnreachable")
    assert "w-1.invalid" in caught.value.message


def test_mpirun_forwards_only_the_variables_that_ranks_need():
    from finetune_trainer.launching.mpi import forwarded

    needed = [
        "AWS_SECRET_ACCESS_KEY",
        "FINETUNE_REPORT",
        "HF_TOKEN",
        "KUBEFLOW_TRAINER_SERVER_URL",
        "NCCL_DEBUG",
        "PATH",
    ]
    needed += ["PYTHONUNBUFFERED", "MASTER_ADDR", "FINETUNE_FORWARD_ENV", "MY_SETTING"]
    others = ["HOME", "HOSTNAME", "K_MPI_JOB_ROLE", "OMPI_MCA_plm_rsh_args", "KUBERNETES_SERVICE_HOST", "RANK"]
    environment = dict.fromkeys([*needed, *others], "x") | {"FINETUNE_FORWARD_ENV": "MY_SETTING, OPTIONAL, "}
    assert forwarded(environment) == sorted(needed)


@pytest.mark.parametrize(
    ("output", "ends"),
    [
        pytest.param(
            "mpirun noticed that process rank 1 with PID 71 on node w-0 exited on signal 9 (Killed).",
            {1: -9},
            id="Open MPI 4, a signal",
        ),
        pytest.param(
            "prterun noticed that process rank 3 with PID 71 on node w-0 exited on signal 11 (Segmentation fault).",
            {3: -11},
            id="Open MPI 5, a signal",
        ),
        pytest.param("  Process name: [[55411,1],2]\n  Exit code:    3\n", {2: 3}, id="an exit code"),
        pytest.param("nothing of the kind", {}, id="other words"),
    ],
)
def test_output_of_mpirun_gives_the_end_of_each_rank(output: str, ends: Mapping[int, int]):
    from finetune_trainer.launching.mpi import ends_of_ranks

    assert ends_of_ranks(output) == ends


def test_stage_without_a_report_is_reported_with_its_last_output(bench, cluster_of, tmp_path: Path):
    package = tmp_path / "site" / "finetune_trainer"
    cluster = cluster_of(bench)
    (tmp_path / "site").mkdir()
    # Both the stage and the launcher find it at their start; the launcher must not care.
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'launch' not in sys.orig_argv:\n    sys.stderr.write('the driver is gone\\n')\n    sys.stderr.flush()\n"
        "    os._exit(3)\n"
    )
    code, report, output = cluster.run(Stage.PREPARE, "--with", "process", PYTHONPATH=str(package.parent))
    assert (code, report.failure.failure_class, report.failure.reason) == (1, FailureClass.PROGRAM, "NoReport"), output
    assert "exit code 3" in report.failure.message
    assert "the driver is gone" in report.failure.message


COUNTERS: dict[str, tuple[dict[str, str], int]] = {
    "version 2, in a container": ({"memory.events": "max 9\noom_kill 2\noom_group_kill 1\n"}, 2),
    "version 2, by its path": ({"pods/one/memory.events": "oom_kill 3\n", "memory.events": "oom_kill 8\n"}, 3),
    "version 1, in a container": ({"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"}, 4),
    "version 1, by its path": (
        {"memory/jobs/two/memory.oom_control": "oom_kill 5\n", "memory/memory.oom_control": "oom_kill 8\n"},
        5,
    ),
    "a kernel that does not count": ({"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 0),
    "no cgroup to read": ({}, 0),
}


@pytest.mark.parametrize(("files", "count"), COUNTERS.values(), ids=COUNTERS.keys())
def test_ends_for_memory_are_read_from_the_own_cgroup(files: Mapping[str, str], count: int, tmp_path: Path):
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/x\n4:memory:/jobs/two\n1:name=systemd:/y\n0::/pods/one\n")
    assert oom_kills(tmp_path / "cgroup", own) == count


def test_rank_that_the_kernel_kills_for_memory_is_out_of_memory(bench, cluster_of, tmp_path: Path):
    cluster = cluster_of(bench)
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif 'launch' not in sys.orig_argv:\n{textwrap.indent(EATS_MEMORY, '    ')}"
    )
    with memory_group(200 << 20) as group:
        cluster.python = group.wrapper(tmp_path / "python", sys.executable)
        code, report, output = cluster.run(Stage.PREPARE, "--with", "process", PYTHONPATH=_before(tmp_path))
    assert (code, report.failure.failure_class) == (155, FailureClass.OUT_OF_MEMORY), output
    assert report.failure.reason == "OOMKilled"
    assert "killed from outside with SIGKILL" in report.failure.message


def _before(folder: Path) -> str:
    """Return PYTHONPATH with `folder` first."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


def test_pods_of_an_indexed_job_prepare_as_the_ranks_of_their_index(bench, cluster_of, tmp_path: Path):
    cluster = cluster_of(bench)
    cluster.job = bench.job.model_copy(update={"preparation": Preparation(engine="job", workers=2), "run": "run-1"})
    cluster.quick()
    pods = [
        cluster.start(Stage.PREPARE, "--with", "index", JOB_COMPLETION_INDEX=str(index), FINETUNE_ATTEMPT="uid-1")
        for index in range(2)
    ]
    ended = [pod.end() for pod in pods]
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    assert [(report.rank, report.world_size) for _, report, _ in ended] == [(0, 2), (1, 2)]
    assert ended[0][1].fingerprint == PreparedData.open(cluster.paths).facts.fingerprint

    # A killed rank that waits for the other cannot report which one it was; the launcher does.
    (cluster.paths.state / "prepare.json").unlink()
    cluster.python = sys.executable
    alone = cluster.start(Stage.PREPARE, "--with", "index", JOB_COMPLETION_INDEX="1", FINETUNE_ATTEMPT="uid-2")
    wait_until(alone.ranks, "the rank runs")[0].kill()
    code, report, output = alone.end()
    assert (code, report.rank, report.failure.reason) == (137, 1, "Killed"), output


def test_only_pods_of_an_indexed_job_have_their_rank_by_number(bench, cluster_of):
    cluster = cluster_of(bench)
    code, report, output = cluster.run(Stage.EVALUATE, "--with", "index", JOB_COMPLETION_INDEX="0")
    assert (code, report.failure.reason) == (11, "BadProcessVariable"), output
    assert "pods of an Indexed Job that prepare or predict; this is stage evaluate" in report.failure.message
    code, report, output = cluster.run(Stage.PREPARE, "--with", "index")
    assert (code, report.failure.reason) == (11, "BadProcessVariable"), output
    assert "JOB_COMPLETION_INDEX is ''" in report.failure.message


@pytest.mark.parametrize("how", ["process", "torchrun", "mpirun"])
def test_a_job_that_is_not_understood_is_reported_by_the_launcher_itself(how: str, bench, cluster_of):
    cluster = cluster_of(bench)
    cluster.job = type("Text", (), {"to_json": lambda self: "{}", "name": "tiny"})()
    code, report, _ = cluster.run(Stage.TRAIN, "--with", how)
    assert (code, report.failure.failure_class) == (11, FailureClass.CONFIG)
    assert report.stage == Stage.TRAIN


def test_program_and_its_descendants_end_with_the_grace_period(tmp_path: Path):
    marker = tmp_path / "started"
    deaf = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
    child = deaf + f"open({str(marker)!r}, 'w').close(); time.sleep(600)"
    parent = (
        deaf + f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    )
    parent += "; time.sleep(600)"
    program = (
        "import os, sys; from finetune_trainer.launching.child_supervisor import ChildSupervisor; "
        f"end = ChildSupervisor(grace_seconds=0.5).run([sys.executable, '-c', {parent!r}], os.environ); "
        "import psutil; print(end.code, end.stop_requested_at is not None, psutil.Process().children(recursive=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE)
    wait_until(marker.exists, "the program's child has started")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert output == "-9 True []\n"


def attached(options: str, folder: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Start an attached process whose child is started with `options`; return it and its two descendants."""
    file = folder / "children"
    child = f"import os, time; open({str(file)!r}, 'w').close(); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]{options}).wait()"
    program = (
        "import os, sys; from finetune_trainer.launching.child_supervisor import ChildSupervisor; "
        f"end = ChildSupervisor(attached=True).run([sys.executable, '-c', {parent!r}], os.environ); "
        "print(end.code, end.stop_requested_at)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    wait_until(file.exists, "the program's child has started")
    return process, psutil.Process(process.pid).children(recursive=True)


def test_only_the_main_thread_of_a_launcher_takes_signals(tmp_path: Path):
    process, _ = attached("", tmp_path)
    wait_until(lambda: blocks(process.pid, signal.SIGTERM) == [False, True, True], "both other threads run")
    process.communicate(timeout=TIMEOUT_SECONDS)


def test_attached_launcher_kills_everything_when_its_standard_input_ends(tmp_path: Path):
    process, descendants = attached(", start_new_session=True", tmp_path)
    output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert output == "-9 None\n"
    assert left(descendants) == []


def test_ranks_end_with_an_attached_launcher_that_is_killed(tmp_path: Path):
    tied = ", preexec_fn=__import__('finetune_trainer.launching.child_supervisor', fromlist=['']).end_with_parent"
    process, descendants = attached(tied, tmp_path)
    assert len(descendants) == 2
    process.kill()
    process.communicate()
    wait_until(lambda: not left(descendants), "they are gone")

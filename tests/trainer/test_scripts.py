"""A user's own training program: fetched from a real git host over HTTPS, run by real launchers, judged by its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finetune_contract.choices import Stage
from finetune_contract.layout import EXIT_CODES, SCRIPT_VARIABLES, FailureClass, JobPaths
from finetune_contract.report import KubeflowMetric, KubeflowStatus, KubeflowUpdate, Progress, TrainerReport
from finetune_contract.trainer_job import Script, TrainerJob
from finetune_trainer.core.failures import StageError
from script_support.git_host import GitHost, git_host
from script_support.programs import TELLTALE_FILES, documented
from suite_plugins.patience import patient
from suite_plugins.waiting import wait_until

TIMEOUT_SECONDS = patient(280)
HOSTILE = {
    "quotes": "a'b\"c`d`",
    "shell": "$(touch pwned); rm -rf / && echo $HOME | cat > x",
    "templates": "{{ config }} {% if x %} $(RANK) ${RANK} %s",
    "lines": "first\nsecond\r\n\tthird",
    "unicode": "\U0001f917 日本語 \u2028 e\u0301",
    "empty": "",
    "spaces": "  two  ",
    "option": "--output=/etc/passwd",
}


@dataclass
class Pods:
    """Runs stages of one job as pods do with `--with ...`, else, faster, as the single rank that a pod would start."""

    folder: Path
    job: TrainerJob
    environment: Mapping[str, str]

    @property
    def paths(self) -> JobPaths:
        return JobPaths.of(self.folder / "w", self.job.name)

    def start(self, stage: Stage, *how: str, number: int = 0, **environment: str) -> subprocess.Popen[str]:
        (self.folder / "job.json").write_text(self.job.to_json(), encoding="utf-8")
        self._message(number).unlink(missing_ok=True)
        command = [sys.executable, "-m", "finetune_trainer", *(["launch"] if how else []), str(stage)]
        command += ["--job", "job.json", "--workspace", "w", *how]
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
        settled = {**outside, "HF_HUB_OFFLINE": "1", "FINETUNE_REPORT": str(self._message(number)), **self.environment}
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=settled | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def end(self, pod: subprocess.Popen[str], number: int = 0) -> tuple[int, TrainerReport, str]:
        output, _ = pod.communicate(timeout=TIMEOUT_SECONDS)
        assert self._message(number).exists(), output
        return pod.returncode, TrainerReport.model_validate_json(self._message(number).read_bytes()), output

    @staticmethod
    def wait_for_file(pod: subprocess.Popen[str], file: Path) -> None:
        """Wait for a file of a running pod; fail if the pod ends."""

        def written() -> bool:
            assert pod.poll() is None, pod.communicate()[0]
            return file.exists()

        wait_until(written, f"{file.name} is there")

    def run(self, stage: Stage, *how: str, **environment: str) -> tuple[int, TrainerReport, str]:
        return self.end(self.start(stage, *how, **environment))

    def evaluates(self, **settings: Any) -> None:
        """Change the settings of the evaluation."""
        evaluation = {"device": "cpu", "batch_tokens": 1024, **settings}
        self.job = TrainerJob.model_validate({**self.job.model_dump(by_alias=True), "evaluation": evaluation})

    def well(self, stage: Stage, *how: str, **environment: str) -> TrainerReport:
        code, report, output = self.run(stage, *how, **environment)
        assert (code, report.outcome) == (0, "succeeded"), output
        return report

    def _message(self, number: int) -> Path:
        return self.folder / f"termination-{number}.json"

    def seen(self, rank: int = 0) -> dict[str, Any]:
        """Return the file that the telltale has written."""
        found: dict[str, Any] = json.loads((self.paths.checkpoints / f"seen-{rank}.json").read_text())
        return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitHost]:
    with git_host(tmp_path_factory.mktemp("host") / "git") as host:
        yield host


@pytest.fixture
def pods_of(host: GitHost, tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Callable[..., Pods]:
    """Return a function that makes pods of a job whose program is `files`, committed as `repository`."""

    def make(files: Mapping[str, str], *, processes: int = 1, inference: bool = False, **script: Any) -> Pods:
        repository = f"{tmp_path.name}.git"
        host.commit(repository, files)
        world = {"nodes": 1, "processes_per_node": processes, "device": "cpu", "threads_per_process": 1}
        settled = {"url": host.url(repository), "ref": "main", "entry_point": "train.py", "world": world, **script}
        job: dict[str, Any] = {
            "name": "own",
            "task": "text-classification",
            "model": {"uri": f"file://{tiny_model}"},
            "dataset": {"uri": f"file://{tiny_data}", "columns": {"text": "text", "label": "label"}},
            "preparation": {"max_length": 32},
            "script": settled,
        }
        if inference:
            job["evaluation"] = {"device": "cpu", "batch_tokens": 1024}
        return Pods(tmp_path, TrainerJob.model_validate(job), host.environment)

    return make


def torchrun() -> tuple[str, ...]:
    return ("--with", "torchrun")


# ------------------------------------------------------------------------------------------------------ the whole way


@pytest.mark.slow
def test_documented_program_trains_stops_resumes_and_is_measured(pods_of):
    """The program runs on 2 processes and is asked to stop after its first checkpoint."""
    pods = pods_of(
        {"classify/train.py": documented("python")},
        processes=2,
        inference=True,
        path="classify",
        arguments=("--batch_size", "8", "--epochs", "6", "--learning_rate", "4e-3", "--save_steps", "13"),
    )
    put_code(pods)
    pod = pods.start(Stage.TRAIN, *torchrun())
    pods.wait_for_file(pod, pods.paths.checkpoints / "checkpoint-13" / "trainer_state.json")
    pod.send_signal(signal.SIGTERM)
    code, report, output = pods.end(pod)
    assert (code, report.failure.failure_class) == (143, FailureClass.PREEMPTED), output
    assert not (pods.paths.state / "train.json").exists()

    trained = pods.well(Stage.TRAIN, *torchrun())
    saved = json.loads((pods.paths.checkpoints / "checkpoint-78" / "trainer_state.json").read_text())
    assert saved["global_step"] == 78, "200 rows / (8 x 2), 6 times"
    assert trained.artifacts == {"model": "model"}
    assert {oct(each.stat().st_mode & 0o777) for each in pods.paths.model.glob("*.*")} == {"0o644"}
    section = trained.metrics["train"]
    assert {"loss", "runtime", "samples_per_second", "world_size", "seconds"} <= set(section)
    assert (section["epoch"], section["world_size"]) == (6.0, 2)

    pods.evaluates(metrics=["accuracy", "samples_per_second"], gate={"metric": "epoch", "minimum": 6})
    evaluated = pods.well(Stage.EVALUATE)
    assert evaluated.metrics["evaluate"]["accuracy"] > 0.8
    own = {name: evaluated.metrics["evaluate"][name] for name in ("samples_per_second", "epoch")}
    assert own == {name: section[name] for name in own}
    pods.evaluates(gate={"metric": "epoch", "minimum": 6.5})
    code, report, output = pods.run(Stage.EVALUATE)
    assert (code, report.failure.reason) == (EXIT_CODES[FailureClass.GATE_NOT_MET], "GateNotMet"), output
    assert report.failure.message == ("epoch is 6.0000 as the program measured it; evaluation.gate.minimum is 6.5.")
    assert json.loads(pods.paths.metrics.read_text())["evaluate"]["epoch"] == 6.0


def test_every_rank_gets_its_place_its_arguments_and_its_folders(pods_of, tiny_model: Path, tiny_data: Path):
    arguments = tuple(argument for name, value in HOSTILE.items() for argument in (f"--{name}", value))
    pods = pods_of({f"deep/er/{name}": text for name, text in TELLTALE_FILES.items()}, processes=2,
                   path="deep/er", arguments=arguments)  # fmt: skip
    put_code(pods)
    pods.well(Stage.TRAIN, *torchrun(), KUBEFLOW_TRAINER_SERVER_URL="https://operator/x", FINETUNE_PROGRESS="/none")
    root = pods.paths.root.absolute()
    for rank in (0, 1):
        seen = pods.seen(rank)
        environment = seen["environment"]
        assert seen["argv"] == list(arguments)
        assert seen["folder"] == str(root / "code/repository/deep/er")
        assert environment["PYTHONPATH"].split(os.pathsep)[0] == seen["folder"]
        assert {name: environment.get(name) for name in SCRIPT_VARIABLES} == {
            "FINETUNE_MODEL": str(tiny_model),
            "FINETUNE_MODEL_REVISION": None,
            "FINETUNE_DATASET": str(tiny_data),
            "FINETUNE_DATASET_REVISION": None,
            "FINETUNE_DATASET_CONFIG": None,
            "FINETUNE_DATASET_SPLITS": "{}",
            "FINETUNE_DATASET_COLUMNS": '{"text": "text", "label": "label"}',
            "FINETUNE_OUTPUT": str(root / "model"),
            "FINETUNE_CHECKPOINTS": str(root / "checkpoints"),
            "FINETUNE_RESUME_FROM": None,
        }
        torch_names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        assert [environment[name] for name in torch_names] == [str(rank), "2", str(rank), "2", "1"]
        assert {"MASTER_ADDR", "MASTER_PORT"} <= set(environment)
        ours = {"FINETUNE_REPORT", "FINETUNE_PROGRESS", "TRANSFORMERS_VERBOSITY", "PYTHONSAFEPATH"}
        assert not ours & set(environment)
        assert "DISABLE_KUBEFLOW_INTEGRATION" not in environment
    assert pods.seen(0)["environment"]["KUBEFLOW_TRAINER_SERVER_URL"] == "https://operator/x"
    assert "KUBEFLOW_TRAINER_SERVER_URL" not in pods.seen(1)["environment"]


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI (mpirun) is not installed")
def test_under_mpirun_a_program_finds_the_variables_of_torchrun(pods_of, tmp_path: Path):
    pods = pods_of(TELLTALE_FILES, processes=2)
    put_code(pods)
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    how = ("--with", "mpirun", "--hostfile", str(tmp_path / "hostfile"))
    report = pods.well(Stage.TRAIN, *how, MASTER_PORT="29511", **as_root)
    assert report.world_size == 2
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    places = [[pods.seen(rank)["environment"][name] for name in names] for rank in (0, 1)]
    assert places == [[str(rank), "2", str(rank), "localhost", "29511"] for rank in (0, 1)]


def test_program_imports_the_module_beside_its_entry_point(pods_of):
    files = {"src/train.py": "import beside\nbeside.fail()", "src/beside.py": "def fail():\n    raise ValueError('hi')"}
    pods = pods_of(files, entry_point="src/train.py")
    put_code(pods)
    _, report, output = pods.run(Stage.TRAIN)
    assert report.failure is not None, output
    assert report.failure.message.endswith("at src/beside.py, line 2: ValueError: hi")


def test_single_process_gets_no_distributed_variables(pods_of):
    pods = pods_of(TELLTALE_FILES)
    put_code(pods)
    report = pods.well(Stage.TRAIN)
    assert (report.rank, report.world_size) == (0, 1)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(pods.seen()["environment"])


# -------------------------------------------------------------------------------------------------------- how it ends

ENDS: dict[str, tuple[str, FailureClass, str, str]] = {
    "an exception": (
        "def inner():\n    raise ValueError('no such column: texxt')\ninner()",
        FailureClass.PROGRAM, "ValueError",
        "The program ended with exit code 1 at train.py, line 2: ValueError: no such column: texxt",
    ),
    "an exception of a library, in its own file": (
        "import helper\nhelper.go()",
        FailureClass.PROGRAM, "JSONDecodeError",
        "The program ended with exit code 1 at helper.py, line 3: JSONDecodeError: Expecting value: line 1 column 1",
    ),
    "an exception after the processes have met, as torch prints it": (
        "import sys, traceback\nsys.excepthook = lambda kind, error, frames: sys.stderr.writelines(\n"
        "    f'[rank0]: {line}\\n' for line in ''.join(traceback.format_exception(error)).splitlines())\n"
        "raise ValueError('odd row')",
        FailureClass.PROGRAM, "ValueError",
        "The program ended with exit code 1 at train.py, line 4: ValueError: odd row",
    ),
    "an exception behind another": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('label') from error",
        FailureClass.PROGRAM, "KeyError", "The program ended with exit code 1 at train.py, line 4: KeyError: 'label'",
    ),
    "a syntax error": (
        "def x(:\n", FailureClass.PROGRAM, "ProgramFailed", "The program ended with exit code 1: SyntaxError: ",
    ),
    "an argument that it does not know": (
        "import argparse\nargparse.ArgumentParser(prog='train.py').parse_args(['--x'])",
        FailureClass.PROGRAM, "ProgramFailed",
        "The program ended with exit code 2: train.py: error: unrecognized arguments: --x",
    ),
    "words and a code of its own": (
        "import sys; sys.exit('the license server said no')",
        FailureClass.PROGRAM, "ProgramFailed", "The program ended with exit code 1: the license server said no",
    ),
    "a code of the contract": (
        "import sys; print('lost', file=sys.stderr); sys.exit(151)",
        FailureClass.STORAGE_LOST, "ProgramFailed", "The program ended with exit code 151: lost",
    ),
    "no memory on the GPU": (
        "class OutOfMemoryError(RuntimeError): pass\nraise OutOfMemoryError('CUDA out of memory. Tried ...')",
        FailureClass.OUT_OF_MEMORY, "OutOfMemoryError",
        "The program ended with exit code 1 at train.py, line 2: OutOfMemoryError: CUDA out of memory. Tried ...",
    ),
    "no space": (
        "import errno\nraise OSError(errno.ENOSPC, 'No space left on device')",
        FailureClass.STORAGE_FULL, "OSError",
        "The program ended with exit code 1 at train.py, line 2: OSError: [Errno 28] No space left on device",
    ),
    "a connection refused, and no other rank": (
        "raise RuntimeError('Connection refused')",
        FailureClass.PROGRAM, "RuntimeError",
        "The program ended with exit code 1 at train.py, line 1: RuntimeError: Connection refused",
    ),
    "killed": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        FailureClass.KILLED, "Killed", "The program was killed from outside with SIGKILL",
    ),
    "a process that loads its data was killed": (
        "raise RuntimeError('DataLoader worker (pid 41) is killed by signal: Killed. ')",
        FailureClass.KILLED, "RuntimeError", "DataLoader worker (pid 41) is killed by signal: Killed.",
    ),
    "crashed": (
        "import ctypes; ctypes.string_at(0)",
        FailureClass.PROGRAM, "KilledBySignal", "The program was ended by SIGSEGV",
    ),
    "well, without a model": (
        "import os; open(os.environ['FINETUNE_OUTPUT'] + '/training_args.bin', 'w')",
        FailureClass.PROGRAM, "NoModel",
        "lacks config.json and weights (*.safetensors or pytorch_model*.bin); it holds training_args.bin.",
    ),
    "well, with its weights alone": (
        "import os; open(os.environ['FINETUNE_OUTPUT'] + '/pytorch_model.bin', 'w')",
        FailureClass.PROGRAM, "NoModel", "lacks config.json; it holds pytorch_model.bin.",
    ),
    "well, with a model of an earlier attempt alone": (
        "", FailureClass.PROGRAM, "NoModel", "it holds nothing.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_end_of_a_program_is_reported_by_class_reason_and_message(case: str, pods_of):
    program, failure_class, reason, text = ENDS[case]
    pods = pods_of({"train.py": program, "helper.py": "import json\ndef go():\n    json.loads('x')\n"})
    put_code(pods)
    half = pods.paths.model
    half.mkdir()
    for name in ("config.json", "model.safetensors"):
        (half / name).touch()
    code, report, output = pods.run(Stage.TRAIN)
    failure = report.failure
    assert failure is not None, output
    assert (failure.failure_class, failure.reason, code) == (failure_class, reason, failure.exit_code), output
    assert text in failure.message
    assert failure.hint
    assert "{" not in failure.message


SENDS = """
import os, pathlib, sys, time
text, ending = sys.argv[1:3]
file = pathlib.Path(os.environ["NCCL_DEBUG_FILE"])
file.write_text("".join(f"node-0:41:52 [0] NCCL INFO {line}\\n" for line in text.split(";")))
if ending == "hang":
    time.sleep(600)
out = pathlib.Path(os.environ["FINETUNE_OUTPUT"])
for name in ("config.json", "model.safetensors"):
    (out / name).touch()
sys.exit(int(ending))
"""
SOCKETS = "NET/Socket : Using [0]eth0:10.0.0.7<0>;Using network Socket"
NETWORKS: dict[str, tuple[str, str, str | None, str, str | None]] = {
    "sockets in place of rdma stop it": (SOCKETS, "hang", "rdma", "NCCL uses TCP sockets over eth0", None),
    "no device for rdma explains its failure": ("NET/IB : No device found.", "1", "rdma", "NCCL finds no device", None),
    "sockets as planned are reported": (SOCKETS, "0", None, "", "socket"),
}


@pytest.mark.parametrize("case", NETWORKS)
def test_network_of_a_program_is_read_while_it_runs(case: str, pods_of):
    text, ending, planned, message, between = NETWORKS[case]
    world = {"nodes": 2, "processes_per_node": 1, "device": "cuda", "threads_per_process": 1, "network": planned}
    pods = pods_of({"train.py": SENDS}, world=world, arguments=(text, ending))
    put_code(pods)
    first = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    code, report, output = pods.run(Stage.TRAIN, **first)
    if not message:
        assert code == 0, output
        assert report.communication is not None
        assert (report.communication.between, report.communication.adapters) == (between, ("eth0",))
        return
    assert report.failure is not None, output
    found = (report.failure.failure_class, report.failure.reason)
    assert found == (FailureClass.STRATEGY_NOT_IN_EFFECT, "NetworkNotInEffect"), output
    assert message in report.failure.message


def put_code(pods: Pods) -> None:
    """Write the output of prepare without running it, which saves seconds."""
    from finetune_trainer.scripts.code import fetch_code

    assert pods.job.script is not None
    with pytest.MonkeyPatch.context() as patch:
        for name, value in pods.environment.items():
            patch.setenv(name, value)
        fetch_code(pods.job.script, pods.paths)


def test_with_rows_to_evaluate_the_tokenizer_has_to_be_there(pods_of):
    pods = pods_of(TELLTALE_FILES, inference=True)
    put_code(pods)
    _, report, output = pods.run(Stage.TRAIN)
    assert report.failure is not None, output
    assert "lacks the tokenizer (tokenizer_config.json), which evaluate and predict need" in report.failure.message


def test_first_error_of_a_rank_is_the_cause(pods_of):
    program = (
        "import os, pathlib, time\n"
        "place = pathlib.Path(os.environ['FINETUNE_CHECKPOINTS'])\n"
        "if os.environ['RANK'] == '1':\n"
        "    place.mkdir(parents=True, exist_ok=True)\n"
        "    (place / f'of-{os.getppid()}').touch()\n"
        "    raise RuntimeError('a broken row')\n"
        "def ended(process):\n"
        "    try:\n"
        "        return (process / 'stat').read_text().rpartition(')')[2].split()[0] == 'Z'\n"
        "    except OSError:\n"
        "        return True\n"
        "while not any(ended(pathlib.Path('/proc') / of.name[3:]) for of in place.glob('of-*')):\n"
        "    time.sleep(0.05)\n"
        "raise RuntimeError('[pair.cc:534] Connection closed by peer [127.0.0.1]:42')\n"
    )
    pods = pods_of({"train.py": program}, processes=2)
    put_code(pods)
    code, report, output = pods.run(Stage.TRAIN, *torchrun())
    assert report.failure is not None, output
    assert (code, report.rank, report.failure.failure_class, report.failure.message) == (
        1,
        1,
        FailureClass.PROGRAM,
        "The program ended with exit code 1 at train.py, line 6: RuntimeError: a broken row",
    )


def test_program_stopped_by_a_signal_is_no_success(pods_of):
    program = (
        "import os, pathlib, signal, sys, time\n"
        "model = pathlib.Path(os.environ['FINETUNE_OUTPUT'])\n"
        "place = pathlib.Path(os.environ['FINETUNE_CHECKPOINTS'])\n"
        "def stop(*_):\n"
        "    (place / 'stopped').touch()\n"
        "    (model / 'config.json').touch()\n"
        "    (model / 'model.safetensors').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "(place / 'started').touch()\n"
        "time.sleep(100)\n"
    )
    pods = pods_of({"train.py": program})
    put_code(pods)
    pod = pods.start(Stage.TRAIN, "--with", "process")
    pods.wait_for_file(pod, pods.paths.checkpoints / "started")
    pod.send_signal(signal.SIGTERM)
    code, report, output = pods.end(pod)
    assert report.failure is not None, output
    assert (code, report.failure.failure_class) == (143, FailureClass.PREEMPTED)
    assert (pods.paths.checkpoints / "stopped").exists()
    assert not (pods.paths.state / "train.json").exists()


# -------------------------------------------------------------------------------------------------------- checkpoints


def leave_checkpoint(pods: Pods, step: int, *, state: str = "{}", unfinished: bool = False) -> Path:
    folder = pods.paths.checkpoints / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    if state:
        (folder / "trainer_state.json").write_text(state)
    if unfinished:
        (folder / "checkpoint-is-incomplete.txt").touch()
    return folder


def test_the_newest_whole_checkpoint_is_offered(pods_of):
    pods = pods_of(TELLTALE_FILES)
    put_code(pods)
    pods.well(Stage.TRAIN)
    leave_checkpoint(pods, 9)
    whole = leave_checkpoint(pods, 10)
    leave_checkpoint(pods, 11, state="")
    leave_checkpoint(pods, 12, state='{"global_st')
    leave_checkpoint(pods, 13, unfinished=True)
    pods.well(Stage.TRAIN)
    assert pods.seen()["environment"]["FINETUNE_RESUME_FROM"] == str(whole.absolute())


def test_checkpoints_of_another_program_are_deleted_or_refused(pods_of):
    pods = pods_of(TELLTALE_FILES)
    put_code(pods)
    leave_checkpoint(pods, 3)
    code, report, output = pods.run(Stage.TRAIN)
    assert report.failure is not None, output
    assert (code, report.failure.reason) == (18, "CheckpointOfAnotherJob")

    assert pods.job.script is not None
    pods.job = pods.job.model_copy(update={"script": pods.job.script.model_copy(update={"resume": False})})
    pods.well(Stage.TRAIN)
    assert "FINETUNE_RESUME_FROM" not in pods.seen()["environment"]
    assert not (pods.paths.checkpoints / "checkpoint-3").exists()

    leave_checkpoint(pods, 4)
    changed = {"resume": True, "arguments": ("--epochs", "7")}
    pods.job = pods.job.model_copy(update={"script": pods.job.script.model_copy(update=changed)})
    _, report, output = pods.run(Stage.TRAIN)
    assert report.failure is not None, output
    assert "arguments was [], is ['--epochs', '7']" in report.failure.message


def test_an_earlier_model_stays_until_there_is_a_new_one(pods_of):
    pods = pods_of({"train.py": "raise SystemExit(1)"})
    put_code(pods)
    pods.paths.model.mkdir()
    (pods.paths.model / "config.json").write_text("of the earlier training")
    former = pods.paths.model.with_name("model.former")
    for _ in range(2):
        code, _, output = pods.run(Stage.TRAIN)
        assert code == 1, output
        assert (former / "config.json").read_text() == "of the earlier training"


# --------------------------------------------------------------------------------------------------------------- code


def script_of(host: GitHost, repository: str, **fields: Any) -> Script:
    world = {"nodes": 1, "processes_per_node": 1, "device": "cpu", "threads_per_process": 1}
    settled = {"url": host.url(repository), "ref": "main", "entry_point": "train.py", "world": world, **fields}
    return Script.model_validate(settled)


@pytest.fixture
def found(host: GitHost, monkeypatch: pytest.MonkeyPatch) -> GitHost:
    """Return the host, and let this process's git find it."""
    for name, value in host.environment.items():
        monkeypatch.setenv(name, value)
    return host


def fetch(script: Script, folder: Path) -> Any:
    from finetune_trainer.scripts.code import fetch_code

    return fetch_code(script, JobPaths.of(folder, "own"))


REFUSED: dict[str, tuple[Mapping[str, Any], FailureClass, str, str, str]] = {
    "no such branch": (
        {"ref": "mian"}, FailureClass.CONFIG, "GitRefNotFound", "It has main, topic, v1.", "Did you mean main?",
    ),
    "a commit in short": (
        {"ref": "0123abc"}, FailureClass.CONFIG, "GitRefNotFound", "no such branch", "a commit needs all its 40 digits",
    ),
    "a commit that is not there": (
        {"ref": "0123456789" * 4}, FailureClass.CONFIG, "GitRefNotFound", "no such branch", "Use one of them",
    ),
    "an option of git": (
        {"ref": "--upload-pack=touch pwned"}, FailureClass.CONFIG, "GitRefNotFound", "not a name of a branch", "Use",
    ),
    "two refs in one": (
        {"ref": "main:refs/heads/x"}, FailureClass.CONFIG, "GitRefNotFound", "not a name of a branch", "Use",
    ),
    "no such folder": (
        {"path": "sub"}, FailureClass.CONFIG, "FolderNotFound", "It has subs.", "Did you mean subs?",
    ),
    "no such file": (
        {"entry_point": "trian.py"}, FailureClass.CONFIG, "EntryPointNotFound",
        "It has subs/other.py, train.py.", "Did you mean train.py?",
    ),
    "a folder in place of a file": (
        {"entry_point": "subs"}, FailureClass.CONFIG, "EntryPointNotFound", "'subs'", "Use one of them",
    ),
    "a file outside": (
        {"entry_point": "../code.json"}, FailureClass.CONFIG, "LeadsOut", "'../code.json'", "inside",
    ),
    "an absolute file": (
        {"entry_point": "/etc/passwd"}, FailureClass.CONFIG, "LeadsOut", "'/etc/passwd'", "inside",
    ),
    "a link that leads out": (
        {"entry_point": "link.py"}, FailureClass.CONFIG, "LeadsOut", "'link.py'", "links must stay inside",
    ),
    "a folder by a link that leads out": (
        {"path": "outside"}, FailureClass.CONFIG, "LeadsOut", "'outside'", "links must stay inside",
    ),
    "no TLS": (
        {"url": "http://git.example.com/tree"}, FailureClass.CONFIG, "BadUri", "https:// only", "HTTPS",
    ),
    "another protocol": (
        {"url": "ext::sh -c 'touch pwned'"}, FailureClass.CONFIG, "BadUri", "https:// only", "HTTPS",
    ),
    "no such repository": (
        {"url": "https://git.example.com/none"}, FailureClass.CONFIG, "GitRepositoryNotFound", "not found", "Check",
    ),
    "a repository behind a password": (
        {"url": "https://git.example.com/private"}, FailureClass.CONFIG, "GitNotOpen", "Username", "public",
    ),
    "a redirect": (
        {"url": "https://git.example.com/moved"}, FailureClass.CONFIG, "GitRedirect", "301", ".git at its end",
    ),
    "a host in trouble": (
        {"url": "https://git.example.com/sick"}, FailureClass.CODE_UNAVAILABLE, "GitFailed", "503", "try again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_code_is_refused_with_the_existing_files(case: str, found: GitHost, tmp_path: Path):
    fields, failure_class, reason, text, hint = REFUSED[case]
    tree = {"train.py": "", "subs/other.py": "", "link.py": "-> /etc/passwd", "outside": "-> /etc"}
    if not (found.folder / "tree").exists():
        found.commit("tree", tree, tag="v1")
        found.commit("tree", tree, branch="topic")
        found.answers["private"] = (401, {"WWW-Authenticate": 'Basic realm="git"'})
        found.answers["moved"] = (301, {"Location": "https://elsewhere.example.com/tree"})
        found.answers["sick"] = (503, {})
    with pytest.raises(StageError) as caught:
        fetch(script_of(found, "tree", **fields), tmp_path)
    error = caught.value
    assert (error.failure_class, error.reason) == (failure_class, reason), error.message
    assert text in error.message
    assert hint in error.hint
    assert not list(tmp_path.rglob("pwned"))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_certificate_of_an_unknown_authority_is_refused(
    found: GitHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found.commit("trusted", TELLTALE_FILES)
    monkeypatch.delenv("GIT_SSL_CAINFO")
    with pytest.raises(StageError) as caught:
        fetch(script_of(found, "trusted"), tmp_path)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CONFIG, "GitCertificate")


def test_a_host_that_does_not_answer_is_worth_another_try(
    found: GitHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(StageError) as caught:
        fetch(script_of(found, "away"), tmp_path)
    assert (caught.value.failure_class, caught.value.reason) == (FailureClass.CODE_UNAVAILABLE, "GitFailed")


@pytest.mark.parametrize("kind", ["branch", "tag", "commit"])
def test_a_reference_of_any_kind_is_fetched_once_and_stays_its_commit(kind: str, found: GitHost, tmp_path: Path):
    repository = f"pinned-{kind}"
    first = found.commit(repository, {"train.py": "print(1)"}, tag="v1")
    ref = {"branch": "main", "tag": "v1", "commit": first}[kind]
    assert fetch(script_of(found, repository, ref=ref), tmp_path).commit == first
    second = found.commit(repository, {"train.py": "print(2)"})
    assert fetch(script_of(found, repository, ref=ref), tmp_path).commit == first
    again = fetch(script_of(found, repository, ref=second), tmp_path)
    assert (again.commit, again.file.read_text()) == (second, "print(2)")
    assert not list((tmp_path / "own" / "code" / "repository").glob(".git"))


def test_git_obeys_nobodys_configuration(found: GitHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither a file nor the variables of the user who runs it count: both could redirect it or run programs."""
    found.commit("plain", TELLTALE_FILES)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text('[url "https://elsewhere.example.com/"]\n\tinsteadOf = https://git.example.com/\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "http.sslVerify")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "bad value")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert fetch(script_of(found, "plain"), tmp_path).file.is_file()


def test_prepare_fetches_the_code_and_reports_its_commit(pods_of, host: GitHost):
    pods = pods_of(TELLTALE_FILES)
    report = pods.well(Stage.PREPARE)
    assert pods.job.script is not None
    url = pods.job.script.url
    commit = host.commit(url.rpartition("/")[2], TELLTALE_FILES)
    assert report.metrics["commit"] != commit, "that one is newer"
    assert report.artifacts == {"code": "code", "script": f"{url}@{report.metrics['commit']}"}


def test_training_waits_for_the_code(pods_of):
    pods = pods_of(TELLTALE_FILES)
    code, report, output = pods.run(Stage.TRAIN)
    assert report.failure is not None, output
    assert (code, report.failure.reason) == (11, "NotPrepared")


def test_prepare_refuses_data_that_are_not_there(pods_of):
    pods = pods_of(TELLTALE_FILES)
    assert pods.job.dataset is not None
    dataset = pods.job.dataset.model_copy(update={"uri": "file:///nowhere/at/all"})
    pods.job = pods.job.model_copy(update={"dataset": dataset})
    code, report, output = pods.run(Stage.PREPARE)
    assert report.failure is not None, output
    assert (code, report.failure.reason) == (10, "DataNotFound")


# ----------------------------------------------------------------------------------------------------------- progress


class RecordingSink:
    """A sink that records updates."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int, dict[str, float]]] = []

    def update(self, step: int, total: int, **values: float) -> None:
        self.updates.append((step, total, values))

    def close(self) -> None:
        """Do nothing: nothing is open."""


def test_callback_of_transformers_reaches_the_progress_without_a_server(monkeypatch: pytest.MonkeyPatch):
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations import KubeflowCallback

    from finetune_trainer.scripts.relay import relayed

    sink = RecordingSink()
    with relayed({"PATH": "x"}, sink) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        callback = KubeflowCallback()
        monkeypatch.setattr(callback, "_MIN_UPDATE_INTERVAL", 0.0)
        state, control = TrainerState(max_steps=8, global_step=2, epoch=0.5), TrainerControl()
        callback.on_train_begin(TrainingArguments, state, control)
        callback.on_log(TrainingArguments, state, control, logs={"loss": 0.25, "epoch": 0.5})
        callback.on_step_end(TrainingArguments, state, control)
        callback.on_train_end(TrainingArguments, state, control)
    assert sink.updates == [(2, 8, {"loss": 0.25, "epoch": 0.5})]


def test_progress_of_a_program_is_not_taken_from_a_web_site():
    from finetune_trainer.scripts.relay import relayed

    metrics = [{"name": "current_step", "value": "3"}, {"name": "total_steps", "value": "4"}]
    body = json.dumps({"trainerStatus": {"lastUpdatedTime": "now", "metrics": metrics}}).encode()
    sink, codes = RecordingSink(), []
    with relayed({}, sink) as environment:
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {}):
            request = urllib.request.Request(environment["KUBEFLOW_TRAINER_SERVER_URL"], body, headers)
            try:
                codes.append(urllib.request.urlopen(request).status)
            except urllib.error.HTTPError as error:
                codes.append(error.code)
    assert (codes, sink.updates) == ([403, 421, 200], [(3, 4, {})])


def test_a_server_that_is_there_already_is_left_alone():
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.scripts.relay import relayed

    given = {"KUBEFLOW_TRAINER_SERVER_URL": "https://operator/"}
    with relayed(given, RecordingSink()) as environment:
        assert environment == given
    with relayed({}, NoProgress()) as environment:
        assert environment == {}


ODD_UPDATES: dict[str, Sequence[tuple[str, str]]] = {
    "no step": [("loss", "0.5")],
    "a step beyond the end": [("current_step", "9"), ("total_steps", "8")],
    "a step that is no number": [("current_step", "nan"), ("total_steps", "8")],
    "words": [("current_step", "many"), ("total_steps", "8")],
    "below zero": [("current_step", "-1"), ("total_steps", "8")],
}


@pytest.mark.parametrize("case", ODD_UPDATES)
def test_an_update_without_a_place_in_the_run_is_dropped(case: str):
    from finetune_trainer.scripts.relay import pass_on

    metrics = tuple(KubeflowMetric(name=name, value=value) for name, value in ODD_UPDATES[case])
    sink = RecordingSink()
    pass_on(KubeflowUpdate(trainer_status=KubeflowStatus(metrics=metrics, last_updated_time="now")), sink)
    assert sink.updates == []


def test_progress_of_a_local_run_is_written_to_its_file(pods_of, tmp_path: Path):
    program = (
        "import json, os, urllib.request\n"
        "metrics = [{'name': 'current_step', 'value': '3'}, {'name': 'total_steps', 'value': '4'}]\n"
        "body = {'trainerStatus': {'lastUpdatedTime': 'now', 'metrics': metrics}}\n"
        "url = os.environ['KUBEFLOW_TRAINER_SERVER_URL']\n"
        "urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), method='POST'))\n"
        "raise SystemExit(1)\n"
    )
    pods = pods_of({"train.py": program})
    put_code(pods)
    pods.run(Stage.TRAIN, FINETUNE_PROGRESS=str(tmp_path / "progress.jsonl"))
    updates = [Progress.model_validate_json(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [(each.stage, each.step, each.total_steps) for each in updates] == [(Stage.TRAIN, 3, 4)]

"""One rank of a user's own program: started as `python FILE --key value ...`, stopped with this process, and judged.

It runs in the folder of its code with torchrun's variables, under any launcher, and uses transformers' progress
protocol by itself. Exit code 0 is not enough: training succeeded only if the output folder holds a model. The end of
its stderr becomes the failure's message; the contract's exit codes are understood.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_contract.causes import of_exit, signal_of
from finetune_contract.layout import (
    CLASS_OF_EXIT_CODE,
    ENV_KUBEFLOW_CA,
    ENV_KUBEFLOW_TOKEN,
    ENV_KUBEFLOW_URL,
    ENV_PROGRESS,
    ENV_REPORT,
    ENV_SCRIPT_RESUME_FROM,
    EXIT_OK,
    FailureClass,
    JobPaths,
)
from finetune_contract.python_command import ENV_SAFE_PATH
from finetune_contract.trainer_job import Script, TrainerJob
from finetune_trainer.core.distributed import ProcessWorld, settle_rank
from finetune_trainer.core.failures import StageError, classify_text
from finetune_trainer.core.files import share
from finetune_trainer.core.interruption import preempted
from finetune_trainer.core.progress import Findings, ProgressSink
from finetune_trainer.launching.child_supervisor import ChildSupervisor, End, grace_seconds
from finetune_trainer.models.loading import WEIGHT_FILES
from finetune_trainer.report.reporting import merge_metrics
from finetune_trainer.scripts import site
from finetune_trainer.scripts.code import Program, open_code
from finetune_trainer.scripts.network_watch import network_watch
from finetune_trainer.scripts.relay import relayed
from finetune_trainer.scripts.script_inputs import Origin, check_origin, former_model, make_folders, variables

log = logging.getLogger(__name__)

_OURS = (ENV_REPORT, ENV_PROGRESS, ENV_SAFE_PATH)
"""Variables of this process alone: files that only it writes, and that it imports nothing from beside a program."""
_KUBEFLOW = (ENV_KUBEFLOW_URL, ENV_KUBEFLOW_CA, ENV_KUBEFLOW_TOKEN)
_WEIGHTS = (*WEIGHT_FILES, "adapter_model*.bin")
_CONFIGS = ("config.json", "adapter_config.json")
_TOKENIZER = "tokenizer_config.json"
_RESULTS = "all_results.json"
"""File to which transformers' `Trainer.save_metrics` writes."""
_RAISED = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: ?(?P<text>.*))?")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)')
_TYPE_NAME = re.compile(r"[A-Za-z]\w{0,63}")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""Prefix that torch writes before each line of a traceback once the process group is initialized."""
_SHOWN = 1000
"""Characters of the program's stderr that go into a message."""
_HINTS = {
    FailureClass.OUT_OF_MEMORY: "The program decides how much memory it uses: lower its batch size under "
    "training.script.hyperparameters, or raise resources.memory or the number of GPUs.",
    FailureClass.STORAGE_FULL: "Free space or enlarge the workspace; save_total_limit limits the space of checkpoints.",
    FailureClass.COLLECTIVE: "See the report of another rank for the first cause.",
}
_HINT = "The error is in the program; the log above has its whole output."


@dataclass(frozen=True)
class Result:
    """Additions to the stage's report."""

    metrics: dict[str, Any]
    artifacts: dict[str, str]


def run_program(
    job: TrainerJob,
    script: Script,
    paths: JobPaths,
    progress: ProgressSink,
    world: ProcessWorld,
    findings: Findings | None = None,
) -> Result:
    """Run this rank to its end, and note the network that it used in `findings`. StageErrors: PREEMPTED, those of
    `open_code`, `check_origin` and `NetworkWatch`, that of the program's end, and PROGRAM `NoModel` if it succeeded
    without a model.
    """
    started = time.monotonic()
    program = open_code(script, paths)
    origin = Origin.of(job, script, program)
    if script.resume:
        check_origin(paths, origin)
    environment = program_environment(os.environ, job, script, paths, program, world)
    if world.is_main:
        make_folders(paths, origin, script.resume)
    command = [sys.executable, str(program.file.absolute()), *script.arguments]
    resumed = environment.get(ENV_SCRIPT_RESUME_FROM)
    start = "from the beginning" if resumed is None else f"from {Path(resumed).name}"
    label = f"{script.entry_point} of commit {program.commit}"
    log.info("%s runs as rank %d of %d, %s.", label, world.rank, world.size, start)
    supervisor = ChildSupervisor(grace_seconds=grace_seconds())
    watch = network_watch(environment, script.world, world.rank, supervisor.kill)
    with relayed(environment, progress) as child_environment:
        supervisor.start(command, child_environment, program.folder)
        watch.start()
        end = supervisor.wait()
    (findings or Findings()).communication = watch.end(failed=end.code != EXIT_OK and end.stop_requested_at is None)
    _check_end(end, program, world)
    if not world.is_main:
        return Result({}, {})
    _check_model(job, paths.model)
    share(paths.model)
    shutil.rmtree(former_model(paths), ignore_errors=True)
    section = {"train": {**_measured(paths), "world_size": world.size, "seconds": time.monotonic() - started}}
    merge_metrics(paths, section, without=("evaluate", "majority"))
    return Result(section, {"model": paths.model.name})


def program_environment(
    base: Mapping[str, str], job: TrainerJob, script: Script, paths: JobPaths, program: Program, world: ProcessWorld
) -> dict[str, str]:
    """Return the program's environment: that of this process, and more."""
    environment = {name: value for name, value in base.items() if name not in _OURS}
    if not world.is_main:
        for name in _KUBEFLOW:
            environment.pop(name, None)
    if world.size > 1:
        settle_rank(environment, world)
    environment["OMP_NUM_THREADS"] = str(script.world.threads_per_process)
    if script.world.device == "cpu":
        # As `accelerate launch --cpu` does: without it every process would silently train alone.
        environment["ACCELERATE_USE_CPU"] = "true"
    folders = [str(program.folder.absolute()), *filter(None, [base.get("PYTHONPATH")]), *site.__path__]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    return environment | variables(job, script, paths)


def _measured(paths: JobPaths) -> dict[str, float]:
    """Return the program's own metrics, without the prefix `train_`, which is the section's name. transformers writes
    them to the Trainer's `output_dir`, which may be either folder.
    """
    file = next((path for folder in (paths.model, paths.checkpoints) if (path := folder / _RESULTS).is_file()), None)
    try:
        results = {} if file is None else json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read, so its metrics are not reported: %s", file, error)
        return {}
    values = results.items() if isinstance(results, dict) else ()
    return {
        str(name).removeprefix("train_"): value
        for name, value in values
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


# ---------------------------------------------------------------------------------------------------------- its end


def _check_end(end: End, program: Program, world: ProcessWorld) -> None:
    """Raise StageError unless it ended by itself with code 0.

    After a signal the training is unfinished, whatever the code: a Trainer that saves a checkpoint because of SIGTERM
    then saves a partly trained model.
    """
    if end.stop_requested_at is not None:
        raise preempted("while the program ran; it resumes from its newest checkpoint if it reads FINETUNE_RESUME_FROM")
    if end.code == EXIT_OK:
        return
    if signal_of(end.code) is not None:
        failure = of_exit(end.code, subject="The program")
        hint = _HINTS.get(failure.failure_class, failure.hint)
        raise StageError(failure.failure_class, failure.reason, failure.message, hint)
    raise _raised(end, program, world)


def _raised(end: End, program: Program, world: ProcessWorld) -> StageError:
    """Return the error from the end of the program's stderr, with the class of its text or of the exit code."""
    output = _RANK_PREFIX.sub("", end.last_output)
    kind, text = last_error(output)
    place = _place(output, program)
    problem = f"{kind}: {text}" if kind and text else kind or text
    failure_class = CLASS_OF_EXIT_CODE.get(end.code, FailureClass.PROGRAM)
    if failure_class is FailureClass.PROGRAM:
        failure_class = classify_text(kind, text)
        if failure_class is FailureClass.COLLECTIVE and world.size == 1:
            failure_class = FailureClass.PROGRAM  # there is no other rank to lose
    ending = f"The program ended with exit code {end.code}"
    return StageError(
        failure_class,
        kind if _TYPE_NAME.fullmatch(kind) else "ProgramFailed",
        f"{ending}{place}: {problem[:_SHOWN]}" if problem else f"{ending} and wrote nothing to stderr.",
        _HINTS.get(failure_class, _HINT),
    )


def last_error(output: str) -> tuple[str, str]:
    """Return type name and message of the exception that ended a Python program, from its stderr; an empty name and the
    last line if there is no traceback.
    """
    _, found, tail = output.rpartition(_TRACEBACK)
    lines = [line.rstrip() for line in tail.replace("\r", "\n").splitlines() if line.strip()]
    if not found:
        return "", lines[-1].strip() if lines else ""
    at = next((number for number, line in enumerate(lines) if not line.startswith((" ", "\t"))), None)
    if at is None:
        return "", lines[-1].strip() if lines else ""
    raised = _RAISED.fullmatch(lines[at])
    if raised is None:
        return "", lines[at]
    return raised["kind"].rpartition(".")[2], raised["text"] or ""


def _place(output: str, program: Program) -> str:
    """Return the last place in the traceback that is in the program's own files."""
    root = str(program.folder.absolute()) + os.sep
    frames = [match for match in _FRAME.finditer(output.rpartition(_TRACEBACK)[2]) if match["file"].startswith(root)]
    return f" at {frames[-1]['file'].removeprefix(root)}, line {frames[-1]['line']}" if frames else ""


def _check_model(job: TrainerJob, model: Path) -> None:
    missing = []
    if not any((model / name).is_file() for name in _CONFIGS):
        missing.append("config.json")
    if not any(path for pattern in _WEIGHTS for path in model.glob(pattern)):
        missing.append("weights (*.safetensors or pytorch_model*.bin)")
    if (job.evaluation or job.predict) and not (model / _TOKENIZER).is_file():
        missing.append(f"the tokenizer ({_TOKENIZER}), which evaluate and predict need")
    if not missing:
        return
    there = ", ".join(sorted(path.name for path in model.iterdir())[:8]) or "nothing"
    raise StageError(
        FailureClass.PROGRAM,
        "NoModel",
        f"The program ended with exit code 0, and {model} lacks {' and '.join(missing)}; it holds {there}.",
        "Save model and tokenizer with save_pretrained(os.environ['FINETUNE_OUTPUT']), on rank 0 at least.",
    )

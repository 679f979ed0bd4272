"""Facts of this machine, of the model and of data prepared earlier, for a plan made without a cluster.

The trainer measures (it has transformers and torch), in a process of its own because these take seconds to import and
this command must not depend on them. Its answer is cached in the user's cache folder until the model's files or the
machine change. Without the trainer, or if it cannot measure, the machine is read without it and the planner assumes the
rest, with a note.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import ValidationError

from finetune_contract.byte_text import human_bytes
from finetune_contract.data_settings import ModelSource
from finetune_contract.facts import HardwareFacts, ModelFacts, TrainerFacts
from finetune_contract.layout import JobPaths
from finetune_contract.python_command import module_command
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.cli.local import hub_reach
from finetune_operator.cli.local.environment import trainer_environment, usable_cores
from finetune_operator.cli.local.local_files import place_of, write_atomically
from finetune_operator.cli.terminal.console import err, note
from finetune_operator.spec.types import FineTuneJob

TRAINER = "finetune_trainer"
TIMEOUT_SECONDS = 120
"""Timeout: importing torch and reading a config take about 10 s, and longer from the Hub over a slow line."""
MEMORY_STEP = 512 * 1024**2
"""Unit in bytes to which free memory is rounded down."""
LITTLE_FREE = 0.25
"""Fraction of the memory; if less is free, a note is printed."""

# The trainer's last line is a log line: time, class and reason of the failure, then the message.
_LOG_PREFIX = re.compile(r"^[0-9:]{8} \w+ \(\w+\): ")


@dataclass(frozen=True)
class Measured:
    """Measurements of this machine and the model."""

    model: ModelFacts | None
    hardware: HardwareFacts


def trainer_is_installed() -> bool:
    """Return True if stages can run in this environment."""
    return importlib.util.find_spec(TRAINER) is not None


def measure(job: FineTuneJob, hint: str = hub_reach.HINT) -> Measured:
    """Return the model's shape and this machine; without the trainer only the machine, with a note. `hint`: remedy for
    an unreachable Hub.
    """
    if not trainer_is_installed():
        note("the package finetune-trainer is not installed here, so the model's size is assumed.")
        return Measured(None, own_hardware())
    cached = _cache_file(job)
    facts = _read(cached)
    if facts is None and hub_reach.missing({job.spec.model.uri: "model"}):
        note(
            f"the size of {job.spec.model.uri} is assumed: {hub_reach.unreachable_reason()}, "
            f"and there is no copy here. {hint}."
        )
        return Measured(None, own_hardware())
    if facts is None:
        variables = hub_reach.variables({job.spec.model.uri: "model"})
        with err().status(f"Measuring {job.spec.model.uri} ..."):
            facts = _measure_with_trainer(job, variables)
        if facts is not None:
            with contextlib.suppress(OSError):  # a cache that cannot be written only costs the next plan some seconds
                write_atomically(cached, facts.to_json())
    return Measured(None, own_hardware()) if facts is None else Measured(facts.model, facts.hardware)


def own_hardware() -> HardwareFacts:
    """Return this machine as far as it can be read without torch: without GPUs."""
    total = psutil.virtual_memory().total
    return HardwareFacts(cpu_cores=usable_cores(), memory_bytes=total, assumed=True)


def free_part(hardware: HardwareFacts) -> HardwareFacts:
    """Return the machine with the memory that other programs leave, in whole steps so that equal plans stay equal. A
    run that takes more would make the machine swap, or the kernel kill a process.
    """
    free = psutil.virtual_memory().available // MEMORY_STEP * MEMORY_STEP
    if free >= hardware.memory_bytes // MEMORY_STEP * MEMORY_STEP:
        return hardware
    if free < hardware.memory_bytes * LITTLE_FREE:
        memory = f"{human_bytes(free)} of {human_bytes(hardware.memory_bytes)} of memory"
        note(f"only {memory} is free, which limits the plan. Close other programs to plan with more.")
    return hardware.model_copy(update={"memory_bytes": max(MEMORY_STEP, free)})


def _measure_with_trainer(job: FineTuneJob, variables: Mapping[str, str]) -> TrainerFacts | None:
    request = TrainerJob(name=job.name, task=job.spec.task, model=source_of_model(job))
    with tempfile.TemporaryDirectory(prefix="finetune-facts-") as folder:
        paths = JobPaths.of(Path(folder), job.name)
        write_atomically(paths.job, request.to_json())
        report = Path(folder) / "report.json"
        environment = trainer_environment(
            {**os.environ, **variables}, device="cuda", threads=1, report=report, progress=None
        )
        command = module_command(TRAINER, "facts", "--job", str(paths.job), "--workspace", folder)
        try:
            completed = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            note(f"the model was not measured within {TIMEOUT_SECONDS} s, so its size is assumed.")
            return None
        if completed.returncode:
            note(f"the model could not be measured, so its size is assumed. {_reason(report, completed.stderr)}")
            return None
    try:
        return TrainerFacts.model_validate_json(completed.stdout[max(completed.stdout.find("{"), 0) :])
    except ValidationError as error:
        note(f"the trainer's measurement cannot be read, so the model's size is assumed. {error}")
        return None


def _reason(report: Path, log: str) -> str:
    try:
        failure = TrainerReport.model_validate_json(report.read_text()).failure
    except (OSError, ValidationError):
        failure = None
    return failure.message if failure else _LOG_PREFIX.sub("", (log.strip().splitlines() or [""])[-1])


def source_of_model(job: FineTuneJob) -> ModelSource:
    model = job.spec.model
    return ModelSource(uri=model.uri, revision=model.revision, trust_remote_code=model.trust_remote_code)


def _read(file: Path) -> TrainerFacts | None:
    try:
        return TrainerFacts.model_validate_json(file.read_text())
    except (OSError, ValidationError):
        return None


def _cache_file(job: FineTuneJob) -> Path:
    """Return the cache file for a model, the state of its files, the machine, library versions and measured fields."""
    key = {
        "model": source_of_model(job).model_dump(),
        "task": job.spec.task,
        "files": _state_of_files(job.spec.model.uri),
        "machine": [platform.node(), psutil.boot_time() // 60, usable_cores(), os.environ.get("CUDA_VISIBLE_DEVICES")],
        "facts": sorted(ModelFacts.model_fields),
        "versions": [_version(name) for name in ("finetune-trainer", "torch", "transformers")],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else Path.home() / ".cache"
    return folder / "finetune" / "facts" / f"{digest[:32]}.json"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _state_of_files(uri: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of a local model's files; empty for a remote model, identified by its revision."""
    folder = place_of(uri)
    return [] if folder is None else state_of_files(folder)


def state_of_files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size in bytes and time of change in ns of a file, or of the files in a folder."""
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]

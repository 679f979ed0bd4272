"""`finetune run`: the stages of one job as processes of this machine, from the job file to the result.

`run` shows the order: check existing results, plan, write the contract's files, run each stage that is not done, plan
again once the data are known, report. Every stage is the same as in a cluster, with the same `job.json`.

Refused: more than one node (this machine is one), results of a different job under the same name, and a concurrent run
of the same job. A stage counts as done by its completion marker only, whatever its exit code.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import Device, Stage
from finetune_contract.facts import HardwareFacts
from finetune_contract.layout import (
    DEFAULT_GRACE_SECONDS,
    ENV_GRACE_SECONDS,
    ENV_REPORT,
    ESTIMATE_FILE,
    FailureClass,
    JobPaths,
)
from finetune_contract.python_command import module_command
from finetune_operator.cli.local import hub_reach
from finetune_operator.cli.local.environment import trainer_environment, usable_cores
from finetune_operator.cli.local.local_files import write_atomically
from finetune_operator.cli.local.local_request import CannotRunError, RunRequest, RunResult
from finetune_operator.cli.local.local_stage import Interrupts, StageProcess, failure_of, processes_of, stage_command
from finetune_operator.cli.local.measure import (
    TRAINER,
    Measured,
    free_part,
    measure,
    own_hardware,
    trainer_is_installed,
)
from finetune_operator.cli.local.stage_selection import check_hub, check_inputs, stages_to_redo, stages_to_run, uris_of
from finetune_operator.cli.local.workspace import (
    FAILURE_FILE,
    LOCAL_STAGES,
    bytes_to_predict,
    finished,
    locked,
    move_earlier_results,
    prepared_facts,
    read_data_facts,
    record_inputs,
    size_of,
)
from finetune_operator.cli.terminal.console import err, note, note_misfits
from finetune_operator.cli.terminal.display import Display, Shown, Tail, latest
from finetune_operator.jobs.render.contract import DEEPSPEED_FILE, JOB_FILE, files
from finetune_operator.plan.inference.inference_processes import requested_processes
from finetune_operator.plan.plan import misfits, plan
from finetune_operator.plan.types.plan_types import Facts, JobPlan
from finetune_operator.spec.types import FineTuneJob

POLL_SECONDS = 0.1
SECOND_PRESS_SECONDS = 1.0
"""Seconds before a second Ctrl-C counts: `timeout` and some shells deliver one twice."""
GRACE_SECONDS = DEFAULT_GRACE_SECONDS
"""Time to save a checkpoint after the first Ctrl-C or SIGTERM; the launcher ends all processes earlier."""
REPORT_SECONDS = 120


def run(request: RunRequest) -> RunResult:
    """Run the job. Raise CannotRunError, PlanRefused, BusyError or DifferentJobError before a stage has started."""
    if not trainer_is_installed():
        raise CannotRunError(
            "the package finetune-trainer runs the stages and is not installed; install it in this environment"
        )
    paths, job = request.paths, request.job
    with locked(request.workspace, job.name):
        redone = stages_to_redo(request)
        check_hub(request, redone)
        facts = _facts(request, keep_data=Stage.PREPARE not in redone)
        planned = plan(job, facts, request.settings)
        note_misfits(misfits(job, facts, request.settings))
        note_fewer_processes(job, planned)
        note_idle_gpus(job, facts.hardware)
        stages = stages_to_run(request, planned)
        check_inputs(request, planned, stages, redone)
        contract = files(planned)
        moved = move_earlier_results(paths, redone)
        if moved is not None:
            note(f"earlier results are in {moved}; delete that folder when you no longer need them.")
        _write(paths, planned, contract)
        (paths.root / FAILURE_FILE).unlink(missing_ok=True)
        return _Run(request, facts, planned).run_stages(stages)


def planned_run(request: RunRequest) -> tuple[JobPlan, dict[Stage, str]]:
    """Return, for --dry-run, the plan, and for each stage `run` or `kept`. Raises as `run` does; writes nothing."""
    redone = stages_to_redo(request)
    facts = _facts(request, keep_data=Stage.PREPARE not in redone)
    planned = plan(request.job, facts, request.settings)
    note_misfits(misfits(request.job, facts, request.settings))
    note_idle_gpus(request.job, facts.hardware)
    stages = stages_to_run(request, planned)
    check_inputs(request, planned, stages, redone)
    return planned, {
        stage: "kept" if stage not in redone and finished(request.paths, stage) else "run" for stage in stages
    }


def _facts(request: RunRequest, keep_data: bool) -> Facts:
    measured = measure(request.job) if request.measure else Measured(None, own_hardware())
    data = prepared_facts(request.paths, request.job) if keep_data else None
    return Facts(
        model=measured.model,
        data=data,
        hardware=free_part(measured.hardware),
        local=True,
        predict_bytes=bytes_to_predict(request.job),
    )


def note_fewer_processes(job: FineTuneJob, planned: JobPlan) -> None:
    """Report that this machine predicts with fewer processes than the job requests."""
    asked, there = requested_processes(job.spec.predict), planned.trainer.inference(Stage.PREDICT).models
    if asked is not None and there < asked:
        hardware = planned.hardware
        gpus = f", {hardware.gpus_per_node} GPUs" if hardware.gpus_per_node else ""
        memory = human_bytes(hardware.memory_bytes)
        note(
            f"predict: {there} of {asked} processes: {hardware.cpu_cores} cores{gpus} and {memory} of memory are free."
        )


def note_idle_gpus(job: FineTuneJob, hardware: HardwareFacts | None) -> None:
    """Report that the job runs on the CPU of a machine with GPUs, unless its file says so."""
    count = 0 if hardware is None else hardware.gpus_per_node
    if count and "gpus_per_node" not in job.spec.resources.model_fields_set:
        gpus = "GPU is" if count == 1 else f"{count} GPUs are"
        note(f"this machine's {gpus} not used, as resources.gpusPerNode defaults to 0. Set it to auto to use them.")


def _write(paths: JobPaths, planned: JobPlan, contract: Mapping[str, str]) -> None:
    """Write the plan and the contract's files, each atomically."""
    write_atomically(paths.plan, planned.to_json())
    write_atomically(paths.root / JOB_FILE, contract[JOB_FILE])
    for name in (DEEPSPEED_FILE, ESTIMATE_FILE):
        if name in contract:
            write_atomically(paths.root / name, contract[name])
        else:
            (paths.root / name).unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------- stages


class _Run:
    """Stages of one run."""

    def __init__(self, request: RunRequest, facts: Facts, planned: JobPlan) -> None:
        self._request = request
        self._paths = request.paths
        self._facts = facts
        self._result = RunResult(planned)

    def run_stages(self, stages: Sequence[Stage]) -> RunResult:
        """Run the stages that are not done, in order, up to the first that fails or an interruption."""
        result = self._result
        with Interrupts() as interrupts:
            with Shown(err()) as display:
                for stage in stages:
                    done = finished(self._paths, stage)
                    if done is not None:
                        result.seconds[stage] = done.seconds
                        result.kept.append(stage)
                        display.log(f"{stage}: done in an earlier run, kept")
                        continue
                    if interrupts.count == 0:
                        record_inputs(self._paths, self._request.job, stage)
                        self._run_stage(stage, display, interrupts)
                    if interrupts.count:
                        result.interrupted, result.exit_code = stage, interrupts.exit_code
                    if result.exit_code:
                        if result.failure is not None and result.failure.failure_class == FailureClass.GATE_NOT_MET:
                            # The last stage anyway: people want to see the measurements.
                            write_report(self._paths, self._request.command)
                        return result
                    if stage is Stage.PREPARE:
                        self._plan_with_data(display)
            if self._request.report:
                write_report(self._paths, self._request.command)
        self._clean_up()
        return result

    def _clean_up(self) -> None:
        """Delete checkpoints that are no longer needed, or report their size. A program's own are left alone."""
        planned, folder = self._result.plan, self._paths.checkpoints
        size = size_of(folder)
        if planned.trainer.training is None or not size:
            return
        usage = f"checkpoints in {folder} take {human_bytes(size)}"
        done = all(finished(self._paths, stage) for stage in LOCAL_STAGES if stage in planned.stages)
        if not done:
            note(f"{usage}; they are deleted after all stages have succeeded, unless checkpoints.afterSuccess is keep.")
        elif self._request.job.spec.checkpoints.after_success == "keep":
            note(f"{usage} and are kept because checkpoints.afterSuccess is keep; they are no longer needed.")
        else:
            shutil.rmtree(folder)
            note(
                f"deleted {human_bytes(size)} of checkpoints because all stages have succeeded; "
                "to keep them, set spec.checkpoints.afterSuccess to keep."
            )

    def _run_stage(self, stage: Stage, display: Display, interrupts: Interrupts) -> None:
        progress, log = self._paths.logs / f"{stage}.progress.jsonl", self._paths.logs / f"{stage}.log"
        for old in (progress, log, *self._paths.reports.glob(f"{stage}-*.json")):
            old.unlink(missing_ok=True)
        self._paths.reports.mkdir(parents=True, exist_ok=True)
        self._paths.logs.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        display.start(stage)
        process = StageProcess(
            stage_command(stage, self._paths, self._result.plan), self._environment(stage, progress), log
        )
        try:
            code = self._watch(process, Tail(progress), Tail(log), display, interrupts, stage)
        finally:
            process.kill()
        seconds = time.monotonic() - started
        self._result.seconds[stage] = seconds
        if finished(self._paths, stage) is not None and code == 0:
            display.end(stage, seconds, "done")
        elif interrupts.count:
            display.end(stage, seconds, "stopped")
        else:
            display.end(stage, seconds, "failed")
            failure = failure_of(stage, code, self._paths.reports, log)
            text = failure.model_dump_json(by_alias=True, exclude_none=True, indent=2)
            with contextlib.suppress(OSError):  # on a full disk the message on the screen must suffice
                write_atomically(self._paths.root / FAILURE_FILE, text + "\n")
            self._result.failure, self._result.exit_code = failure, 1

    def _watch(
        self,
        process: StageProcess,
        progress: Tail,
        log: Tail,
        display: Display,
        interrupts: Interrupts,
        stage: Stage,
    ) -> int:
        stop_requested_at: float | None = None
        while True:
            code = process.exit_code()
            news = latest(progress.lines())
            if news is not None:
                display.update(news)
            for line in log.lines() if self._request.verbose else ():
                display.log(line)
            if code is not None:
                return code
            if stop_requested_at is None and interrupts.count:
                stop_requested_at = time.monotonic()
                saving = "saving a checkpoint" if stage is Stage.TRAIN else "stopping"
                display.log(f"{stage}: {saving} (at most {GRACE_SECONDS} s); press Ctrl-C again to kill it")
                process.request_stop()
            elif stop_requested_at is not None:
                waited = time.monotonic() - stop_requested_at
                if waited < SECOND_PRESS_SECONDS:
                    interrupts.count = 1
                elif interrupts.count > 1 or waited > GRACE_SECONDS:
                    process.kill()
            time.sleep(POLL_SECONDS)

    def _environment(self, stage: Stage, progress: Path) -> dict[str, str]:
        world = self._result.plan.trainer.world
        threads = max(1, usable_cores() // processes_of(stage, self._result.plan))
        if stage is Stage.TRAIN and world is not None:
            threads = world.threads_per_process
        return trainer_environment(
            {**os.environ, **hub_reach.variables(uris_of(self._request.job)), ENV_GRACE_SECONDS: str(GRACE_SECONDS)},
            device=device_of(self._request.job, self._result.plan),
            threads=threads,
            report=self._paths.reports / f"{stage}-{{rank}}.json",
            progress=progress,
        )

    def _plan_with_data(self, display: Display) -> None:
        """Plan again with the counted rows; only here, between two stages, the trainer's input changes."""
        data = read_data_facts(self._paths)
        for text in data.notes if data else ():
            display.log(f"prepare: {text}")
        new_plan = plan(self._request.job, replace(self._facts, data=data), self._request.settings)
        changed = plan_changes(self._result.plan, new_plan)
        self._result.plan = new_plan
        _write(self._paths, new_plan, files(new_plan))
        if changed:
            display.log(f"planned again with the prepared data: {', '.join(changed)}")


def device_of(job: FineTuneJob, planned: JobPlan) -> Device:
    """Return the device on which the stages compute."""
    if planned.trainer.world is not None:
        return planned.trainer.world.device
    return "cpu" if job.spec.resources.gpus_per_node == 0 else planned.hardware.device


def plan_changes(before: JobPlan, after: JobPlan) -> list[str]:
    """Return changes of the trainer's input, e.g. `training.maxSteps 100 -> 61`."""
    old, new = (dict(_flat(planned.trainer.model_dump(mode="json", by_alias=True))) for planned in (before, after))
    return [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _flat(value: object, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{prefix}.{key}" if prefix else key)]
    return [(prefix, value)]


def write_report(paths: JobPaths, repeat_command: str) -> None:
    """Write report.html from the folder's content. The results stand without it, so a failure is only noted."""
    command = module_command(TRAINER, "report", "--job", str(paths.job), "--workspace", str(paths.root.parent))
    command += ["--command", repeat_command] if repeat_command else []
    environment = trainer_environment(
        {name: value for name, value in os.environ.items() if name != ENV_REPORT},
        device="cpu",
        threads=1,
        report=paths.reports / "report-{rank}.json",
        progress=None,
    )
    try:
        completed = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=REPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        note(f"report.html was not written within {REPORT_SECONDS} s.")
        return
    if completed.returncode:
        note(f"report.html could not be written: {(completed.stderr.strip().splitlines() or ['no reason given'])[-1]}")

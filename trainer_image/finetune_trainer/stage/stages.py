"""Each stage as a function of the same inputs. A stage's libraries are imported when it runs, not before."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_contract.choices import Stage
from finetune_contract.combinations import broken
from finetune_contract.constraints import Constraint, choices_of
from finetune_contract.facts import DataFacts
from finetune_contract.inference_settings import Evaluation, Prediction
from finetune_contract.layout import FailureClass, JobPaths
from finetune_contract.report import MeasuredFacts
from finetune_contract.trainer_job import Script, TrainerJob, Training
from finetune_trainer.core import garbage_collection
from finetune_trainer.core.distributed import ProcessWorld
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.interruption import Interruption
from finetune_trainer.core.job_file import with_columns
from finetune_trainer.core.progress import Findings, ProgressSink
from finetune_trainer.stage import runs

if TYPE_CHECKING:
    from finetune_trainer.prepare.prepare_pods import Leader

log = logging.getLogger(__name__)

_HISTOGRAM_BUCKETS = 32
"""Buckets of 512 tokens, every second one of the prepared data's: four splits of them take half of a report."""


@dataclass(frozen=True)
class StageInput:
    """Input of a stage."""

    job: TrainerJob
    paths: JobPaths
    progress: ProgressSink
    world: ProcessWorld
    deepspeed: Path | None
    interruption: Interruption
    findings: Findings = field(default_factory=Findings)
    estimate: Path | None = None
    """File with the plan's estimates (`PlannedTraining`); None: there is none."""


@dataclass(frozen=True)
class StageResult:
    """Data that a stage adds to its report."""

    metrics: Mapping[str, Any]
    artifacts: Mapping[str, str]
    fingerprint: str | None = None
    measured: MeasuredFacts | None = None
    model_revision: str | None = None


def _prepare(given: StageInput) -> StageResult:
    if given.job.preparation.engine != "job":
        return _prepare_alone(given)
    from finetune_trainer.prepare.prepare_pods import Leader, Pod, follow

    pod = Pod.of(given.job, given.world, given.paths, os.environ)
    if pod.leads:
        with Leader(pod) as leader:
            return _prepare_alone(given, leader)
    garbage_collection.begin()
    settings = runs.RecordedSettings.of(given.job, given.deepspeed)

    def finished() -> bool:
        return runs.finished(given.paths, Stage.PREPARE, settings) is not None

    rows = follow(pod, given.job, finished, given.progress)
    return StageResult({"rows": rows}, {})


def _prepare_alone(given: StageInput, leader: Leader | None = None) -> StageResult:
    """Prepare in one process, which may lead others."""
    from finetune_trainer.models.loading import pinned

    if given.job.training is not None:
        _refuse_settings(given.job, given.job.training)  # before a GPU is taken
    job, commit = pinned(given.job)
    given = replace(given, job=job)
    if job.training is not None and job.training.precision == "fp8":
        from finetune_trainer.models.float8 import refuse_without_layers
        from finetune_trainer.report.measured_facts import model_without_weights

        refuse_without_layers(model_without_weights(job))
    made = _prepare_rows(given, leader) if job.script is None else _prepare_script(given, job.script)
    return replace(made, model_revision=commit)


def _prepare_rows(given: StageInput, leader: Leader | None) -> StageResult:
    from finetune_trainer.prepare.prepare import prepare
    from finetune_trainer.prepare.shared_data import SharedData

    garbage_collection.begin()
    facts = prepare(given.job, given.paths, given.progress, leader, SharedData.of(given.paths, os.environ))
    rows = {role: split.rows for role, split in facts.splits.items()}
    measured = _measured(given.job, facts) if given.job.run is not None else None
    return StageResult({"rows": rows}, {"prepared": given.paths.prepared.name}, facts.fingerprint, measured)


def _prepare_script(given: StageInput, script: Script) -> StageResult:
    """Fetch the program and check its inputs. Rows to evaluate are prepared for the model that it will have saved, with
    that model's tokenizer.
    """
    from finetune_trainer.scripts.code import fetch_code
    from finetune_trainer.scripts.script_inputs import check_inputs

    garbage_collection.begin()
    given.progress.update(0, 2)
    program = fetch_code(script, given.paths)
    given.progress.update(1, 2)
    check_inputs(given.job)
    given.progress.update(2, 2)
    details = {"code": given.paths.code.name, "script": f"{script.url}@{program.commit}"}
    measured = _shape_if_known(given.job) if given.job.run is not None else None
    return StageResult({"commit": program.commit}, details, measured=measured)


def _shape_if_known(job: TrainerJob) -> MeasuredFacts | None:
    """Return the model's size, by which pods request memory. The task's classes may not know a program's model."""
    from finetune_trainer.report.measured_facts import model_facts

    try:
        return MeasuredFacts(model=model_facts(job))
    except Exception as error:
        log.warning("The size of the model is not known, and the plan assumes one: %s", error)
        return None


def _measured(job: TrainerJob, data: DataFacts) -> MeasuredFacts:
    """Return the facts for the operator's plan of the later stages; on a laptop the finetune command measures them."""
    from finetune_trainer.report.measured_facts import model_facts

    return MeasuredFacts(model=model_facts(job), data=data.for_planning(_HISTOGRAM_BUCKETS))


def _train(given: StageInput) -> StageResult:
    from finetune_trainer.core.distributed import check_world, connect, settle_environment
    from finetune_trainer.devices.nccl import measured_transports, refuse_sockets, settle_nccl

    if given.job.script is not None:
        return _run_script(given, given.job.script)
    training = given.job.training
    if training is not None:
        # Refuse everything that can be refused before seconds go into imports and the model.
        check_world(given.world, training.world, training.batch.data_parallel, training.strategy.replica_ranks)
        _refuse_settings(given.job, training)
        device, threads, strategy = training.world.device, training.world.threads_per_process, training.strategy.name
        settle_environment(os.environ, given.world, device=device, threads=threads, strategy=strategy)
        transports = device == "cuda" and strategy != "single"
        if transports:
            settle_nccl(os.environ, given.world.rank)
        connect(given.world, device, threads, strategy)
        _measure_devices(given, training)
        if transports:
            given.findings.communication = measured_transports(training.world, given.world.rank)
            refuse_sockets(given.findings.communication, training.world.network)
    from finetune_trainer.training.run import train
    from finetune_trainer.training.run_inputs import read_deepspeed_config, read_estimate

    garbage_collection.begin_with_models()
    config = read_deepspeed_config(given.deepspeed)
    outcome = train(
        given.job,
        given.paths,
        given.progress,
        world=given.world,
        deepspeed=config,
        interruption=given.interruption,
        planned=read_estimate(given.estimate),
        devices=given.findings.devices,
        communication=given.findings.communication,
        note=given.findings.add_note,
    )
    return StageResult(outcome.metrics, outcome.artifacts, outcome.fingerprint)


def _measure_devices(given: StageInput, training: Training) -> None:
    """Measure the GPUs, before weights are loaded; raise StageError REPLANNED where they need another plan."""
    from finetune_trainer.devices.device_measure import measured_devices, refuse_other_plan

    given.findings.devices = measured_devices(training)
    refuse_other_plan(given.job.device, given.findings.devices, training)


def _refuse_settings(job: TrainerJob, training: Training) -> None:
    from finetune_trainer.models.adapters import four_bits
    from finetune_trainer.models.float8 import refuse_without_library
    from finetune_trainer.training.tracking import refuse_missing_trackers
    from finetune_trainer.training.training_arguments import refuse_bad_arguments

    refuse_combinations(job, training)
    refuse_bad_arguments(training)
    refuse_missing_trackers(training.arguments, os.environ)
    if training.in_four_bits:
        four_bits()
    if training.precision == "fp8":
        refuse_without_library()


def _run_script(given: StageInput, script: Script) -> StageResult:
    from finetune_trainer.core.distributed import check_world
    from finetune_trainer.scripts.program import run_program

    check_world(given.world, script.world, script.world.size)
    result = run_program(given.job, script, given.paths, given.progress, given.world, given.findings)
    return StageResult(result.metrics, result.artifacts)


def _evaluate(given: StageInput) -> StageResult:
    from finetune_trainer.predict.evaluate import evaluate

    _settle_gpus(given, given.job.evaluation)
    garbage_collection.begin_with_models()
    if given.job.script is None:
        sections = evaluate(given.job, given.paths, given.progress, given.world)
    else:
        sections = _evaluate_program(given)
    return StageResult(sections, {"metrics": given.paths.metrics.name})


def _evaluate_program(given: StageInput) -> dict[str, Any]:
    """Evaluate the model of a user's own program, with the metrics that only the program measures."""
    from finetune_trainer.predict.evaluate import check_gate, evaluate
    from finetune_trainer.report.reporting import merge_metrics
    from finetune_trainer.scripts.own_metrics import own_metrics, without_own_metrics

    metrics = own_metrics(given.job, given.paths)
    job = _inference_job(replace(given, job=without_own_metrics(given.job)))
    sections = evaluate(job, given.paths, given.progress, given.world)
    if sections and metrics.values:
        sections["evaluate"] |= metrics.values
        merge_metrics(given.paths, sections)
    if metrics.gate is not None:
        check_gate(metrics.gate, metrics.values, "as the program measured it")
    return sections


def _predict(given: StageInput) -> StageResult:
    from finetune_trainer.predict.predict import predict
    from finetune_trainer.predict.prediction_spark import predict_by_spark

    _settle_gpus(given, given.job.predict)
    garbage_collection.begin_with_models()
    job = _inference_job(given)
    if job.predict is not None and job.predict.engine == "spark":
        return StageResult(predict_by_spark(job, given.paths, given.progress), {})
    return StageResult(predict(job, given.paths, given.progress, given.world, os.environ), {})


def _settle_gpus(given: StageInput, settings: Evaluation | Prediction | None) -> None:
    from finetune_trainer.predict.pod_processes import settle_gpus

    if settings is not None:
        settle_gpus(given.world, settings, settings.device)


def _inference_job(given: StageInput) -> TrainerJob:
    """Return the job for inference. The model of a user's own program is an existing one; its rows are prepared now, as
    its tokenizer and its labels are not known earlier.
    """
    if given.job.script is None:
        return given.job
    from finetune_trainer.core.progress import NoProgress
    from finetune_trainer.prepare.prepare import prepare
    from finetune_trainer.scripts.trained import job_of_trained_model

    job = job_of_trained_model(given.job, given.paths)
    return with_columns(job, prepare(job, given.paths, NoProgress()).columns)


STAGES: Mapping[Stage, Callable[[StageInput], StageResult]] = {
    Stage.PREPARE: _prepare,
    Stage.TRAIN: _train,
    Stage.EVALUATE: _evaluate,
    Stage.PREDICT: _predict,
}


# --------------------------------------------------------------------------------------------------------- combinations


def refuse_combinations(job: TrainerJob, training: Training) -> None:
    """Raise StageError CONFIG `NotCombined` that names every constraint which the job breaks."""
    choices = choices_of(job, training)
    constraints = broken(choices)
    if constraints:
        rules = "; ".join(_rule_text(constraint, constraint.value(choices)) for constraint in constraints)
        hints = "; ".join(dict.fromkeys(f"spec.{constraint.field}: {constraint.hint}" for constraint in constraints))
        raise StageError(FailureClass.CONFIG, "NotCombined", f"{rules}.", f"{hints}.")


def _rule_text(constraint: Constraint, value: object) -> str:
    shown = "" if value is None or isinstance(value, bool) else f" ({value})"
    return f"spec.{constraint.field}{shown} {constraint.rule}"

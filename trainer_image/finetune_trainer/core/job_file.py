"""Readers of job.json, the input of every program of this package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune_contract.choices import Stage
from finetune_contract.data_settings import Columns
from finetune_contract.facts import DataFacts
from finetune_contract.layout import FACTS_FILE, FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob, World
from finetune_trainer.core.failures import StageError


def read_job(path: Path) -> TrainerJob:
    """Return the job in `path`; raise StageError CONFIG for an unreadable file, an unknown field or schema version."""
    try:
        return TrainerJob.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StageError(
            FailureClass.CONFIG, "JobNotReadable", f"{path} cannot be read: {error}", "Check --job."
        ) from error
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        where = [(".".join(map(str, detail["loc"])) or "job.json", detail) for detail in details]
        version = any(detail["loc"] in (("schemaVersion",), ("schema_version",)) for detail in details)
        raise StageError(
            FailureClass.CONFIG,
            "UnknownSchemaVersion" if version else "JobNotUnderstood",
            f"{path}: "
            + "; ".join(f"{field}: {detail['msg']} (found {str(detail['input'])[:60]})" for field, detail in where[:5]),
            "Use compatible versions of operator and trainer image.",
        ) from error


def as_prepared(job: TrainerJob, paths: JobPaths) -> TrainerJob:
    """Return the job with the columns by which `prepare` has read its rows; the job itself without prepared data."""
    try:
        facts = DataFacts.model_validate_json((paths.prepared / FACTS_FILE).read_bytes())
    except (OSError, ValueError):  # stages that need the data report them
        return job
    return with_columns(job, facts.columns)


def with_columns(job: TrainerJob, columns: Mapping[str, str]) -> TrainerJob:
    """Return the job with the columns (role -> name) that its rows have by their shape; empty: those of the job. Rows
    that are not plain text are packed only if the job asks for it.
    """
    if not columns or job.dataset is None:
        return job
    update: dict[str, Any] = {"dataset": job.dataset.model_copy(update={"columns": Columns(**columns)})}
    other = job.dataset.columns.text is not None and "text" not in columns
    if other and not job.preparation.packing_asked:
        update["preparation"] = job.preparation.model_copy(update={"packing": False})
    return job.model_copy(update=update)


def world_of(job: TrainerJob, stage: str) -> World:
    """Return the processes of `stage`, for a launcher of several; raise StageError CONFIG for a one-process stage."""
    settings = {Stage.EVALUATE: job.evaluation, Stage.PREDICT: job.predict}.get(Stage(stage))
    if settings is not None and settings.processes > 1:
        return World(nodes=1, processes_per_node=settings.processes, device=settings.device, threads_per_process=1)
    if stage != Stage.TRAIN or job.world is None:
        raise StageError(
            FailureClass.CONFIG,
            "OneProcessOnly",
            f"Stage {stage} of job {job.name} runs in one process; torchrun and mpirun are for several.",
            "Use --with process.",
        )
    return job.world

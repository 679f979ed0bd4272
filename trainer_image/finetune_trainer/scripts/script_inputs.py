"""Inputs of a user's own program: places of the model, the data and its folders, in the variables of
`SCRIPT_VARIABLES`.

Nothing is converted: the program reads model and data itself. Prepare only checks that they exist, so that a misspelt
name costs no accelerator time.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from finetune_contract.contract_models import Message
from finetune_contract.data_settings import DataSource
from finetune_contract.layout import (
    ENV_SCRIPT_CHECKPOINTS,
    ENV_SCRIPT_COLUMNS,
    ENV_SCRIPT_DATASET,
    ENV_SCRIPT_DATASET_CONFIG,
    ENV_SCRIPT_DATASET_REVISION,
    ENV_SCRIPT_MODEL,
    ENV_SCRIPT_OUTPUT,
    ENV_SCRIPT_RESUME_FROM,
    ENV_SCRIPT_REVISION,
    ENV_SCRIPT_SPLITS,
    FailureClass,
    JobPaths,
)
from finetune_contract.trainer_job import Script, TrainerJob
from finetune_trainer.core.failures import StageError, other_settings
from finetune_trainer.core.files import write_atomically
from finetune_trainer.core.uris import Uri, local_path, package_path
from finetune_trainer.models.loading import load_config, resolve_model
from finetune_trainer.scripts.code import Program

log = logging.getLogger(__name__)

ORIGIN_FILE = "program.json"
"""File beside the checkpoints that names the program that wrote them."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = "checkpoint-is-incomplete.txt"
"""transformers' own marker while it saves a checkpoint because of SIGTERM."""
_STATE = "trainer_state.json"
"""transformers' Trainer writes it into a checkpoint last."""


class Origin(Message):
    """Values that must be equal for a program to resume from a checkpoint."""

    url: str
    commit: str
    path: str | None
    entry_point: str
    arguments: tuple[str, ...]
    model: str
    revision: str
    data: Annotated[
        DataSource | None, BeforeValidator(lambda data: json.loads(data) if isinstance(data, str) else data)
    ]
    """Earlier images wrote it as text."""

    @classmethod
    def of(cls, job: TrainerJob, script: Script, program: Program) -> Origin:
        return cls(
            url=script.url,
            commit=program.commit,
            path=script.path,
            entry_point=script.entry_point,
            arguments=script.arguments,
            model=job.model.uri,
            revision=job.model.revision,
            data=job.dataset,
        )


def check_inputs(job: TrainerJob) -> None:
    """Check that the model and the data exist; StageErrors of `load_config` and of the data sources.

    A data set of the Hub that `datasets` cannot read as a table is accepted: the program may be able to read it.
    """
    from finetune_trainer.data.sources import source_of

    load_config(job)
    if job.dataset is None:
        return
    try:
        source_of(job.dataset, "dataset").names()
    except StageError as error:
        if error.reason != "HubDatasetUnreadable":
            raise
        log.warning("%s The program must read it itself.", error.message)


def variables(job: TrainerJob, script: Script, paths: JobPaths) -> dict[str, str]:
    """Return the variables of `SCRIPT_VARIABLES` that have a value."""
    name, keywords = resolve_model(job.model.uri, job.model.revision, job.model.trust_remote_code)
    environment = {
        ENV_SCRIPT_MODEL: name,
        ENV_SCRIPT_OUTPUT: str(paths.model.absolute()),
        ENV_SCRIPT_CHECKPOINTS: str(paths.checkpoints.absolute()),
    }
    if "revision" in keywords:
        environment[ENV_SCRIPT_REVISION] = str(keywords["revision"])
    if job.dataset is not None:
        environment |= _data(job.dataset)
    newest = newest_checkpoint(paths.checkpoints.absolute()) if script.resume else None
    return environment if newest is None else environment | {ENV_SCRIPT_RESUME_FROM: str(newest)}


def _data(dataset: DataSource) -> dict[str, str]:
    uri = Uri.parse(dataset.uri, "dataset.uri")
    environment = {
        ENV_SCRIPT_SPLITS: json.dumps(dataset.splits.model_dump(by_alias=True, exclude_none=True)),
        ENV_SCRIPT_COLUMNS: json.dumps(dataset.columns.model_dump(by_alias=True, exclude_none=True)),
    }
    if dataset.config is not None:
        environment[ENV_SCRIPT_DATASET_CONFIG] = dataset.config
    match uri.scheme:
        case "hf":
            name, _, revision = uri.rest.strip("/").partition("@")
            environment[ENV_SCRIPT_DATASET] = name.removeprefix("datasets/")
            if revision:
                environment[ENV_SCRIPT_DATASET_REVISION] = revision
        case "file":
            environment[ENV_SCRIPT_DATASET] = str(local_path(uri).absolute())
        case "pkg":
            path = package_path(uri, "dataset.uri", FailureClass.DATA, "DataNotFound")
            environment[ENV_SCRIPT_DATASET] = str(path)
        case _:
            environment[ENV_SCRIPT_DATASET] = dataset.uri
    return environment


# --------------------------------------------------------------------------------------------------------- checkpoints


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete `checkpoint-<step>` of transformers' Trainer; None if there is none."""
    if not folder.is_dir():
        return None
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    return next((path for _, path in sorted(named, reverse=True) if _is_whole(path)), None)


def _is_whole(checkpoint: Path) -> bool:
    if (checkpoint / _UNFINISHED).exists():
        return False
    try:
        json.loads((checkpoint / _STATE).read_bytes())
    except (OSError, ValueError):
        return False
    return True


def check_origin(paths: JobPaths, origin: Origin) -> None:
    """Raise StageError CHECKPOINT if existing checkpoints are of another program, or of other settings."""
    if newest_checkpoint(paths.checkpoints) is None:
        return
    try:
        theirs = Origin.model_validate_json((paths.checkpoints / ORIGIN_FILE).read_bytes())
    except (OSError, ValueError):
        theirs = None
    if theirs != origin:
        settings = {} if theirs is None else theirs.model_dump(mode="json", exclude_defaults=True)
        ours = origin.model_dump(mode="json", exclude_defaults=True)
        raise other_settings(f"The checkpoints in {paths.checkpoints} were", settings, ours)


def make_folders(paths: JobPaths, origin: Origin, resume: bool) -> None:
    """Create an empty folder for the model, and one for checkpoints with their origin. For rank 0.

    An earlier training's model stays beside it until there is a new one; an earlier attempt's partial one is removed.
    """
    former = former_model(paths)
    if paths.model.exists() and not former.exists():
        os.replace(paths.model, former)
    shutil.rmtree(paths.model, ignore_errors=True)
    paths.model.mkdir(parents=True)
    if not resume:
        shutil.rmtree(paths.checkpoints, ignore_errors=True)
    write_atomically(paths.checkpoints / ORIGIN_FILE, origin.to_json())


def former_model(paths: JobPaths) -> Path:
    """Return the folder that keeps an earlier training's model while another training runs."""
    return paths.model.with_name(f"{paths.model.name}.former")

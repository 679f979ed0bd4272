"""Experiment trackers for a training's figures: TensorBoard, MLflow, Weights & Biases.

transformers' own callbacks send the figures, on rank 0; this module opens the destinations and closes them. All files
are below the job's folder unless the trackers' own variables set another place, a resumed run continues the same
curves, and no data leave the machine without a request for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import JsonValue

from finetune_contract.arguments import Tracker, trackers
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import write_atomically

if TYPE_CHECKING:
    from transformers import TrainerCallback

_TENSORBOARD_FOLDER = "TENSORBOARD_LOGGING_DIR"
_MLFLOW_STORE = "MLFLOW_TRACKING_URI"
_IDS = "runs.json"
"""File below the folder of trackers: tracker -> the run that a resumed training continues."""


@dataclass(frozen=True)
class Tracked:
    """A training to be tracked."""

    job: str
    folder: Path
    """Folder for the trackers' files."""
    first_step: int
    """Number of steps already done; 0: a new run."""
    environment: Mapping[str, str]


def refuse_missing_trackers(arguments: Mapping[str, JsonValue], environment: Mapping[str, str]) -> None:
    """Raise StageError CONFIG `TrackerMissing` for trackers without a library in this image."""
    for tracker in trackers(arguments):
        missing = [name for name in libraries_of(tracker, environment) if find_spec(name) is None]
        if missing:
            extra = "wandb" if tracker == "wandb" else "tracking"
            raise StageError(
                FailureClass.CONFIG,
                "TrackerMissing",
                f"training.arguments.report_to names {tracker}, and this image lacks {', '.join(missing)}.",
                f"Add pip install 'finetune-trainer[{extra}]' to the image, or leave {tracker} out.",
            )


def libraries_of(tracker: Tracker, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that a tracker needs; our own store needs a database."""
    if tracker == "mlflow" and _MLFLOW_STORE not in environment:
        return ("mlflow", "sqlalchemy", "alembic")
    return (tracker,)


@contextmanager
def tracking(arguments: Mapping[str, JsonValue], tracked: Tracked) -> Iterator[tuple[TrainerCallback, ...]]:
    """Yield callbacks of the trackers that `report_to` names. When the training fails, their runs are marked as failed.

    Raise StageError STORAGE_LOST `TrackerUnavailable` when one cannot be opened.
    """
    openers = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}
    with ExitStack() as stack:
        opened = []
        for tracker in trackers(arguments):
            try:
                opened.append(stack.enter_context(openers[tracker](tracked)))
            except Exception as error:
                raise StageError(
                    FailureClass.STORAGE_LOST,
                    "TrackerUnavailable",
                    f"{tracker} cannot be written to: {type(error).__name__}: {error}",
                    f"Check the address and the credentials in the job's environment, or leave {tracker} out of "
                    "training.arguments.report_to.",
                ) from error
        yield tuple(opened)


@contextmanager
def _tensorboard(tracked: Tracked) -> Iterator[TrainerCallback]:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations.integration_utils import TensorBoardCallback

    folder = tracked.environment.get(_TENSORBOARD_FOLDER) or str(tracked.folder / "tensorboard")
    # Hide records of an earlier attempt on later steps.
    writer: Any = SummaryWriter(folder, purge_step=tracked.first_step + 1)
    try:
        yield TensorBoardCallback(writer)  # type: ignore[no-untyped-call]
    finally:
        writer.close()


@contextmanager
def _mlflow(tracked: Tracked) -> Iterator[TrainerCallback]:
    from transformers.integrations.integration_utils import MLflowCallback

    mlflow: Any = import_module("mlflow")
    environment, folder = tracked.environment, (tracked.folder / "mlflow").resolve()
    own_store = _MLFLOW_STORE not in environment
    if own_store:
        folder.mkdir(parents=True, exist_ok=True)
        # MLflow maintains its database store; its store of plain files is deprecated (MLflow 3).
        mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    name = environment.get("MLFLOW_EXPERIMENT_NAME") or tracked.job
    if mlflow.get_experiment_by_name(name) is None:
        mlflow.create_experiment(name, (folder / "artifacts").as_uri() if own_store else None)
    mlflow.set_experiment(name)
    run = environment.get("MLFLOW_RUN_ID") or _run_id(tracked, "mlflow")
    started = mlflow.start_run(run_id=run, run_name=environment.get("MLFLOW_RUN_NAME") or tracked.job)
    _remember(tracked, "mlflow", started.info.run_id)
    status = "FAILED"
    try:
        yield MLflowCallback()  # type: ignore[no-untyped-call]
        status = "FINISHED"
    finally:
        mlflow.flush_async_logging()
        mlflow.end_run(status)
        if own_store:
            mlflow.set_tracking_uri(None)  # or it would be taken for the environment's


@contextmanager
def _wandb(tracked: Tracked) -> Iterator[TrainerCallback]:
    from transformers.integrations.integration_utils import WandbCallback

    wandb: Any = import_module("wandb")
    environment, folder = tracked.environment, tracked.folder / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    run = environment.get("WANDB_RUN_ID") or _run_id(tracked, "wandb") or uuid4().hex
    started = wandb.init(
        project=environment.get("WANDB_PROJECT") or "finetune",
        name=environment.get("WANDB_NAME") or tracked.job,
        id=run,
        resume="allow",
        dir=environment.get("WANDB_DIR") or str(folder),
        mode=environment.get("WANDB_MODE") or "offline",
    )
    _remember(tracked, "wandb", run)
    failed = 1
    try:
        yield WandbCallback()  # type: ignore[no-untyped-call]
        failed = 0
    finally:
        started.finish(exit_code=failed)


def _ids(tracked: Tracked) -> dict[str, str]:
    """Return the ids that `_remember` has kept."""
    try:
        return dict(json.loads((tracked.folder / _IDS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _run_id(tracked: Tracked, tracker: Tracker) -> str | None:
    """Return the tracker's run that a resumed training continues."""
    return _ids(tracked).get(tracker) if tracked.first_step else None


def _remember(tracked: Tracked, tracker: Tracker, run: str) -> None:
    ids = {**_ids(tracked), tracker: run}
    tracked.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(tracked.folder / _IDS, json.dumps(ids, indent=2) + "\n")

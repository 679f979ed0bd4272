"""Experiment trackers for a training's figures: TensorBoard, MLflow, Weights & Biases.

transformers' own callbacks send the figures, on rank 0; this module opens the destinations and closes them. All files
are below the job's folder unless the trackers' own variables set another place, a resumed run continues the same
curves, and no data leave the machine without a request for it. A tracker that does not answer costs 10 s, not the
training: MLflow's client alone would try to open a run for a quarter of an hour, while all GPUs wait for rank 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
_MLFLOW_RUN = "MLFLOW_RUN_ID"
_IDS = "runs.json"
"""File below the folder of trackers: tracker -> the run that a resumed training continues."""
_DESTINATIONS: Mapping[Tracker, str] = {
    "tensorboard": _TENSORBOARD_FOLDER,
    "mlflow": _MLFLOW_STORE,
    "wandb": "WANDB_MODE",
}
"""Variables that name a tracker's server, or another folder than the job's."""
_MODULES: Mapping[Tracker, str] = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
CALL_SECONDS = 10.0
"""Limit of a call to a tracker with a server: it answers in milliseconds, and figures are sent in the background. Files
have no limit: a database of MLflow takes 2 CPU seconds to create.
"""


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
def tracking(
    arguments: Mapping[str, JsonValue], tracked: Tracked, note: Callable[[str], None]
) -> Iterator[tuple[BoundedTracker, ...]]:
    """Yield the trackers that `report_to` names. When the training fails, their runs are marked as failed.

    `note`: called with a sentence about a tracker that does not answer; the training goes on without it.
    Raise StageError STORAGE_LOST `TrackerUnavailable` when one refuses to be opened.
    """
    openers = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}
    with ExitStack() as stack:
        opened = []
        for name in trackers(arguments):
            seconds = CALL_SECONDS if _has_server(name, tracked.environment) else None
            tracker = BoundedTracker(name, openers[name](tracked), seconds, note)
            tracker.open()
            stack.push(tracker.close)
            opened.append(tracker)
        yield tuple(opened)


def _has_server(tracker: Tracker, environment: Mapping[str, str]) -> bool:
    destination = environment.get(_DESTINATIONS[tracker], "")
    is_url = "://" in destination and not destination.startswith(("sqlite:", "file:"))
    return is_url or destination in ("online", "shared", "databricks")


class BoundedTracker:
    """Tracker whose calls run in a thread of their own, for a limited time each. The first that takes longer, or fails
    once the tracker is open, is the last.
    """

    def __init__(
        self,
        name: Tracker,
        run: AbstractContextManager[TrainerCallback],
        seconds: float | None,
        note: Callable[[str], None],
    ) -> None:
        """`seconds`: limit of a call; None: none."""
        self.name = name
        self._run = run
        self._seconds = seconds
        self._note = note
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._callback: TrainerCallback | None = None
        """Callback of transformers; None: not open, or left out."""

    def open(self) -> None:
        """Open the destination. Raise StageError STORAGE_LOST when it refuses; one that takes too long is left out."""
        import_module(_MODULES[self.name])  # takes seconds, and no answer of anybody
        opening = self._thread.submit(self._run.__enter__)
        if not self._ends(opening):
            return
        if (error := opening.exception()) is not None:
            raise StageError(
                FailureClass.STORAGE_LOST,
                "TrackerUnavailable",
                f"{self.name} cannot be written to: {type(error).__name__}: {error}",
                f"Check the address and the credentials in the job's environment, or leave {self.name} out of "
                "training.arguments.report_to.",
            ) from error
        self._callback = opening.result()

    def notify(self, event: str, *arguments: Any, **figures: Any) -> None:
        """Pass an event of transformers to its callback."""
        if self._callback is not None:
            self._call(getattr(self._callback, event), *arguments, **figures)

    def close(self, *failure: Any) -> None:
        """Close the destination; `failure` is that of the training, as `__exit__` takes it."""
        if self._callback is not None:
            self._call(self._run.__exit__, *failure)

    def _call(self, function: Callable[..., object], *arguments: Any, **figures: Any) -> None:
        call = self._thread.submit(function, *arguments, **figures)
        if self._ends(call) and (error := call.exception()) is not None:
            self._leave_out(f"has failed with {type(error).__name__}: {str(error)[:200]}")

    def _ends(self, call: Future[Any]) -> bool:
        # A signal to stop raises its StageError from here.
        ends = bool(wait([call], self._seconds).done)
        if not ends:
            self._leave_out(f"did not answer within {self._seconds:g} s; check its address and the job's NetworkPolicy")
        return ends

    def _leave_out(self, reason: str) -> None:
        self._callback = None
        self._note(f"{self.name} {reason}. The training goes on without it.")


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
    run = environment.get(_MLFLOW_RUN) or _run_id(tracked, "mlflow")
    started = mlflow.start_run(run_id=run, run_name=environment.get("MLFLOW_RUN_NAME") or tracked.job)
    _remember(tracked, "mlflow", started.info.run_id)
    named = os.environ.pop(_MLFLOW_RUN, None)  # transformers' callback would start that run again
    status = "FAILED"
    try:
        yield MLflowCallback()  # type: ignore[no-untyped-call]
        status = "FINISHED"
    finally:
        if named is not None:
            os.environ[_MLFLOW_RUN] = named
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

"""Request for a run on this machine, its result, and the result as data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_contract.choices import Stage
from finetune_contract.layout import (
    JobPaths,
)
from finetune_operator.cli.local.workspace import (
    finished,
)
from finetune_operator.plan.types.plan_types import JobPlan
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FailureStatus, FineTuneJob


@dataclass(frozen=True)
class RunRequest:
    """Request of the user."""

    job: FineTuneJob
    workspace: Path
    settings: Settings
    stages: tuple[Stage, ...] = ()
    """Stages to run; empty: all."""
    restart: bool = False
    measure: bool = True
    verbose: bool = False
    report: bool = True
    """True to write report.html after the last stage."""
    command: str = ""
    """Command that repeats the whole run; empty: the report derives it."""

    @property
    def paths(self) -> JobPaths:
        return JobPaths.of(self.workspace, self.job.name)


@dataclass
class RunResult:
    """Result of a run: success, a failure, or an interruption (`exit_code` 130, 143, 129)."""

    plan: JobPlan
    seconds: dict[Stage, float] = field(default_factory=dict)
    """Wall-clock seconds by stage; those of the earlier run for a stage that was kept."""
    kept: list[Stage] = field(default_factory=list)
    failure: FailureStatus | None = None
    interrupted: Stage | None = None
    exit_code: int = 0


class CannotRunError(Exception):
    """Error of a run that is refused before anything is started; the text has a hint."""


def result_data(request: RunRequest, result: RunResult) -> dict[str, Any]:
    """Return the result for `-o json` and the table."""
    paths = request.paths
    try:
        metrics = json.loads(paths.metrics.read_text())
    except (OSError, ValueError):
        metrics = {}
    predicted = finished(paths, Stage.PREDICT)
    prediction = {} if predicted is None else predicted.metrics
    artifacts = {
        "model": paths.model,
        "predictions": Path(str(prediction["path"])) if "path" in prediction else None,
        "badRows": Path(str(prediction["bad_rows_path"])) if "bad_rows_path" in prediction else None,
        "metrics": paths.metrics,
        "report": paths.report,
        "plan": paths.plan,
    }
    world = result.plan.trainer.world
    failure = (
        None if result.failure is None else result.failure.model_dump(mode="json", by_alias=True, exclude_none=True)
    )
    return {
        "name": request.job.name,
        "outcome": "interrupted" if result.interrupted else "failed" if failure else "succeeded",
        "folder": str(paths.root),
        "strategy": result.plan.strategy,
        "worldSize": world.size if world else 1,
        "stages": [
            {"name": stage.value, "seconds": round(seconds, 1), "kept": stage in result.kept}
            for stage, seconds in result.seconds.items()
        ],
        "metrics": metrics,
        "artifacts": {name: str(path) for name, path in artifacts.items() if path is not None and path.exists()},
        "failure": failure,
    }

"""A job's folder on this machine: write access, existing results, and whether they belong to this job.

Results are kept unless the user asks otherwise, and never lost silently: finished stages of the same job are not run
again, a different job under the same name is refused, and a restart moves earlier results aside. A stage that failed
and left nothing does not make the corrected job a different one. Settings that only evaluation or prediction read may
change: that stage runs again, with the trained model. A stage's inputs are recorded when it starts, as the user's own
settings by field, so that a refusal can name the differences. Settings that change only how fast or where a stage runs
(resources, checkpoints, launcher, runPolicy) may change between runs.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError

from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts
from finetune_contract.layout import JobPaths
from finetune_contract.report import TrainerReport
from finetune_operator.cli.local.local_files import write_atomically
from finetune_operator.cli.local.measure import state_of_files
from finetune_operator.spec.types import FineTuneJob, GenerationSpec

Inputs: TypeAlias = dict[str, Any]
"""Field path of the job -> value, for every set field that a stage's result depends on."""

LOCAL_STAGES = (Stage.PREPARE, Stage.TRAIN, Stage.EVALUATE, Stage.PREDICT)
AFTER_TRAINING = (Stage.EVALUATE, Stage.PREDICT)
"""Stages that change nothing on which another stage depends."""
_OWN_BLOCKS = ("spec.evaluation", "spec.predict", "spec.generation")
"""Blocks of fields that stages of AFTER_TRAINING read."""
_PREDICT_DATASET = "spec.predict.dataset"
"""Field of the data that only predict reads; without it, prepare copies the columns of the predictions."""
INPUTS_FILE = "inputs.json"
FAILURE_FILE = "failure.json"
FILES_FIELD = "files of "
"""Prefix of entries for the content behind a URI."""


class BusyError(Exception):
    """Error of another process that works on this job."""


class UnusableWorkspaceError(Exception):
    """Error of results that cannot be written to their place."""


class DifferentJobError(Exception):
    """Error of a folder with results of another job."""

    def __init__(self, stage: Stage, differences: Sequence[str]) -> None:
        super().__init__("; ".join(differences))
        self.stage = stage
        self.differences = tuple(differences)


# ----------------------------------------------------------------------------------------------------------------- lock


@contextmanager
def locked(workspace: Path, name: str) -> Iterator[None]:
    """Lock the job against other runs; raise BusyError with the other's process id, UnusableWorkspaceError for a folder
    that is not writable.

    The kernel holds the lock and releases it with the process, however that ends, so a lock cannot be stale. The file
    stays: a lock on a file that somebody else just removed would exclude nobody.
    """
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        file = (workspace / f".{name}.lock").open("a+", encoding="utf-8")
    except OSError as error:
        reason = "it is a file" if workspace.is_file() else error.strerror
        raise UnusableWorkspaceError(
            f"--workspace {workspace}: cannot write there: {reason}. Name a folder that you may write to"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise BusyError(f"process {file.read().strip() or 'unknown'} is running this job in {workspace}") from error
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


# --------------------------------------------------------------------------------------------------------------- inputs


def inputs_of(job: FineTuneJob, stage: Stage) -> Inputs:
    """Return the inputs of the result of `stage`: its own settings and those of the stages before it."""
    spec = job.spec
    parts: dict[str, Any] = {"task": spec.task, "model": spec.model, "dataset": spec.dataset}
    parts["preparation"] = spec.preparation.model_copy(update={"engine": "auto", "workers": 1})
    if spec.training is not None:
        parts["training.seed"] = spec.training.seed
    if spec.script is not None:
        parts["training.script.git"] = spec.script.git
    if stage is not Stage.PREPARE:
        parts |= {"training": spec.training, "parallelism": spec.parallelism}
    if stage is Stage.EVALUATE:
        parts["evaluation"] = spec.evaluation
    if stage is Stage.PREDICT:
        # Sharing the rows among workers does not affect the result.
        shared = {"workers": 1, "engine": "job"}
        parts["predict"] = None if spec.predict is None else spec.predict.model_copy(update=shared)
    if stage in AFTER_TRAINING and spec.generation != GenerationSpec():
        parts["generation"] = spec.generation
    plain = {
        f"spec.{path}": part.model_dump(mode="json", by_alias=True, exclude_none=True)
        if isinstance(part, BaseModel)
        else part
        for path, part in parts.items()
    }
    uris = [spec.dataset.uri if spec.dataset else None]
    if stage is Stage.PREDICT and spec.predict is not None and spec.predict.dataset is not None:
        uris.append(spec.predict.dataset.uri)
    files = {f"{FILES_FIELD}{uri}": _files_behind(uri) for uri in uris if uri and uri.startswith("file://")}
    # Through JSON, so that values have the same types as in a record.
    flat: Inputs = json.loads(json.dumps(dict(_flat(plain)) | files))
    return flat


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{key}.")
        elif inner is not None:
            yield f"{prefix}{key}", inner


_TEXT_FILES = (".csv", ".json", ".jsonl", ".tsv", ".txt")
"""Endings of files whose bytes are about those of their rows; others are compressed."""


def bytes_to_predict(job: FineTuneJob) -> int | None:
    """Return the bytes of the rows of `predict.dataset`; None unless they are text files of this machine."""
    predict = job.spec.predict
    if predict is None or predict.dataset is None or not predict.dataset.uri.startswith("file://"):
        return None
    files = _files_behind(predict.dataset.uri)
    if not files or not all(name.endswith(_TEXT_FILES) for name, _, _ in files):
        return None
    return sum(size for _, size, _ in files)


def _files_behind(uri: str) -> list[tuple[str, int, int]]:
    path = Path(uri.removeprefix("file://"))
    if any(sign in path.name for sign in "*?["):
        return [state for match in sorted(path.parent.glob(path.name)) for state in state_of_files(match)]
    return state_of_files(path) if path.exists() else []


def recorded_inputs(paths: JobPaths) -> dict[str, Inputs]:
    """Return the inputs of each stage that has started, by its name; empty if none has."""
    try:
        record = json.loads((paths.root / INPUTS_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def record_inputs(paths: JobPaths, job: FineTuneJob, stage: Stage) -> None:
    """Record the inputs of `stage`, which is about to start."""
    record = recorded_inputs(paths) | {stage.value: inputs_of(job, stage)}
    write_atomically(paths.root / INPUTS_FILE, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def differences(earlier: Inputs, now: Inputs) -> list[str]:
    """Return one phrase for each field that has changed."""
    changed = [field for field in dict.fromkeys([*earlier, *now]) if earlier.get(field) != now.get(field)]
    return [_difference(field, earlier.get(field), now.get(field)) for field in changed]


def _difference(field: str, earlier: object, now: object) -> str:
    if field.startswith(FILES_FIELD):
        return f"the {field} have changed"
    return f"{field} was {_shown(earlier)} and is {_shown(now)}"


def _shown(value: object) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


# -------------------------------------------------------------------------------------------------------------- results


def finished(paths: JobPaths, stage: Stage) -> TrainerReport | None:
    """Return the report of a stage that succeeded; None if it has not."""
    try:
        report = TrainerReport.model_validate_json((paths.state / f"{stage}.json").read_text())
    except (OSError, ValidationError):
        return None
    return report if report.outcome == "succeeded" else None


def check_same_job(paths: JobPaths, job: FineTuneJob, stages: Iterable[Stage]) -> None:
    """Raise DifferentJobError if one of the stages has results of other inputs than the job's current ones."""
    record = recorded_inputs(paths)
    for stage in stages:
        earlier = record.get(stage.value)
        if earlier is not None and _has_results(paths, stage):
            changed = differences(earlier, inputs_of(job, stage))
            if changed:
                raise DifferentJobError(stage, changed)
        elif finished(paths, stage) is not None:
            raise DifferentJobError(stage, [f"{INPUTS_FILE} does not record the inputs of {stage}"])


def _has_results(paths: JobPaths, stage: Stage) -> bool:
    """Return False for a prepare or a training that has left nothing: a corrected job would replace no results."""
    match stage:
        case Stage.PREPARE:
            places: tuple[Path, ...] = (paths.prepared,)
        case Stage.TRAIN:
            places = (paths.checkpoints, paths.model, paths.history)
        case _:
            return True
    left = any(place.is_file() or any(place.glob("*")) for place in places)
    return left or finished(paths, stage) is not None


def changed_after_training(paths: JobPaths, job: FineTuneJob) -> dict[Stage, list[str]]:
    """Return the stages of AFTER_TRAINING that have started and whose own settings, and nothing else, have changed
    since, with one phrase for each changed field.
    """
    record = recorded_inputs(paths)
    changes = {}
    for stage in AFTER_TRAINING:
        if stage.value not in record:
            continue
        earlier, now = record[stage.value], inputs_of(job, stage)
        changed = [field for field in {**earlier, **now} if earlier.get(field) != now.get(field)]
        if changed and all(_is_own(field, earlier, now) for field in changed):
            changes[stage] = differences(earlier, now)
    return changes


def _is_own(field: str, earlier: Inputs, now: Inputs) -> bool:
    """Return whether no stage before reads the field."""
    data, before = (inputs.get(f"{_PREDICT_DATASET}.uri") for inputs in (now, earlier))
    if field.startswith((_PREDICT_DATASET, "spec.predict.columns")):
        return data is not None
    files = {f"{FILES_FIELD}{uri}" for uri in (data, before) if uri != now.get("spec.dataset.uri")}
    return field.startswith(_OWN_BLOCKS) or field in files


def prepared_facts(paths: JobPaths, job: FineTuneJob) -> DataFacts | None:
    """Return facts of data that an earlier run prepared for this very job; None if there are none."""
    earlier = recorded_inputs(paths).get(Stage.PREPARE.value)
    if earlier is None or finished(paths, Stage.PREPARE) is None:
        return None
    if differences(earlier, inputs_of(job, Stage.PREPARE)):
        return None
    return read_data_facts(paths)


def read_data_facts(paths: JobPaths) -> DataFacts | None:
    """Return the facts of the prepared data in the folder."""
    try:
        return DataFacts.model_validate_json((paths.prepared / "data.json").read_text())
    except (OSError, ValidationError):
        return None


def size_of(folder: Path) -> int:
    """Return the bytes of the files in `folder`; 0 if there is none, or a link in its place."""
    if folder.is_symlink():
        return 0
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def move_earlier_results(paths: JobPaths, stages: Sequence[Stage]) -> Path | None:
    """Move the products of `stages` to `<job>.previous-<n>` beside the job's folder; return None if there are none.

    All stages: the whole folder moves. Only some: their products move, and metrics.json is copied because all stages
    share it.
    """
    if not paths.root.exists() or not any(paths.root.iterdir()):
        return None
    number = 1
    while (place := paths.root.with_name(f"{paths.root.name}.previous-{number}")).exists():
        number += 1
    if set(stages) == set(LOCAL_STAGES):
        paths.root.rename(place)
        return place
    products = [product for stage in stages for product in _products(paths, stage) if product.exists()]
    if not products:
        return None
    if paths.metrics.exists():
        write_atomically(place / paths.metrics.name, paths.metrics.read_text())
    for product in products:
        target = place / product.relative_to(paths.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        product.rename(target)
    names = {stage.value for stage in stages}
    record = {name: inputs for name, inputs in recorded_inputs(paths).items() if name not in names}
    write_atomically(paths.root / INPUTS_FILE, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return place


def _products(paths: JobPaths, stage: Stage) -> list[Path]:
    marker = paths.state / f"{stage}.json"
    match stage:
        case Stage.PREPARE:
            return [marker, paths.prepared, paths.code]
        case Stage.TRAIN:
            return [marker, paths.checkpoints, paths.model, paths.history]
        case Stage.PREDICT:
            return [marker, paths.predictions_jsonl, paths.predictions_parquet]
        case _:
            return [marker]

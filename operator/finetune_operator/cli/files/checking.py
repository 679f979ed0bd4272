"""`finetune validate --data`: the trainer's findings in the first rows of a job's data.

The trainer reads them, in a process of its own, with the readers and the rules of its stage prepare; this module calls
it and shows the answer. Nothing is planned, and no model is loaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from finetune_contract.checked import CheckedData, CheckedSplit, TextLengths
from finetune_contract.data_settings import Preparation
from finetune_contract.inference_settings import Evaluation, Gate, Generation, Prediction
from finetune_contract.layout import JobPaths
from finetune_contract.python_command import module_command
from finetune_contract.report import FailureReport
from finetune_contract.trainer_job import TrainerJob
from finetune_operator.cli.files.job_files import JobEntry, located
from finetune_operator.cli.local import hub_reach
from finetune_operator.cli.local.environment import trainer_environment, usable_cores
from finetune_operator.cli.local.local_files import write_atomically
from finetune_operator.cli.local.measure import TRAINER, source_of_model, trainer_is_installed
from finetune_operator.cli.terminal.console import UsageError, err, print_trimmed
from finetune_operator.plan.plan import packs_rows
from finetune_operator.plan.trainer_order import data_source, packs_any_rows, predicted_source
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.types import EvaluationSpec, FineTuneJob, FineTuneJobSpec, PredictSpec, TrainingSpec

_SHOWN_LABELS = 6
_FIELD = re.compile(r"(?:dataset|predict|model|preparation|evaluation|training|generation)(?:\.[A-Za-z]+)+(?= is )")
"""Start of messages about a field."""


@dataclass(frozen=True)
class EntryCheck:
    """Findings for one job of the files."""

    data: CheckedData
    problems: tuple[tuple[str, Problem], ...]
    """Source and problem."""


def check_entry(entry: JobEntry) -> EntryCheck:
    """Run the trainer on the first rows. Raise UsageError if it is not installed or gives no answer."""
    if not trainer_is_installed():
        raise UsageError("--data requires the package finetune-trainer, which is not installed here")
    unreadable = tuple(
        (entry.source, located(entry.document, problem))
        for problem in (*_cluster_only(entry.job.spec), *_out_of_reach(entry.job.spec))
    )
    if unreadable:
        return EntryCheck(CheckedData(), unreadable)
    with err().status(f"Reading the data of {entry.job.name} ..."):
        data = _run_check(entry.job)
    return EntryCheck(data, tuple((entry.source, _problem(entry, problem)) for problem in data.problems))


def _datasets(spec: FineTuneJobSpec) -> dict[str, str]:
    """Return the URIs of the job's data sets by their fields."""
    predicted = spec.predict.dataset if spec.predict else None
    datasets = {"spec.dataset.uri": spec.dataset, "spec.predict.dataset.uri": predicted}
    return {path: rows.uri for path, rows in datasets.items() if rows is not None}


def _cluster_only(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield the problems of data sets that only a cluster can see."""
    rule = "is a claim of the cluster, which --data cannot read from this machine"
    for path, uri in _datasets(spec).items():
        if uri.startswith("pvc://"):
            yield Problem(path, f'"{uri}"', rule, "omit --data, or check a copy of the data with file://")


def _out_of_reach(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield the problems of data sets that neither the Hub nor its cache on this machine has."""
    datasets = _datasets(spec)
    for uri in hub_reach.missing(dict.fromkeys(datasets.values(), "dataset")):
        rule = f"is not in the cache of this machine, and {hub_reach.unreachable_reason()}"
        yield from (Problem(path, f'"{uri}"', rule, hub_reach.HINT) for path in datasets if datasets[path] == uri)


def _run_check(job: FineTuneJob) -> CheckedData:
    options = _training_options(job.spec.training)
    with tempfile.TemporaryDirectory(prefix="finetune-check-") as folder:
        paths = JobPaths.of(Path(folder), job.name)
        write_atomically(paths.job, data_question(job).to_json())
        report = Path(folder) / "report.json"
        threads = usable_cores()
        variables = {**os.environ, **hub_reach.variables(_hub_uris(job))}
        environment = trainer_environment(variables, device="cpu", threads=threads, report=report, progress=None)
        command = module_command(TRAINER, "check", "--job", str(paths.job), "--workspace", folder, *options)
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        return CheckedData.model_validate_json(completed.stdout[max(completed.stdout.find("{"), 0) :])
    except ValidationError:
        last_line = (completed.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise UsageError(f"--data: the trainer could not check the data of {job.name}: {last_line}") from None


def _training_options(training: TrainingSpec | None) -> list[str]:
    """Return the trainer's options for the kind of training, which is not in its job before a plan is made."""
    if training is None:
        return []
    if training.script is not None:
        return ["--script"]
    stopping = training.early_stopping
    watched = [] if stopping is None else ["--stopping", stopping.metric]
    return ["--trains", "--batch", str(training.global_batch_size), *watched]


def _hub_uris(job: FineTuneJob) -> dict[str, hub_reach.Kind]:
    rows: dict[str, hub_reach.Kind] = dict.fromkeys(_datasets(job.spec).values(), "dataset")
    return {job.spec.model.uri: "model", **rows}


def data_question(job: FineTuneJob) -> TrainerJob:
    """Return the part of `job.json` about data, before anything is planned."""
    spec = job.spec
    packing = spec.training is not None and spec.training.script is None and packs_rows(spec)
    return TrainerJob(
        name=job.name,
        task=spec.task,
        model=source_of_model(job),
        dataset=None if spec.dataset is None else data_source(spec.task, spec.dataset),
        preparation=Preparation(
            max_length=spec.preparation.max_length,
            stride=spec.preparation.stride,
            packing=packing,
            packing_asked=packing and packs_any_rows(spec),
            chat_template=spec.preparation.chat_template,
        ),
        evaluation=None if spec.evaluation is None else _evaluation(spec.evaluation),
        predict=None if spec.predict is None else _prediction(spec, spec.predict),
        generation=Generation(**spec.generation.model_dump()),
    )


def _evaluation(evaluation: EvaluationSpec) -> Evaluation:
    gate = evaluation.gate
    return Evaluation(
        metrics=None if evaluation.metrics == "auto" else evaluation.metrics,
        gate=None if gate is None else Gate(metric=gate.metric, minimum=gate.minimum, maximum=gate.maximum),
        device="cpu",
        batch_tokens=1,
    )


def _prediction(spec: FineTuneJobSpec, predict: PredictSpec) -> Prediction:
    return Prediction(dataset=predicted_source(spec), columns=predict.columns, device="cpu", batch_tokens=1)


def _problem(entry: JobEntry, failure: FailureReport) -> Problem:
    """Return the failure as a problem of the field that it is about, else of the data set."""
    field = _FIELD.match(failure.message)
    rule = failure.message if field is None else failure.message[field.end() :].strip()
    path = "spec.dataset.uri" if entry.job.spec.dataset is not None else "spec.predict.dataset.uri"
    if field is not None:
        path = f"spec.{field.group()}"
    return located(entry.document, Problem(path, None, rule, failure.hint))


# ----------------------------------------------------------------------------------------------------------- for people


def print_check(console: Console, entry: JobEntry, data: CheckedData) -> None:
    """Print a table with a row for each split."""
    if not data.splits:
        return
    length = data.max_length
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    labels = any(split.labels for split in data.splits)
    longer = any(split.longer is not None for split in data.splits)
    for title in ("split", "rows read", *(["labels"] if labels else []), "words (mean, longest)"):
        table.add_column(title, overflow="fold")
    if longer:
        table.add_column("tokens (mean, longest)")
        table.add_column(f"longer than {length} tokens", overflow="fold")
    for split in data.splits:
        cells = [split.role, f"{'all' if split.whole else 'first'} {split.rows:,}"]
        cells += [_labels(split)] if labels else []
        cells.append("; ".join(_lengths(lengths, name, split) for name, lengths in split.words.items()))
        if longer:
            cells += ["" if split.tokens is None else _lengths(split.tokens), _longer(split)]
        table.add_row(*cells)
    console.print(f"Data of {entry.job.name}", style="bold cyan")
    print_trimmed(console, Padding(table, (0, 0, 0, 2)))
    for columns in dict.fromkeys(split.columns for split in data.splits):
        roles = ", ".join(split.role for split in data.splits if split.columns == columns)
        console.print(f"  columns of {roles}: {', '.join(columns)}", soft_wrap=True)
    if length is not None and any(split.longer for split in data.splits):
        console.print(f"  Rows of more than {length} tokens {data.long_rows}; preparation.maxLength sets the length.")


def _labels(split: CheckedSplit) -> str:
    shown = [f"{name} {count:,}" for name, count in list(split.labels.items())[:_SHOWN_LABELS]]
    more = len(split.labels) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _lengths(lengths: TextLengths, name: str = "", split: CheckedSplit | None = None) -> str:
    prefix = f"{name} " if split is not None and len(split.words) > 1 else ""
    return f"{prefix}{lengths.mean:,.0f}, {lengths.longest:,}"


def _longer(split: CheckedSplit) -> str:
    if split.longer is None:
        return ""
    share = 100 * split.longer / max(split.rows, 1)
    return f"{'about ' if split.estimated else ''}{split.longer:,} ({share:.1f} %)" if split.longer else "none"

"""`finetune predict`: predictions for data on this machine, without a job file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from finetune_operator.cli.terminal.console import Output, UsageError, note, print_line

_TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "masked-lm",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
}
"""End of a model's class -> task. Sequence-to-sequence models have none: they may summarise or translate."""
_ENDINGS = (".jsonl", ".parquet")


Model: TypeAlias = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model or of a run, or hf://name.")]
Data: TypeAlias = Annotated[str, typer.Argument(metavar="DATA", help="File, folder or glob, or hf://name.")]
Out: TypeAlias = Annotated[
    Path, typer.Option("--out", "-o", metavar="OUT", help="File for the predictions, .jsonl or .parquet.")
]
TaskName: TypeAlias = Annotated[
    str | None,
    typer.Option("--task", metavar="TASK", help="Task of the model. Default: from the folder's config.json."),
]
Columns: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="ROLE=NAME", help="Column of a role, such as text=review; repeatable. Default: the role."
    ),
]
CopiedColumns: TypeAlias = Annotated[
    list[str] | None, typer.Option("--copy", metavar="NAME", help="Column to copy to the output; repeatable.")
]
Split: TypeAlias = Annotated[
    str | None, typer.Option("--split", metavar="NAME", help="Split or file stem. Default: the only one, or test.")
]
MaxLength: TypeAlias = Annotated[
    int | None,
    typer.Option("--max-length", metavar="TOKENS", help="Truncate rows to this length. Default: the model's limit."),
]
MaxBadRows: TypeAlias = Annotated[
    int | None,
    typer.Option("--max-bad-rows", metavar="COUNT", help="Maximum unreadable rows. Default: 1 % of the rows."),
]
Optimization: TypeAlias = Annotated[
    str,
    typer.Option(
        "--optimization", metavar="NAME", help="Optimization of the model; auto measures and chooses in a large job."
    ),
]
Tolerance: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--tolerance", metavar="SHARE", help="Share of labels that optimization must not change. Default: all."
    ),
]
Server: TypeAlias = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="OpenAI-compatible server with the model, for --optimization vllm."),
]
Workers: TypeAlias = Annotated[
    int, typer.Option("--workers", min=1, max=1024, metavar="N", help="Processes that share the rows and the cores.")
]


def predict(
    model: Model,
    data: Data,
    out: Out,
    task: TaskName = None,
    column: Columns = None,
    copy: CopiedColumns = None,
    split: Split = None,
    max_length: MaxLength = None,
    max_bad_rows: MaxBadRows = None,
    optimization: Optimization = "auto",
    tolerance: Tolerance = None,
    server: Server = None,
    workers: Workers = 1,
    restart: Annotated[bool, typer.Option("--restart", help="Start over instead of resuming an earlier call.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job without running it.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also show the log.")] = False,
) -> None:
    """Predict with a model on this machine.

    Run the prediction as a job, as `finetune run` does; --dry-run prints the job. If the call is stopped (Ctrl-C),
    the same call resumes it, also with another number of workers. Unreadable rows are listed in a file named like
    OUT, with .bad-rows.jsonl.

    \b
    Examples:
      finetune predict runs/quickstart reviews.jsonl -o predictions.jsonl
      finetune predict ./model 'new/*.csv' -o answers.parquet --column text=review --copy id
      finetune predict ./model reviews.jsonl -o out.jsonl --workers 4
      finetune predict hf://org/name rows.jsonl -o out.jsonl --task text-classification
    """
    out = out.resolve()
    if out.suffix not in _ENDINGS:
        raise UsageError(f"--out: {out.name} must end in {' or '.join(_ENDINGS)}, which sets the format")
    uri = model_uri(model)
    rows: dict[str, Any] = {"uri": _data_uri(data), "columns": _columns(column or ())}
    if split is not None:
        rows["splits"] = {"test": split}
    predicts: dict[str, Any] = {"dataset": rows, "output": f"file://{out}", "columns": list(copy or ())}
    if optimization != "auto":
        predicts["optimization"] = optimization
    if tolerance is not None:
        predicts["tolerance"] = tolerance
    if server is not None:
        predicts["server"] = server
    if workers > 1:
        predicts["workers"] = workers
    if max_bad_rows is not None:
        predicts["maxBadRows"] = max_bad_rows
    spec: dict[str, Any] = {"task": task or task_of(uri), "model": {"uri": uri}, "predict": predicts}
    if max_length is not None:
        spec["preparation"] = {"maxLength": max_length}
    from finetune_operator.cli.terminal.yaml_text import documents
    from finetune_operator.spec.types import API_VERSION, KIND

    job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "predict"}, "spec": spec}
    if dry_run:
        print_line(documents([job]).rstrip("\n"))
        return
    _run(documents([job]), out, restart=restart, verbose=verbose)


def _run(job_text: str, out: Path, *, restart: bool, verbose: bool) -> None:
    """Run the job in a folder beside `out`, which is kept until the predictions are complete."""
    from finetune_contract.choices import Stage
    from finetune_operator.cli.commands.run_command import refusals_reported, show_failure
    from finetune_operator.cli.commands.steps import checked_jobs, refuse_absent
    from finetune_operator.cli.local.local_request import RunRequest
    from finetune_operator.cli.local.local_run import run as run_locally
    from finetune_operator.cli.local.workspace import finished
    from finetune_operator.spec.settings.settings import LOCAL_SETTINGS

    folder = out.with_name(f".{out.name}.predict")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.yaml"
    file.write_text(job_text, encoding="utf-8")
    try:
        (entry,) = checked_jobs([str(file)], LOCAL_SETTINGS, Output.TEXT)
        refuse_absent([entry], Output.TEXT)
    except typer.Exit:
        file.unlink()
        with suppress(OSError):
            folder.rmdir()  # it holds what an earlier call has left
        raise
    request = RunRequest(
        job=entry.job,
        workspace=folder,
        settings=LOCAL_SETTINGS,
        restart=restart,
        measure=False,
        verbose=verbose,
        report=False,
    )
    with refusals_reported(request, entry, Output.TEXT, f"Choose another file than {out.name}, or start over"):
        result = run_locally(request)
    if result.failure is not None:
        show_failure(request, result.failure)
    elif result.interrupted is not None:
        note(f"stopped; the same call resumes from the state in {folder}")
    else:
        report = finished(request.paths, Stage.PREDICT)
        metrics = {} if report is None else report.metrics
        shutil.rmtree(folder, ignore_errors=True)
        print_line(f"{metrics.get('rows', 0):,} rows -> {out}")
        if "bad_rows" in metrics:
            note(f"rows without a prediction: {metrics['bad_rows']:,}; the reasons are in {metrics['bad_rows_path']}")
    raise typer.Exit(result.exit_code)


def model_uri(text: str) -> str:
    """Return the URI of a folder with a model or of a run's folder; return a URI unchanged."""
    if "://" in text:
        return text
    folder = Path(text).expanduser()
    for place in (folder, folder / "model"):
        if (place / "config.json").is_file():
            return f"file://{place.resolve()}"
    reason = "has no config.json" if folder.is_dir() else "does not exist"
    raise UsageError(f"MODEL: {text} {reason}; name a folder with a model, a run's folder, or hf://name for the Hub")


def _data_uri(text: str) -> str:
    if "://" in text:
        return text
    from finetune_operator.cli.files.job_files import GLOB_CHARACTERS, glob_matches

    path = Path(text).expanduser().absolute()
    if not path.exists() and not glob_matches(str(path)):
        reason = "matches no file" if GLOB_CHARACTERS & set(text) else "does not exist"
        raise UsageError(f"DATA: {text} {reason}; name a file, a folder, a glob, or hf://name for the Hub")
    return f"file://{path}"


def task_of(uri: str) -> str:
    """Return the task of the classes in the model's config.json."""
    names: Sequence[str] = ()
    if uri.startswith("file://"):
        try:
            names = (
                json.loads((Path(uri.removeprefix("file://")) / "config.json").read_bytes()).get("architectures") or ()
            )
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(f"MODEL: {uri}/config.json cannot be read: {error}") from error
    tasks = [task for name in names for end, task in _TASKS.items() if str(name).endswith(end)]
    if not tasks:
        reason = f"{names[0]} supports several tasks" if names else "only a folder's config.json shows it"
        raise UsageError(f"--task: name the model's task, such as text-classification or summarization: {reason}")
    return tasks[0]


def _columns(given: Sequence[str]) -> dict[str, str]:
    columns = {}
    for text in given:
        role, mark, name = text.partition("=")
        if not (role and mark and name):
            raise UsageError(f"--column: {text!r} must be ROLE=NAME, such as text=review")
        columns[role] = name
    return columns

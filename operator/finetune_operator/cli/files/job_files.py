"""From file names on the command line to checked jobs: the first step of every command.

Files, folders and standard input are accepted as by kubectl. All problems in all of them are collected with file and
line. A relative `file://` URI is resolved from the folder of the file that holds it, so that a job file and its data
can be moved together and run from anywhere; it becomes absolute here, before anything is planned.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from finetune_operator.cli.local.local_files import place_of
from finetune_operator.cli.terminal.console import UsageError
from finetune_operator.documents import Document, Position, position_of, read_documents
from finetune_operator.documents.input_file import UnreadableFileError, files_in, read_input, read_stream
from finetune_operator.spec.checks.notices import notices, null_evaluation
from finetune_operator.spec.checks.validation import foreign, notices_for_invalid_job, validate_job
from finetune_operator.spec.problems import PathPart, Problem, format_path
from finetune_operator.spec.settings.settings import LOCAL_SETTINGS, Settings
from finetune_operator.spec.types import KIND, FineTuneJob

STDIN = "-"
SUFFIXES = (".yaml", ".yml", ".json")
"""Endings of files that are read in a folder, as by kubectl; others are ignored."""

GLOB_CHARACTERS = frozenset("*?[")
_LAST_PART = re.compile(r"""(?:\.?[A-Za-z_][A-Za-z0-9_-]*|\[[0-9]+\]|\["(?:[^"\\]|\\.)*"\])$""")


@dataclass(frozen=True)
class JobEntry:
    """A checked job and its source."""

    source: str
    """File as the user named it; `<stdin>` for standard input."""
    folder: Path
    """Folder from which relative `file://` URIs are resolved."""
    document: Document
    job: FineTuneJob


@dataclass(frozen=True)
class Inputs:
    """Everything that was read, good or bad."""

    entries: tuple[JobEntry, ...]
    problems: tuple[tuple[str, Problem], ...]
    """Source and problem, in the order of files and lines."""
    notes: tuple[str, ...]
    """Notes on ignored documents, and on accepted jobs."""


_NO_JOB = Problem(
    "",
    None,
    f"there is no {KIND} in the input",
    "name a file that holds one: apiVersion: finetune.dev/v1alpha1, kind: FineTuneJob, metadata: {name: my-job}, and "
    "spec with task, model: {uri: hf://...}, dataset: {uri: hf://...} and training: {}",
)


def read_inputs(names: Sequence[str], settings: Settings = LOCAL_SETTINGS) -> Inputs:
    """Return all FineTuneJobs in `names`, checked against `settings`.

    Raise UsageError (a usage error) for a file that cannot be read and for a call that names no file.
    """
    if not names:
        raise UsageError("name at least one file: FILE, or -f FILE (- reads standard input)")
    entries: list[JobEntry] = []
    problems: list[tuple[str, Problem]] = []
    notes: list[str] = []
    programs: list[tuple[str, Problem]] = []
    by_name: dict[tuple[str | None, str], JobEntry] = {}
    for source, folder, content in _contents(names):
        documents, unreadable = read_documents(content)
        file_problems = list(unreadable)
        for document, following in zip_longest(documents, documents[1:]):
            end = None if following is None else following.line
            ignored = foreign(document.value)
            if ignored is not None:
                from finetune_operator.spec.hints.other_tools import workload

                program = workload(document.value)
                if program is not None:
                    programs.append((source, located(document, program)))
                notes.append(f"{source}:{document.line}: {ignored}")
                continue
            job, wrong = validate_job(document.value, settings)
            file_problems.extend(located(document, problem) for problem in wrong)
            misread = any(document.line <= (p.line or 0) and (end is None or (p.line or 0) < end) for p in unreadable)
            if job is None or wrong or misread:
                beside = () if misread else notices_for_invalid_job(document.value, wrong)
                notes.extend(f"{source}:{document.line}: {notice}." for notice in beside)
                continue
            entry = JobEntry(source, folder, document, _with_absolute_uris(job, folder))
            earlier = by_name.setdefault((job.metadata.namespace, job.name), entry)
            if earlier is entry:
                entries.append(entry)
                notes.extend(
                    f"{source}:{document.line}: {job.name}: {notice}."
                    for notice in (*notices(job.spec, settings.network_policy), *null_evaluation(document.value))
                )
            else:
                file_problems.append(_same_name(document, job.name, earlier))
        file_problems.sort(key=lambda problem: (problem.line or 0, problem.column or 0))
        problems.extend((source, problem) for problem in file_problems)
    if not entries and not problems and programs:
        return Inputs((), tuple(programs[:1]), ())
    if not entries and not problems:
        problems.append(("<stdin>" if names[0] == STDIN else names[0], _NO_JOB))
    return Inputs(tuple(entries), tuple(problems), tuple(notes))


def _contents(names: Sequence[str]) -> Iterator[tuple[str, Path, bytes]]:
    try:
        for name in names:
            if name == STDIN:
                if sys.stdin is None:
                    raise UsageError("there is no standard input to read")
                yield "<stdin>", Path.cwd(), read_stream(sys.stdin.buffer)
                continue
            files = files_in(Path(name), SUFFIXES)
            if files == []:
                raise UsageError(f"the folder {name} contains no {', '.join(SUFFIXES)} file")
            for file in files or [Path(name)]:
                content = read_input(file)
                yield str(file), file.resolve().parent, content
    except UnreadableFileError as error:
        raise UsageError(str(error)) from error


def _same_name(document: Document, name: str, earlier: JobEntry) -> Problem:
    position = position_of(document, ("metadata", "name"))
    return Problem(
        "metadata.name",
        f'"{name}"',
        f"must be unique; {earlier.source}:{earlier.document.line} has the same name",
        "give one of them another name",
        position.line,
        position.column,
        "Duplicate",
    )


def located(document: Document, problem: Problem) -> Problem:
    """Return the problem with the line of its field, or of the nearest object that should hold it."""
    if problem.line is not None:
        return problem
    position = _position(document, problem.path)
    return replace(problem, line=position.line, column=position.column)


def _position(document: Document, written: str) -> Position:
    by_text: dict[str, tuple[PathPart, ...]] = {format_path(path): path for path in document.positions}
    while written and written not in by_text:
        shorter = _LAST_PART.sub("", written)
        written = shorter if shorter != written else ""
    return position_of(document, by_text.get(written, ()))


def _with_absolute_uris(job: FineTuneJob, folder: Path) -> FineTuneJob:
    spec = job.spec
    model = spec.model.model_copy(update={"uri": absolute_uri(spec.model.uri, folder)})
    update: dict[str, object] = {"model": model}
    if spec.dataset is not None:
        update["dataset"] = spec.dataset.model_copy(update={"uri": absolute_uri(spec.dataset.uri, folder)})
    if spec.predict is not None:
        predict: dict[str, object] = {}
        if spec.predict.dataset is not None:
            rows = spec.predict.dataset
            predict["dataset"] = rows.model_copy(update={"uri": absolute_uri(rows.uri, folder)})
        if spec.predict.output is not None:
            place = absolute_uri(spec.predict.output, folder)
            is_folder = spec.predict.output.endswith("/") and not place.endswith("/")
            predict["output"] = f"{place}/" if is_folder else place
        update["predict"] = spec.predict.model_copy(update=predict)
    if spec.endpoint is not None and spec.endpoint.adapters:
        adapters = tuple(
            adapter.model_copy(update={"uri": absolute_uri(adapter.uri, folder)}) for adapter in spec.endpoint.adapters
        )
        update["endpoint"] = spec.endpoint.model_copy(update={"adapters": adapters})
    return job.model_copy(update={"spec": spec.model_copy(update=update)})


def absolute_uri(uri: str, folder: Path) -> str:
    """Return a `file://` URI made absolute from `folder`, with `~/` as the home folder; any other unchanged."""
    rest = uri.removeprefix("file://")
    if rest == uri:
        return uri
    if rest.startswith("~/"):
        rest = str(Path.home() / rest.removeprefix("~/"))
    return f"file://{(folder / rest).resolve()}"


def glob_matches(path: str) -> bool:
    """Return True if an absolute path has characters of a glob and matches a file."""
    return bool(GLOB_CHARACTERS & set(path)) and any(Path("/").glob(path.lstrip("/")))


def absent_inputs(entry: JobEntry) -> tuple[Problem, ...]:
    """Return the problems of models and data sets behind `file://` and `pkg://` that do not exist."""
    spec = entry.job.spec
    predicted = spec.predict.dataset if spec.predict else None
    named = {
        "spec.model.uri": (spec.model.uri, "/config.json", "a folder with a model"),
        "spec.dataset.uri": (spec.dataset.uri if spec.dataset else "", "", "a folder, a file or a glob"),
        "spec.predict.dataset.uri": (predicted.uri if predicted else "", "", "a folder, a file or a glob"),
    }
    problems = []
    for path, (uri, inside, target) in named.items():
        absent = _absence(uri, inside, target)
        if absent is not None:
            problems.append(located(entry.document, Problem(path, None, *absent)))
    return tuple(problems)


def _absence(uri: str, inside: str, target: str) -> tuple[str, str] | None:
    """Return rule and hint for a place that does not exist; None: it exists, or is not on this machine."""
    scheme, _, rest = uri.partition("://")
    if scheme not in ("file", "pkg"):
        return None
    root = place_of(uri)
    if root is None:
        package = rest.partition("/")[0]
        return f"no package {package} is installed here", f"install it, or name {target} with file://"
    place = f"{root}{inside}"
    if Path(place).exists() or (not inside and glob_matches(place)):
        return None
    relative = "; file://path without a third slash is relative to the job file's folder" if scheme == "file" else ""
    return f"{place} does not exist", f"name {target} that exists{relative}"


def read_settings(file: Path) -> Settings:
    """Read an administrator's settings file. Raise UsageError, with every problem, if it cannot be used."""
    from finetune_operator.documents.settings_file import SettingsError, read_settings_file

    try:
        return read_settings_file(file)
    except SettingsError as error:
        raise UsageError(f"--settings: {error}") from error

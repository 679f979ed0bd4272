"""Checks of a spec that need several fields at once, or the operator's settings beside them."""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Iterator, Mapping, Set
from typing import get_args

from pydantic import JsonValue

from finetune_contract.arguments import (
    OWNED_BY_PLAN,
    ArgumentProblem,
    ArgumentReason,
    Sampling,
    Tracker,
    check_arguments,
    known_arguments,
)
from finetune_contract.hub import is_hub_name
from finetune_operator.spec.checks.allow_check import allowed_problems
from finetune_operator.spec.checks.copied_settings import settle, with_same
from finetune_operator.spec.checks.deepspeed_overrides import override_problems
from finetune_operator.spec.checks.named_objects import named_uris
from finetune_operator.spec.fields.field_values import Path, value_at
from finetune_operator.spec.fields.support import served_schemes, unsupported
from finetune_operator.spec.fields.uri_hints import (
    DATA_ENDING,
    copy_hint,
    hub_name_hint,
    one_machine,
    rows_in_files,
    windows_path_hint,
)
from finetune_operator.spec.hint_values import Drop, Hint, ReplaceBy
from finetune_operator.spec.hints.mounted_claims import in_claim, on_claim
from finetune_operator.spec.problems import (
    Problem,
    Reason,
    describe_value,
    format_path,
)
from finetune_operator.spec.rules import RULES, SOMETHING_TO_DO
from finetune_operator.spec.rules.rule import Rule
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import (
    HYPERPARAMETER_PATTERN,
    PATTERN_DESCRIPTIONS,
    FineTuneJobSpec,
    TrainingSpec,
)

# Strict, because git and other readers disagree on unusual URLs: the checked URL must be the fetched one.
_GIT_URL = re.compile(r"https://(?P<host>[A-Za-z0-9.-]+)(:443)?/[A-Za-z0-9._~/%+-]+")
_HUB_SPLIT = re.compile(r"\w+(\.\w+)*(\[(-?[\d_]+%?)?:(-?[\d_]+%?)?\])?(\([^)]*\))?")
"""`_SUB_SPEC_RE` of `datasets/arrow_reader.py`."""
_SLICE = re.compile(r"\[[^\[\]]*:[^\[\]]*\]$")
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%|0?(?P<part>\.[0-9]+)")
_OTHER_FILE = re.compile(
    r"\.(?:xlsx?|ods|xml|html?|pdf|docx?|zip|tar|tgz|tar\.(?:gz|bz2|xz|zst)|rar|7z|pkl|pickle|db|sqlite|feather|orc|avro|npy|npz|h5"
    r"|tfrecord)$"
)
"""Ending of files that people have as data, and that no reader of the trainer knows."""
_SAVED = "save the rows as .csv (UTF-8), .jsonl or .parquet, and name that file"
_UNPACKED = 'unpack it in Python: import shutil; shutil.unpack_archive("{0}", "data"), and name what it holds'
_CONVERSIONS = (
    (
        re.compile(r"\.(?:xlsx?|ods)$"),
        f'{_SAVED}; in Python: import pandas; pandas.read_excel("{{0}}").to_csv("{{1}}.csv", index=False)',
    ),
    (re.compile(r"\.(?:zip|tgz|tar\.(?:gz|bz2|xz|zst))$"), _UNPACKED),
    (
        re.compile(r"\.tar$"),
        f"{_UNPACKED}; of WebDataset: import datasets; "
        'datasets.load_dataset("webdataset", data_files="{0}", split="train").to_parquet("{1}.parquet")',
    ),
)
"""Ending -> hint; `{0}` is the file, `{1}` the file without its ending."""
_LONGEST_ARGUMENT = 32_000
"""Maximum characters of an argument: Linux takes 131,071 bytes, and a character has up to four of them in UTF-8."""
_METADATA_HOSTS = frozenset({"metadata", "metadata.google.internal", "instance-data", "metadata.azure.com"})
_ARGUMENT_REASONS: Mapping[ArgumentReason, Reason] = {
    "UnknownArgument": "Unknown",
    "OwnedByPlan": "Forbidden",
    "FixedByTrainer": "Forbidden",
    "WrongType": "Invalid",
    "UnknownTracker": "Invalid",
    "UnknownSampling": "Invalid",
}
_KINDS: Mapping[str, str] = {
    "float": "a number",
    "int": "an integer",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "an object",
}
"""Type of a training argument -> its name for a reader of YAML."""


def across_fields(
    spec: FineTuneJobSpec,
    written: JsonValue,
    faults: tuple[Path, ...],
    gone: frozenset[Path],
    placed: frozenset[Path],
    settings: Settings,
) -> Iterator[Problem]:
    """Check rules, missing support, settings and foreign vocabularies, except on fields that are faulty themselves."""
    touched = {path[:length] for path in gone for length in range(len(path) + 1)}
    missing = unsupported(spec, settings.schemes)
    absent = {tuple(str(problem.path).split(".")[1:]) for problem in missing if problem.remedy == Drop()}
    if not SOMETHING_TO_DO.holds(spec) and not _reads(SOMETHING_TO_DO, gone, touched):
        yield _rule_problem(SOMETHING_TO_DO, spec, written)
        if spec.dataset is not None:
            # The hint is to train with the defaults: the other rules apply to that.
            spec = spec.model_copy(update={"training": TrainingSpec()})
    settled = settle(spec).spec
    for rule in RULES:
        if (gone and _reads(rule, gone, touched)) or (absent and _reads(rule, absent, set())):
            continue
        if rule is not SOMETHING_TO_DO and (not rule.holds(spec) or not rule.holds(settled)):
            yield _rule_problem(rule, spec, written)
    others = (
        *missing,
        *_hub_names(spec),
        *_windows_paths(spec),
        *_split_names(spec),
        *_data_files(spec),
        *_settings(spec, settings, written),
        *_mounted_paths(spec, settings, written),
        *allowed_problems(spec, settings),
        *_shared_workspace(spec, settings),
        *_arguments(settled),
        *_hyperparameters(spec),
        *override_problems(settled.parallelism.deepspeed_config),
        *_template(spec),
    )
    faulty = {format_path(("spec", *fault)) for fault in faults if fault not in placed}
    for problem in others:
        ends = [at for at, letter in enumerate(problem.path) if letter in ".["]
        if not any(problem.path[:end] in faulty for end in (*ends, len(problem.path))):
            yield problem


def _template(spec: FineTuneJobSpec) -> Iterator[Problem]:
    if spec.template.model_fields_set:
        from finetune_operator.spec.checks.template import template_problems  # imports the models of all parts of a pod

        yield from template_problems(spec)


def _rule_problem(rule: Rule, spec: FineTuneJobSpec, written: JsonValue) -> Problem:
    """Return the problem of a spec that breaks a rule; `written` is its document."""
    path: Path = tuple(rule.path.split("."))
    given = value_at(written, path)
    if given is None:
        given = value_at(spec.model_dump(mode="json", by_alias=True), path)
    shown = None if given is None else describe_value(given, path)
    advice = rule.advice(spec) if rule.advice else rule.hint
    reason: Reason = "Required" if given is None else "Invalid"
    return Problem(f"spec.{rule.path}", shown, rule.text, advice, reason=reason)


def _reads(rule: Rule, gone: Set[Path], touched: Set[Path]) -> bool:
    """Return True if the rule reads a removed field; `touched`: the removed paths and all their parents.

    CEL names each field that it reads, and a block only to test its presence; a block in `reads` stands for everything
    below it.
    """
    for read in (tuple(name.split(".")) for name in rule.fields_read):
        if any(read[:length] in gone for length in range(len(read) + 1)) or (rule.reads and read in touched):
            return True
    return False


def _arguments(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Check `training.arguments` against the TrainingArguments of the trainer's transformers."""
    arguments = spec.training.arguments if spec.training else {}
    for problem in check_arguments(arguments):
        path = ("spec", "training", "arguments", problem.name)
        rule, hint = _argument_texts(problem, arguments[problem.name])
        if (broken := _rule_against(spec, problem.name, arguments[problem.name])) is not None:
            hint = Drop(broken)
        value = describe_value(arguments[problem.name], path)
        yield Problem(format_path(path), value, rule, hint, reason=_ARGUMENT_REASONS[problem.reason])


def _rule_against(spec: FineTuneJobSpec, argument: str, given: JsonValue) -> str | None:
    """Return the rule that the field with the meaning of a training argument would break with its value; None if it
    would break none.
    """
    changed = with_same(spec, argument, given)
    if changed is None:
        return None
    for rule in RULES:
        if rule.holds(spec) and not rule.holds(changed):
            return f"spec.{rule.path} {rule.text}"
    return None


def _argument_texts(problem: ArgumentProblem, given: JsonValue) -> tuple[str, Hint]:
    """Return rule and hint. The contract's own message is for the trainer's log: it repeats path and value."""
    from finetune_operator.spec.hints.unknown_names import argument

    match problem.reason:
        case "UnknownArgument":
            return "transformers.TrainingArguments has no such field", argument(
                problem.name, given
            ) or problem.hint.rstrip(".")
        case "OwnedByPlan":
            field = OWNED_BY_PLAN[problem.name]
            return f"is set by spec.{field}", argument(problem.name, given, field) or Drop()
        case "FixedByTrainer":
            return "has no effect: the trainer handles this itself", argument(problem.name, given) or Drop()
        case "WrongType":
            kinds = [_KINDS.get(kind, kind) for kind in known_arguments()[problem.name] if kind != "null"]
            return f"must be {' or '.join(kinds)}", "change it; write numbers and booleans without quotes"
        case "UnknownTracker":
            named = [arg for arg in get_args(Tracker) if isinstance(given, list) and arg in given]
            hint = ReplaceBy(list(named)) if named else problem.hint.rstrip(".")
            return f"must be one or a list of {', '.join(get_args(Tracker))}", hint
        case "UnknownSampling":
            return f"must be one of {', '.join(get_args(Sampling))}", "leave it out for the default of the task"


def _hyperparameters(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield hyperparameters that cannot be command-line arguments. All others reach the program byte for byte."""
    for name, value in (spec.script.hyperparameters if spec.script else {}).items():
        path = ("spec", "training", "script", "hyperparameters", name)
        if not re.fullmatch(HYPERPARAMETER_PATTERN.strip("^$"), name):
            rule = f"must be {PATTERN_DESCRIPTIONS[HYPERPARAMETER_PATTERN]}: it becomes --NAME on the command line"
            yield Problem(format_path(path), describe_value(value, path), rule, "rename it")
        if isinstance(value, str) and "\0" in value:
            rule = "contains a NUL character, which a command-line argument cannot"
            yield Problem(format_path(path), describe_value(value, path), rule, "remove it")
        if isinstance(value, str) and len(value) > _LONGEST_ARGUMENT:
            rule = f"has {len(value):,} characters; an argument can have at most {_LONGEST_ARGUMENT:,}"
            yield Problem(format_path(path), None, rule, "move it to a file of the repository")


def _shared_workspace(spec: FineTuneJobSpec, settings: Settings) -> Iterator[Problem]:
    if settings.defaults.access_modes is not None:
        # Few installations set them.
        from finetune_operator.spec.checks.shared_claims import shared_claim_problems

        yield from shared_claim_problems(spec, settings)


def _hub_names(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Check that `hf://` names one repository of the Hub: no folder, no file, no `..`."""
    for path, uri in named_uris(spec):
        scheme, _, name = uri.partition("://")
        if path.endswith("dataset.uri"):
            name = name.partition("@")[0].removeprefix("datasets/")
        if scheme == "hf" and not is_hub_name(name):
            yield Problem(path, describe_value(uri), "is not the name of a Hub repository", hub_name_hint(path, name))


def _windows_paths(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield paths with a drive of Windows, which would be read as names of files below the job's folder."""
    for path, uri in named_uris(spec):
        drive = re.fullmatch(r"file:///?([A-Za-z]:[\\/].*)", uri)
        if drive is not None:
            yield Problem(path, describe_value(uri), "is a path of Windows", windows_path_hint(drive[1]))


def _data_files(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield files of a form that no stage reads, such as a spreadsheet."""
    for path, uri in named_uris(spec):
        ending = _OTHER_FILE.search(uri)
        if path.endswith("dataset.uri") and ending is not None and not uri.startswith("hf://"):
            yield Problem(path, describe_value(uri), f"{ending[0]} files cannot be read", _conversion(uri, ending[0]))


def _conversion(uri: str, ending: str) -> str:
    """Return the hint that converts a file."""
    file = uri.rpartition("/")[2]
    hint = next((hint for pattern, hint in _CONVERSIONS if pattern.search(file)), _SAVED)
    return hint.format(file, file.removesuffix(ending))


def _split_names(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield impossible split names: fractions, paths of files, and slices of data that are not on the Hub."""
    predicted = spec.predict.dataset if spec.predict else None
    for block, rows in (("dataset", spec.dataset), ("predict.dataset", predicted)):
        for role, name in rows.splits.model_dump(exclude_none=True).items() if rows is not None else ():
            uri = "" if rows is None else rows.uri
            fault = _hub_split(role, name) if uri.startswith("hf://") else _file_split(role, name, uri)
            if fault is not None:
                yield Problem(f"spec.{block}.splits.{role}", describe_value(name), *fault)


def _hub_split(role: str, name: str) -> tuple[str, Hint] | None:
    """Return rule and hint for a name that `datasets` reads neither as a split nor as a slice of one."""
    share = _SHARE.fullmatch(name)
    if share is None and all(_HUB_SPLIT.fullmatch(part) for part in re.split(r"\s*\+\s*", name)):
        return None
    rule = "is neither the name of a split nor a slice such as train[:80%]"
    percent = 0 if share is None else round(100 * float(share["part"]) if share["part"] else float(share[1]))
    if not 0 < percent < 100:
        return rule, f"write the name as the Hub shows it, or leave it out for the split named {role}"
    if role == "train":
        return rule, f"write train[:{percent}%], and train[{percent}%:] for the split that gets the rest"
    return rule, f"write train[{100 - percent}%:], and train[:{100 - percent}%] for spec.dataset.splits.train"


def _file_split(role: str, name: str, uri: str) -> tuple[str, Hint] | None:
    """Return the rule and the hint for a name that is not a file's name without its ending."""
    if _SHARE.fullmatch(name) or _SLICE.search(name):
        rule = "is a fraction of rows, and a split of files is a file name without its extension"
        return rule, rows_in_files(role, uri)
    stem = DATA_ENDING.sub("", name.rpartition("/")[2])
    if stem == name or not stem:
        return None
    return "is a split of files, which is a file name without folder and extension", ReplaceBy(stem)


def _mounted_paths(spec: FineTuneJobSpec, settings: Settings, written: JsonValue) -> Iterator[Problem]:
    """Yield paths of this machine that are meant in a volume, by a mount of `written`, the spec's document."""
    for path, uri in named_uris(spec):
        if "file" in settings.schemes and uri.startswith("file://") and (claim := on_claim(uri, written)) is not None:
            yield Problem(
                path, describe_value(uri), "is a path in a volume of the pods, which read claims by pvc:// only",
                in_claim(claim),
            )  # fmt: skip


def _settings(spec: FineTuneJobSpec, settings: Settings, written: JsonValue) -> Iterator[Problem]:
    """Yield values that the administrator's settings do not allow; `written` is the spec's document."""
    for path, uri in named_uris(spec):
        scheme, field = uri.partition("://")[0], path.removeprefix("spec.")
        if scheme in settings.schemes or scheme not in served_schemes(field, None):
            continue  # `unsupported` refuses the others
        local = scheme in ("file", "pkg")
        hint: Hint = copy_hint(path, [f"{served}://" for served in served_schemes(field, settings.schemes)])
        hint = f"{hint}; or run the job with finetune run" if local else hint
        if scheme == "file" and "pvc" in settings.schemes and (claim := on_claim(uri, written)) is not None:
            hint = in_claim(claim)
        rule = one_machine(path) if local else f"{scheme}:// is not allowed here"
        yield Problem(path, describe_value(uri), rule, hint, reason="Forbidden")
    if spec.model.trust_remote_code:
        yield from _remote_code(spec.model.uri, settings)
    if spec.image is not None and not any(fnmatch.fnmatchcase(spec.image, glob) for glob in settings.images):
        yield Problem(
            "spec.image", describe_value(spec.image), "is not allowed by the administrator",
            f"use one of {', '.join(settings.images)}" if settings.images else "leave it out", reason="Forbidden",
        )  # fmt: skip
    if spec.script is not None:
        yield from _git_host(spec.script.git.url, settings)


def _remote_code(uri: str, settings: Settings) -> Iterator[Problem]:
    repository = uri.removeprefix("hf://")
    allowed = uri.startswith("hf://") and any(
        fnmatch.fnmatchcase(repository, glob) for glob in settings.trust_remote_code
    )
    if not allowed:
        yield Problem(
            "spec.model.trustRemoteCode", "true", "runs code of the model's author, which the settings do not allow "
            f"for {describe_value(uri)}", "leave it out, or ask the administrator", reason="Forbidden",
        )  # fmt: skip


def _git_host(url: str, settings: Settings) -> Iterator[Problem]:
    path = "spec.training.script.git.url"
    match = _GIT_URL.fullmatch(url)
    if match is None:
        yield Problem(
            path,
            describe_value(url),
            "must be an HTTPS URL of a host and a path, without user, password and port",
            "write https://host/owner/repository",
        )
        return
    host = match["host"].lower().rstrip(".")
    try:
        address = ipaddress.ip_address(host)
        never = address.is_link_local or address.is_loopback or address.is_unspecified
    except ValueError:
        never = host in _METADATA_HOSTS or host == "localhost"
    if never or host not in settings.git_hosts:
        rule = (
            "is a local or cloud metadata address, which is never fetched from"
            if never
            else "is on a host that is not allowed"
        )
        hosts = ", ".join(settings.git_hosts)
        hint = f"use a repository on {hosts}" if hosts else "ask the administrator to allow a host"
        yield Problem(path, describe_value(url), rule, hint, reason="Forbidden")

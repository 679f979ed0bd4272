"""Validation of a FineTuneJob that reports all problems at once, in terms of its own fields.

Input is the JSON value of one document; nothing is fetched and no model is loaded, so that `finetune validate`, the
operator and an editor plug-in get the same answer. pydantic checks the fields one by one; to check the rules although
some fields are wrong, those are removed and every rule that reads one of them is skipped until they are corrected: one
mistake gives one problem.

A null field counts as omitted, as in the API server. `metadata.generateName` alone is refused: `kubectl apply` cannot
use it and a run needs a name for its folder before it starts.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, islice
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
from finetune_operator.api.allowed import allowed_problems, named_uris
from finetune_operator.api.copied import settle
from finetune_operator.api.deepspeed_overrides import override_problems
from finetune_operator.api.fields import Path, read_fields, unknown_field, value_at, without_nulls
from finetune_operator.api.foreign_files import DOCUMENT, recognise, spec_fields
from finetune_operator.api.foreign_names import plain
from finetune_operator.api.hints import argument_name, owned_key
from finetune_operator.api.meant_uris import hub_name_hint
from finetune_operator.api.meant_values import unwrapped
from finetune_operator.api.notices import notices
from finetune_operator.api.problems import (
    HIDDEN,
    HUB_TOKEN_PATTERN,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_VALUES,
    MOST_PROBLEMS,
    Problem,
    Reason,
    describe_value,
    format_path,
)
from finetune_operator.api.rules import RULES, SOMETHING_TO_DO
from finetune_operator.api.rules.rule import Rule
from finetune_operator.api.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.api.shapes import spec_shape
from finetune_operator.api.support import served_schemes, unsupported
from finetune_operator.api.syntax import DNS_LABEL_RULE, MAX_NAME, is_dns_label, label_problems, quote
from finetune_operator.api.template import template_problems
from finetune_operator.api.types import (
    API_VERSION,
    GROUP,
    HYPERPARAMETER_PATTERN,
    KIND,
    PATTERN_DESCRIPTIONS,
    FineTuneJob,
    FineTuneJobSpec,
    ObjectMeta,
    TrainingSpec,
)

_HUB_TOKEN = re.compile(rf"\b{HUB_TOKEN_PATTERN}")
# Strict, because git and other readers disagree on unusual URLs: the checked URL must be the fetched one.
_GIT_URL = re.compile(r"https://(?P<host>[A-Za-z0-9.-]+)(:443)?/[A-Za-z0-9._~/%+-]+")
_HUB_SPLIT = re.compile(r"\w+(\.\w+)*(\[(-?[\d_]+%?)?:(-?[\d_]+%?)?\])?(\([^)]*\))?")
"""`_SUB_SPEC_RE` of `datasets/arrow_reader.py`."""
_SLICE = re.compile(r"\[[^\[\]]*:[^\[\]]*\]$")
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?%|0?(?P<part>\.[0-9]+)")
_DATA_ENDING = re.compile(r"\.(jsonl?|csv|tsv|txt|parquet|arrow)(\.(gz|zst|bz2|xz))?$")
_OTHER_FILE = re.compile(
    r"\.(?:xlsx?|ods|xml|html?|pdf|docx?|zip|tar|tgz|rar|7z|pkl|pickle|db|sqlite|feather|orc|avro|npy|npz|h5|tfrecord)$"
)
"""Ending of files that people have as data, and that no reader of the trainer knows."""
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
_PLACEHOLDERS: Mapping[str, JsonValue] = {"task": "text-classification", "model": {"uri": "hf://some/model"}}
"""Values for required fields that are missing or wrong, only while the rules on other fields are checked."""


def validate_job(value: JsonValue, settings: Settings = CLUSTER_SETTINGS) -> tuple[FineTuneJob | None, list[Problem]]:
    """Return the job and all its problems; the job is None if its fields cannot be read at all.

    At most MOST_PROBLEMS are returned. Problems have no line: the caller knows the document's position. A job with
    problems must not be run.
    """
    if not isinstance(value, dict):
        return None, [
            Problem(
                "", describe_value(value), "a FineTuneJob must be an object", f"start with apiVersion: {API_VERSION}"
            )
        ]
    if exceeded := _exceeded_limit(value):
        return None, [exceeded]
    if other := recognise(value):
        return None, [*islice(_tokens(value, ()), MOST_PROBLEMS), other]
    framed = _framed(value)
    outside_spec = chain(_tokens(value, ()), _frame(value), _metadata(framed.get("metadata"), value.get("name")))
    problems = list(islice(outside_spec, MOST_PROBLEMS))
    spec_value = framed.get("spec")
    if spec_value is None:
        # Fields of the spec beside `kind` are to be moved below it: they are checked there.
        spec_value = {name: value[name] for name in spec_fields() if name in value}
        if not spec_value:
            hint = "write spec: with task and model.uri"
            return None, [*problems, Problem("spec", None, "is required", hint, reason="Required")]
    if not isinstance(spec_value, dict):
        dashes = ", without the dashes" if isinstance(spec_value, list) else ""
        hint = f"write its fields below it{dashes}"
        problems.append(Problem("spec", describe_value(spec_value), "must be an object", hint))
        spec_value = unwrapped(spec_value)
        if not isinstance(spec_value, dict):
            return None, problems
    beside_kind = {name: value[name] for name in spec_fields() if name in value and name not in spec_value}
    written = without_nulls({**beside_kind, **spec_value}, spec_shape())
    read = read_fields(FineTuneJobSpec, spec_shape(), written, ("spec",), _PLACEHOLDERS, settings.schemes)
    spec = read.value
    problems.extend(read.problems)
    if spec is not None:
        problems.extend(_across_fields(spec, written, read.faults, read.gone, read.placed, settings))
    problems = _one_method(_one_per_field(_merge_followups(problems, read.placed)))[:MOST_PROBLEMS]
    if problems or spec is None:
        return None, problems
    metadata = value["metadata"]
    assert isinstance(metadata, dict), "a valid job has metadata"
    known = ObjectMeta.model_validate({name: given for name, given in metadata.items() if given is not None})
    # Its parts are validated: building FineTuneJob's own validator, with that of the status, would take half as long
    # as everything before.
    return FineTuneJob.model_construct(api_version=API_VERSION, kind=KIND, metadata=known, spec=spec), []


def notices_for_invalid_job(value: JsonValue, problems: Sequence[Problem]) -> tuple[str, ...]:
    """Return notices about a job with problems, if its other fields can be read: to be corrected at the same time."""
    written = value.get("spec") if isinstance(value, dict) else None
    if not isinstance(written, dict) or not problems or any(problem.path in ("", "spec") for problem in problems):
        return ()
    read = read_fields(FineTuneJobSpec, spec_shape(), without_nulls(written, spec_shape()), ("spec",), _PLACEHOLDERS)
    blamed = tuple(problem.path for problem in problems)
    found = () if read.value is None else notices(read.value)
    return tuple(sentence for sentence in found if not sentence.startswith(blamed))


def foreign(value: JsonValue) -> str | None:
    """Return the note for a document that is another project's object and so ignored; None for everything that is ours.

    Ours is also a document too broken to tell (no kind, no apiVersion), or one of our group with another version or a
    misspelt kind: `validate_job` reports its problems.
    """
    if not isinstance(value, dict):
        return None
    version, kind, metadata = value.get("apiVersion"), value.get("kind"), value.get("metadata")
    if not (isinstance(version, str) and version and isinstance(kind, str) and kind):
        return None
    if version.partition("/")[0] == GROUP or kind == KIND:
        return None
    name = (metadata.get("name") or metadata.get("generateName")) if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        return None
    return f"{kind} {name} ({version}) is not a {KIND} and is ignored"


# ------------------------------------------------------------------------------------------------------ around the spec


def _exceeded_limit(value: Mapping[str, JsonValue]) -> Problem | None:
    """Return the problem of a document that is too deep, too wide or too long for the later checks, or None.

    It stops at the first bound that is passed, so that its own time is bounded, too.
    """
    # Values with their depth and the first steps to them.
    left: list[tuple[JsonValue, int, Path]] = [(dict(value), 1, ())]
    values = characters = 0
    while left:
        inner, depth, path = left.pop()
        if path[:2] != ("metadata", "annotations"):
            if isinstance(inner, str):
                characters += len(inner)
            elif isinstance(inner, dict):
                characters += sum(map(len, inner))
        if isinstance(inner, dict | list):
            values += len(inner)
            if depth > MAX_DEPTH:
                return _limit_problem(path, f"must nest at most {MAX_DEPTH} levels deep", "reduce the nesting")
        if values > MAX_VALUES:
            rule = f"a FineTuneJob must have at most {MAX_VALUES:,} fields and items"
            return _limit_problem(path, rule, "remove some")
        if characters > MAX_CHARACTERS:
            rule = f"names and text of a FineTuneJob must have at most {MAX_CHARACTERS:,} characters in total"
            return _limit_problem(path, rule, "move long text to a file of the dataset or the repository")
        if isinstance(inner, dict | list):
            parts = inner.items() if isinstance(inner, dict) else enumerate(inner)
            left.extend((part, depth + 1, path if len(path) == 3 else (*path, name)) for name, part in parts)
    return None


def _limit_problem(path: Path, rule: str, hint: str) -> Problem:
    return Problem(format_path(path), None, rule, hint)


def _frame(value: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """Check apiVersion, kind, and fields beside them."""
    framed = _framed(value)
    for field, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        given = framed.get(field)
        if given is None or given == "":
            yield Problem(field, None, "is required", f"write {field}: {expected}", reason="Required")
        elif field == "apiVersion" and isinstance(given, str) and given.startswith(f"{GROUP}/") and given != expected:
            rule = f"must be {expected}, the version that is served"
            yield Problem(field, describe_value(given), rule, f"write {field}: {expected}", reason="NotSupported")
        elif given != expected:
            yield Problem(field, describe_value(given), f"must be {expected}", f"write {field}: {expected}")
    for name in value:
        if name not in DOCUMENT:
            yield unknown_field((name,), value[name], DOCUMENT, of_job=True)


def _framed(value: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a document whose fields in another spelling, such as `Kind`, have their names, as their messages say."""
    names = {plain(name): name for name in DOCUMENT}
    return {**{names.get(plain(name), name): inner for name, inner in value.items()}, **value}


_METADATA = (
    "name", "namespace", "labels", "annotations", "generateName", "finalizers", "ownerReferences", "uid",
    "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink",
    "managedFields",
)  # fmt: skip
"""Fields of the API server's ObjectMeta; kubectl refuses any other."""


def _metadata(metadata: JsonValue, beside: JsonValue) -> Iterator[Problem]:
    """Check the metadata; `beside`: a name that stands beside it, and is to be moved there."""
    if metadata is None and isinstance(beside, str):
        yield from _name(beside)
        return
    if not isinstance(metadata, dict):
        yield Problem("metadata.name", None, "is required", "write metadata: {name: my-job}", reason="Required")
        return
    name = metadata.get("name")
    if name is None or name == "":
        hint = "; generateName works with kubectl create only" if metadata.get("generateName") else ""
        if not any(plain(each) == "name" for each in metadata if each != "name"):
            yield Problem("metadata.name", None, "is required", f"give the job a name{hint}", reason="Required")
    elif not isinstance(name, str):
        yield quote(("metadata", "name"), name)
    else:
        yield from _name(name)
    namespace = metadata.get("namespace")
    if namespace is not None and not (isinstance(namespace, str) and is_dns_label(namespace)):
        yield Problem(
            "metadata.namespace",
            describe_value(namespace),
            DNS_LABEL_RULE,
            "name an existing namespace, or leave it out",
        )
    for other in metadata:
        if other not in _METADATA:
            yield unknown_field(("metadata", other), metadata[other], _METADATA, of_job=True)
    yield from _labels(metadata.get("labels"))
    annotations = metadata.get("annotations")
    if annotations is not None and not isinstance(annotations, dict):
        shown = describe_value(annotations)
        yield Problem("metadata.annotations", shown, "must be an object", "write key: value below it, or leave it out")
    for key, text in annotations.items() if isinstance(annotations, dict) else ():
        if not isinstance(text, str):
            yield quote(("metadata", "annotations", key), text)


def _name(name: str) -> Iterator[Problem]:
    if not is_dns_label(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME].strip("-")
        yield Problem(
            "metadata.name", describe_value(name), DNS_LABEL_RULE, f"write {near}" if near else "choose another name"
        )


def _labels(labels: JsonValue) -> Iterator[Problem]:
    if labels is None:
        return
    if not isinstance(labels, dict):
        shown = describe_value(labels)
        yield Problem("metadata.labels", shown, "must be an object", "write key: value below it, or leave it out")
        return
    yield from label_problems(labels, ("metadata", "labels"), "move longer text to metadata.annotations")


def _tokens(value: JsonValue, path: Path) -> Iterator[Problem]:
    """Yield Hub tokens in plain text. Neither the token nor a field name that holds one is repeated."""
    match value:
        case str() if _HUB_TOKEN.search(value):
            yield Problem(
                format_path(path), HIDDEN, "looks like a Hub token, which a job must not contain",
                "revoke it, store a new one in a Secret, and set spec.secrets.hubToken to {name: SECRET, key: KEY}",
                reason="Forbidden",
            )  # fmt: skip
        case dict():
            for key, inner in value.items():
                if _HUB_TOKEN.search(key):
                    yield from _tokens(key, path)
                yield from _tokens(inner, (*path, key if not _HUB_TOKEN.search(key) else HIDDEN))
        case list():
            for index, inner in enumerate(value):
                yield from _tokens(inner, (*path, index))


# ------------------------------------------------------------------------------------------------------- across fields


def _across_fields(
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
    absent = {tuple(str(problem.path).split(".")[1:]) for problem in missing if problem.hint == "leave it out"}
    if not SOMETHING_TO_DO.holds(spec) and not _reads(SOMETHING_TO_DO, gone, touched):
        yield _broken(SOMETHING_TO_DO, spec, written)
        if spec.dataset is not None:
            # The hint is to train with the defaults: the other rules apply to that.
            spec = spec.model_copy(update={"training": TrainingSpec()})
    settled = settle(spec).spec
    for rule in RULES:
        if (gone and _reads(rule, gone, touched)) or (absent and _reads(rule, absent, set())):
            continue
        if rule is not SOMETHING_TO_DO and (not rule.holds(spec) or not rule.holds(settled)):
            yield _broken(rule, spec, written)
    others = (
        *missing,
        *_hub_names(spec),
        *_split_names(spec),
        *_data_files(spec),
        *_settings(spec, settings),
        *allowed_problems(spec, settings),
        *_arguments(settled),
        *_hyperparameters(spec),
        *override_problems(settled.parallelism.deepspeed_config),
        *template_problems(spec),
    )
    faulty = {format_path(("spec", *fault)) for fault in faults if fault not in placed}
    for problem in others:
        ends = [at for at, letter in enumerate(problem.path) if letter in ".["]
        if not any(problem.path[:end] in faulty for end in (*ends, len(problem.path))):
            yield problem


def _broken(rule: Rule, spec: FineTuneJobSpec, written: JsonValue) -> Problem:
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
    for found in check_arguments(arguments):
        path = ("spec", "training", "arguments", found.name)
        rule, hint = _argument_texts(found, arguments[found.name])
        value = describe_value(arguments[found.name], path)
        yield Problem(format_path(path), value, rule, hint, reason=_ARGUMENT_REASONS[found.reason])


def _argument_texts(found: ArgumentProblem, given: JsonValue) -> tuple[str, str]:
    """Return rule and hint. The contract's own message is for the trainer's log: it repeats path and value."""
    match found.reason:
        case "UnknownArgument":
            hint = argument_name(found.name, given) or found.hint.rstrip(".")
            return "transformers.TrainingArguments has no such field", hint
        case "OwnedByPlan":
            field = OWNED_BY_PLAN[found.name]
            return f"is set by spec.{field}", argument_name(found.name, given) or owned_key(field, given)
        case "FixedByTrainer":
            hint = argument_name(found.name, given) or "leave it out"
            return "has no effect: the trainer handles this itself", hint
        case "WrongType":
            kinds = [_KINDS.get(kind, kind) for kind in known_arguments()[found.name] if kind != "null"]
            return f"must be {' or '.join(kinds)}", "change it; write numbers and booleans without quotes"
        case "UnknownTracker":
            named = [each for each in get_args(Tracker) if isinstance(given, list) and each in given]
            hint = f"write {json.dumps(named)}" if named else found.hint.rstrip(".")
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


def _hub_names(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Check that `hf://` names one repository of the Hub: no folder, no file, no `..`."""
    for path, uri in named_uris(spec):
        scheme, _, name = uri.partition("://")
        if path.endswith("dataset.uri"):
            name = name.partition("@")[0].removeprefix("datasets/")
        if scheme == "hf" and not is_hub_name(name):
            yield Problem(path, describe_value(uri), "is not the name of a Hub repository", hub_name_hint(path, name))


def _data_files(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield files of a form that no stage reads, such as a spreadsheet."""
    for path, uri in named_uris(spec):
        ending = _OTHER_FILE.search(uri)
        if path.endswith("dataset.uri") and ending is not None and not uri.startswith("hf://"):
            yield Problem(
                path, describe_value(uri), f"{ending[0]} files cannot be read",
                "save the rows as .csv (UTF-8), .jsonl or .parquet, and name that file",
            )  # fmt: skip


def _split_names(spec: FineTuneJobSpec) -> Iterator[Problem]:
    """Yield impossible split names: fractions, paths of files, and slices of data that are not on the Hub."""
    predicted = spec.predict.dataset if spec.predict else None
    for block, rows in (("dataset", spec.dataset), ("predict.dataset", predicted)):
        for role, name in rows.splits.model_dump(exclude_none=True).items() if rows is not None else ():
            fault = (_hub_split if rows is not None and rows.uri.startswith("hf://") else _file_split)(role, name)
            if fault is not None:
                yield Problem(f"spec.{block}.splits.{role}", describe_value(name), *fault)


def _hub_split(role: str, name: str) -> tuple[str, str] | None:
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


def _file_split(role: str, name: str) -> tuple[str, str] | None:
    """Return the rule and the hint for a name that is not a file's name without its ending."""
    if _SHARE.fullmatch(name) or _SLICE.search(name):
        rule = "is a fraction of rows, and a split of files is a file name without its extension"
        default = ": 5 % of train are held out if no split is named validation" if role == "validation" else ""
        return rule, f"leave it out{default}" + ("" if default else ", and write the rows to separate files")
    stem = _DATA_ENDING.sub("", name.rpartition("/")[2])
    if stem == name or not stem:
        return None
    return "is a split of files, which is a file name without folder and extension", f"write {stem}"


def _settings(spec: FineTuneJobSpec, settings: Settings) -> Iterator[Problem]:
    """Yield values that the administrator's settings do not allow."""
    for path, uri in named_uris(spec):
        scheme = uri.partition("://")[0]
        if scheme not in settings.schemes:
            allowed = ", ".join(f"{name}://" for name in served_schemes(path.removeprefix("spec."), settings.schemes))
            local = scheme in ("file", "pkg")
            where = "names data on one machine, which pods cannot read" if local else "is not allowed here"
            yield Problem(
                path, describe_value(uri), f"{scheme}:// {where}",
                (f"use {allowed}" if allowed else "leave it out") + (", or run the job with finetune run" * local),
                reason="Forbidden",
            )  # fmt: skip
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
    found = _GIT_URL.fullmatch(url)
    if found is None:
        yield Problem(
            path,
            describe_value(url),
            "must be an HTTPS URL of a host and a path, without user, password and port",
            "write https://host/owner/repository",
        )
        return
    host = found["host"].lower().rstrip(".")
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


def _merge_followups(problems: Sequence[Problem], placed: Set[Path]) -> list[Problem]:
    """Append to the problem of a value with a plain meaning the problems of that meaning."""
    paths = {format_path(("spec", *path)) for path in placed}
    joined: list[Problem] = []
    at: dict[str, int] = {}
    for problem in problems:
        if problem.path in paths and problem.path in at:
            first = joined[at[problem.path]]
            follows = f"{first.hint}; it then {problem.rule}: {problem.hint}"
            joined[at[problem.path]] = replace(first, hint=follows)
        else:
            at.setdefault(problem.path, len(joined))
            joined.append(problem)
    return joined


_METHOD = re.compile(r"(spec\.model\.adapter\.method(?: to|:)) lora\b")


def _one_method(problems: list[Problem]) -> list[Problem]:
    """Name qlora in all hints if one of them does: LoRA over weights in 4 bits is one method, set in several names."""
    if not any(re.search(r"adapter\.method(?: to|:) qlora\b", problem.hint) for problem in problems):
        return problems
    return [replace(problem, hint=_METHOD.sub(r"\1 qlora", problem.hint)) for problem in problems]


def _one_per_field(problems: list[Problem]) -> list[Problem]:
    """Keep only the first problem of a field that is not supported yet; other fields keep all of theirs."""
    first: dict[str, Problem] = {}
    kept: dict[Problem, None] = {}
    for problem in problems:
        earlier = first.setdefault(problem.path, problem)
        repeats = earlier is not problem and (problem.reason == "NotYetSupported" or earlier.value == HIDDEN)
        if not repeats:
            kept[problem] = None
    return list(kept)

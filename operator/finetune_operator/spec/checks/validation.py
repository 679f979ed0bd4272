"""Validation of a FineTuneJob that reports all problems at once, in terms of its own fields.

Input is the JSON value of one document; nothing is fetched and no model is loaded, so that `finetune validate`, the
operator and an editor plug-in get the same answer. pydantic checks the fields one by one; to check the rules although
some fields are wrong, those are removed and every rule that reads one of them is skipped until they are corrected: one
mistake gives one problem.

A null field counts as omitted, as in the API server. `metadata.generateName` alone is refused: `kubectl apply` cannot
use it and a run needs a name for its folder before it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, islice

from pydantic import JsonValue

from finetune_operator.spec.checks.cross_checks import across_fields
from finetune_operator.spec.checks.field_checks import read_fields, without_nulls
from finetune_operator.spec.checks.notices import notices
from finetune_operator.spec.checks.syntax import DNS_LABEL_RULE, MAX_NAME, is_dns_label, label_problems, quote
from finetune_operator.spec.fields.field_names import DOCUMENT, plain, spec_fields
from finetune_operator.spec.fields.field_values import Path
from finetune_operator.spec.fields.shapes import spec_shape
from finetune_operator.spec.hint_values import Hint, ReplaceBy, SetTo
from finetune_operator.spec.problems import (
    HIDDEN,
    HUB_TOKEN_PATTERN,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_VALUES,
    MOST_PROBLEMS,
    Problem,
    describe_value,
    format_path,
)
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.types import (
    API_VERSION,
    GROUP,
    KIND,
    FineTuneJob,
    FineTuneJobSpec,
    ObjectMeta,
)

_HUB_TOKEN = re.compile(rf"\b{HUB_TOKEN_PATTERN}")
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
    if other := _of_another_tool(value):
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
        from finetune_operator.spec.hints.wrong_values import unwrapped

        spec_value = unwrapped(spec_value)
        if not isinstance(spec_value, dict):
            return None, problems
    beside_kind = {name: value[name] for name in spec_fields() if name in value and name not in spec_value}
    written = without_nulls({**beside_kind, **spec_value}, spec_shape)
    read = read_fields(FineTuneJobSpec, spec_shape, written, ("spec",), _PLACEHOLDERS, settings.schemes)
    spec = read.value
    problems.extend(read.problems)
    if spec is not None:
        problems.extend(across_fields(spec, written, read.faults, read.gone, read.placed, settings))
    problems = _one_method(_one_per_field(_merge_followups(problems, read.placed)))[:MOST_PROBLEMS]
    if problems or spec is None:
        return None, problems
    metadata = value["metadata"]
    assert isinstance(metadata, dict), "a valid job has metadata"
    known = ObjectMeta.model_validate({name: given for name, given in metadata.items() if given is not None})
    # Its parts are valid. Validating the whole would build the validators of the status, which no file has.
    return FineTuneJob.model_construct(api_version=API_VERSION, kind=KIND, metadata=known, spec=spec), []


def notices_for_invalid_job(value: JsonValue, problems: Sequence[Problem]) -> tuple[str, ...]:
    """Return notices about a job with problems, if its other fields can be read: to be corrected at the same time."""
    written = value.get("spec") if isinstance(value, dict) else None
    if not isinstance(written, dict) or not problems or any(problem.path in ("", "spec") for problem in problems):
        return ()
    read = read_fields(FineTuneJobSpec, spec_shape, without_nulls(written, spec_shape), ("spec",), _PLACEHOLDERS)
    blamed = tuple(problem.path for problem in problems)
    sentences = () if read.value is None else notices(read.value)
    return tuple(sentence for sentence in sentences if not sentence.startswith(blamed))


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


def _of_another_tool(value: Mapping[str, JsonValue]) -> Problem | None:
    """Return the one problem of a document that is, or whose spec is, another tool's configuration; else None."""
    spec = value.get("spec")
    if value.keys() <= set(DOCUMENT) and not (isinstance(spec, dict) and spec.keys() - set(spec_fields())):
        return None
    from finetune_operator.spec.hints.other_tools import recognise

    return recognise(value)


def _unknown_fields(value: Mapping[str, JsonValue], path: Path, known: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of fields of the document, or of its metadata, that are not `known`."""
    unknown = [name for name in value if name not in known]
    if unknown:
        from finetune_operator.spec.hints.faulty_fields import unknown_field

        yield from (unknown_field((*path, name), value[name], known) for name in unknown)


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
    yield from _unknown_fields(value, (), DOCUMENT)


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
        if not any(plain(field) == "name" for field in metadata if field != "name"):
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
    yield from _unknown_fields(metadata, ("metadata",), _METADATA)
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


def _merge_followups(problems: Sequence[Problem], placed: Set[Path]) -> list[Problem]:
    """Append to the problem of a value with a plain meaning the problems of that meaning."""
    paths = {format_path(("spec", *path)) for path in placed}
    joined: list[Problem] = []
    at: dict[str, int] = {}
    for problem in problems:
        if problem.path in paths and problem.path in at:
            first = joined[at[problem.path]]
            follows = f"{first.follows}; it then {problem.rule}: {problem.hint}"
            joined[at[problem.path]] = replace(first, follows=follows)
        else:
            at.setdefault(problem.path, len(joined))
            joined.append(problem)
    return joined


_METHOD = "spec.model.adapter.method"


def _one_method(problems: list[Problem]) -> list[Problem]:
    """Name qlora in all hints if one of them does: LoRA over weights in 4 bits is one method, set in several names."""
    remedies = [problem.remedy for problem in problems]
    if not any(isinstance(remedy, SetTo) and remedy.fields.get(_METHOD) == "qlora" for remedy in remedies):
        return problems
    return [replace(problem, remedy=_with_qlora(problem.remedy)) for problem in problems]


def _with_qlora(hint: Hint) -> Hint:
    match hint:
        case SetTo(fields) if fields.get(_METHOD) == "lora":
            return replace(hint, fields={**fields, _METHOD: "qlora"})
        case ReplaceBy({"method": "lora"}):
            return replace(hint, value={"method": "qlora"})
    return hint


def _one_per_field(problems: list[Problem]) -> list[Problem]:
    """Keep only the first problem of a field that is not supported yet; other fields keep all of theirs."""
    first: dict[str, Problem] = {}
    kept: list[Problem] = []
    for problem in problems:
        earlier = first.setdefault(problem.path, problem)
        repeats = earlier is not problem and (problem.reason == "NotYetSupported" or earlier.value == HIDDEN)
        if not repeats and problem not in kept:
            kept.append(problem)
    return kept

"""Answer the API server when it asks whether a FineTuneJob may be stored.

The CRD's own rules are checked before. This adds the rules that CEL cannot express: those of the administrator's
settings, those across many fields with lists of known names, and those across jobs. It is the code of
`finetune validate --cluster`, and of the operator, which would report the same a moment later in a condition.

An answer names no other job: the rights of the requester are not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic.alias_generators import to_camel

from finetune_operator.api.json_text import loads
from finetune_operator.api.notices import notices
from finetune_operator.api.problems import Problem, describe_value
from finetune_operator.api.settings import Settings
from finetune_operator.api.types import FineTuneJobSpec
from finetune_operator.api.validation import validate_job
from finetune_operator.launchers.launcher_rows import LauncherName
from finetune_operator.reconcile.planned import problems_text
from finetune_operator.reconcile.reconcile_types import JobView
from finetune_operator.reconcile.status import ended

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"


class NoReviewError(ValueError):
    """Error of a body that is no AdmissionReview."""


class _Request(BaseModel):
    """Fields that are read from an AdmissionReview's request."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, validate_by_alias=True)

    uid: str
    operation: Literal["CREATE", "UPDATE", "DELETE", "CONNECT"]
    namespace: str = ""
    name: str = ""
    sub_resource: str = ""
    object: dict[str, Any] | None = None
    old_object: dict[str, Any] | None = None


class _Review(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    api_version: Literal["admission.k8s.io/v1"] = Field(alias="apiVersion")
    kind: Literal["AdmissionReview"]
    request: _Request


def answer(
    review: bytes, settings: Settings, jobs: Iterable[JobView], served: Collection[LauncherName] = ()
) -> dict[str, JsonValue]:
    """Return the AdmissionReview that answers `review`. `jobs` are all known ones; `served` empty: it is not known
    which launchers the cluster has. Raises NoReviewError.
    """
    try:
        request = _Review.model_validate(loads(review)).request
    except ValueError as error:
        raise NoReviewError("the body is not an AdmissionReview of admission.k8s.io/v1") from error
    problems, warnings = _verdict(request, settings, jobs, served)
    response: dict[str, JsonValue] = {"uid": request.uid, "allowed": not problems}
    if problems:
        response["status"] = _status(request, problems)
    if warnings:
        response["warnings"] = list(warnings)
    return {"apiVersion": API_VERSION, "kind": KIND, "response": response}


def _verdict(
    request: _Request, settings: Settings, jobs: Iterable[JobView], served: Collection[LauncherName]
) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    document = request.object
    if (
        document is None
        or request.sub_resource
        or request.operation not in ("CREATE", "UPDATE")
        or _is_being_deleted(document)
    ):
        return (), ()
    # A job that was stored under other settings can still be labelled, suspended, given more time, and deleted.
    if request.old_object is not None and _work(request.old_object) == _work(document):
        return (), ()
    job, problems = validate_job(document, settings)
    if job is None:
        return tuple(problems), ()
    spec = job.spec
    conflicts = tuple(_conflicts(request, spec, jobs))
    unserved = served and spec.launcher != "auto" and spec.launcher not in served
    warning = f"spec.launcher: this cluster does not serve {spec.launcher} yet; the job waits until it does"
    warnings = (*notices(spec), *((warning,) if unserved else ()))
    return conflicts, (() if conflicts else warnings)


def _work(job: Mapping[str, JsonValue]) -> JsonValue:
    """Return the job's work: its spec without the run policy."""
    spec = job.get("spec")
    return {name: value for name, value in spec.items() if name != "runPolicy"} if isinstance(spec, dict) else spec


def _is_being_deleted(document: Mapping[str, JsonValue]) -> bool:
    metadata = document.get("metadata")
    return isinstance(metadata, dict) and metadata.get("deletionTimestamp") is not None


def _conflicts(request: _Request, spec: FineTuneJobSpec, jobs: Iterable[JobView]) -> Iterator[Problem]:
    """Yield a problem for each place that another unfinished job writes to: one would overwrite the other's results."""
    written = dict(_written(spec))
    for other in jobs:
        same = (other.namespace, other.name) == (request.namespace, request.name)
        if same or other.namespace != request.namespace or other.job is None or ended(other.status) is not None:
            continue
        written_by_other = {uri for _, uri in _written(other.job.spec)}
        for path in [path for path, uri in written.items() if uri in written_by_other]:
            yield Problem(
                path,
                describe_value(written.pop(path)),
                "is written to by another unfinished job of this namespace",
                "choose another location, or wait until that job has ended",
                reason="Forbidden",
            )


def _written(spec: FineTuneJobSpec) -> Iterator[tuple[str, str]]:
    """Yield the fields that name a place to write to, and the place."""
    if spec.predict is not None and spec.predict.output is not None:
        yield "spec.predict.output", spec.predict.output
    if spec.checkpoints.uri is not None:
        yield "spec.checkpoints.uri", spec.checkpoints.uri


def _status(request: _Request, problems: Iterable[Problem]) -> dict[str, JsonValue]:
    """Return the Status that the API server has for a spec that its schema refuses: one cause for each field."""
    found = tuple(problems)
    causes: list[JsonValue] = [
        # kubectl puts the field before each.
        {"reason": "FieldValueInvalid", "field": one.path, "message": problems_text((replace(one, path=""),))}
        for one in found
    ]
    return {
        "code": 422,
        "reason": "Invalid",
        "message": problems_text(found),
        "details": {"name": request.name, "kind": "FineTuneJob", "causes": causes},
    }

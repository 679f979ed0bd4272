"""Answer the API server when it asks whether a FineTuneJob may be stored.

The CRD's own rules are checked before. This adds the rules that CEL cannot express: those of the administrator's
settings, those across many fields with lists of known names, and those across jobs. It is the code of
`finetune validate --cluster`, and of the operator, which would report the same a moment later in a condition.

An answer names no other job: the rights of the requester are not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.alias_generators import to_camel

from finetune_operator.jobs.outcomes.status import ended
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.jobs.state.planned import problems_text
from finetune_operator.spec.checks.notices import notices
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.json_text import loads
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.problems import Problem, describe_value
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import GROUP, PLURAL, VERSION, FineTuneJob, FineTuneJobSpec

JOBS = {"group": GROUP, "version": VERSION, "resource": PLURAL}


class NoReviewError(ValueError):
    """Error of a body that is no AdmissionReview."""


class _Part(BaseModel):
    """Fields that kopf and we read from a review; the API server always sends them."""

    model_config = ConfigDict(extra="ignore", alias_generator=to_camel, validate_by_alias=True)


class _Metadata(_Part):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class _Job(_Part):
    metadata: _Metadata


class _Request(_Part):
    uid: str
    operation: Literal["CREATE", "UPDATE", "DELETE", "CONNECT"]
    resource: dict[str, str]
    sub_resource: str = ""
    user_info: dict[str, Any]
    object: _Job | None = None
    old_object: _Job | None = None

    @model_validator(mode="after")
    def _has_a_job(self) -> Self:
        if self.resource != JOBS or (self.object is None and self.old_object is None):
            raise ValueError("the review is not about a FineTuneJob")
        return self


class _Review(_Part):
    api_version: Literal["admission.k8s.io/v1"]
    kind: Literal["AdmissionReview"]
    request: _Request


def read_review(body: bytes) -> dict[str, Any]:
    """Return the AdmissionReview. NoReviewError."""
    try:
        review: Any = loads(body)
        _Review.model_validate(review)
    except ValueError as error:
        raise NoReviewError("the body is not an AdmissionReview of admission.k8s.io/v1 about a FineTuneJob") from error
    checked: dict[str, Any] = review
    return checked


@dataclass(frozen=True)
class Request:
    """The change that a review is about."""

    operation: str
    namespace: str
    name: str
    object: dict[str, JsonValue] | None
    """The job that would be stored; None: it would be deleted."""
    old_object: dict[str, JsonValue] | None = None


def request_of(review: Mapping[str, Any]) -> Request:
    """Return the change that a review is about; `review`: as `read_review` returns it."""
    request = review["request"]
    namespace, name = request.get("namespace") or "", request.get("name") or ""
    return Request(request["operation"], namespace, name, request.get("object"), request.get("oldObject"))


def answer_to(review: Mapping[str, Any], status: dict[str, JsonValue] | None) -> dict[str, Any]:
    """Return the answer that allows a change, or refuses it with a Status."""
    response = {"uid": review["request"]["uid"], "allowed": status is None, **({"status": status} if status else {})}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def needs_validation(request: Request) -> bool:
    """Return whether a change is one of the job's work. A job that was stored under other settings can still be
    labelled, suspended, given more time, and deleted.
    """
    document, before = request.object, request.old_object
    if document is None or request.operation not in ("CREATE", "UPDATE") or _is_being_deleted(document):
        return False
    return before is None or _work(before) != _work(document)


@dataclass(frozen=True)
class Judgement:
    """Judgement of a change."""

    problems: tuple[Problem, ...] = ()
    """Reasons why it may not."""
    warnings: tuple[str, ...] = ()
    job: FineTuneJob | None = None
    """The job, if it may be stored and its work is new."""


def judge(
    request: Request, settings: Settings, jobs: Iterable[JobView], served: Collection[LauncherName] = ()
) -> Judgement:
    """Return the judgement of a change. `jobs` are all known ones; `served` empty: it is not known which launchers the
    cluster has.
    """
    if request.object is None or not needs_validation(request):
        return Judgement()
    job, problems = validate_job(request.object, settings)
    if job is None:
        return Judgement(tuple(problems))
    spec = job.spec
    conflicts = tuple(_conflicts(request, spec, jobs))
    unserved = served and spec.launcher != "auto" and spec.launcher not in served
    warning = f"spec.launcher: this cluster does not serve {spec.launcher} yet; the job waits until it does"
    warnings = (*notices(spec, settings.network_policy), *((warning,) if unserved else ()))
    return Judgement(conflicts) if conflicts else Judgement((), warnings, job)


def _work(job: Mapping[str, JsonValue]) -> JsonValue:
    """Return the job's work: its spec without the run policy."""
    spec = job.get("spec")
    return {name: value for name, value in spec.items() if name != "runPolicy"} if isinstance(spec, dict) else spec


def _is_being_deleted(document: Mapping[str, JsonValue]) -> bool:
    metadata = document.get("metadata")
    return isinstance(metadata, dict) and metadata.get("deletionTimestamp") is not None


def _conflicts(request: Request, spec: FineTuneJobSpec, jobs: Iterable[JobView]) -> Iterator[Problem]:
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


def refusal(name: str, problems: Iterable[Problem]) -> dict[str, JsonValue]:
    """Return the Status that the API server has for a spec that its schema refuses: one cause for each field."""
    all_problems = tuple(problems)
    causes: list[JsonValue] = [
        # kubectl puts the field before each.
        {"reason": "FieldValueInvalid", "field": one.path, "message": problems_text((replace(one, path=""),))}
        for one in all_problems
    ]
    return {
        "code": 422,
        "reason": "Invalid",
        "message": problems_text(all_problems),
        "details": {"name": name, "kind": "FineTuneJob", "causes": causes},
    }

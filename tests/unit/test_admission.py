"""Answers of the webhook to reviews."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import pytest

from finetune_operator.controller.servers.webhook import Reviewing, answered, with_authority
from finetune_operator.jobs.admission import JOBS, NoReviewError, read_review
from finetune_operator.jobs.observed import job_view
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from kopf_support import answering

SPEC: dict[str, Any] = {
    "task": "text-classification",
    "model": {"uri": "hf://a/b"},
    "dataset": {"uri": "hf://c/d"},
    "training": {},
}
CLOSED = Settings.model_validate_json('{"images": ["registry.example.com/*"], "schemes": ["hf"]}')


def a_job(spec: dict[str, Any], name: str = "reviews", **metadata: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", **metadata}
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": meta, "spec": spec}


def stored(spec: dict[str, Any], name: str, namespace: str = "team", phase: str | None = None) -> JobView:
    ended = [{"type": phase, "status": "True", "reason": "Done", "lastTransitionTime": "2026-01-05T10:00:00Z"}]
    status = {"phase": phase, "conditions": ended} if phase else {}
    return job_view({**a_job(spec, name, namespace=namespace), "status": status}, CLUSTER_SETTINGS)


def review(wanted: dict[str, Any] | None, **more: Any) -> bytes:
    request = {
        "uid": "question-1", "operation": "CREATE", "namespace": "team", "name": "reviews", "object": wanted,
        "resource": JOBS, "userInfo": {"username": "ann"},
    }  # fmt: skip
    return json.dumps(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {**request, **more}}
    ).encode()


def answer(body: bytes, settings: Settings, jobs: Sequence[JobView], served: Sequence[LauncherName] = ()) -> Any:
    """Return the answer of our handler of admission, which kopf calls."""
    return answered(answering(settings), read_review(body), Reviewing(jobs, served))


def response_of(*arguments: Any) -> dict[str, Any]:
    found = answer(*arguments)
    assert (found["apiVersion"], found["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response: Any = found["response"]
    assert response["uid"] == "question-1"
    return dict(response)


def test_valid_job_is_allowed_without_a_warning() -> None:
    assert response_of(review(a_job(SPEC)), CLUSTER_SETTINGS, ()) == {"uid": "question-1", "allowed": True}


def test_forbidden_field_is_refused_with_rule_and_hint() -> None:
    response = response_of(review(a_job({**SPEC, "image": "elsewhere/trainer:1"})), CLOSED, ())
    status = response["status"]
    assert (response["allowed"], status["code"], status["reason"]) == (False, 422, "Invalid")
    assert [cause["field"] for cause in status["details"]["causes"]] == ["spec.image"]
    assert "registry.example.com/*" in status["message"]


def test_a_rule_over_several_fields_is_refused_as_validate_does() -> None:
    spec = {**SPEC, "training": {"arguments": {"no_such_argument": 1}}}
    (cause,) = response_of(review(a_job(spec)), CLUSTER_SETTINGS, ())["status"]["details"]["causes"]
    assert cause["field"] == "spec.training.arguments.no_such_argument"


OUTPUT = {**SPEC, "predict": {"output": "pvc://results/answers.jsonl"}}
CLASHES: dict[str, tuple[JobView, bool]] = {
    "a job that runs writes there": (stored(OUTPUT, "other"), False),
    "one that has ended has written there": (stored(OUTPUT, "other", phase="Succeeded"), True),
    "one of another namespace writes there": (stored(OUTPUT, "other", namespace="elsewhere"), True),
    "it is the job itself": (stored(OUTPUT, "reviews"), True),
    "the other writes somewhere else": (
        stored({**SPEC, "predict": {"output": "pvc://other/b.jsonl"}}, "other"),
        True,
    ),
}


@pytest.mark.parametrize("case", CLASHES)
def test_two_jobs_that_run_do_not_write_to_one_place(case: str) -> None:
    other, allowed = CLASHES[case]
    response = response_of(review(a_job(OUTPUT)), CLUSTER_SETTINGS, (other,))
    assert response["allowed"] is allowed
    if not allowed:
        assert response["status"]["details"]["causes"][0]["field"] == "spec.predict.output"
        assert "other" not in response["status"]["message"].replace("another", ""), "who asks may not know of it"


FORBIDDEN = a_job({**SPEC, "image": "elsewhere/trainer:1"})
LET_THROUGH: dict[str, bytes] = {
    "a label on a job of other settings": review(FORBIDDEN, operation="UPDATE", oldObject=FORBIDDEN),
    "suspending it": review(
        a_job({**FORBIDDEN["spec"], "runPolicy": {"suspend": True}}), operation="UPDATE", oldObject=FORBIDDEN
    ),
    "what only ends": review(
        a_job(FORBIDDEN["spec"], deletionTimestamp="2026-01-05T10:00:00Z"), operation="UPDATE", oldObject=a_job(SPEC)
    ),
    "its deletion": review(None, operation="DELETE", oldObject=FORBIDDEN),
    "its status": review(FORBIDDEN, operation="UPDATE", subResource="status"),
}


@pytest.mark.parametrize("case", LET_THROUGH)
def test_change_without_effect_on_the_work_is_allowed(case: str) -> None:
    assert response_of(LET_THROUGH[case], CLOSED, ())["allowed"] is True


def test_an_edit_of_the_work_is_checked_like_a_new_job() -> None:
    edited = review(FORBIDDEN, operation="UPDATE", oldObject=a_job(SPEC))
    assert response_of(edited, CLOSED, ())["allowed"] is False


def test_a_launcher_that_is_not_there_yet_is_a_warning_and_no_refusal() -> None:
    wanted = review(a_job({**SPEC, "launcher": "mpijob"}))
    (warning,) = response_of(wanted, CLUSTER_SETTINGS, (), ("job",))["warnings"]
    assert warning == "spec.launcher: this cluster does not serve mpijob yet; the job waits until it does"
    assert "warnings" not in response_of(wanted, CLUSTER_SETTINGS, (), ("job", "mpijob"))
    assert "warnings" not in response_of(wanted, CLUSTER_SETTINGS, ()), "what is not known is not told"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", review(a_job(SPEC)).replace(b"admission.k8s.io/v1", b"v1"), b"\xff"]
)
def test_body_that_is_no_review_is_refused(body: bytes) -> None:
    with pytest.raises(NoReviewError):
        answer(body, CLUSTER_SETTINGS, ())


# ---------------------------------------------------------------------------------------------------------- authorities


def pem(name: str) -> str:
    return f"-----BEGIN CERTIFICATE-----\n{base64.b64encode(name.encode()).decode()}\n-----END CERTIFICATE-----\n"


def bundled(*names: str) -> str:
    return base64.b64encode("".join(pem(name) for name in names).encode()).decode()


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        pytest.param("", bundled("ours"), True, id="nothing was there"),
        pytest.param(bundled("ours"), bundled("ours"), False, id="it knows us"),
        pytest.param(bundled("old"), bundled("ours", "old"), True, id="the last one stays, for replicas that show it"),
        pytest.param(bundled("old", "older"), bundled("ours", "old"), True, id="and no more than that"),
        pytest.param("no base64!", bundled("ours"), True, id="what cannot be read is replaced"),
    ],
)
def test_our_authority_comes_first_in_every_bundle(before: str, after: str, changed: bool) -> None:
    hook = {"name": "jobs.finetune.dev", "clientConfig": {"service": {"name": "s"}, "caBundle": before}}
    found, patch = with_authority({"webhooks": [hook]}, pem("ours"))
    assert found is changed
    assert patch == {"webhooks": [{**hook, "clientConfig": {"service": {"name": "s"}, "caBundle": after}}]}


def test_a_setting_that_was_copied_is_a_warning_of_kubectl() -> None:
    (warning,) = response_of(
        review(a_job({**SPEC, "training": {"arguments": {"logging_steps": 5}}})), CLUSTER_SETTINGS, ()
    )["warnings"]
    assert warning.startswith("spec.training.arguments.logging_steps: 5 is ignored")

"""Claims whose job does not exist, and what uses a claim."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.jobs.leftover_claims import WorkspaceClaim, claims_used, without_job

NOW = "2026-01-05T10:00:00Z"


def claim(job: str, namespace: str = "team", **metadata: Any) -> dict[str, Any]:
    labels = {"finetune.dev/job": job}
    named = {"name": f"{job}-workspace", "namespace": namespace, "labels": labels, "creationTimestamp": NOW}
    return {"metadata": {**named, **metadata}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}}


def test_claims_without_a_job_of_their_namespace_are_found() -> None:
    owner = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "name": "owned", "uid": "1"}
    claims = [
        claim("there"),
        claim("there", namespace="other"),
        claim("deleted"),
        claim("ending", deletionTimestamp=NOW),
        claim("owned", ownerReferences=[owner]),
    ]
    found = without_job(claims, {("team", "there"), ("other", "deleted")})
    assert [one.key for one in found] == [("other", "there-workspace"), ("team", "deleted-workspace")]


def test_size_is_that_of_the_volume_where_there_is_one() -> None:
    waiting = claim("a")
    bound = {**waiting, "status": {"capacity": {"storage": "1536Mi"}}}
    assert [WorkspaceClaim.model_validate(one).size for one in (waiting, bound)] == [2**30, 1536 * 2**20]


SIZES = {"1e9": 10**9, "1.5E3": 1500, "5u": 0, "100n": 0, "2Ei": 2 * 2**60}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_rare_form_of_a_size_that_anybody_may_write_is_no_error(text: str, size: int) -> None:
    one = claim("a")
    one["spec"]["resources"]["requests"]["storage"] = text
    assert WorkspaceClaim.model_validate(one).size == size


def test_claims_are_found_in_uris_and_volumes_at_any_depth() -> None:
    spec = {
        "model": {"uri": "pvc://models"},
        "endpoint": {"adapters": [{"name": "a", "uri": "pvc://tuned/reviews/adapter"}]},
        "template": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}}]},
        "dataset": {"uri": "hf://org/pvc"},
        "storage": {"retain": "keep", "workspace": None},
    }
    assert sorted(claims_used(spec)) == ["data", "models", "tuned"]

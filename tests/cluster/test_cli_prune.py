"""`finetune prune` against a real API server: claims of deleted jobs, as the operator leaves them."""

from __future__ import annotations

import json
from typing import Any

from cluster_support.api_access import wait_until
from cluster_support.jobs_with_status import JOB, SUCCEEDED, Jobs

LABELS = {"app.kubernetes.io/managed-by": "finetune-operator"}


def leave(jobs: Jobs, job: str, size: str = "10Gi", labels: dict[str, str] = LABELS, **metadata: Any) -> str:
    """Create the claim of a job, as the operator does; return its name."""
    name = f"{job}-workspace"
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}, "storageClassName": "none"}
    metadata = {"name": name, "labels": {**labels, "finetune.dev/job": job}, **metadata}
    create(jobs, {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})
    return name


def create(jobs: Jobs, manifest: dict[str, Any]) -> None:
    jobs.api.must("create", "-n", jobs.namespace, "-f", "-", stdin=json.dumps(manifest))


def claims(jobs: Jobs) -> set[str]:
    shown = jobs.api.must("get", "pvc", "-n", jobs.namespace, "-o", "jsonpath={.items[*].metadata.name}")
    return set(shown.split())


def pod_with(claim: str) -> dict[str, Any]:
    """Return a pod of somebody else that mounts a claim."""
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "main", "image": "notebook", "securityContext": restricted}
    volume = {"name": "results", "persistentVolumeClaim": {"claimName": claim}}
    spec = {"containers": [container], "volumes": [volume], "nodeSelector": {"there": "is-none"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "notebook"}, "spec": spec}


def test_prune_lists_claims_of_deleted_jobs_and_deletes_them_with_yes(jobs: Jobs) -> None:
    assert jobs.finetune("prune") == (0, "", f"Note: no claim of a deleted job in {jobs.namespace}.\n")
    leave(jobs, "small")
    leave(jobs, "large", "1536Mi", labels={**LABELS, "team": "search"})
    leave(jobs, "large-too", "1Ti")
    jobs.make("done", SUCCEEDED)
    kept = {leave(jobs, "done"), leave(jobs, "mine", labels={})}
    code, out, err = jobs.finetune("prune")
    rows = [line.split()[:5] for line in out.splitlines()]
    assert (code, rows[0]) == (0, ["CLAIM", "DELETED", "JOB", "SIZE", "STORAGE"])
    assert [row[:4] for row in rows[1:]] == [
        ["large-too-workspace", "large-too", "1.0", "TiB"],
        ["small-workspace", "small", "10.0", "GiB"],
        ["large-workspace", "large", "1.5", "GiB"],
        ["total", "3", "claims", "1.0"],
    ]
    assert err == "Note: nothing was deleted; with --yes, these claims are deleted with everything on them.\n"
    assert len(claims(jobs)) == 5
    code, out, _ = jobs.finetune("prune", "small-workspace", "--yes")
    assert (code, out) == (0, "PersistentVolumeClaim small-workspace is deleted.\n")
    code, out, _ = jobs.finetune("prune", "--yes", "-o", "json")
    found = json.loads(out)
    assert [(one["name"], one["bytes"], one["deleted"]) for one in found["claims"]] == [
        ("large-too-workspace", 2**40, True),
        ("large-workspace", 1536 * 2**20, True),
    ]
    assert found["totalBytes"] == 2**40 + 1536 * 2**20
    wait_until(lambda: claims(jobs) == kept, "only claims of others are left", detail=lambda: claims(jobs))


def test_prune_keeps_claims_that_a_job_or_a_pod_uses(jobs: Jobs) -> None:
    used = {leave(jobs, "served"), leave(jobs, "mounted"), leave(jobs, "explored")}
    spec = {
        **JOB["spec"],
        "model": {"uri": "pvc://served-workspace/served/model"},
        "template": {
            "volumes": [{"name": "old", "persistentVolumeClaim": {"claimName": "mounted-workspace"}}],
            "volumeMounts": [{"name": "old", "mountPath": "/data"}],
        },
    }
    create(jobs, {**JOB, "metadata": {"name": "reader"}, "spec": spec})
    create(jobs, pod_with("explored-workspace"))
    code, out, err = jobs.finetune("prune", "--yes")
    assert (code, out) == (0, "")
    assert set(err.splitlines()) >= {
        "Note: claim served-workspace is kept: FineTuneJob reader uses it.",
        "Note: claim mounted-workspace is kept: FineTuneJob reader uses it.",
        "Note: claim explored-workspace is kept: pod notebook uses it.",
    }
    code, _, err = jobs.finetune("prune", "served-workspace", "reader-workspace", "--yes")
    assert (code, "reader-workspace is no claim of a deleted job" in err) == (1, True)
    assert claims(jobs) == used


def test_prune_leaves_claims_with_an_owner_to_the_garbage_collector(jobs: Jobs) -> None:
    jobs.make("reviews")
    uid = jobs.api.must("get", "ftj", "reviews", "-n", jobs.namespace, "-o", "jsonpath={.metadata.uid}")
    owner = {"apiVersion": JOB["apiVersion"], "kind": "FineTuneJob", "name": "reviews", "uid": uid}
    leave(jobs, "owned", ownerReferences=[owner])
    code, out, _ = jobs.finetune("prune", "-o", "json")
    assert (code, json.loads(out)) == (0, {"claims": [], "inUse": [], "totalBytes": 0})


def test_doctor_counts_the_claims_of_deleted_jobs(jobs: Jobs) -> None:
    leave(jobs, "one")
    leave(jobs, "two", "5Gi")
    findings = json.loads(jobs.finetune("doctor", "-o", "json")[1])["findings"]
    (found,) = [one for one in findings if one["what"] == "claims of deleted jobs"]
    assert (found["state"], found["found"]) == ("note", "2 claims with 15.0 GiB, which nothing uses")
    assert found["hint"].startswith(f"finetune prune -n {jobs.namespace} ")

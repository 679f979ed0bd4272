"""Attacks on jobs by a user with rights in another namespace, on a real API server."""

from __future__ import annotations

import json

from cluster_support.access import Object, path_of
from cluster_support.plays import RUNS, fails
from cluster_support.world import World, namespace_for_pods, states
from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.report import FailureReport, TrainerReport
from finetune_operator.api.types import API_VERSION, PLURAL
from finetune_operator.rendering.pods import CONTAINER_NAME
from finetune_operator.rendering.types import ATTEMPT_LABEL, JOB_LABEL, STAGE_LABEL, UID_LABEL

FAILURE = TrainerReport(
    job="victim",
    stage=Stage.TRAIN,
    outcome="failed",
    failure=FailureReport(
        failure_class=FailureClass.DATA, reason="Forged", message="It was somebody else.", hint="None.", time=1.0
    ),
)
SUCCESS = TrainerReport(job="victim", stage=Stage.EVALUATE, outcome="succeeded", metrics={"accuracy": 1.0, "forged": 1})
LONG_AGO = "2020-01-01T00:00:00Z"
"""So that what the operator waits for is over."""


def forged_pod(labels: Object) -> Object:
    """A pod that PodSecurity admits, with somebody else's labels."""
    secure = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "forged", "labels": labels},
        "spec": {
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [{"name": CONTAINER_NAME, "image": "example.com/forged:1", "securityContext": secure}],
        },
    }  # fmt: skip


def ended(report: TrainerReport) -> Object:
    """The status of a pod whose container has left that report."""
    failed = report.failure is not None
    terminated = {
        "exitCode": 10 if failed else 0, "message": report.to_termination_message(), "reason": "Error",
        "startedAt": LONG_AGO, "finishedAt": LONG_AGO,
    }  # fmt: skip
    container = {
        "name": CONTAINER_NAME, "image": "i", "imageID": "i", "ready": False, "restartCount": 0,
        "state": {"terminated": terminated},
    }  # fmt: skip
    return {"status": {"phase": "Failed" if failed else "Succeeded", "containerStatuses": [container]}}


def forge(world: World, namespace: str, labels: Object, report: TrainerReport) -> None:
    """A pod with these labels has ended in that namespace with that report."""
    world.api.create(path_of("v1", "pods", namespace), forged_pod(labels))
    world.api.patch(path_of("v1", "pods", namespace, "forged", "status"), ended(report))


def test_a_failed_pod_of_another_namespace_ends_no_attempt(world: World) -> None:
    world.kubelet.playbook.set("victim", "train", RUNS)
    world.apply("victim", {"predict": None})
    world.wait_running("victim", "train")
    (pod,) = world.pods("victim", "train")
    with namespace_for_pods(world.cluster) as evil:
        forge(world, evil, pod["metadata"]["labels"], FAILURE)
        # A job that comes later has ended, so the operator has heard of the pod; then it looks at the victim.
        world.apply("later", {"predict": None, "evaluation": None})
        world.wait_phase("later", "Succeeded")
        note = {"metadata": {"annotations": {"example.com/looked": "at"}}}
        world.api.patch(world.path(API_VERSION, PLURAL, "victim"), note)
        world.apply("latest", {"predict": None, "evaluation": None})
        world.wait_phase("latest", "Succeeded")
        status = world.status("victim")
    assert states(status)["train"] == ("Running", 1)
    assert "failure" not in status
    (same,) = world.pods("victim", "train")
    assert (same["metadata"]["uid"], same["status"]["phase"]) == (pod["metadata"]["uid"], "Running")


def test_what_a_program_prints_of_its_secrets_is_in_no_status_and_no_event(world: World) -> None:
    token, password, key = "hf_" + "Ab1" * 12, "s3cret-pa55", "AKIA" + "Z9" * 8
    said = f"HF_TOKEN={token}\nhttps://me:{password}@git.example.com/a\nAuthorization: Bearer {token}\n{key}\n"
    world.kubelet.playbook.set("talks", "train", fails(FailureClass.PROGRAM, "Raised", said, log=said))
    world.apply("talks", {"predict": None})
    world.wait_phase("talks", "Failed")
    told = json.dumps([world.status("talks"), world.events("talks")])
    assert "Raised" in told
    assert [secret for secret in (token, password, key) if secret in told] == []


def test_a_report_of_another_namespace_is_no_result(world: World) -> None:
    world.apply("victim", {"predict": None})
    labels = {
        JOB_LABEL: "victim",
        UID_LABEL: world.job("victim")["metadata"]["uid"],
        STAGE_LABEL: "evaluate",
        ATTEMPT_LABEL: "1",
    }
    with namespace_for_pods(world.cluster) as evil:
        forge(world, evil, labels, SUCCESS)
        metrics = world.wait_phase("victim", "Succeeded")["artifacts"]["metrics"]
    assert "forged" not in metrics

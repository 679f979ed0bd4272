"""Attacks on jobs by a user with rights in another namespace, on a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cluster_support.api_access import Object, path_of, wait_until
from cluster_support.plays import RUNS, fails
from cluster_support.world import BASE, World, loose_crd, merged, namespace_for_pods, states
from finetune_contract.choices import Stage
from finetune_contract.layout import FailureClass
from finetune_contract.report import FailureReport, TrainerReport
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME
from finetune_operator.jobs.render.render_types import ATTEMPT_LABEL, JOB_LABEL, STAGE_LABEL, UID_LABEL
from finetune_operator.spec.schema.crd import crd_yaml
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

FAILURE = TrainerReport(
    job="victim",
    stage=Stage.TRAIN,
    outcome="failed",
    failure=FailureReport(
        failure_class=FailureClass.DATA, reason="Forged", message="It was somebody else.", hint="None.", time=1.0
    ),
)
SUCCESS = TrainerReport(job="victim", stage=Stage.EVALUATE, outcome="succeeded", metrics={"accuracy": 1.0, "forged": 1})
NESTED = "(nested)"
"""Placeholder for JSON text that Python itself could not write."""
LONG_AGO = "2020-01-01T00:00:00Z"
"""A time long enough ago for the operator's waits to be over."""


def forged_pod(labels: Object) -> Object:
    """Return a pod that PodSecurity admits, with somebody else's labels."""
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
    """Return the status of a pod whose container has written that report."""
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
    """Create a pod with these labels that has ended in that namespace with that report."""
    world.api.create(path_of("v1", "pods", namespace), forged_pod(labels))
    world.api.patch(path_of("v1", "pods", namespace, "forged", "status"), ended(report))


def test_a_failed_pod_of_another_namespace_ends_no_attempt(world: World) -> None:
    world.kubelet.playbook.set("victim", "train", RUNS)
    world.apply("victim", {"predict": None})
    world.wait_running("victim", "train")
    (pod,) = world.pods("victim", "train")
    with namespace_for_pods(world.cluster) as evil:
        forge(world, evil, pod["metadata"]["labels"], FAILURE)
        # A later job has ended, so the operator has received the pod; then it reconciles the victim.
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


@pytest.mark.parametrize("where", ["beside it", "in another namespace"])
def test_pod_with_foreign_job_labels_is_ignored_and_gets_an_event(world: World, where: str) -> None:
    """Such a pod is a copy that somebody made for debugging."""
    world.kubelet.playbook.set("victim", "train", RUNS)
    world.apply("victim", {"predict": None})
    world.wait_running("victim", "train")
    (pod,) = world.pods("victim", "train")
    with namespace_for_pods(world.cluster) as other:
        namespace = world.namespace if where == "beside it" else other
        # Without the Job's labels, as its controller would adopt the pod, which would then belong to the job.
        labels = {key: value for key, value in pod["metadata"]["labels"].items() if key.startswith("finetune.dev/")}
        forge(world, namespace, labels, FAILURE)
        forged = world.api.get(path_of("v1", "pods", namespace, "forged"))
        assert forged is not None
        events = path_of("v1", "events", namespace)

        def pod_events() -> list[Object]:
            found = world.api.get(events) or {"items": []}
            return [one for one in found["items"] if one["involvedObject"].get("uid") == forged["metadata"]["uid"]]

        (event,) = wait_until(
            lambda: [one for one in pod_events() if one["reason"] == "NotOfThisJob"], "the pod is told"
        )
        # The job has been reconciled since, as often as necessary.
        note = {"metadata": {"annotations": {"example.com/looked": "at"}}}
        world.api.patch(world.path(API_VERSION, PLURAL, "victim"), note)
        world.catch_up()
        status = world.status("victim")
        again = [one for one in pod_events() if one["reason"] == "NotOfThisJob"]
    assert (event["type"], event["involvedObject"]["kind"]) == ("Warning", "Pod")
    assert 'FineTuneJob "victim"' in event["message"]
    assert [one["count"] for one in again] == [1]
    assert states(status)["train"] == ("Running", 1)
    assert "failure" not in status
    assert "NotOfThisJob" not in json.dumps(world.events("victim"))


def test_secrets_printed_by_a_program_stay_out_of_status_and_events(world: World) -> None:
    token, password, key = "hf_" + "Ab1" * 12, "s3cret-pa55", "AKIA" + "Z9" * 8
    output = f"HF_TOKEN={token}\nhttps://me:{password}@git.example.com/a\nAuthorization: Bearer {token}\n{key}\n"
    world.kubelet.playbook.set("talks", "train", fails(FailureClass.PROGRAM, "Raised", output, log=output))
    world.apply("talks", {"predict": None})
    world.wait_phase("talks", "Failed")
    published = json.dumps([world.status("talks"), world.events("talks")])
    assert "Raised" in published
    assert [secret for secret in (token, password, key) if secret in published] == []


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


# ------------------------------------------------------------------------------------------------------ hostile objects


def document(name: str, arguments: str) -> str:
    """Return a job whose `training.arguments.x` is this JSON text."""
    spec = merged(BASE, {"training": {"arguments": {"x": NESTED}}, "predict": None})
    body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    return json.dumps(body).replace(json.dumps(NESTED), arguments)


def store(world: World, name: str, arguments: str) -> None:
    """Create the job."""
    text = document(name, arguments)
    world.cluster.must("create", "--raw", world.path(API_VERSION, PLURAL), "-f", "-", stdin=text)


def taken(world: World, arguments: str) -> bool:
    """Return whether the API server accepts the job in a dry run."""
    path = f"{world.path(API_VERSION, PLURAL)}?dryRun=All"
    tried = world.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=document("probe", arguments))
    return tried.returncode == 0


@contextmanager
def before_there_were_bounds(world: World) -> Iterator[None]:
    """Use the CRD from before free objects had bounds; objects stored meanwhile stay afterwards."""
    deep = HOSTILE["levels"]["objects"]
    apply = ("apply", "--server-side", "--force-conflicts", "-f", "-")
    world.cluster.must(*apply, stdin=loose_crd())
    try:
        wait_until(lambda: taken(world, deep), "the API server takes everything")
        yield
    finally:
        world.cluster.must(*apply, stdin=crd_yaml())
        wait_until(lambda: not taken(world, deep), "the API server keeps to the bounds")


def accepted(world: World, name: str) -> tuple[str, str]:
    """Return status and message of the job's condition Accepted by kubectl, as Python could not read the job."""
    wanted = '{range .status.conditions[?(@.type=="Accepted")]}{.status}{"|"}{.message}{end}'
    found = world.cluster.must("get", PLURAL, name, "-n", world.namespace, "-o", f"jsonpath={wanted}")
    status, _, message = found.partition("|")
    return status, message


HOSTILE = {
    "levels": {
        "objects": '{"a":' * 500 + "1" + "}" * 500,
        "lists": "[" * 3_000 + "]" * 3_000,
        "deepest": '{"a":' * 9_000 + "1" + "}" * 9_000,
    },
    "fields and items": {"wide": json.dumps({f"k{at}": 1 for at in range(50_000)}), "items": f"[{'1,' * 400_000}1]"},
    # More in all than a page of a list.
    "characters": {f"long-{at}": json.dumps("\\" * 300_000 + "x" * 600_000) for at in range(16)},
}
"""Kind of limit -> name -> JSON of a value beyond it. The API server stored such values before the CRD had bounds."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_the_api_server_does_not_store_a_new_one(world: World, kind: str) -> None:
    assert [name for name, value in HOSTILE[kind].items() if taken(world, value)] == []


@pytest.mark.parametrize("when", ["while it runs", "before it starts"])
def test_hostile_jobs_are_refused_and_block_no_other_job(world: World, when: str) -> None:
    if when == "before it starts":
        world.operator.terminate()
    with before_there_were_bounds(world):
        for of_kind in HOSTILE.values():
            for name, value in of_kind.items():
                store(world, name, value)
    if when == "before it starts":
        world.operator.start()
    pid = world.operator.pid
    world.apply("honest", {"predict": None, "evaluation": None})
    world.wait_phase("honest", "Succeeded")
    for kind, of_kind in HOSTILE.items():
        for name in of_kind:
            wait_until(
                lambda name=name: accepted(world, name)[0] == "False", f"{name} is refused", detail=world.operator.logs
            )
            message = accepted(world, name)[1]
            assert f" {kind}" in message, (name, message)
    assert world.operator.healthy()
    assert world.operator.running
    assert world.operator.pid == pid
    logs = world.operator.logs()
    assert [fault for fault in ("Traceback", "RecursionError", "has ended") if fault in logs] == []

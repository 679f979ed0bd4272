"""One job from training to an endpoint that clients query while it is scaled, changed, hurt, guarded and removed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient

from box_support.box import Box
from box_support.endpoint_client import BACK_OFF, HUNG_SECONDS, MANY_SECONDS, Answers, Client
from box_support.faults import kill_pod
from box_support.team import INPUTS, Team, stage_of, tiny_spec
from cluster_support.api_access import Object, path_of, wait_until
from cluster_support.control_plane import ROOT
from finetune_contract.layout import JobPaths
from finetune_operator.jobs.render.render_types import ROLLBACK_ANNOTATION
from finetune_operator.spec.types import API_VERSION, PLURAL
from golden_records import ENDPOINT_KINDS, REVISION_KINDS

APPS = "apps/v1"
PLURALS = {
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "NetworkPolicy": "networkpolicies",
    "Service": "services",
    "ConfigMap": "configmaps",
    "Deployment": "deployments",
}
REVIEWS = [
    json.loads(line)
    for line in (ROOT / "manifests/examples/data/product-reviews/test.jsonl").read_text(encoding="utf-8").splitlines()
][:40]
TEXTS = [row["text"] for row in REVIEWS]
LEAST_REQUESTS = 30
"""Requests before and after each change, so that both are seen."""
TOKEN = "only-for-friends"


@dataclass(frozen=True)
class Served:
    """The job whose endpoint is queried."""

    team: Team
    name: str
    status: Object
    """Status when it was ready for the first time."""
    objects: set[str]
    """Kinds of its objects then."""
    expected: list[tuple[str, float]]
    """The label of each text and its probability, by plain transformers."""
    by_client: list[tuple[str, float]]
    by_protocol: tuple[list[str], list[Any]]

    @property
    def url(self) -> str:
        return url_of(self.team, self.name)

    def deployment(self, revision: int) -> Object:
        name = f"{self.name}-endpoint-{revision}"
        found = self.team.box.api.get(path_of(APPS, "deployments", self.team.namespace, name))
        return dict(found or {})

    def revisions(self) -> Object:
        """Return the status's part about revisions."""
        return dict(self.team.status(self.name)["endpoint"])

    def pods(self) -> set[str]:
        """Return the names of servers that are ready and not being deleted."""
        return {
            str(pod["metadata"]["name"])
            for pod in self.team.pods(self.name, "serve")
            if "deletionTimestamp" not in pod["metadata"]
            and any(one["ready"] for one in pod["status"].get("containerStatuses", []))
        }

    def change(self, revision: int, servers: int, **endpoint: Any) -> None:
        """Edit the endpoint, and wait until that revision serves with so many servers and others are gone."""
        if endpoint:
            self.team.patch(self.name, {"endpoint": endpoint})

        def rolled() -> bool:
            found = self.deployment(revision)
            status = found.get("status", {})
            return (
                self.revisions()["revision"] == revision
                and status.get("observedGeneration") == found["metadata"]["generation"]
                and status.get("updatedReplicas") == status.get("availableReplicas") == servers
                and status.get("replicas") == servers
                and len(self.team.pods(self.name, "serve")) == servers
            )

        wait_until(rolled, f"{self.name}: revision {revision} serves", 600, lambda: self.team.describe(self.name))

    def roll_back(self, request: str) -> None:
        """Annotate the job as `finetune rollback` does."""
        path = path_of(API_VERSION, PLURAL, self.team.namespace, self.name)
        self.team.box.api.patch(path, {"metadata": {"annotations": {ROLLBACK_ANNOTATION: request}}})


def url_of(team: Team, job: str) -> str:
    """Return the Service's URL by its address: this machine cannot resolve the cluster's names."""
    service = team.box.api.get(path_of("v1", "services", team.namespace, f"{job}-endpoint"))
    assert service is not None
    return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"


def of_endpoint(team: Team, job: str, revision: int = 1) -> set[str]:
    """Return the kinds of the endpoint's objects, with that revision of its servers."""
    shared = f"{job}-endpoint"
    names = {
        kind: f"{shared}-{revision}" if (version, kind) in REVISION_KINDS else shared
        for version, kind in ENDPOINT_KINDS
    }
    return {
        kind
        for version, kind in ENDPOINT_KINDS
        if team.box.api.get(path_of(version, PLURALS[kind], team.namespace, names[kind])) is not None
    }


def by_transformers(model: Path) -> list[tuple[str, float]]:
    """Return the label of each text and its probability, one text at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer, classifier = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForSequenceClassification.from_pretrained(model),
    )
    found = []
    with torch.inference_mode():
        for text in TEXTS:
            scores = classifier(**tokenizer(text, truncation=True, max_length=64, return_tensors="pt")).logits
            best = torch.softmax(scores.float(), -1)[0].max(0)
            found.append((str(classifier.config.id2label[int(best.indices)]), float(best.values)))
    return found


@pytest.fixture(scope="module")
def served(box: Box, team: Team) -> Served:
    box.own("asking a Service from this machine")
    name = team.new_name("served")
    team.apply(
        name,
        tiny_spec(
            model={"uri": f"pvc://{INPUTS}/minilm"},
            dataset={"uri": f"pvc://{INPUTS}/reviews"},
            preparation={"maxLength": 64},
            training={"epochs": 2, "globalBatchSize": 16, "learningRate": 0.0002, "precision": "fp32"},
            parallelism={"strategy": "single"},
            resources={"nodes": 1, "processesPerNode": 1, "cpu": "1", "memory": "4Gi"},
            evaluation={"gate": {"metric": "accuracy", "minimum": 0.7}},
            endpoint={},
        ),
    )
    status = team.wait(name, lambda one: one if condition(one, "Ready").get("status") == "True" else None, "Ready")
    objects, url = of_endpoint(team, name), url_of(team, name)
    hub = InferenceClient(model=url)
    answered = [hub.text_classification(text)[0] for text in TEXTS]
    outputs = Client(url).infer(name, TEXTS)
    return Served(
        team, name, status, objects,
        by_transformers(JobPaths(team.results(name)).model),
        [(one.label, one.score) for one in answered],
        (outputs["label"], outputs["scores"]),
    )  # fmt: skip


def condition(status: Object, kind: str) -> Object:
    return next((one for one in status.get("conditions", []) if one["type"] == kind), {})


@dataclass(frozen=True)
class Changed:
    """The endpoint after it was scaled, rolled out and rolled back under requests."""

    answers: Answers
    before: set[str]
    scaled: set[str]
    rolled: set[str]
    rolled_at: float
    """Time at which the second revision served alone, on the monotonic clock."""
    rollback_at: float
    """Time of the rollback's request."""
    back_at: float
    """Time at which the revision of the rollback served alone."""
    history: list[tuple[int, str, str]]
    """Number, state and reason of each revision then."""


@pytest.fixture(scope="module")
def changed(served: Served) -> Changed:
    before = served.pods()
    with Client(served.url).steady_requests(TEXTS[0], each_seconds=MANY_SECONDS) as answers:
        wait_for_answers(answers, LEAST_REQUESTS)
        served.change(1, 2, replicas=2)
        scaled = served.pods()
        wait_for_answers(answers, LEAST_REQUESTS)
        served.change(2, 2, maxQueue=200)
        rolled, rolled_at = served.pods(), time.monotonic()
        wait_for_answers(answers, LEAST_REQUESTS)
        rollback_at = time.monotonic()
        served.roll_back("2:1")
        served.change(3, 2)
        back_at = time.monotonic()
        wait_for_answers(answers, LEAST_REQUESTS)
    history = [(one["number"], one["state"], one.get("reason", "")) for one in served.revisions()["revisions"]]
    return Changed(answers, before, scaled, rolled, rolled_at, rollback_at, back_at, history)


@pytest.fixture(scope="module")
def killed(served: Served, changed: Changed) -> Answers:
    """Answers to clients that retry while one of two servers is killed and starts again."""
    pod = min(served.pods())
    with Client(served.url, answer_seconds=HUNG_SECONDS).steady_requests(TEXTS[0], BACK_OFF) as answers:
        wait_for_answers(answers, LEAST_REQUESTS)
        kill_pod(served.team, pod)

        def restarted() -> bool:
            (status,) = served.team.pod(pod)["status"]["containerStatuses"]
            return status["restartCount"] == 1 and status["ready"]

        wait_until(restarted, f"{pod} is ready again", 300, lambda: served.team.describe(served.name))
        wait_for_answers(answers, LEAST_REQUESTS)
    return answers


def wait_for_answers(answers: Answers, more: int) -> None:
    """Wait until that many more requests have ended."""
    until = answers.over + more
    wait_until(lambda: answers.over >= until, f"{more} more requests are answered or given up")


@pytest.fixture(scope="module")
def guarded(served: Served, killed: Answers) -> dict[str, int | str]:
    """Guard the endpoint; return the codes without a token and with a wrong one, and the answers with the right one."""
    team, secret = served.team, f"{served.name}-token"
    team.apply_manifest(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": secret}, "stringData": {"token": TOKEN}}
    )
    served.change(4, 2, token={"name": secret, "key": "token"})
    body = {"inputs": TEXTS[0]}
    return {
        "without": Client(served.url).post("/", body).status_code,
        "wrong": Client(served.url, "guessed").post("/", body).status_code,
        "with": Client(served.url, TOKEN).post("/", body).status_code,
        "client": InferenceClient(model=served.url, token=TOKEN).text_classification(TEXTS[0])[0].label,
        "protocol": Client(served.url, TOKEN).infer(served.name, TEXTS[:1])["label"][0],
    }


@pytest.fixture(scope="module")
def removed(served: Served, guarded: dict[str, int | str]) -> Object:
    """Remove the endpoint from the job's spec and return the job's status."""
    team = served.team
    team.patch(served.name, {"endpoint": None})
    status = team.succeeds(served.name)
    wait_until(lambda: of_endpoint(team, served.name, 6) == set(), "nothing of the endpoint is left", 120)
    wait_until(lambda: team.pods(served.name, "serve") == [], "the servers are gone", 300)
    return status


# ---------------------------------------------------------------------------------------------------------- its tests


def test_model_that_met_its_gate_is_served(served: Served) -> None:
    assert served.status["phase"] == "Serving"
    assert [(one["name"], one["state"]) for one in served.status["stages"]] == [
        ("prepare", "Succeeded"), ("train", "Succeeded"), ("evaluate", "Succeeded"), ("serve", "Running"),
    ]  # fmt: skip
    url = f"http://{served.name}-endpoint.{served.team.namespace}.svc"
    assert served.status["artifacts"]["endpointUrl"] == url
    assert url in condition(served.status, "Ready")["message"]
    assert {"Deployment", "Service", "ConfigMap"} <= served.objects
    assert not served.objects & {"HorizontalPodAutoscaler", "PodDisruptionBudget"}


def test_clients_get_the_labels_that_transformers_gives(served: Served) -> None:
    labels, scores = [label for label, _ in served.expected], [score for _, score in served.expected]
    assert len(set(labels)) == 2, "the model tells them apart"
    assert [label for label, _ in served.by_client] == labels
    assert [score for _, score in served.by_client] == pytest.approx(scores, abs=1e-4)
    assert served.by_protocol[0] == labels
    assert [max(json.loads(row).values()) for row in served.by_protocol[1]] == pytest.approx(scores, abs=1e-4)


def test_no_request_fails_while_revisions_are_rolled_out_and_back(
    served: Served, changed: Changed, record_testsuite_property: Any
) -> None:
    answers = changed.answers
    counts = ", ".join(f"{len(by)} by revision {number}" for number, by in by_revision(answers).items())
    record_testsuite_property("endpoint requests during rollouts", f"{counts}, {len(answers.failed)} failed")
    assert len(changed.before) == 1
    assert len(changed.scaled) == 2
    assert changed.before < changed.scaled
    assert len(changed.rolled) == 2
    assert not changed.rolled & changed.scaled
    assert answers.failed == []
    assert answers.sent >= 4 * LEAST_REQUESTS
    assert answers.labels == {served.expected[0][0]: answers.sent}


def by_revision(answers: Answers) -> dict[int, list[float]]:
    """Return the start times of the requests that each revision answered."""
    return {
        number: [began for began, by in answers.revisions if by == number]
        for number in sorted({by for _, by in answers.revisions})
    }


def test_only_the_revision_that_serves_answers_once_it_has_taken_over(changed: Changed) -> None:
    after = {by for began, by in changed.answers.revisions if changed.rolled_at <= began < changed.rollback_at}
    assert after == {2}
    assert {by for began, by in changed.answers.revisions if began >= changed.back_at} == {3}
    assert changed.history == [(1, "Ended", "Superseded"), (2, "Ended", "RolledBack"), (3, "Serving", "")]


def test_clients_that_try_again_see_nothing_of_a_server_that_is_killed(
    served: Served, killed: Answers, record_testsuite_property: Any
) -> None:
    counts = f"{killed.sent} sent, {killed.retried} tried again, {len(killed.failed)} failed"
    record_testsuite_property("endpoint requests during a kill", counts)
    assert killed.failed == []
    assert killed.labels == {served.expected[0][0]: killed.sent}


def test_requests_need_the_token_of_the_spec(served: Served, guarded: dict[str, int | str]) -> None:
    label = served.expected[0][0]
    assert guarded == {"without": 401, "wrong": 401, "with": 200, "client": label, "protocol": label}


def test_endpoint_that_is_removed_leaves_a_job_that_has_succeeded(served: Served, removed: Object) -> None:
    assert [one["name"] for one in removed["stages"]] == ["prepare", "train", "evaluate"]
    assert "endpointUrl" not in removed["artifacts"]
    assert JobPaths(served.team.results(served.name)).model.is_dir()


def test_time_from_the_end_of_the_evaluation_to_ready_is_recorded(
    served: Served, record_testsuite_property: Any
) -> None:
    ends = {name: stage_of(served.status, name)["completionTime"] for name in ("train", "evaluate")}
    ready = datetime.fromisoformat(condition(served.status, "Ready")["lastTransitionTime"])
    for name, text in ends.items():
        end = datetime.fromisoformat(text)
        assert end <= ready
        record_testsuite_property(f"endpoint ready after {name}", f"{(ready - end).total_seconds():.0f} s")


def test_model_that_misses_its_gate_is_not_served(box: Box, team: Team) -> None:
    name = team.new_name("not-served")
    team.apply(
        name,
        tiny_spec(
            parallelism={"strategy": "single"},
            resources={"nodes": 1, "processesPerNode": 1, "cpu": "1", "memory": "2Gi"},
            evaluation={"gate": {"metric": "loss", "maximum": 0.000001}},
            endpoint={},
        ),
    )
    failure = team.fails(name)
    assert failure["class"] == "GateNotMet"
    assert failure["message"].startswith("loss is ")
    assert "evaluation.gate.maximum is 1e-06" in failure["message"]
    status = team.status(name)
    assert stage_of(status, "evaluate")["state"] == "Failed"
    assert stage_of(status, "serve")["state"] == "Pending"
    assert condition(status, "Ready").get("status") != "True"
    assert of_endpoint(team, name) == set()
    assert "endpointUrl" not in status.get("artifacts", {})

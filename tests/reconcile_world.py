"""A simulated cluster: it executes decisions, and children, pods and users act on request.

It keeps the raw JSON of its objects and passes it through the same parsing as the API server's answers, so that tests
cover the whole way from an object to a decision. It enforces the rules that no cluster breaks (a name is used once, a
status goes through JSON) and allows everything else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts, SplitFacts
from finetune_contract.layout import EXIT_CODES, FailureClass
from finetune_contract.report import FailureReport, MeasuredFacts, TrainerReport
from finetune_operator.endpoints.decide.endpoint_view import endpoint_view, inference_service_view, joined
from finetune_operator.jobs.decide.decide import decide
from finetune_operator.jobs.observed import job_view, pod_view, pods_being_deleted, wanted_logs
from finetune_operator.jobs.state.children import child_view
from finetune_operator.jobs.state.decision_types import (
    NO_FINDINGS,
    AutoscalerView,
    Decision,
    EndpointView,
    EventNote,
    Findings,
    IdleScalingView,
    JobView,
    ObjectRef,
    Observed,
    Refusal,
    RouteView,
    StartEvent,
)
from finetune_operator.jobs.state.plan_table import KEPT, NotPlannedError, PlanTable, planned
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.types.plan_types import LearnedRatios
from finetune_operator.spec.launcher_rows import SUPPORTED, LauncherName
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.spec.status_times import stamp
from finetune_operator.spec.types import FineTuneJobStatus, ProgressStatus

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NOT_FOR_PEOPLE = re.compile(
    r"\bNone\b|\bTrue\b|\bFalse\b|<[A-Z]\w+[.:]|\b(FailureClass|OperatorCause|Stage)\.|\w+\(\w+="
)
"""Python's names, which must not occur in messages."""
CHILD_KINDS = tuple(each.kind for each in SUPPORTED)
BERT = model_facts(
    {
        "model_type": "bert",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "text-classification",
)
MEASURED = MeasuredFacts(
    model=BERT,
    data=DataFacts(
        fingerprint="f00d",
        splits={"train": SplitFacts(rows=640, tokens=20_000, longest=64, length_histogram={32: 400, 64: 240})},
        max_length=64,
    ),
)

SPEC: dict[str, Any] = {
    "task": "text-classification",
    "model": {"uri": "hf://org/encoder"},
    "dataset": {"uri": "hf://org/reviews"},
    "training": {"epochs": 1, "globalBatchSize": 32},
    "predict": {},
}
UID = "5f3c"
GRACE = timedelta(seconds=60)


def report(stage: str, failure: tuple[FailureClass, float] | None = None, **fields: Any) -> str:
    """Return a termination message, of success or of a failure of that class and time."""
    if failure is None:
        fields = {"outcome": "succeeded", **fields}
        if stage == "prepare":
            fields = {"measured": MEASURED, "fingerprint": "f00d", **fields}
        if stage == "train":
            fields = {"metrics": {"train_loss": 0.5}, "artifacts": {"model": "model"}, **fields}
        if stage == "evaluate":
            fields = {"metrics": {"accuracy": 0.875, "split": "test"}, **fields}
    else:
        failure_report = FailureReport(
            failure_class=failure[0], reason="Told", message="Told by the trainer.", hint="Do so.", time=failure[1]
        )
        fields = {"outcome": "failed", "failure": failure_report, **fields}
    return TrainerReport(job="reviews", stage=Stage(stage), **fields).to_termination_message()


def view_of(raw: Any) -> EndpointView | None:
    """Return the operator's view of an object that runs servers."""
    return inference_service_view(raw) if raw["kind"] == "InferenceService" else endpoint_view(raw)


@dataclass
class World:
    """Simulated cluster with one job: see the module."""

    spec: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(SPEC)))
    settings: Settings = CLUSTER_SETTINGS
    served: tuple[LauncherName, ...] = ("job",)
    now: datetime = NOON
    generation: int = 1
    deleting: bool = False
    status: Any = None
    children: dict[str, Any] = field(default_factory=dict)
    pods: dict[str, Any] = field(default_factory=dict)
    others: dict[tuple[str, str], Any] = field(default_factory=dict)
    kserve: bool = False
    """True if InferenceServices are served."""
    custom_metrics: bool = False
    """True if the custom metrics API is served."""
    http_routes: bool = False
    """True if HTTPRoutes are served."""
    route: RouteView | None = None
    """State of the endpoint's HTTPRoute."""
    http_scaled_objects: bool = False
    """True if HTTPScaledObjects are served."""
    idle_scaling: IdleScalingView | None = None
    """State of the endpoint's HTTPScaledObject."""
    autoscaler: AutoscalerView | None = None
    """State of the endpoint's autoscaler."""
    servers: dict[str, Any] = field(default_factory=dict)
    """Deployments and InferenceServices of the endpoint's revisions."""
    predictors: dict[str, Any] = field(default_factory=dict)
    """Deployments created by KServe, by the name of their InferenceService."""
    annotations: dict[str, str] = field(default_factory=dict)
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Kind -> code and message with which its creation is refused."""
    refusals: tuple[Refusal, ...] = ()
    start_events: tuple[StartEvent, ...] = ()
    """Newest events of what keeps an attempt from starting."""
    learned: tuple[LearnedRatios, ...] = ()
    """Ratios of the namespace's finished jobs."""
    progress: ProgressStatus | None = None
    findings: Findings = NO_FINDINGS
    last_progress_at: datetime | None = None
    reports_complete_since: datetime | None = None
    """Time since which the operator receives reports; None, the default: it does not."""
    logs: dict[str, str] = field(default_factory=dict)
    """Pod -> its log."""
    last_logs: dict[str, str] = field(default_factory=dict)
    """Logs that were read at the start of a deletion."""
    uid: str = UID
    events: list[EventNote] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    applied: list[Any] = field(default_factory=list)
    """Objects as they were applied, oldest first."""
    removed: list[tuple[str, str]] = field(default_factory=list)
    """Kind and name of removed objects beside children and servers."""
    writes: int = 0
    gone: bool = False
    _viewed: tuple[str, Settings, JobView] | None = None
    """Text and settings of the last view of the job, and the view."""
    _plans: tuple[Settings, PlanTable] | None = None
    """Plans by these settings."""

    # ---------------------------------------------------------------------------------------------------- operator

    def job(self) -> JobView:
        """Return the job as in the API server."""
        metadata: dict[str, Any] = {
            "name": "reviews",
            "namespace": "team",
            "uid": self.uid,
            "generation": self.generation,
            "creationTimestamp": stamp(NOON),
        }
        if self.deleting:
            metadata["deletionTimestamp"] = stamp(self.now)
        metadata |= {"annotations": self.annotations} if self.annotations else {}
        document = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata}
        document |= {"spec": self.spec, "status": self.status}
        # Most of a walk's time is validation, and most calls see the same job again.
        text = json.dumps(document)
        if self._viewed is None or self._viewed[:2] != (text, self.settings):
            self._viewed = text, self.settings, job_view(document, self.settings)
        return self._viewed[2]

    def observed(self) -> Observed:
        """Return everything else, with the requested logs."""
        children = tuple(view for raw in self.children.values() if (view := child_view(raw)) is not None)
        pods = tuple(view for raw in self.pods.values() if (view := pod_view(raw)) is not None)
        seen = Observed(
            children, pods, self.progress, self.findings, start_events=self.start_events,
            served=self.served, refusals=self.refusals, learned=self.learned,
            last_progress_at=self.last_progress_at, reports_complete_since=self.reports_complete_since,
        )  # fmt: skip
        self.last_logs = {name: text for name, text in self.last_logs.items() if name in {one.name for one in pods}}
        views = (view_of(raw) for raw in (*self.servers.values(), *self.predictors.values()))
        endpoints = joined(view for view in views if view is not None)
        seen = replace(
            seen, last_logs=tuple(self.last_logs.items()), endpoints=endpoints, kserve=self.kserve,
            custom_metrics=self.custom_metrics, autoscaler=self.autoscaler,
            http_routes=self.http_routes, route=self.route,
            http_scaled_objects=self.http_scaled_objects, idle_scaling=self.idle_scaling,
        )  # fmt: skip
        for name in pods_being_deleted(self.job(), seen):
            self.last_logs[name] = self.logs.get(name, "")
        wanted = wanted_logs(self.job(), seen, self.now, self.settings)
        logs = tuple((name, self.logs.get(name, "")) for name in wanted)
        return replace(seen, logs=logs, last_logs=tuple(self.last_logs.items()))

    def decide(self) -> Decision:
        """Return the operator's decision now; as in the operator, plans are computed between decisions."""
        if self._plans is None or self._plans[0] != self.settings:
            self._plans = self.settings, PlanTable()
        table = self._plans[1]
        for _ in range(KEPT):
            try:
                return decide(self.job(), self.observed(), self.now, self.settings, None, table.find)
            except NotPlannedError:
                assert table.missing is not None
                table.put(table.missing, planned(table.missing, self.settings))
        raise AssertionError("a decision asks for more plans than are kept")

    def step(self, crash_after: int | None = None) -> Decision:
        """Reconcile once; with `crash_after`, the operator dies after that many of its writes."""
        over = self.status is not None and self.status.get("phase") in ("Succeeded", "Failed")
        decision = self.decide()
        over = over and decision.status.phase != "Serving"
        assert not (over and decision.create), "a job that has ended creates nothing, unless it serves again"
        left = 10**6 if crash_after is None else crash_after
        for ref in decision.delete:
            if left <= 0:
                return decision
            left -= 1
            self._delete(ref)
        for ref in decision.remove:
            self._remove(ref)
        steps = [(self._create, one) for one in decision.create] + [(self._apply, one) for one in decision.apply]
        for make, manifest in steps:
            if left <= 0:
                return decision
            left -= 1
            refusal = make(manifest)
            if refusal is not None:
                self.refusals = (refusal,)
                return decision
        if left <= 0:
            return decision
        status = FineTuneJobStatus.model_dump(decision.status, mode="json", by_alias=True, exclude_none=True)
        status = json.loads(json.dumps(status))
        if status != self.status:
            self.writes += 1
        self.status = status
        assert self.job().status == decision.status, "a status has to survive its way through the API server"
        assert decision.requeue_at is None or decision.requeue_at > self.now, (
            "a time that is over would be met for ever"
        )
        self._check_plan(decision)
        for record in (*decision.events, *decision.status.conditions):
            assert record.message, f"{record.reason} has no message"
            assert not NOT_FOR_PEOPLE.search(record.message), record.message
        self.events.extend(decision.events)
        self.refusals = ()
        self.deleted = decision.delete_job
        return decision

    def _check_plan(self, decision: Decision) -> None:
        """Check that a new attempt at train gets the plan in the status."""
        plan = decision.status.plan
        for manifest in decision.create:
            if manifest["kind"] != "ConfigMap" or "-train-" not in manifest["metadata"]["name"]:  # type: ignore[index, call-overload, operator]
                continue
            training = json.loads(manifest["data"]["job.json"])["training"]  # type: ignore[index, call-overload, arg-type]
            assert plan is not None, "something is trained without a plan"
            expected = plan.micro_batch_size, plan.gradient_accumulation
            batch = training["batch"] if training else {}
            assert expected == (batch.get("microBatchSize"), batch.get("gradientAccumulation")), (
                "the status contradicts the children"
            )

    def settle(self, passes: int = 12) -> None:
        """Reconcile until nothing changes; fail after `passes` reconciles."""
        for _ in range(passes):
            before = (self.status, set(self.children), self.refusals)
            decision = self.step()
            made = decision.create or decision.apply
            if (self.status, set(self.children), self.refusals) == before and not made:
                return
        raise AssertionError(f"{passes} passes and no end: {self.status}")

    def wait(self, seconds: float) -> None:
        """Advance the time; end pods whose grace period is over, then reconcile."""
        self.now += timedelta(seconds=seconds)
        for name, raw in list(self.pods.items()):
            until = raw["metadata"].get("deletionTimestamp")
            if until is not None and until <= stamp(self.now) and not raw.get("stuck"):
                del self.pods[name]
        self.settle()

    def _create(self, manifest: Any) -> Refusal | None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        ref = ObjectRef(manifest["apiVersion"], kind, name)
        if kind in self.refuse:
            return Refusal(ref, *self.refuse[kind])
        if kind not in CHILD_KINDS:
            # An existing one stays unchanged, as its name is the job's.
            self.others.setdefault((kind, name), json.loads(json.dumps(manifest)))
            return None
        if name in self.children:
            return None
        assert name not in self.created, f"{name} is made a second time"
        assert not (running := self.alive(manifest["metadata"]["labels"]["finetune.dev/stage"])), f"{running} still run"
        raw = json.loads(json.dumps(manifest))
        raw["metadata"] |= {"uid": f"uid-{name}", "creationTimestamp": stamp(self.now)}
        self.children[name] = raw
        self.created.append(name)
        # Earlier reports belong to the attempt before.
        self.progress = self.last_progress_at = None
        self.findings = NO_FINDINGS
        return None

    def _apply(self, manifest: Any) -> Refusal | None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in self.refuse:
            return Refusal(ObjectRef(manifest["apiVersion"], kind, name), *self.refuse[kind])
        raw = json.loads(json.dumps(manifest))
        self.applied.append(manifest)
        if kind not in ("Deployment", "InferenceService"):
            self.others[kind, name] = raw
            return None
        new = {"metadata": {"creationTimestamp": stamp(self.now), "generation": 0}, "status": {}, "spec": None}
        before = self.servers.get(name, new)
        if kind == "Deployment" and before["spec"] is not None:
            # The number stays that of the one who has set it.
            raw["spec"].setdefault("replicas", before["spec"]["replicas"])
        generation = before["metadata"]["generation"] + (before["spec"] != raw["spec"])
        made = {"uid": f"uid-{name}", "creationTimestamp": before["metadata"]["creationTimestamp"]}
        raw["metadata"] |= {**made, "generation": generation}
        self.servers[name] = {**raw, "status": before["status"]}
        return None

    def _remove(self, ref: ObjectRef) -> None:
        if self.others.pop((ref.kind, ref.name), None) is not None:
            self.removed.append((ref.kind, ref.name))
        if ref.kind == "Deployment":
            self.servers.pop(ref.name, None)
        if ref.kind == "InferenceService":
            self.servers.pop(ref.name, None)
            self.predictors.pop(ref.name, None)

    def _delete(self, ref: ObjectRef) -> None:
        if ref.kind not in CHILD_KINDS:
            self.others.pop((ref.kind, ref.name), None)
            return
        self.delete_child(ref.name)

    @property
    def server(self) -> Any:
        """Deployment of the newest revision; None if there is none."""
        return next(reversed(self.servers.values()), None)

    # -------------------------------------------------------------------------------------------------------- cluster

    def alive(self, stage: str) -> list[str]:
        """Return pods and children of a stage that run or may still run, without pods forgotten by their node."""
        pods = []
        for name, raw in self.pods.items():
            until = raw["metadata"].get("deletionTimestamp")
            forgotten = until is not None and datetime.fromisoformat(until) + timedelta(seconds=30) <= self.now
            if raw["status"]["phase"] not in ("Succeeded", "Failed") and not forgotten and self._stage(raw) == stage:
                pods.append(name)
        views = [(name, child_view(raw)) for name, raw in self.children.items() if self._stage(raw) == stage]
        return pods + [name for name, view in views if view is not None and view.state not in ("Succeeded", "Failed")]

    @staticmethod
    def _stage(raw: Any) -> str:
        return str(raw["metadata"]["labels"]["finetune.dev/stage"])

    def delete_child(self, name: str) -> None:
        """Delete the child; its running pods get their grace period."""
        self.children.pop(name, None)
        for pod, raw in list(self.pods.items()):
            if raw["child"] != name:
                continue
            if raw["status"]["phase"] in ("Succeeded", "Failed"):
                del self.pods[pod]
            else:
                raw["metadata"].setdefault("deletionTimestamp", stamp(self.now + GRACE))

    def configuration(self, attempt: str) -> str:
        """Return job.json of an attempt."""
        return str(self.others["ConfigMap", attempt]["data"]["job.json"])

    def unfinished(self, name: str) -> bool:
        """Return whether the child has not ended."""
        view = child_view(self.children[name])
        return view is not None and view.state not in ("Succeeded", "Failed")

    def after(self, seconds: float) -> str:
        """Return the time `seconds` from now, in Kubernetes' form."""
        return stamp(self.now + timedelta(seconds=seconds))

    def newest(self) -> str:
        """Return the name of the newest existing child."""
        return next(name for name in reversed(self.created) if name in self.children)

    def make_pods(self, name: str, phase: str = "Pending", node: str | None = None) -> list[str]:
        """Create the pods of a child, like its controller."""
        raw = self.children[name]
        spec, made = raw["spec"], []
        if raw["kind"] == "Job":
            names = [
                (f"{name}-{i}", {"batch.kubernetes.io/job-completion-index": str(i)})
                for i in range(spec["completions"])
            ]
        elif raw["kind"] == "PyTorchJob":
            count = spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
            names = [(f"{name}-worker-{i}", {"training.kubeflow.org/replica-index": str(i)}) for i in range(count)]
        elif raw["kind"] == "SparkApplication":
            names = [(f"{name}-driver", {})]
        else:
            count = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
            role, index = "training.kubeflow.org/job-role", "training.kubeflow.org/replica-index"
            names = [(f"{name}-worker-{i}", {role: "worker", index: str(i)}) for i in range(count)]
            names.append((f"{name}-launcher", {role: "launcher", index: "0"}))
        for number, (pod, labels) in enumerate(names):
            self.pods[pod] = {
                "child": name,
                "metadata": {
                    "name": pod,
                    "uid": f"uid-{pod}",
                    "labels": {**raw["metadata"]["labels"], **labels},
                    "creationTimestamp": stamp(self.now),
                },
                "spec": {"nodeName": node or f"node-{number}"},
                "status": {"phase": phase},
            }
            made.append(pod)
        return made

    def start(self, name: str | None = None) -> str:
        """Start the newest child, or `name`, with all its pods."""
        name = name or self.newest()
        raw = self.children[name]
        self.make_pods(name, "Running")
        began = stamp(self.now)
        if raw["kind"] == "Job":
            raw["status"] = {"active": 1, "ready": 1, "startTime": began}
        elif raw["kind"] == "SparkApplication":
            raw["status"] = {"applicationState": {"state": "RUNNING"}, "lastSubmissionAttemptTime": began}
        else:
            raw["status"] = {"startTime": began, "conditions": [self.condition("Running")]}
        return name

    def condition(self, type_: str, reason: str = "Because", message: str = "") -> dict[str, str]:
        """Return a condition that is true from now on."""
        moment = stamp(self.now)
        return {"type": type_, "status": "True", "reason": reason, "message": message, "lastTransitionTime": moment}

    def end_pod(self, pod: str, code: int, message: str = "", reason: str = "") -> None:
        """End the pod's container."""
        raw = self.pods[pod]
        raw["status"]["phase"] = "Succeeded" if code == 0 else "Failed"
        ended = {
            "exitCode": code,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "message": message,
            "finishedAt": stamp(self.now),
        }
        raw["status"]["containerStatuses"] = [{"name": "pytorch", "state": {"terminated": ended}}]

    def pods_of(self, child: str) -> list[str]:
        return [pod for pod, raw in self.pods.items() if raw["child"] == child]

    def end_child(self, name: str, succeeded: bool, reason: str = "BackoffLimitExceeded") -> None:
        """End the child, as set in the status by its controller."""
        raw = self.children[name]
        if raw["kind"] == "SparkApplication":
            application = {"state": "COMPLETED" if succeeded else "FAILED"}
            raw["status"] |= {"applicationState": application, "terminationTime": stamp(self.now)}
            return
        condition_type = ("Complete" if raw["kind"] == "Job" else "Succeeded") if succeeded else "Failed"
        status = raw.setdefault("status", {})
        status["conditions"] = [
            *status.get("conditions", []),
            self.condition(condition_type, "Done" if succeeded else reason),
        ]
        if succeeded or raw["kind"] != "Job":
            status["completionTime"] = stamp(self.now)

    def succeed(self, name: str | None = None, **fields: Any) -> str:
        """Let the newest child, or `name`, run and succeed; `fields` replace those of its reports."""
        name = name or self.newest()
        if not self.pods_of(name):
            self.start(name)
        stage = self.children[name]["metadata"]["labels"]["finetune.dev/stage"]
        for rank, pod in enumerate(self.pods_of(name)):
            self.end_pod(pod, 0, report(stage, rank=rank, **fields))
        self.end_child(name, succeeded=True)
        return name

    def fail(self, failure: FailureClass, name: str | None = None, **fields: Any) -> str:
        """Let the newest child, or `name`, fail: its first pod reports `failure`, the others a lost connection;
        `fields`: more of the reports.
        """
        name = name or self.newest()
        if not self.pods_of(name):
            self.start(name)
        stage = self.children[name]["metadata"]["labels"]["finetune.dev/stage"]
        for rank, pod in enumerate(self.pods_of(name)):
            reported = failure if rank == 0 else FailureClass.COLLECTIVE
            if reported is FailureClass.PREEMPTED:
                self.pods[pod]["metadata"].setdefault("deletionTimestamp", stamp(self.now))
            self.end_pod(pod, EXIT_CODES[reported], report(stage, (reported, 10.0 + rank), rank=rank, **fields))
        self.end_child(name, succeeded=False)
        return name

    def fail_silently(self, code: int, name: str | None = None, reason: str = "") -> str:
        """Let the newest child, or `name`, fail without a report."""
        name = name or self.newest()
        if not self.pods_of(name):
            self.start(name)
        for pod in self.pods_of(name):
            self.end_pod(pod, code, reason=reason)
        self.end_child(name, succeeded=False)
        return name

    # ----------------------------------------------------------------------------------------------------------- user

    def edit(self, **policy: Any) -> None:
        """Change fields of runPolicy."""
        self.spec = {**self.spec, "runPolicy": {**self.spec.get("runPolicy", {}), **policy}}
        self.generation += 1

    # ----------------------------------------------------------------------------------------------------- assertions

    @property
    def phase(self) -> str:
        return str(self.job().status.phase)

    def stage(self, name: str) -> tuple[str, int]:
        """Return state and attempt of a stage."""
        found = next(one for one in self.job().status.stages if one.name == name)
        return found.state, found.attempt

    def job_condition(self, type_: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition."""
        one = next(one for one in self.job().status.conditions if one.type == type_)
        return one.status, one.reason, one.message

    def event_reasons(self) -> list[str]:
        """Return the reasons of all events."""
        return [note.reason for note in self.events]


# ---------------------------------------------------------------------------------------------------------------- lives


def through(world: World, stages: int) -> None:
    """Let `stages` stages succeed, and the next one run."""
    world.settle()
    for _ in range(stages):
        world.succeed()
        world.settle()
    if world.phase not in ("Succeeded", "Failed"):
        world.start()
    world.settle()


def failing(world: World, failure: FailureClass) -> None:
    through(world, 1)
    world.fail(failure)
    world.settle()


def suspended(world: World) -> None:
    through(world, 1)
    world.edit(suspend=True)
    world.settle()


def refused(world: World) -> None:
    world.refuse["Job"] = (403, "exceeded quota")
    world.settle()


def invalid(world: World) -> None:
    world.spec["task"] = "poetry"
    world.settle()


def unplannable(world: World) -> None:
    world.spec["launcher"] = "mpijob"
    world.settle()


LIVES: dict[str, Callable[[World], object]] = {
    "a spec that is refused": invalid,
    "a plan that is refused": unplannable,
    "a first stage whose pods are not made yet": lambda w: w.settle(),
    "prepare runs": lambda w: through(w, 0),
    "train runs": lambda w: through(w, 1),
    "evaluate runs": lambda w: through(w, 2),
    "predict runs": lambda w: through(w, 3),
    "all is done": lambda w: through(w, 4),
    "a stage that starts again": lambda w: failing(w, FailureClass.COLLECTIVE),
    "a job that has failed": lambda w: failing(w, FailureClass.DATA),
    "a suspended job": suspended,
    "a quota in the way": refused,
}
"""Sentence -> function that brings a job there; one for each phase and each kind of end."""


def limits(**seconds: float) -> Settings:
    """Return settings with these limits."""
    return Settings.model_validate({"limits": seconds})

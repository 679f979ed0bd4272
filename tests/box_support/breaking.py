"""A training that is broken on purpose, once or several times in a row, and the result of each time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from box_support.box import on_fragile_nodes
from box_support.faults import puppet
from box_support.team import JOB_SECONDS, Team, stage_of, tiny_spec
from cluster_support.api_access import ApiError, Object, path_of, wait_until
from finetune_operator.jobs.render.pod_parts import CONTAINER_NAME

STEPS = 300
BEFORE_FAULT = 25
"""Steps of an attempt before its fault."""
EVERY = 10
"""Steps between two checkpoints."""
STEP_SECONDS = 0.1
"""Shortest time of a step, so that a fault of a second hits a running training."""
_SIZES = ("worldSize", "microBatchSize", "gradientAccumulation")
_RESUMED = re.compile(r"Resuming from \S+ \(step (\d+)\)")
_INDEX = "batch.kubernetes.io/job-completion-index"


def _ended_by_itself(pod: Object) -> bool:
    return pod["status"].get("phase") == "Failed" and "deletionTimestamp" not in pod["metadata"]


def sizes(status: Object) -> tuple[int, int, int]:
    """Return world size, micro-batch and accumulation of the current plan."""
    world, micro, accumulation = (status["plan"][name] for name in _SIZES)
    return world, micro, accumulation


@dataclass(frozen=True)
class Broken:
    """End of one attempt, and start of the next."""

    attempt: int
    pods: tuple[Object, ...]
    """Pods of the attempt, by node rank, before the fault."""
    reached: int
    """Last step of the attempt."""
    status: Object
    """Status of the job once it had the failure."""
    resumed: int = 0
    """Step from which the next attempt resumed; 0 if the job has ended."""
    left: frozenset[str] = frozenset()
    """Names of its pods that ended before their deletion: their logs can be reported."""

    @property
    def failure(self) -> Object:
        found: Object = self.status["failure"]
        return found

    @property
    def lost(self) -> int:
        """Number of steps to repeat."""
        return self.reached - self.resumed

    def failure_fields(self, *fields: str) -> list[object]:
        """Return fields of the failure."""
        return [self.failure.get(name) for name in fields]

    def name(self, rank: int) -> str:
        """Return the name of the pod with that node rank."""
        return str(self.pods[rank]["metadata"]["name"])

    def node(self, rank: int) -> str:
        """Return the node of the pod with that node rank."""
        return str(self.pods[rank]["spec"]["nodeName"])


@dataclass
class Training:
    """A job that only prepares and trains, as an Indexed Job, and can be made to raise (`faults.puppet`)."""

    team: Team
    name: str
    resumed: int = 0
    """Step from which the current attempt resumed."""
    attempt: int = 1
    seconds: float = field(default=JOB_SECONDS, kw_only=True)
    """Longest wait for any event of the job on a busy machine."""

    @classmethod
    def start(
        cls, team: Team, stem: str, step_seconds: float = STEP_SECONDS, *, fragile: bool = False, **spec: Any
    ) -> Training:
        """Apply the job; blocks of `spec` replace those of a tiny job. `fragile`: on nodes that may be taken away."""
        training = {"maxSteps": STEPS, "globalBatchSize": 16, "learningRate": 0.002, "precision": "fp32"}
        name = team.new_name(stem)
        base: Object = {"training": training, "checkpoints": {"every": {"steps": EVERY}}}
        template = {**puppet(team, step_seconds), **(on_fragile_nodes(team.box, "training") if fragile else {})}
        team.apply(name, tiny_spec(**{**base, "template": template, **spec}))
        return cls(team, name)

    def pods(self) -> tuple[Object, ...]:
        """Return the pods of the current attempt, by node rank."""
        found = self.team.pods(self.name, "train", self.attempt)
        return tuple(sorted(found, key=lambda pod: int(pod["metadata"]["labels"][_INDEX])))

    def pod(self, rank: int) -> str:
        """Return the name of the current attempt's pod with that node rank."""
        return str(self.pods()[rank]["metadata"]["name"])

    def node(self, rank: int) -> str:
        """Return the node of that pod."""
        return str(self.pods()[rank]["spec"]["nodeName"])

    def describe(self) -> str:
        """Describe the job for a failed test."""
        return self.team.describe(self.name)

    def wait_step(self, step: int) -> int:
        """Wait until the current attempt has done `step`; return its last step."""

        def done() -> int | None:
            stage = stage_of(self.team.status(self.name), "train")
            assert stage.get("attempt", 0) <= self.attempt, f"attempt {self.attempt} broke by itself\n{self.describe()}"
            if (stage.get("attempt"), stage.get("state")) != (self.attempt, "Running"):
                return None
            now = self.team.step(self.name)
            return now if now >= step else None

        return wait_until(done, f"{self.name}: step {step} of attempt {self.attempt}", self.seconds, self.describe)

    def breaks(self, fault: Callable[[], object], over: bool = False) -> Broken:
        """Inject the fault in the middle of the current attempt; wait for the next attempt, or (`over`) the end."""
        self.wait_step(self.resumed + BEFORE_FAULT)
        pods, steps, left = self.pods(), [0], set[str]()
        fault()

        def failed_attempt() -> Object | None:
            status = self.team.status(self.name)
            steps.append(self.team.step(self.name))
            left.update(pod["metadata"]["name"] for pod in self.pods() if _ended_by_itself(pod))
            return status if status.get("failure", {}).get("attempt") == self.attempt else None

        status = wait_until(
            failed_attempt, f"{self.name}: attempt {self.attempt} has failed", self.seconds, self.describe
        )
        if over:
            status = self.team.wait_end(self.name, self.seconds)
            return Broken(self.attempt, pods, max(steps), status, left=frozenset(left))

        def resumed() -> int | None:
            steps.append(self.team.step(self.name))
            return self._resumed(self.attempt + 1)

        step = wait_until(resumed, f"{self.name}: attempt {self.attempt + 1} goes on", self.seconds, self.describe)
        broken = Broken(self.attempt, pods, max(steps), status, step, frozenset(left))
        self.attempt, self.resumed = self.attempt + 1, step
        return broken

    def _resumed(self, attempt: int) -> int | None:
        """Return the step from which an attempt resumed, from the log of its rank 0."""
        for pod in self.team.pods(self.name, "train", attempt):
            if pod["metadata"]["labels"].get(_INDEX) != "0" or pod["status"].get("phase") == "Pending":
                continue
            place = path_of("v1", "pods", self.team.namespace, pod["metadata"]["name"], "log")
            try:
                match = _RESUMED.search(self.team.box.api.call("GET", f"{place}?container={CONTAINER_NAME}"))
            except ApiError:
                continue  # It has no log yet.
            if match is not None:
                return int(match[1])
        return None

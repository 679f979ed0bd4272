"""A training that is broken on purpose, several times in a row if need be, and what became of it each time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from box_support.box import on_fragile_nodes
from box_support.faults import puppet
from box_support.team import JOB_SECONDS, Team, stage_of, tiny_spec
from cluster_support.api_access import ApiError, Object, path_of, wait_until
from finetune_operator.rendering.pod_parts import CONTAINER_NAME

STEPS = 300
BEFORE_FAULT = 25
"""Steps that an attempt has done when it breaks."""
EVERY = 10
"""Steps between two checkpoints."""
STEP_SECONDS = 0.1
"""At least; so that a fault of a second finds the training under way."""
_SIZES = ("worldSize", "microBatchSize", "gradientAccumulation")
_RESUMED = re.compile(r"Resuming from \S+ \(step (\d+)\)")
_INDEX = "batch.kubernetes.io/job-completion-index"


def _ended_by_itself(pod: Object) -> bool:
    return pod["status"].get("phase") == "Failed" and "deletionTimestamp" not in pod["metadata"]


def sizes(status: Object) -> tuple[int, int, int]:
    """World, micro-batch and accumulation of the plan in force."""
    world, micro, accumulation = (status["plan"][name] for name in _SIZES)
    return world, micro, accumulation


@dataclass(frozen=True)
class Broken:
    """One attempt's end, and the beginning of the next."""

    attempt: int
    pods: tuple[Object, ...]
    """Of the attempt, by node rank, before it was broken."""
    reached: int
    """The last step that it has done."""
    status: Object
    """When it told of the failure."""
    resumed: int = 0
    """The step that the next attempt went on from; 0 when the job is over."""
    left: frozenset[str] = frozenset()
    """Names of its pods that ended before anybody deleted them: of these there is a log to be told."""

    @property
    def failure(self) -> Object:
        found: Object = self.status["failure"]
        return found

    @property
    def lost(self) -> int:
        """Steps that had to be done again."""
        return self.reached - self.resumed

    def told(self, *fields: str) -> list[object]:
        """Fields of the failure."""
        return [self.failure.get(name) for name in fields]

    def name(self, rank: int) -> str:
        """Of the pod with that node rank."""
        return str(self.pods[rank]["metadata"]["name"])

    def node(self, rank: int) -> str:
        """Where that pod ran."""
        return str(self.pods[rank]["spec"]["nodeName"])


@dataclass
class Training:
    """A job that only prepares and trains, as an Indexed Job, and can be told to raise (`faults.puppet`)."""

    team: Team
    name: str
    resumed: int = 0
    """The step that the current attempt went on from."""
    attempt: int = 1
    seconds: float = field(default=JOB_SECONDS, kw_only=True)
    """How long anything of it may take on a busy machine."""

    @classmethod
    def start(
        cls, team: Team, stem: str, step_seconds: float = STEP_SECONDS, *, fragile: bool = False, **spec: Any
    ) -> Training:
        """Apply it; blocks of `spec` replace those of a tiny job. `fragile`: on nodes that may be taken away."""
        training = {"maxSteps": STEPS, "globalBatchSize": 16, "learningRate": 0.002, "precision": "fp32"}
        name = team.new_name(stem)
        base: Object = {"training": training, "checkpoints": {"every": {"steps": EVERY}}}
        template = {**puppet(team, step_seconds), **(on_fragile_nodes(team.box) if fragile else {})}
        team.apply(name, tiny_spec(**{**base, "template": template, **spec}))
        return cls(team, name)

    def pods(self) -> tuple[Object, ...]:
        """Of the current attempt, by node rank."""
        found = self.team.pods(self.name, "train", self.attempt)
        return tuple(sorted(found, key=lambda pod: int(pod["metadata"]["labels"][_INDEX])))

    def pod(self, rank: int) -> str:
        """Name of the current attempt's pod with that node rank."""
        return str(self.pods()[rank]["metadata"]["name"])

    def node(self, rank: int) -> str:
        """Where that pod runs."""
        return str(self.pods()[rank]["spec"]["nodeName"])

    def tell(self) -> str:
        """For a failed test."""
        return self.team.tell(self.name)

    def wait_step(self, step: int) -> int:
        """Until the current attempt has done that step; the last one now."""

        def done() -> int | None:
            stage = stage_of(self.team.status(self.name), "train")
            assert stage.get("attempt", 0) <= self.attempt, f"attempt {self.attempt} broke by itself\n{self.tell()}"
            if (stage.get("attempt"), stage.get("state")) != (self.attempt, "Running"):
                return None
            now = self.team.step(self.name)
            return now if now >= step else None

        return wait_until(done, f"{self.name}: step {step} of attempt {self.attempt}", self.seconds, self.tell)

    def breaks(self, fault: Callable[[], object], over: bool = False) -> Broken:
        """The fault in the middle of the current attempt, and what follows: the next attempt, or (`over`) the end."""
        self.wait_step(self.resumed + BEFORE_FAULT)
        pods, steps, left = self.pods(), [0], set[str]()
        fault()

        def told() -> Object | None:
            status = self.team.status(self.name)
            steps.append(self.team.step(self.name))
            left.update(pod["metadata"]["name"] for pod in self.pods() if _ended_by_itself(pod))
            return status if status.get("failure", {}).get("attempt") == self.attempt else None

        status = wait_until(told, f"{self.name}: attempt {self.attempt} has failed", self.seconds, self.tell)
        if over:
            status = self.team.wait_end(self.name, self.seconds)
            return Broken(self.attempt, pods, max(steps), status, left=frozenset(left))

        def resumed() -> int | None:
            steps.append(self.team.step(self.name))
            return self._resumed(self.attempt + 1)

        step = wait_until(resumed, f"{self.name}: attempt {self.attempt + 1} goes on", self.seconds, self.tell)
        broken = Broken(self.attempt, pods, max(steps), status, step, frozenset(left))
        self.attempt, self.resumed = self.attempt + 1, step
        return broken

    def _resumed(self, attempt: int) -> int | None:
        """From which step an attempt went on, in the words of its rank 0."""
        for pod in self.team.pods(self.name, "train", attempt):
            if pod["metadata"]["labels"].get(_INDEX) != "0" or pod["status"].get("phase") == "Pending":
                continue
            place = path_of("v1", "pods", self.team.namespace, pod["metadata"]["name"], "log")
            try:
                said = _RESUMED.search(self.team.box.api.call("GET", f"{place}?container={CONTAINER_NAME}"))
            except ApiError:
                continue  # It has no log yet.
            if said is not None:
                return int(said[1])
        return None

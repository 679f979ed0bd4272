"""Attempts that hang, on a real API server with posts over HTTPS: stopped after their time, and never for silence of
the operator's own.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from cluster_support.api_access import Object, wait_until
from cluster_support.plays import RUNS, SUCCEEDS
from cluster_support.world import World, condition, stage_of, states
from suite_plugins.patience import patient

SECONDS = math.ceil(patient(8))
SPEC = {"evaluation": None, "predict": None, "runPolicy": {"progressDeadlineSeconds": SECONDS}}


def since(status: Object) -> datetime:
    """Return the time since which the failure counts silence."""
    found = re.search(r"since (\S+Z)", status["failure"]["message"])
    assert found is not None, status["failure"]["message"]
    return datetime.fromisoformat(found[1])


def first_pod(world: World, job: str) -> Object:
    label = "batch.kubernetes.io/job-completion-index"
    return next(pod for pod in world.pods(job, "train") if pod["metadata"]["labels"][label] == "0")


def begin(world: World, job: str, nodes: int = 1) -> Object:
    """Start the job's training, report step 5, and return the pod of rank 0."""
    world.kubelet.playbook.set(job, "train", replace(RUNS, log="stack of a rank\n"), attempt=1)
    world.apply(job, {**SPEC, "resources": {"nodes": nodes}})
    world.wait_running(job, "train")
    wait_until(lambda: len(world.pods(job, "train")) == nodes, "all pods are there")
    pod = first_pod(world, job)
    assert world.report(job, pod, {"step": 5, "total_steps": 9}).status_code == 200
    world.wait(job, "progress", lambda status: (status.get("progress") or {}).get("step") == 5)
    return pod


def test_a_gang_that_only_repeats_itself_is_stopped_and_starts_again(world: World) -> None:
    world.kubelet.playbook.set("hung", "train", SUCCEEDS, attempt=2)
    pod = begin(world, "hung", nodes=2)
    history = world.record("hung")
    world.wait("hung", "told", lambda status: condition(status, "Running").get("reason") == "NoProgress")
    assert world.report("hung", pod, {"step": 5, "total_steps": 9}).status_code == 200
    status = world.wait_phase("hung", "Succeeded")
    assert (states(status)["train"], status["restarts"], status["countedRestarts"]) == (("Succeeded", 2), 1, 1)
    failure = next(each["failure"] for each in history.statuses() if "failure" in each)
    assert (failure["class"], failure["reason"], failure["stage"], failure["attempt"]) == (
        "NoProgress",
        "Hung",
        "train",
        1,
    )
    assert "(step 5 of 9)" in failure["message"]
    assert failure["logTail"].splitlines().count("stack of a rank") == 2
    for wanted in ("ProgressStopped", "StageFailed", "Restarting"):
        world.wait_event("hung", wanted, lambda _, reason, __, wanted=wanted: reason == wanted)
    wait_until(lambda: not world.pods("hung", "train", attempt=1), "the pods that hung are gone")


def test_silence_while_the_operator_was_away_does_not_count(world: World) -> None:
    begin(world, "alone")
    world.operator.kill()
    over = datetime.now(UTC) + timedelta(seconds=SECONDS)
    wait_until(lambda: datetime.now(UTC) > over, "the deadline has passed", 2 * SECONDS)
    again = datetime.now(UTC).replace(microsecond=0)
    world.operator.start()
    status = world.wait("alone", "stopped", lambda found: "failure" in found)
    assert status["failure"]["class"] == "NoProgress"
    assert since(status) >= again


def test_attempt_without_any_report_is_left_alone(world: World) -> None:
    """The silent attempt runs on while another one, which did report, is stopped."""
    world.kubelet.playbook.set("mute", "train", RUNS)
    world.apply("mute", SPEC)
    world.wait_running("mute", "train")
    begin(world, "loud")
    world.wait("loud", "stopped", lambda found: "failure" in found)
    world.catch_up()
    status = world.status("mute")
    found = stage_of(status, "train")
    assert found is not None
    assert (found["state"], found["attempt"], status.get("failure")) == ("Running", 1, None)

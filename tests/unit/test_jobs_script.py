"""A job with a training program of the user's own, from its plan to its end."""

from __future__ import annotations

import json
from typing import Any

from finetune_contract.layout import FailureClass
from finetune_contract.report import MeasuredFacts
from reconcile_world import SPEC, World

COMMIT = "0123456789" * 4
GIT = {"url": "https://github.com/example/programs", "ref": "v1", "path": "classify"}


def own(**blocks: Any) -> World:
    """Return a job with the program on two nodes, running its first attempt."""
    script = {"git": GIT, "hyperparameters": {"epochs": 2}}
    spec = {name: value for name, value in SPEC.items() if name not in ("training", "predict")}
    world = World(spec={**spec, "training": {"script": script}, "resources": {"nodes": 2}, **blocks})
    world.settle()
    artifacts = {"code": "code", "script": f"{GIT['url']}@{COMMIT}"}
    world.succeed(artifacts=artifacts, measured=MeasuredFacts(), fingerprint=None, metrics={"commit": COMMIT})
    world.settle()
    world.start()
    world.settle()
    assert world.stage("train") == ("Running", 1)
    return world


def test_status_of_a_program_has_only_its_known_fields():
    world = own()
    status = world.job().status
    assert status.plan is not None
    assert status.artifacts is not None
    plan = status.plan
    assert (plan.strategy, plan.world_size, plan.micro_batch_size, plan.memory_per_device) == ("script", 2, None, {})
    assert [stage.name for stage in status.stages] == ["prepare", "train"]
    assert status.artifacts.script == f"{GIT['url']}@{COMMIT}"
    planned = next(one for one in status.conditions if one.type == "Planned")
    assert planned.message == "Runs your program by job on 2 processes."
    ordered = json.loads(world.configuration("reviews-train-1"))
    assert (ordered["training"], ordered["script"]["arguments"]) == (None, ["--epochs", "2"])


def test_its_own_figures_are_the_jobs():
    world = own()
    world.succeed(metrics={"train": {"loss": 0.25, "eval_accuracy": 0.9, "world_size": 2}})
    world.settle()
    status = world.job().status
    assert status.artifacts is not None
    assert world.phase == "Succeeded"
    assert status.artifacts.metrics == {"train_loss": 0.25, "eval_accuracy": 0.9, "train_world_size": 2.0}
    assert status.artifacts.model == "pvc://reviews-workspace/reviews/model"


def test_program_out_of_memory_is_retried_and_counted_without_adaptation():
    world = own()
    world.fail(FailureClass.OUT_OF_MEMORY)
    world.settle()
    world.wait(10)
    status = world.job().status
    assert (world.stage("train"), status.counted_restarts, status.adaptation) == (("Running", 2), 1, None)


def test_a_git_host_that_is_away_is_tried_again_and_counted():
    world = World(spec={**SPEC, "training": {"script": {"git": GIT}}})
    world.settle()
    world.fail(FailureClass.CODE_UNAVAILABLE)
    world.settle()
    world.wait(10)
    assert (world.stage("prepare"), world.job().status.counted_restarts) == (("Running", 2), 1)


def test_a_preempted_program_is_started_again_free_of_charge():
    world = own()
    world.fail(FailureClass.PREEMPTED)
    world.settle()
    world.wait(10)
    assert (world.stage("train"), world.job().status.counted_restarts) == (("Running", 2), 0)

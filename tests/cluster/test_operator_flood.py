"""Jobs of one tenant in a flood of another's, and without the process that plans, on a real API server."""

from __future__ import annotations

import psutil

from cluster_support.api_access import Object, path_of, wait_until
from cluster_support.world import World, fresh_namespace
from finetune_operator.controller.reconcile import plan_process
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

FLOOD, HONEST = 24, 5


def large_job(number: int) -> Object:
    """Return a job that takes long to plan: it fits nowhere, and the plan of no other job serves it."""
    spec = {
        "task": "text-generation",
        "model": {"uri": "hf://meta-llama/Llama-2-70b-hf"},
        "dataset": {"uri": "hf://tatsu-lab/alpaca"},
        "training": {"maxSteps": 1000 + number},
        "resources": {"gpusPerNode": 8, "accelerator": {"product": "NVIDIA-H100-80GB-HBM3"}},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": f"flood-{number}"}, "spec": spec}


def planned(job: Object) -> bool:
    conditions = job.get("status", {}).get("conditions", [])
    return any((one["type"], one["status"]) in (("Planned", "True"), ("Planned", "False")) for one in conditions)


def test_jobs_start_while_a_flood_of_another_namespace_is_planned(world: World) -> None:
    with fresh_namespace(world.cluster) as noise:
        path = path_of(API_VERSION, PLURAL, noise)
        for number in range(FLOOD):
            world.api.create(path, large_job(number))
        for number in range(HONEST):
            world.apply(f"honest-{number}")
        wait_until(
            lambda: all(world.children(f"honest-{number}") for number in range(HONEST)), "every honest job has a child"
        )
        served_before = sum(planned(job) for job in world.api.items(path))

        assert served_before < FLOOD // 2, "honest jobs waited for those of the flood"
        wait_until(lambda: any(planned(job) for job in world.api.items(path)), "jobs of the flood are planned as well")


def test_job_is_planned_again_after_its_planning_process_was_killed(world: World) -> None:
    def planners() -> list[psutil.Process]:
        children = psutil.Process(world.operator.pid).children()
        return [one for one in children if plan_process.__name__ in one.cmdline()]

    with fresh_namespace(world.cluster) as noise:
        world.api.create(path_of(API_VERSION, PLURAL, noise), large_job(0))
        wait_until(planners, "a process plans")
        for killed in planners():
            killed.kill()
        world.apply("after")
        wait_until(lambda: world.children("after"), "the job has a child")
        read = path_of(API_VERSION, PLURAL, noise, "flood-0")
        wait_until(lambda: planned(world.api.get(read) or {}), "the job whose process was killed is planned")

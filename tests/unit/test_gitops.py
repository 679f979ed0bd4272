"""Health of a FineTuneJob by Argo CD's Lua and Flux's CEL, over the statuses that the operator really writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import celpy
import pytest
import yaml
from lupa.lua54 import LuaRuntime

from finetune_operator.spec.types import GROUP, KIND, Phase
from reconcile_world import LIVES, World

GITOPS = Path(__file__).parents[2] / "manifests" / "gitops"
SERVING = {
    "phase": "Serving",
    "observedGeneration": 1,
    "conditions": [{"type": "Ready", "status": "True", "reason": "Ready", "message": "1 of 1 replicas answers."}],
}


def lived(life: str) -> dict[str, Any]:
    """Return the job after that life."""
    world = World()
    LIVES[life](world)
    metadata = {"name": "reviews", "generation": world.generation}
    return {"kind": KIND, "metadata": metadata, "spec": world.spec, "status": world.status}


JOBS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a job that the operator has not seen": ({"metadata": {"generation": 1}, "spec": {}}, "Progressing", "InProgress"),
    "a spec that was edited a moment ago": (
        {**lived("all is done"), "metadata": {"generation": 2}},
        "Progressing",
        "InProgress",
    ),
    "a spec that is refused": (lived("a spec that is refused"), "Degraded", "Failed"),
    "a plan that is refused": (lived("a plan that is refused"), "Degraded", "Failed"),
    "a first stage whose pods are not made yet": (
        lived("a first stage whose pods are not made yet"),
        "Progressing",
        "InProgress",
    ),
    "prepare runs": (lived("prepare runs"), "Progressing", "InProgress"),
    "train runs": (lived("train runs"), "Progressing", "InProgress"),
    "evaluate runs": (lived("evaluate runs"), "Progressing", "InProgress"),
    "predict runs": (lived("predict runs"), "Progressing", "InProgress"),
    "all is done": (lived("all is done"), "Healthy", "Current"),
    "a stage that starts again": (lived("a stage that starts again"), "Progressing", "InProgress"),
    "a job that has failed": (lived("a job that has failed"), "Degraded", "Failed"),
    "a suspended job": (lived("a suspended job"), "Suspended", "Current"),
    "a quota in the way": (lived("a quota in the way"), "Degraded", "Failed"),
    "a job that serves": ({"metadata": {"generation": 1}, "spec": {}, "status": SERVING}, "Healthy", "Current"),
}


def test_every_life_of_a_job_is_judged() -> None:
    assert set(LIVES) <= set(JOBS)
    judged = {job["status"]["phase"] for job, _, _ in JOBS.values() if "status" in job}
    assert judged >= {"Pending", "Preparing", "Training", "Evaluating", "Predicting", "Serving", "Suspended"}
    assert judged >= {"Succeeded", "Failed"}
    assert judged <= set(Phase.__args__)  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------------------- Argo CD


def argo_health(job: dict[str, Any], script: str) -> dict[str, str]:
    """Return Argo CD's health of the job: it runs the script with `obj` and takes the returned table."""
    lua = LuaRuntime(unpack_returned_tuples=True)
    lua.globals()["obj"] = lua.table_from(job, recursive=True)
    return dict(lua.execute(script).items())


@pytest.mark.parametrize("case", JOBS)
def test_argo_cd_sees_the_health_of_a_job(case: str) -> None:
    job, health, _ = JOBS[case]
    settings = yaml.safe_load((GITOPS / "argocd" / "argocd-cm.yaml").read_text())
    found = argo_health(job, settings["data"][f"resource.customizations.health.{GROUP}_{KIND}"])
    assert found["status"] == health
    assert found["message"]


def test_argo_cd_shows_the_failure_and_the_progress_of_a_job() -> None:
    script = (GITOPS / "argocd" / "health.lua").read_text()
    failed, training = JOBS["a job that has failed"][0], lived("train runs")
    cause = next(one["message"] for one in failed["status"]["conditions"] if one["type"] == "Failed")
    assert argo_health(failed, script)["message"] == cause
    training["status"]["progress"] = {"percent": 45}
    assert argo_health(training, script)["message"] == "Training 45 %"


def test_argo_cd_leaves_suspending_to_people() -> None:
    (jobs,) = yaml.safe_load_all((GITOPS / "argocd" / "jobs.yaml").read_text())
    assert jobs["spec"]["ignoreDifferences"] == [
        {"group": GROUP, "kind": KIND, "jsonPointers": ["/spec/runPolicy/suspend"]}
    ]


# ----------------------------------------------------------------------------------------------------------------- Flux


def flux_statuses(job: dict[str, Any], expressions: dict[str, str]) -> list[str]:
    """Return the statuses that hold. Flux gives expressions the object's own fields, and waits where one is missing."""
    environment, held = celpy.Environment(), []
    for name, status in (("inProgress", "InProgress"), ("failed", "Failed"), ("current", "Current")):
        program = environment.program(environment.compile(expressions[name]))
        try:
            if program.evaluate({key: celpy.json_to_cel(value) for key, value in job.items()}):
                held.append(status)
        except celpy.CELEvalError:
            assert "status" not in job, f"{name}: a field is missing of a job that has a status"
            return ["InProgress"]
    return held


@pytest.mark.parametrize("case", JOBS)
def test_flux_sees_the_health_of_a_job(case: str) -> None:
    job, _, health = JOBS[case]
    documents = yaml.safe_load_all((GITOPS / "flux" / "jobs.yaml").read_text())
    kustomization = next(one for one in documents if one["kind"] == "Kustomization")
    (check,) = kustomization["spec"]["healthCheckExprs"]
    assert (check["apiVersion"].partition("/")[0], check["kind"]) == (GROUP, KIND)
    assert flux_statuses(job, check) == [health]

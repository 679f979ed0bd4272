"""Render the objects that run a plan, and read their status, by the module of each launcher.

Pure: the operator creates the returned objects in this order, and `finetune render` prints them. A launcher or a stage
that cannot be rendered raises PlanRefused; validation refuses it before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pydantic import JsonValue

from finetune_contract.choices import Stage
from finetune_operator.endpoints.render.endpoint_objects import endpoint_objects
from finetune_operator.jobs.launchers.job import job_launcher as job
from finetune_operator.jobs.launchers.launcher_status import Verdict
from finetune_operator.jobs.launchers.mpijob import mpijob_launcher as mpijob
from finetune_operator.jobs.launchers.pytorchjob import pytorchjob_launcher as pytorchjob
from finetune_operator.jobs.launchers.sparkapplication import sparkapplication_launcher as sparkapplication
from finetune_operator.jobs.render.manifests import config_map, shared
from finetune_operator.jobs.render.render_types import Attempt, Manifest, RenderContext
from finetune_operator.jobs.render.spot_affinity import first_capacity
from finetune_operator.jobs.render.trainer_pod import StagePods
from finetune_operator.plan.types.plan_types import JobPlan, PlanRefused
from finetune_operator.spec.launcher_rows import SUPPORTED, TRAINING, LauncherName, launcher_of
from finetune_operator.spec.problems import Problem, any_of, describe_value


class LauncherModule(Protocol):
    """Interface of a launcher's module."""

    def render(self, pods: StagePods) -> tuple[Manifest, ...]:
        """Return the objects that run the attempt, without its ConfigMap, in order of creation."""

    def read(self, value: Mapping[str, JsonValue]) -> Verdict:
        """Return the state of an object of the launcher's kind. Raise ValidationError if it cannot be read."""


MODULES: Mapping[LauncherName, LauncherModule] = {
    "job": job,
    "mpijob": mpijob,
    "pytorchjob": pytorchjob,
    "sparkapplication": sparkapplication,
}


def module_of(api_version: str, kind: str) -> LauncherModule | None:
    """Return the module of a kind; None for a kind that runs no attempts."""
    names = (launcher.name for launcher in SUPPORTED if (launcher.api_version, launcher.kind) == (api_version, kind))
    return next((MODULES[name] for name in names), None)


def render(plan: JobPlan, context: RenderContext) -> tuple[Manifest, ...]:
    """Return all objects of a job without failures: the shared ones, then the first attempt of each stage in order."""
    attempts = [Attempt(name, capacity=first_capacity(context.spec, name)) for name in plan.stages]
    stages = [stage(plan, context, attempt) for attempt in attempts]
    return (*shared(plan, context), *(manifest for objects in stages for manifest in objects))


def stage(plan: JobPlan, context: RenderContext, attempt: Attempt) -> tuple[Manifest, ...]:
    """Return the objects of an attempt: its ConfigMap, a Service if its pods need one, last the launcher's object."""
    if attempt.stage is Stage.SERVE:
        return endpoint_objects(plan, context).manifests
    if attempt.stage is Stage.TRAIN and plan.launcher not in TRAINING:
        raise _refused(
            "spec.launcher", plan.launcher, "has no manifest in this version", f"set launcher to {any_of(TRAINING)}"
        )
    pods = StagePods(plan, context, attempt)
    name = launcher_of(attempt.stage, plan.launcher, plan.engine_of(attempt.stage)).name
    return (config_map(pods), *MODULES[name].render(pods))


def _refused(field: str, value: str, rule: str, hint: str) -> PlanRefused:
    shown = describe_value(value, field.split("."))
    return PlanRefused((Problem(field, shown, rule, hint, reason="NotYetSupported"),))

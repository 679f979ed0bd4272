"""Reads and renders the golden jobs: those of `tests/golden`, where each `<name>.yaml` has a job and the facts for its
plan, and those of `manifests/examples`.

For an example in a cluster model, data and nodes are unknown, and every launcher is served; the quickstart is planned
for two cores.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from examples import EXAMPLES, LOCAL, example_job
from finetune_contract.facts import DataFacts, SplitFacts
from finetune_operator.jobs.launchers.launcher_registry import render
from finetune_operator.jobs.render.render_types import Manifest, Owner, ProgressEndpoint, RenderContext
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.models.architectures import model_facts
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.draft import decided
from finetune_operator.plan.types.plan_types import Facts, JobPlan
from finetune_operator.spec.launcher_rows import TRAINING, LauncherName
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings, Spark
from finetune_operator.spec.types import FineTuneJob

NAMESPACE = "finetune-golden"
OWNER_UID = "6f1c9a52-0f0e-4a59-9a34-2b1d7c5e8f00"
PROGRESS = ProgressEndpoint(
    "https://finetune-operator-progress.finetune-system.svc:8443",
    "-----BEGIN CERTIFICATE-----\nbm90IGEgY2VydGlmaWNhdGU=\n-----END CERTIFICATE-----\n",
    "finetune-system",
)
FOLDER = Path(__file__).parent / "golden"
LAUNCHERS = TRAINING
CASES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
NAME = "golden"
"""Name of every golden job that is named after its file, so that names cause no differences."""
SPARK = "by-spark"
"""The job `gpu-gang-with-everything`, prepared and predicted by Spark."""
JOBS = (*CASES, SPARK, *(f"examples/{name}" for name in EXAMPLES))
JSON = TypeAdapter[Any](Any)


@functools.cache
def read_case(name: str) -> tuple[FineTuneJob, Facts, Settings]:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    job_document, facts_document = yaml.load_all(text, Loader=yaml.CSafeLoader)
    job = FineTuneJob.model_validate_json(JSON.dump_json(job_document))
    local = facts_document.get("local", False)
    model, hardware, data = (facts_document.get(key) for key in ("model", "hardware", "data"))
    facts = Facts(
        model=None if model is None else model_facts(model, job.spec.task),
        hardware=None if hardware is None else parse_hardware(hardware),
        data=None
        if data is None
        else DataFacts(
            fingerprint="fixed", splits={"train": SplitFacts(**data["train"])}, max_length=data["maxLength"]
        ),
        local=local,
        served=tuple(facts_document.get("served", ("job",))),
        kserve=facts_document.get("kserve", False),
        custom_metrics=facts_document.get("customMetrics", False),
    )
    base = LOCAL_SETTINGS if local else CLUSTER_SETTINGS
    changes = facts_document.get("settings", {})
    settings = Settings.model_validate_json(JSON.dump_json(base.model_dump(by_alias=True, mode="json") | changes))
    return job, facts, settings


def golden_context(job: FineTuneJob, settings: Settings) -> RenderContext:
    """Return the render context of all golden manifests."""
    return RenderContext(NAMESPACE, job.spec, settings, Owner(job.name, OWNER_UID), PROGRESS)


def golden_job(name: str) -> tuple[FineTuneJob, Facts, Settings]:
    """Return a job of JOBS, and the facts and settings of its plan."""
    folder, _, file = name.rpartition("/")
    if name == SPARK:
        job, facts, settings = run_by_spark()
    elif not folder:
        job, facts, settings = read_case(file)
    elif file in LOCAL:
        hardware = parse_hardware("cpu=2,hostMemory=8Gi")
        job, facts, settings = example_job(file), Facts(hardware=hardware, local=True), LOCAL_SETTINGS
    else:
        job, facts, settings = example_job(file), Facts(served=LAUNCHERS), CLUSTER_SETTINGS
    if job.name in (*CASES, *EXAMPLES):
        job = job.model_copy(update={"metadata": job.metadata.model_copy(update={"name": NAME})})
    return job, facts, settings


def run_by_spark() -> tuple[FineTuneJob, Facts, Settings]:
    job, facts, settings = read_case("gpu-gang-with-everything")
    preparation = job.spec.preparation.model_copy(update={"engine": "spark", "workers": 4})
    predict = decided(job.spec.predict).model_copy(update={"engine": "spark", "workers": 3})
    changes = {"preparation": preparation, "predict": predict}
    job = job.model_copy(update={"spec": job.spec.model_copy(update=changes)})
    spark = Spark(image="registry.example.com/team/trainer-spark:1", serviceAccountName="spark-driver")
    return job, replace(facts, served=(*LAUNCHERS, "sparkapplication")), settings.model_copy(update={"spark": spark})


@functools.cache
def golden_plan(name: str) -> JobPlan:
    return plan(*golden_job(name))


@functools.cache
def golden_manifests(name: str) -> dict[LauncherName, tuple[Manifest, ...]]:
    """Return launcher -> all objects of the job: of every launcher for a job of `tests/golden` that trains, of the
    plan's launcher for all others, and nothing for a local job.
    """
    job, facts, settings = golden_job(name)
    if facts.local:
        return {}
    if name not in CASES:
        launchers = (golden_plan(name).launcher,)
    else:
        launchers = LAUNCHERS if job.spec.training is not None else ("job",)
    found: dict[LauncherName, tuple[Manifest, ...]] = {}
    for launcher in launchers:
        spec = job.spec.model_copy(update={"launcher": launcher})
        served = tuple(dict.fromkeys((*LAUNCHERS, *facts.served)))
        made = plan(job.model_copy(update={"spec": spec}), replace(facts, served=served), settings)
        found[launcher] = render(made, golden_context(job, settings))
    return found

"""Reads the jobs of `tests/golden`: each `<name>.yaml` there holds a job and the facts it is planned with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from finetune_contract.facts import DataFacts, SplitFacts
from finetune_operator.api.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings
from finetune_operator.api.types import FineTuneJob
from finetune_operator.launchers.rows import TRAINING
from finetune_operator.planning.architectures import model_facts
from finetune_operator.planning.facts import parse_hardware
from finetune_operator.planning.types import Facts
from finetune_operator.rendering.types import Owner, ProgressEndpoint, RenderContext

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
    )
    base = LOCAL_SETTINGS if local else CLUSTER_SETTINGS
    changes = facts_document.get("settings", {})
    settings = Settings.model_validate_json(JSON.dump_json(base.model_dump(by_alias=True, mode="json") | changes))
    return job, facts, settings


def golden_context(job: FineTuneJob, settings: Settings) -> RenderContext:
    """The surroundings of all manifests on record."""
    return RenderContext(NAMESPACE, job.spec, settings, Owner(job.name, OWNER_UID), PROGRESS)

"""Whole plans of whole jobs. Each `<name>.yaml` holds a job and the facts it is planned with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from finetune_contract.facts import DataFacts, SplitFacts
from finetune_operator.api.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS, Settings
from finetune_operator.api.types import FineTuneJob
from finetune_operator.planning.architectures import model_facts
from finetune_operator.planning.facts import parse_hardware
from finetune_operator.planning.plan import plan
from finetune_operator.planning.types import Facts
from finetune_operator.rendering.contract import files

FOLDER = Path(__file__).parent
CASES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
JSON = TypeAdapter[Any](Any)


def read(name: str) -> tuple[FineTuneJob, Facts, Settings]:
    job_document, facts_document = yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
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
    )
    base = LOCAL_SETTINGS if local else CLUSTER_SETTINGS
    changes = facts_document.get("settings", {})
    settings = Settings.model_validate_json(JSON.dump_json(base.model_dump(by_alias=True, mode="json") | changes))
    return job, facts, settings


def test_there_are_jobs_to_plan_and_no_plan_without_a_job():
    assert len(CASES) >= 8
    plans = {file.name.removesuffix(".plan.json") for file in FOLDER.glob("*.plan.json")}
    assert plans == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_one_on_record(name: str, golden: Callable[[str, str], None]):
    job, facts, settings = read(name)
    result = plan(job, facts, settings)
    golden(f"{name}.plan.json", result.to_json())
    rendered = files(result)
    if "deepspeed.json" in rendered:
        golden(f"{name}.deepspeed.json", rendered["deepspeed.json"])

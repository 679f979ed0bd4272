"""Whole plans of whole jobs, kept beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from finetune_operator.planning.plan import plan
from finetune_operator.rendering.contract import files
from golden_cases import CASES, FOLDER, read_case


def test_there_are_jobs_to_plan_and_no_plan_without_a_job():
    assert len(CASES) >= 8
    plans = {file.name.removesuffix(".plan.json") for file in FOLDER.glob("*.plan.json")}
    assert plans == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_one_on_record(name: str, golden: Callable[[str, str], None]):
    job, facts, settings = read_case(name)
    result = plan(job, facts, settings)
    golden(f"{name}.plan.json", result.to_json())
    rendered = files(result)
    if "deepspeed.json" in rendered:
        golden(f"{name}.deepspeed.json", rendered["deepspeed.json"])

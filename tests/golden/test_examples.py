"""What the examples become: the plan that `finetune plan` shows, and all objects that the operator creates.

In a cluster nothing is known of model, data and nodes at first, and every launcher is served; the quickstart is planned
for two cores.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from examples import EXAMPLES, IN_CLUSTER, LOCAL, example_job
from finetune_operator.api.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS
from finetune_operator.cli.console import emit
from finetune_operator.launchers.registry import render
from finetune_operator.planning.facts import parse_hardware
from finetune_operator.planning.plan import plan
from finetune_operator.planning.types import Facts, JobPlan
from finetune_operator.rendering.contract import files
from golden_cases import FOLDER, LAUNCHERS, golden_context


def planned(name: str) -> JobPlan:
    if name in LOCAL:
        here = Facts(hardware=parse_hardware("cpu=2,hostMemory=8Gi"), local=True)
        return plan(example_job(name), here, LOCAL_SETTINGS)
    return plan(example_job(name), Facts(served=LAUNCHERS), CLUSTER_SETTINGS)


def test_there_is_a_record_of_every_example_and_of_nothing_else():
    assert len(EXAMPLES) >= 11
    recorded = {file.name.partition(".")[0] for file in (FOLDER / "examples").iterdir()}
    assert recorded == set(EXAMPLES)
    manifests = {file.name.partition(".")[0] for file in (FOLDER / "examples").glob("*.manifests.yaml")}
    assert manifests == set(IN_CLUSTER)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_plan_of_an_example_is_the_one_on_record(name: str, golden: Callable[[str, str], None]):
    result = planned(name)
    golden(f"examples/{name}.plan.json", result.to_json())
    rendered = files(result)
    if "deepspeed.json" in rendered:
        golden(f"examples/{name}.deepspeed.json", rendered["deepspeed.json"])


@pytest.mark.parametrize("name", IN_CLUSTER)
def test_the_manifests_of_an_example_are_those_on_record(
    name: str, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
):
    emit(render(planned(name), golden_context(example_job(name), CLUSTER_SETTINGS)), "yaml")
    golden(f"examples/{name}.manifests.yaml", capsys.readouterr().out)

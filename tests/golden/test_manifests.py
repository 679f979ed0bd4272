"""Whole manifests of whole jobs: what `finetune render` prints and the operator creates, for every launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml

from finetune_contract.choices import Stage
from finetune_operator.api.settings import Spark
from finetune_operator.cli.console import emit
from finetune_operator.launchers.registry import render, stage
from finetune_operator.launchers.rows import LauncherName
from finetune_operator.planning.plan import plan
from finetune_operator.rendering.types import Attempt
from golden_cases import CASES, FOLDER, LAUNCHERS, golden_context, read_case


def rendered_cases() -> list[tuple[str, LauncherName]]:
    """Jobs for a cluster with every launcher; without a training nothing depends on it."""
    found: list[tuple[str, LauncherName]] = []
    for name in CASES:
        job, facts, _ = read_case(name)
        if not facts.local:
            found.extend((name, launcher) for launcher in (LAUNCHERS if job.spec.training is not None else ("job",)))
    return found


RENDERED = rendered_cases()
SPARK = "gpu-gang-with-everything"


def test_there_are_manifests_for_every_job_and_launcher_and_no_others():
    assert len(RENDERED) >= 30
    files = {file.name.removesuffix(".yaml") for file in (FOLDER / "manifests").glob("*.yaml")}
    assert files == {f"{name}.{launcher}" for name, launcher in RENDERED}


@pytest.mark.parametrize(("name", "launcher"), RENDERED)
def test_the_manifests_are_those_on_record(
    name: str, launcher: LauncherName, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
):
    job, facts, settings = read_case(name)
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"launcher": launcher})})
    result = plan(job, replace(facts, served=LAUNCHERS), settings)
    manifests = render(result, golden_context(job, settings))
    emit(manifests, "yaml")
    text = capsys.readouterr().out
    assert tuple(yaml.load_all(text, Loader=yaml.CSafeLoader)) == manifests
    golden(f"manifests/{name}.{launcher}.yaml", text)


def test_a_preparation_by_spark_is_the_one_on_record(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
):
    job, facts, settings = read_case(SPARK)
    preparation = job.spec.preparation.model_copy(update={"engine": "spark", "workers": 4})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"preparation": preparation})})
    spark = Spark(image="registry.example.com/team/trainer-spark:1", serviceAccountName="spark-driver")
    settings = settings.model_copy(update={"spark": spark})
    made = plan(job, replace(facts, served=(*LAUNCHERS, "sparkapplication")), settings)
    manifests = stage(made, golden_context(job, settings), Attempt(Stage.PREPARE))
    assert [each["kind"] for each in manifests] == ["ConfigMap", "SparkApplication"]
    emit(manifests, "yaml")
    golden("spark/prepare.yaml", capsys.readouterr().out)

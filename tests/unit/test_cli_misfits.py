"""`finetune plan` of a job that does not fit: the deciding number is in its first line, and it exits with 1."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner, Result

from finetune_operator.cli.files.job_files import read_inputs
from finetune_operator.cli.main import app
from finetune_operator.plan.plan import misfits
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS

EXAMPLES = Path(__file__).parents[2] / "manifests/examples"

TRAINS: dict[str, Any] = {"training": {}}
EVALUATES: dict[str, Any] = {"evaluation": {}}
SEQUENCE: dict[str, Any] = {"task": "text-classification"}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "on the GPU": (
        "Llama-7B",
        {**TRAINS, "parallelism": {"strategy": "single"}, "resources": {"gpusPerNode": 1}},
        ("--hardware", "gpu=A10G,memory=24Gi"),
        ('spec.parallelism.strategy: value "single": does not fit: needs 1', "GiB a GPU, and there are 24.0 GiB"),
    ),
    "in the host's memory, which is assumed": (
        "Llama-7B",
        {**TRAINS, "resources": {"gpusPerNode": 1}},
        ("--hardware", "gpu=H100,memory=80Gi"),
        ("spec.resources: does not fit: needs 102.0 GiB of host memory a node, and 64.0 GiB are assumed",),
    ),
    "in the host's memory, which is given": (
        "Llama-7B",
        {**TRAINS, "resources": {"gpusPerNode": 1}},
        ("--hardware", "gpu=H100,memory=80Gi,hostMemory=48Gi"),
        ("spec.resources: does not fit: needs 102.0 GiB of host memory a node, and there are 48.0 GiB",),
    ),
    "72 billion parameters on one small GPU": (
        "Qwen2.5-72B",
        {**TRAINS, "resources": {"gpusPerNode": 1}},
        ("--hardware", "gpu=A10G,memory=24Gi"),
        ("spec.resources: does not fit: needs 1.2 TiB of host memory a node", "rows of 512 tokens are assumed"),
    ),
    "on the CPU": (
        "Llama-7B",
        TRAINS,
        ("--hardware", "cpu=8,hostMemory=16Gi"),
        ("does not fit: needs ", "GiB a process, and there are 16.0 GiB"),
    ),
    "on the GPU that is assumed for a cluster": (
        "Llama-7B",
        {**TRAINS, "resources": {"gpusPerNode": 1, "memory": "512Gi"}, "parallelism": {"strategy": "ddp"}},
        ("--cluster",),
        ("does not fit: needs ", "GiB a GPU, and 15.0 GiB are assumed"),
    ),
    "evaluation alone": (
        "Qwen2.5-72B",
        {**EVALUATES, "resources": {"gpusPerNode": 1}},
        ("--hardware", "gpu=A10G,memory=24Gi"),
        ("spec.evaluation: does not fit: one process with the whole model", "138.1 GiB in bf16"),
    ),
    "evaluation alone on the CPU": (
        "Qwen2.5-72B",
        EVALUATES,
        ("--hardware", "cpu=8,hostMemory=16Gi"),
        ("spec.evaluation: does not fit: ", "of 16.0 GiB in fp32 of the node's memory"),
    ),
}


@pytest.fixture(autouse=True, params=["much memory", "little memory"])
def free_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vary the free memory of this machine, which has no part in plans for another one."""
    free = (60 if request.param == "much memory" else 2) << 30
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 << 30, available=free))


@pytest.fixture
def finetune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs the command on a job whose model has not been read."""
    monkeypatch.chdir(tmp_path)

    def run(model: str, spec: dict[str, Any], *options: str, command: str = "plan") -> Result:
        whole = {
            "task": "text-generation",
            "model": {"uri": f"hf://org/{model}"},
            "dataset": {"uri": "hf://org/texts"},
            **spec,
        }
        job = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "a"}, "spec": whole}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
        return CliRunner().invoke(app, [command, "job.yaml", *options])

    return run


@pytest.mark.parametrize("case", CASES)
def test_first_line_reports_the_misfit_and_exit_code_is_1(case: str, finetune: Any) -> None:
    model, spec, options, parts = CASES[case]
    measure = () if "--cluster" in options else ("--no-measure",)
    text = finetune(model, spec, *options, *measure)
    assert text.exit_code == 1
    assert text.stdout == ""
    headline = text.stderr.splitlines()[0]
    for part in parts:
        assert part in headline

    data = finetune(model, spec, *options, *measure, "-o", "json")
    assert data.exit_code == 1
    (problem,) = json.loads(data.stdout)["problems"]
    assert problem["rule"] in headline


def test_misfits_of_training_and_evaluation_are_reported_together(finetune: Any) -> None:
    spec = {**TRAINS, **EVALUATES, "resources": {"gpusPerNode": 1}}
    result = finetune("Qwen2.5-72B", spec, "--no-measure", "--hardware", "gpu=A10G,memory=24Gi")
    assert result.exit_code == 1
    assert [line.split(": ")[1:3] for line in result.stderr.splitlines()] == [
        ["spec.resources", "does not fit"],
        ["spec.evaluation", "does not fit"],
    ]


def test_following_the_hint_makes_the_job_fit(finetune: Any) -> None:
    spec = {**TRAINS, "resources": {"gpusPerNode": 1}}
    message = finetune("Llama-7B", spec, "--no-measure", "--hardware", "gpu=H100,memory=80Gi").stderr
    assert "Add hostMemory=SIZE to --hardware where a node has 102.0 GiB or more" in message
    fits = finetune("Llama-7B", spec, "--no-measure", "--hardware", "gpu=H100,memory=80Gi,hostMemory=108Gi")
    assert fits.exit_code == 0
    message = finetune("Llama-7B", spec, "--cluster").stderr
    assert "Set resources.memory where a node has 102.0 GiB or more" in message
    assert (
        finetune("Llama-7B", {**TRAINS, "resources": {"gpusPerNode": 1, "memory": "136Gi"}}, "--cluster").exit_code == 0
    )


def test_render_writes_objects_with_a_note_on_the_misfit(finetune: Any) -> None:
    spec = {**TRAINS, "resources": {"gpusPerNode": 1}}
    made = finetune("Llama-7B", spec, command="render")
    assert made.exit_code == 0
    assert "Note: spec.resources does not fit: needs 102.0 GiB of host memory a node" in made.stderr


def test_very_large_batch_is_reported(
    finetune: Any,
) -> None:
    spec = {"task": "text-classification", "training": {"globalBatchSize": 100_000}}
    result = finetune("bert", spec, command="validate")
    assert result.exit_code == 0
    assert "globalBatchSize: 100,000 rows per step are unusually many for fine-tuning" in result.stderr


def test_every_example_for_a_cluster_fits() -> None:
    facts, found, planned = Facts(served=("pytorchjob", "mpijob", "job")), {}, 0
    for file in sorted(EXAMPLES.glob("*.yaml")):
        for entry in read_inputs([str(file)], LOCAL_SETTINGS).entries:
            if entry.job.spec.resources.gpus_per_node != "auto":  # "auto" needs a machine
                found[entry.job.name] = misfits(entry.job, facts, CLUSTER_SETTINGS)
                planned += 1
    assert planned > 15
    assert {name: problems for name, problems in found.items() if problems} == {}

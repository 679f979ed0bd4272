"""The examples stay true: valid where they claim to run, each in the table, and each with its command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from example_heads import TITLE
from examples import EXAMPLES, FOLDER, IN_CLUSTER, LOCAL, example_document, example_job
from finetune_contract.choices import Stage
from finetune_operator.cli.files.job_files import read_inputs
from finetune_operator.cli.main import app
from finetune_operator.plan.hardware.devices import find_gpu
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS

README = (FOLDER / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \[([a-z0-9-]+)\]\(([^)]+)\) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_every_example_has_one_row_in_the_table_and_every_row_its_file():
    rows = ROW.findall(README)
    assert sorted(name for name, *_ in rows) == list(EXAMPLES)
    assert all(link == f"{name}.yaml" for name, link, *_ in rows)


def test_the_table_links_to_nothing_that_is_not_there():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README)
    missing = [link for link in links if not link.startswith("https://") and not (FOLDER / link).exists()]
    assert len(links) > len(EXAMPLES)
    assert missing == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_valid_where_it_runs(name: str):
    found = read_inputs([str(FOLDER / f"{name}.yaml")], LOCAL_SETTINGS if name in LOCAL else CLUSTER_SETTINGS)
    assert [problem for _, problem in found.problems] == []
    assert [entry.job.name for entry in found.entries] == [name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_starts_with_its_subject_and_command(name: str):
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    head = text.partition("apiVersion:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    command = "finetune run" if name in LOCAL else "kubectl apply -f"
    assert f"{command} manifests/examples/{name}.yaml" in head
    assert text.count("#") >= 6, "comments are what an example is for"


@pytest.mark.parametrize("name", IN_CLUSTER)
def test_an_example_names_no_namespace_and_no_image(name: str):
    """The job runs in the reader's namespace, with the administrator's image."""
    document = example_document(name)
    assert set(document["metadata"]) == {"name"}
    assert "image" not in document["spec"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_head_of_an_example_has_the_figures_of_its_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # away from the data that a quickstart has prepared in runs/
    _, title, head = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").partition(f"{TITLE}\n")
    assert title
    figures = dict(line[1:].split(maxsplit=1) for line in head.partition("apiVersion:")[0].splitlines())
    program, *arguments = figures["check"].split()
    assert program == "finetune"
    file = str(FOLDER / f"{name}.yaml")
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [file if "/" in each else each for each in arguments])
    assert result.exit_code == 0, result.output
    rows = {found[1]: found[2] for found in re.finditer(r"^  (\S+) +(\S.*)$", result.stdout, re.MULTILINE)}
    if "memory" not in figures:
        assert rows["time"].startswith("unknown")
        return
    assert figures["strategy"] == f"{rows['strategy']}, {rows['precision']}"
    assert re.split(" {2,}", rows["total"])[0] == figures["memory"].partition(" of ")[0]
    assert re.split(" {2,}", rows["time"])[0] == figures["training"].partition(" for ")[0]
    assert figures["hardware"].startswith(f"{example_job(name).spec.resources.nodes} node")


@pytest.mark.parametrize("name", IN_CLUSTER)
def test_an_example_with_gpus_names_one_that_computes_in_bf16(name: str):
    """Without a name the plan would choose the smallest GPU of the table, in fp32."""
    resources = example_job(name).spec.resources
    if not resources.gpus_per_node:
        return
    assert resources.accelerator is not None
    assert resources.accelerator.product is not None
    gpu = find_gpu(resources.accelerator.product)
    assert gpu is not None
    assert gpu.bf16


# Example -> tensor, pipeline and data ranks, the parameters in billions, and the least and the most GPU memory of a
# process in GiB: a plan far below has lost a term.
SPREAD: dict[str, tuple[tuple[int, int, int], float, tuple[int, int]]] = {
    "mnli-pipeline": ((1, 4, 1), 0.4, (3, 24)),
    "gpt2-30b": ((8, 2, 2), 30.0, (40, 80)),
    "gpt2-30b-sharded": ((1, 1, 16), 30.0, (20, 80)),
    "gpt2-175b": ((8, 4, 2), 174.6, (100, 180)),
}


@pytest.mark.parametrize("name", SPREAD)
def test_plan_of_a_spread_example_fits_and_has_its_degrees(name: str):
    degrees, billions, (least, most) = SPREAD[name]
    made = plan(example_job(name), Facts(served=("job",)), CLUSTER_SETTINGS)
    training, memory = made.trainer.training, made.memory
    assert training is not None
    assert memory is not None
    strategy = training.strategy
    stages = 1 if strategy.pipeline is None else strategy.pipeline.degree
    assert (strategy.tensor, stages, training.batch.data_parallel) == degrees
    assert round(made.model.parameters / 1e9, 1) == billions
    assert least << 30 < memory.total_bytes <= memory.capacity_bytes <= most << 30
    assert memory.host_bytes <= made.hardware.memory_bytes
    assert (strategy.activation_checkpointing == "full") == name.startswith("gpt2")
    assert (strategy.offload_optimizer, strategy.offload_activations, strategy.zero_stage) == (
        ("cpu", "cpu", 3) if name.endswith("sharded") else ("none", "none", None)
    )
    # No GPU holds the largest model whole, even in bf16: its layers are placed on several for the evaluation.
    assert Stage.EVALUATE in made.stages
    assert made.trainer.evaluation is not None
    assert (made.trainer.evaluation.devices_per_model > 1) == (name == "gpt2-175b")

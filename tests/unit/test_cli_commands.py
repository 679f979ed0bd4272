"""The `finetune` command from outside: exit codes, output formats, messages, files, and start-up time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_command import finetune as run_finetune
from finetune_contract.inference_settings import CPU_BATCH_TOKENS
from finetune_operator.cli.files.job_files import read_inputs
from finetune_operator.cli.main import COMMANDS, load
from finetune_operator.jobs.launchers.launcher_registry import render
from finetune_operator.jobs.render.render_types import RenderContext
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from suite_plugins.patience import patient

ROOT = Path(__file__).parents[2]
JOB = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata: {name: first}
spec:
  task: text-classification
  model: {uri: hf://some-org/some-model}
  dataset: {uri: file://rows}
  training: {learningRate: 2e-5}
"""
CLUSTER_JOB = JOB.replace("file://rows", "hf://some-org/rows")
FOREIGN = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: other}\n"


def finetune(*arguments: str, folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command with a cache of its own."""
    return run_finetune(*arguments, folder=folder, XDG_CACHE_HOME=str(folder / "cache"), **more)


def test_validate_accepts_good_file_and_notes_foreign_object(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{FOREIGN}---\n{JOB}")
    ran = finetune("validate", "job.yaml", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "job.yaml:5: first is valid\n")
    assert ran.stderr.startswith("Note: job.yaml:1: ConfigMap other")


def test_validate_reports_all_problems_with_line_field_value_rule_and_hint(tmp_path: Path) -> None:
    bad = JOB.replace("2e-5", "fast").replace("text-classification", "guessing") + "  colour: blue\n"
    (tmp_path / "job.yaml").write_text(bad)
    ran = finetune("validate", "job.yaml", folder=tmp_path)
    lines = ran.stderr.splitlines()
    assert (ran.returncode, ran.stdout) == (1, "")
    assert [line.split(": ")[:2] for line in lines] == [
        ["job.yaml:5", "spec.task"],
        ["job.yaml:8", "spec.training.learningRate"],
        ["job.yaml:9", "spec.colour"],
    ]
    assert 'value "guessing": ' in lines[0]
    assert all(line.endswith((".", "?")) and ". " in line for line in lines)

    data = json.loads(finetune("validate", "job.yaml", "-o", "json", folder=tmp_path).stdout)
    assert data["valid"] is False
    assert [(problem["line"], problem["path"]) for problem in data["problems"]] == [
        (5, "spec.task"),
        (8, "spec.training.learningRate"),
        (9, "spec.colour"),
    ]
    assert set(data["problems"][0]) == {"file", "line", "column", "path", "value", "rule", "wayOut", "change", "reason"}


def test_a_missing_field_points_to_the_object_that_should_hold_it(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        JOB.replace("  model: {uri: hf://some-org/some-model}\n", "  model:\n    revision: v1\n")
    )
    ran = finetune("validate", "job.yaml", folder=tmp_path)
    assert ran.returncode == 1
    assert ran.stderr.startswith("job.yaml:6: spec.model.uri: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate"],
        ["validate", "missing.yaml"],
        ["validate", "empty"],
        ["validate", "job.yaml", "-o", "xml"],
        ["plan", "job.yaml", "--hardware", "gpu"],
        ["plan", "job.yaml", "--settings", "job.yaml"],
        ["plan", "job.yaml", "--what-if", "gpu=H100,nodes=0"],
        ["plan", "job.yaml", "--what-if", "gpu=H100,nodes=1,nodes=2"],
        ["plan", "job.yaml", "--what-if", "gpu=H100,network=fast"],
        ["plan", "job.yaml", "--what-if", "gpu=H100", "--alternatives"],
        ["run", "job.yaml", "--resume", "--restart"],
        ["run", "both.yaml"],
        ["run", "both.yaml", "--name", "third"],
        ["status", "first", "-A"],
        ["logs"],
        ["logs", "first", "--pod", "0", "--rank", "0"],
        ["logs", "first", "-f", "--previous"],
        ["watch"],
        ["render", "job.yaml", "--launcher", "trainjob"],
        ["unknown"],
    ],
    ids=" ".join,
)
def test_wrong_call_exits_with_2_and_reports_on_stderr(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "both.yaml").write_text(f"{JOB}---\n{JOB.replace('first', 'second')}")
    (tmp_path / "empty").mkdir()
    ran = finetune(*arguments, folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "Traceback" not in ran.stderr
    assert ran.stderr.strip()


def test_files_folders_and_standard_input_are_read_as_by_kubectl(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for name, file in (("a", "a.yaml"), ("b", "b.yml"), ("d", "notes.txt")):
        (jobs / file).write_text(JOB.replace("first", name))
    (jobs / "c.json").write_text(json.dumps(yaml.safe_load(JOB.replace("first", "c").replace("2e-5", "0.00002"))))
    ran = finetune("validate", "-f", "jobs", "-f", "-", "-o", "json", folder=tmp_path, text=JOB)
    assert [(job["file"], job["name"]) for job in json.loads(ran.stdout)["jobs"]] == [
        ("jobs/a.yaml", "a"),
        ("jobs/b.yml", "b"),
        ("jobs/c.json", "c"),
        ("<stdin>", "first"),
    ]


def test_two_jobs_of_one_name_and_files_without_a_job_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{JOB}---\n{JOB}")
    (tmp_path / "other.yaml").write_text(FOREIGN)
    twice = finetune("validate", "job.yaml", folder=tmp_path)
    none = finetune("validate", "other.yaml", folder=tmp_path)
    assert (twice.returncode, none.returncode) == (1, 1)
    assert twice.stderr.startswith(
        'job.yaml:12: metadata.name: value "first": must be unique; job.yaml:1 has the same name'
    )
    assert "no FineTuneJob" in none.stderr


def test_a_plan_is_a_table_for_people_and_data_for_programs(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    call = ("plan", "job.yaml", "--no-measure", "--hardware", "cpu=4,hostMemory=16Gi")
    text = finetune(*call, folder=tmp_path)
    assert text.returncode == 0, text.stderr
    assert "Reasons" in text.stdout
    assert all(line == line.rstrip() for line in text.stdout.splitlines())
    as_json = json.loads(finetune(*call, "-o", "json", folder=tmp_path).stdout)
    as_yaml = yaml.safe_load(finetune(*call, "-o", "yaml", folder=tmp_path).stdout)
    assert as_json["name"] == "first"
    assert as_json["hardware"]["cpuCores"] == 4
    assert as_json["trainer"]["dataset"]["uri"] == f"file://{tmp_path}/rows"
    assert as_yaml == as_json


def test_several_jobs_give_a_list_in_json_and_documents_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text(f"{CLUSTER_JOB}---\n{CLUSTER_JOB.replace('first', 'second')}")
    call = ("plan", "both.yaml", "--cluster")
    as_json = json.loads(finetune(*call, "-o", "json", folder=tmp_path).stdout)
    assert list(yaml.safe_load_all(finetune(*call, "-o", "yaml", folder=tmp_path).stdout)) == as_json
    assert [planned["name"] for planned in as_json] == ["first", "second"]


@pytest.mark.parametrize(
    ("launcher", "kind"), [(None, "Job"), ("job", "Job"), ("pytorchjob", "PyTorchJob"), ("mpijob", "MPIJob")]
)
def test_render_writes_the_objects_that_the_operator_creates(launcher: str | None, kind: str, tmp_path: Path) -> None:
    """Rendering equals that of the operator's function for the same plan, with nothing on standard error."""
    (tmp_path / "job.yaml").write_text(CLUSTER_JOB)
    job = read_inputs([str(tmp_path / "job.yaml")], CLUSTER_SETTINGS).entries[0].job
    served: tuple[LauncherName, ...] = ("job", "pytorchjob", "mpijob")
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"launcher": launcher or "job"})})
    made = plan(job, Facts(served=served), CLUSTER_SETTINGS)
    expected = render(made, RenderContext("team-a", job.spec, CLUSTER_SETTINGS))

    options = () if launcher is None else ("--launcher", launcher)
    as_json = finetune("render", "job.yaml", "-n", "team-a", "-o", "json", *options, folder=tmp_path)
    as_yaml = finetune("render", "job.yaml", "-n", "team-a", *options, folder=tmp_path)
    assert (as_json.returncode, as_json.stderr) == (0, "")
    assert json.loads(as_json.stdout) == {"apiVersion": "v1", "kind": "List", "items": list(expected)}
    assert list(yaml.safe_load_all(as_yaml.stdout)) == list(expected)
    trains = next(
        each for each in expected if each["metadata"]["name"] == "first-train-1" and each["kind"] != "ConfigMap"
    )
    assert trains["kind"] == kind


def test_launcher_of_the_job_is_assumed_installed_without_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{CLUSTER_JOB}  launcher: mpijob\n")
    rendered = finetune("render", "job.yaml", "-o", "json", folder=tmp_path)
    assert "MPIJob" in [item["kind"] for item in json.loads(rendered.stdout)["items"]]


def test_plan_uses_and_notes_facts_that_the_operator_lacks(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(CLUSTER_JOB)
    described = finetune("plan", "job.yaml", "--cluster", "--hardware", "cpu=4,hostMemory=16Gi", folder=tmp_path)
    assert described.stderr == (
        "Note: first is planned with facts about its hardware that the operator does not have before prepare, "
        "so the operator's first plan may differ.\n"
    )
    assert "4 cores" in described.stdout


@pytest.mark.parametrize("command", [["render"], ["plan", "--cluster"], ["validate", "--cluster"]], ids=" ".join)
def test_local_uris_are_refused_for_a_cluster(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    ran = finetune(*command, "job.yaml", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith('job.yaml:7: spec.dataset.uri: value "file://rows": ')
    assert ran.stderr.count("\n") == 1


def test_a_job_that_needs_a_cluster_is_not_run_here(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("file://rows", "pvc://rows/reviews"))
    ran = finetune("run", "job.yaml", "--no-measure", folder=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (
        1,
        "",
        'job.yaml:7: spec.dataset.uri: value "pvc://rows/reviews": a claim needs a cluster. Name a folder or file with '
        "file://, or apply the job to a cluster.\n",
    )


def test_run_names_variables_of_pods_that_the_shell_lacks(tmp_path: Path) -> None:
    env = "  template: {env: [{name: MLFLOW_TRACKING_URI, value: databricks}, {name: WANDB_PROJECT, value: a}]}\n"
    (tmp_path / "job.yaml").write_text(JOB + env)
    ran = finetune("run", "job.yaml", "--no-measure", "--dry-run", folder=tmp_path, WANDB_PROJECT="a")
    assert (
        "Note: first: spec.template.env is for pods. Set MLFLOW_TRACKING_URI in your shell for this run." in ran.stderr
    )


def test_job_with_spot_nodes_runs_locally_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{JOB}  spot: {{enabled: true}}\n")
    ran = finetune("run", "job.yaml", "--no-measure", "--dry-run", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.startswith("Note: first: it trains on this machine, as there are no spot nodes without a cluster")


def test_namespace_that_differs_from_the_file_is_refused_as_by_kubectl(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(CLUSTER_JOB.replace("{name: first}", "{name: first, namespace: team-b}"))
    both = finetune("render", "job.yaml", "-n", "team-a", folder=tmp_path)
    alone = finetune("render", "job.yaml", "-o", "json", folder=tmp_path)
    assert (both.returncode, both.stdout) == (2, "")
    assert "--namespace team-a: first has metadata.namespace team-b" in both.stderr
    assert {item["metadata"]["namespace"] for item in json.loads(alone.stdout)["items"]} == {"team-b"}


# `status`, `logs` and `watch` without a cluster; tests/cluster/test_cli_cluster.py has one.


@pytest.mark.parametrize(
    "command", [["status"], ["status", "first"], ["logs", "first"], ["watch", "first"]], ids=" ".join
)
def test_commands_without_a_cluster_hint_at_the_kubeconfig(command: list[str], tmp_path: Path) -> None:
    none = finetune(*command, folder=tmp_path, HOME=str(tmp_path), KUBECONFIG="")
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr == (
        f"Error: no cluster is configured: {tmp_path}/.kube/config does not exist. Set KUBECONFIG, or pass "
        "--kubeconfig FILE.\n"
    )


KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
contexts:
- {name: here, context: {cluster: c, user: u}}
clusters:
- {name: c, cluster: {server: "http://127.0.0.1:9"}}
users:
- {name: u, user: {}}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KUBECONFIG, "Error: the API server at http://127.0.0.1:9 cannot be reached: "),
        (
            KUBECONFIG.replace("current-context: here", ""),
            "has no current context; select one with --context (it has here).",
        ),
        (KUBECONFIG.replace("current-context: here", "current-context: old"), "has no context old; it has here."),
        (KUBECONFIG.replace("cluster: c,", "cluster: other,"), "cannot be used: "),
        ("contexts: {", "cannot be read: "),
        ("- a list", "cannot be read: "),
    ],
    ids=["no answer", "no current context", "context gone", "cluster gone", "no YAML", "no kubeconfig"],
)
def test_unusable_kubeconfig_is_reported_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    ran = finetune("status", "first", "--kubeconfig", "config", folder=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert message in ran.stderr


def test_without_the_packages_for_a_cluster_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "kubernetes.py").write_text("raise ModuleNotFoundError('no kubernetes here', name='kubernetes')\n")
    ran = finetune("status", folder=tmp_path, own_process=True, PYTHONPATH=str(tmp_path))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == (
        "Error: connecting to a cluster requires packages that are not installed here (kubernetes); install "
        "finetune-operator[operator].\n"
    )


def test_a_plan_that_is_refused_names_the_line_of_the_field(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + "  resources: {gpusPerNode: 8}\n")
    ran = finetune("plan", "job.yaml", "--no-measure", "--hardware", "gpu=T4,gpus=2", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("job.yaml:9: spec.resources.gpusPerNode: value 8: ")


def test_settings_of_an_administrator_are_obeyed(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "settings.yaml").write_text("schemes: [hf]\n")
    ran = finetune("validate", "job.yaml", "--settings", "settings.yaml", folder=tmp_path)
    assert ran.returncode == 1
    assert "job.yaml:7: spec.dataset.uri: " in ran.stderr


def test_the_crd_and_the_schema_are_written_in_both_forms(tmp_path: Path) -> None:
    crd = yaml.load(finetune("crd", folder=tmp_path).stdout, yaml.CSafeLoader)
    assert crd["metadata"]["name"] == "finetunejobs.finetune.dev"
    assert json.loads(finetune("crd", "-o", "json", folder=tmp_path).stdout) == crd
    schema = finetune("schema", folder=tmp_path).stdout
    assert "spec" in json.loads(schema)["properties"]
    written = finetune("schema", "-o", "yaml", folder=tmp_path).stdout
    assert yaml.load(written, yaml.CSafeLoader) == json.loads(schema)


@pytest.mark.parametrize(
    "command", ["validate", "plan", "render", "run", "status", "logs", "watch", "images", "crd", "schema"]
)
def test_help_shows_examples_under_the_typed_program_name(command: str, tmp_path: Path) -> None:
    plain = finetune(command, "--help", folder=tmp_path)
    plugin = finetune(command, "--help", folder=tmp_path, program="kubectl-finetune")
    assert (plain.returncode, plugin.returncode) == (0, 0)
    assert f"Examples:\n    finetune {command}" in plain.stdout
    assert f"Examples:\n    kubectl finetune {command}" in plugin.stdout
    assert plugin.stdout.startswith(f"Usage: kubectl finetune {command}")


@pytest.mark.parametrize("program", ["finetune", "kubectl-finetune"])
def test_the_version_is_that_of_the_distribution(program: str, tmp_path: Path) -> None:
    ran = finetune("--version", folder=tmp_path, program=program, own_process=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "finetune 0.1.0\n", "")


def test_there_are_no_colours_away_from_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("hf://", "nowhere://"))
    assert "\x1b" not in finetune("validate", "job.yaml", folder=tmp_path).stderr


def test_problem_and_hint_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("2e-5", '"2e-5"'))
    assert finetune("validate", "job.yaml", folder=tmp_path).stderr == (
        'job.yaml:8: spec.training.learningRate: value "2e-5": must be a number above 0 and at most 10. '
        "Write 2e-05 (without quotes).\n"
    )


def test_wrong_option_value_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    form = finetune("validate", "job.yaml", "-o", "xml", folder=tmp_path).stderr.splitlines()[-1]
    stages = finetune("run", "job.yaml", "--resume", "--restart", folder=tmp_path).stderr.splitlines()[-1]
    assert form == "Error: Invalid value for '--output' / '-o': 'xml' is not one of 'text', 'yaml', 'json'."
    assert stages == "Error: --resume and --restart exclude each other"


def test_unusable_settings_are_reported_by_their_field_names(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "settings.yaml").write_text("prices: [{product: T4, perHour: 1}]\ncolour: blue\n")
    assert finetune("validate", "job.yaml", "--settings", "settings.yaml", folder=tmp_path).stderr.splitlines()[-1] == (
        "Error: --settings: settings.yaml: prices[0].gpus: is required; set it: number of GPUs on the node; "
        'settings.yaml: colour "blue": there is no such field; rename it, or leave it out: the fields here are '
        "namespaces, defaults, limits, progress, spot, spark, networkPolicy, allow, schemes, gitHosts, images, "
        "trustRemoteCode, currency, prices, hardware, nodes, network, planning"
    )


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_refused_plan_is_data_and_refused_render_writes_nothing(output: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("2e-5", "fast"))
    refused = finetune("plan", "job.yaml", "-o", output, folder=tmp_path)
    rendered = finetune("render", "job.yaml", "-o", output, folder=tmp_path)
    problems = yaml.safe_load(refused.stdout)["problems"]
    assert (refused.returncode, [problem["path"] for problem in problems]) == (1, ["spec.training.learningRate"])
    assert (rendered.returncode, rendered.stdout) == (1, "")


@pytest.mark.parametrize("workspace", ["job.yaml", "job.yaml/below"])
def test_a_workspace_that_cannot_be_written_to_is_refused(workspace: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    ran = finetune("run", "job.yaml", "--no-measure", "--workspace", workspace, folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith(f"Error: --workspace {tmp_path / workspace}: cannot write there: ")
    assert ran.stderr.count("\n") == 1


def test_a_plan_refuses_a_model_and_data_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.csv").touch()
    job = JOB.replace("hf://some-org/some-model", "file://nowhere")
    other = JOB.replace("first", "other").replace("file://rows", "file://rows/*.json")
    good = CLUSTER_JOB.replace("first", "good").replace("hf://some-org/rows", "file://rows/*.csv")
    packaged = good.replace("good", "packaged").replace("hf://some-org/some-model", "pkg://absent_model/model")
    text = "---\n".join([job.replace("file://rows", "file:///no/rows"), other, good, packaged])
    (tmp_path / "job.yaml").write_text(text)
    ran = finetune("plan", "job.yaml", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert [line.partition(" that exists; ")[0] for line in ran.stderr.splitlines()] == [
        f"job.yaml:6: spec.model.uri: {tmp_path}/nowhere/config.json does not exist. Name a folder with a model",
        "job.yaml:7: spec.dataset.uri: /no/rows does not exist. Name a folder, a file or a glob",
        f"job.yaml:16: spec.dataset.uri: {tmp_path}/rows/*.json does not exist. Name a folder, a file or a glob",
        "job.yaml:33: spec.model.uri: no package absent_model is installed here. Install it, or name a folder with a "
        "model with file://.",
    ]
    assert finetune("plan", "job.yaml", "--no-measure", folder=tmp_path).returncode == 0


def test_plan_without_measuring_lists_its_assumptions_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    planned = json.loads(finetune("plan", "job.yaml", "--no-measure", "-o", "json", folder=tmp_path).stdout)
    assert any(text.startswith("hardware: the node was not measured") for text in planned["assumptions"])


def test_document_with_duplicate_field_is_invalid_and_others_are_valid(tmp_path: Path) -> None:
    twice = JOB.replace("{learningRate: 2e-5}", "{epochs: 1, epochs: 2}")
    (tmp_path / "job.yaml").write_text(f"{JOB.replace('first', 'good')}---\n{twice}---\n{JOB.replace('first', 'fine')}")
    ran = finetune("validate", "job.yaml", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (1, "job.yaml:1: good is valid\njob.yaml:19: fine is valid\n")
    assert ran.stderr.startswith("job.yaml:17: spec.training.epochs: a field may be set once; ")


def test_list_of_commands_shows_the_first_line_of_each_help() -> None:
    assert {name: listed.summary for name, listed in COMMANDS.items()} == {
        name: load(name).help.splitlines()[0] for name in COMMANDS
    }
    longest = max(map(len, COMMANDS))
    assert [listed.summary for listed in COMMANDS.values() if len(listed.summary) > 80 - longest - 6] == []


HEAVY = ("rich", "yaml", "asyncio", "requests", "kubernetes", "finetune_contract", "finetune_operator.spec.types")
FAULTS = tuple(f"hints.{name}" for name in ("faulty_fields", "foreign_table", "unknown_names", "wrong_values"))
REST = ("schema.crd", "types.pod_types", "checks.template", "checks.settings_check")
CHECKS = (
    *("rich", "asyncio", "requests", "kubernetes", "finetune_contract.trainer_job", "finetune_operator.plan"),
    *("finetune_operator.documents.settings_file", "finetune_operator.documents.repairs"),
    *(f"finetune_operator.spec.{name}" for name in (*FAULTS, *REST)),
)


@pytest.mark.parametrize(
    ("typed", "unwanted", "most"),
    [
        ("--help", ("pydantic", *HEAVY), 210),
        ("<TAB>", HEAVY, 310),
        ("plan --<TAB>", HEAVY, 310),
        ("status --help", HEAVY, 310),
        ("validate job.yaml", CHECKS, 376),
    ],
)
def test_command_imports_only_required_modules(
    typed: str, unwanted: tuple[str, ...], most: int, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    command_line, completes = typed.removesuffix("<TAB>"), typed.endswith("<TAB>")
    program = (
        "import sys; from finetune_operator.cli.main import main\n"
        f"sys.argv = ['finetune', *{[] if completes else command_line.split()}]\n"
        "try: main()\n"
        "finally: print(*sorted(sys.modules), file=sys.stderr)\n"
    )
    completing = {
        "_FINETUNE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"finetune {command_line}",
        "COMP_CWORD": str(1 + command_line.count(" ")),
    }
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **(completing if completes else {})},
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert ran.stdout, ran.stderr
    modules = ran.stderr.split()
    assert [name for name in modules if f"{name}.".startswith(tuple(f"{each}." for each in unwanted))] == []
    assert len(modules) <= most


def test_check_of_a_valid_job_builds_no_shapes_and_few_validators(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    program = (
        "import sys; from finetune_operator.cli.main import main\n"
        "sys.argv = ['finetune', 'validate', 'job.yaml']\n"
        "try: main()\n"
        "finally:\n"
        "    from finetune_operator.spec import types\n    from finetune_operator.spec.fields import shapes\n"
        "    print(shapes.spec_shape.cache_info().misses)\n"
        "    models = [*types.FineTuneJob.__bases__[0].__subclasses__(), *types.SpecModel.__subclasses__()]\n"
        "    print(*sorted(model.__name__ for model in models if model.__pydantic_complete__ and model.model_fields))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=patient(300)
    )
    assert ran.stdout.splitlines() == [
        "job.yaml:1: first is valid",
        "0",
        "FineTuneJobSpec ObjectMeta SplitsSpec",
    ], ran.stderr


def test_help_of_serve_has_the_batch_of_plans_on_cpus():
    (option,) = [each for each in load("serve").params if each.name == "batch_tokens"]
    assert f"Default: {CPU_BATCH_TOKENS:,}." in option.help

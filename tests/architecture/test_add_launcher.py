"""A launcher is a row, a module and a template: the steps of "Add a launcher" in CONTRIBUTING.md, done in a copy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from suite_plugins.patience import patient

ROOT = Path(__file__).parents[2]
ROW = """
    Launcher(
        "rayjob", "ray.io/v1", "RayJob", "rayjobs", installed_by="the KubeRay operator",
        manifest="RayJob of one cluster", foreign_names=("kuberay",), pod_suffix="-worker-9999", first_host="-head",
        reserved=Reserved(env_prefixes=("RAY_",), label_prefixes=("ray.io/",)),
    ),
"""
MODULE = '''"""ray.io/v1 RayJob."""

from finetune_operator.spec.kubernetes_objects import Raw
from finetune_operator.jobs.launchers.launcher_status import Verdict
from finetune_operator.jobs.render.manifests import metadata
from finetune_operator.jobs.render.templates import document
from finetune_operator.jobs.render.trainer_pod import stage_pod


def render(pods):
    return (document("rayjob", metadata=metadata(pods), nodes=pods.nodes, pod=stage_pod(pods).manifest()),)


class _Status(Raw):
    job_status: str = ""


class _RayJob(Raw):
    status: _Status = _Status()


def read(value):
    told = _RayJob.model_validate(value).status.job_status
    return Verdict({"SUCCEEDED": "Succeeded", "FAILED": "Failed", "RUNNING": "Running"}.get(told, "Pending"))
'''
TEMPLATE = """apiVersion: ray.io/v1
kind: RayJob
metadata: {{ metadata | tojson }}
spec:
  workers: {{ nodes | tojson }}
  template: {{ pod | tojson }}
"""
PROGRAM = """
import asyncio, json
from dataclasses import replace
from chart_files import launcher_rights
from finetune_operator.spec.schema.crd import crd
from finetune_operator.spec.schema.reference_docs import api_reference, launchers_table, names_reference
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.cli.commands.file_commands import Launcher
from finetune_operator.cli.cluster.debugging import KINDS
from finetune_operator.jobs.launchers.launcher_registry import stage
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, PlanRefused
from finetune_operator.jobs.state.children import child_view
from finetune_operator.jobs.render.render_types import Attempt, RenderContext
from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.controller.servers.operator_metrics import RESOURCE_NAMES
from finetune_contract.choices import Stage
import support_matrix

class Served:
    async def serves(self, resource):
        return resource.plural == "rayjobs"

def judged(**spec):
    spec = {"task": "text-classification", "model": {"uri": "hf://a/b"}, "dataset": {"uri": "hf://c/d"},
        "training": {}, "resources": {"nodes": 2}, **spec}
    metadata = {"name": "trial", "namespace": "team"}
    return validate_job({"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": metadata,
        "spec": spec}, CLUSTER_SETTINGS)

discovered = asyncio.run(Kube.served_launchers(Served()))
job, problems = judged(launcher="rayjob")
made = plan(job, Facts(served=discovered), CLUSTER_SETTINGS)
try:
    plan(job, Facts(), CLUSTER_SETTINGS)
except PlanRefused as refused:
    unserved = refused.problems[0].hint
manifests = stage(made, RenderContext("team", job.spec), Attempt(Stage.TRAIN))
child = child_view({**manifests[-1], "status": {"jobStatus": "FAILED"}})
version = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
print(json.dumps({
    "discovered": discovered,
    "problems": [str(problem) for problem in problems],
    "planned": plan(judged()[0], Facts(served=discovered), CLUSTER_SETTINGS).launcher,
    "unserved": unserved,
    "misspelt": judged(launcher="kuberay")[1][0].hint,
    "reserved": [problem.path for problem in judged(template={"env": [{"name": "RAY_X", "value": "1"}]})[1]],
    "rendered": [manifest["kind"] for manifest in manifests],
    "read": [child.ref.kind, child.state],
    "allowed": version["properties"]["spec"]["properties"]["launcher"]["enum"],
    "choices": list(Launcher),
    "rights": [line for line in launcher_rights().splitlines() if "ray" in line],
    "collected": [kind.api_version for kind in KINDS if kind.plural == "rayjobs"],
    "counted": sorted(name for name in RESOURCE_NAMES if "ray" in name),
    "pages": [name for name, page in {
        "api": api_reference(), "names": names_reference(), "operator": launchers_table()}.items() if "rayjob" in page],
    "columns": support_matrix.WORKING_LAUNCHERS,
}))
"""


def insert(file: Path, before: str, text: str) -> None:
    """Put `text` before the only `before` in `file`."""
    whole = file.read_text(encoding="utf-8")
    assert whole.count(before) == 1, f"{file.name}: {before!r} occurs {whole.count(before)} times"
    file.write_text(whole.replace(before, text + before), encoding="utf-8")


@pytest.fixture
def trial(tmp_path: Path) -> Any:
    """Return the output of a copy of the package with one launcher more."""
    package = tmp_path / "finetune_operator"
    shutil.copytree(ROOT / "operator" / "finetune_operator", package, ignore=shutil.ignore_patterns("__pycache__"))
    row, registry = package / "spec" / "launcher_rows.py", package / "jobs" / "launchers" / "launcher_registry.py"
    insert(row, '    Launcher(\n        "trainjob", ', ROW.lstrip("\n"))
    names = row.read_text(encoding="utf-8").replace('= Literal["pytorchjob",', '= Literal["rayjob", "pytorchjob",')
    row.write_text(names, encoding="utf-8")
    insert(registry, '    "sparkapplication": sparkapplication,', '    "rayjob": rayjob_launcher,\n')
    insert(
        registry,
        "from finetune_operator.jobs.launchers.sparkapplication import",
        "from finetune_operator.jobs.launchers.rayjob import rayjob_launcher\n",
    )
    folder = registry.with_name("rayjob")
    folder.mkdir()
    (folder / "rayjob_launcher.py").write_text(MODULE, encoding="utf-8")
    (folder / "rayjob.yaml.jinja").write_text(TEMPLATE, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_a_new_launcher_is_known_everywhere_by_its_row_and_its_module(trial: Any) -> None:
    assert trial == {
        "discovered": ["rayjob", "job"],
        "problems": [],
        "planned": "rayjob",
        "unserved": "install the KubeRay operator, which serves RayJob (ray.io/v1), or set launcher to auto or job",
        "misspelt": "write rayjob",
        "reserved": ["spec.template.env[0].name"],
        "rendered": ["ConfigMap", "RayJob"],
        "read": ["RayJob", "Failed"],
        "allowed": ["auto", "rayjob", "pytorchjob", "mpijob", "trainjob", "jobset", "job"],
        "choices": ["pytorchjob", "mpijob", "rayjob", "job"],
        "rights": ["  - apiGroups: [ray.io]", "    resources: [rayjobs]"],
        "collected": ["ray.io/v1"],
        "counted": ["rayjobs", "rayjobs/discovery"],
        "pages": ["api", "names", "operator"],
        "columns": ["pytorchjob", "mpijob", "rayjob", "job"],
    }

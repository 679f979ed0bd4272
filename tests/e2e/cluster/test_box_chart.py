"""The operator by its Helm chart on a cluster with nodes: installed from nothing, upgraded and rolled back while jobs
train, taken over by its other replica, and uninstalled. `FINETUNE_UPGRADE_JOBS=10` trains more jobs meanwhile.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from box_support import faults
from box_support.box import SETTINGS, Box
from box_support.team import JOB_SECONDS, Team, stage_of, tiny_spec
from chart_files import CHART
from chart_rendering import helm
from cluster_support.api_access import Object, path_of, wait_until
from cluster_support.operator_process import NAMESPACE, USER
from cluster_support.world import CHILD_KINDS
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL
from suite_plugins.patience import patient

pytestmark = pytest.mark.last
"""The module replaces the operator that the other tests use."""

RELEASE = "finetune-operator"
JOBS = int(os.environ.get("FINETUNE_UPGRADE_JOBS", "3"))
STAGES = ("prepare", "train", "evaluate")
STEPS, HOLDS_AT = 10, 3
"""Length of each training, and the step at which it waits until the upgrade and the rollback are done."""


@dataclass
class Story:
    """Records of the scenario."""

    killed: str = ""
    """Name of the acting replica that was killed."""
    successor: str = ""
    """Name of the next acting replica."""
    mark: int = 0
    """Place in the audit log before the jobs."""
    names: list[str] = field(default_factory=list)
    pods: dict[str, list[str]] = field(default_factory=dict)
    """Job -> uids of its training's pods, before."""
    revisions: list[str] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)
    """Replicas of the Deployment, after each of install, upgrade, rollback."""
    statuses: dict[str, Object] = field(default_factory=dict)


@dataclass(frozen=True)
class Release:
    """Helm, for this cluster."""

    box: Box

    def helm(self, *arguments: str) -> str:
        where = ("--kubeconfig", str(self.box.cluster.kubeconfig), "--namespace", NAMESPACE)
        limit = ("--timeout", f"{patient(300):.0f}s") if "--wait" in arguments else ()
        ran = helm(*arguments, *limit, *where, seconds=420)
        assert ran.returncode == 0, f"helm {' '.join(arguments)}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    def replicas(self) -> int:
        return int(self.box.kubectl("get", "deployment", RELEASE, "-n", NAMESPACE, "-o", "jsonpath={.spec.replicas}"))

    def ready(self) -> None:
        self.box.kubectl("rollout", "status", "-n", NAMESPACE, f"deployment/{RELEASE}", "--timeout=120s", seconds=150)


def earlier(folder: Path) -> Path:
    """Copy the chart with a lower version."""
    chart = folder / CHART.name
    shutil.copytree(CHART, chart)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.0.1"}))
    return chart


@pytest.fixture(scope="module")
def release(box: Box, team: Team) -> Iterator[Release]:
    """Helm on a cluster without any of our objects."""
    box.own("installing by Helm")
    box.uninstall_operator()
    yield Release(box)
    helm("uninstall", RELEASE, "--kubeconfig", str(box.cluster.kubeconfig), "--namespace", NAMESPACE)


@pytest.fixture(scope="module")
def story(release: Release, team: Team, tmp_path_factory: pytest.TempPathFactory) -> Story:
    box, seen, work = release.box, Story(), tmp_path_factory.mktemp("release")
    values = work / "values.yaml"
    values.write_text(yaml.safe_dump({"settings": SETTINGS}))
    release.helm("install", RELEASE, str(earlier(work)), "--create-namespace", "--values", str(values), "--wait")
    release.ready()
    seen.replicas.append(release.replicas())

    spec = tiny_spec(
        training={"maxSteps": STEPS, "globalBatchSize": 8, "learningRate": 0.002, "precision": "fp32"},
        parallelism={"strategy": "single"},
        resources={"nodes": 1, "processesPerNode": 1, "cpu": "500m", "memory": "2Gi"},
        template=faults.puppet(team, holds_at=HOLDS_AT),
    )
    seen.mark, seen.names = box.cluster.audit_mark(), [team.new_name("upgraded") for _ in range(JOBS)]
    for name in seen.names:
        team.apply(name, spec)
    for name in seen.names:
        wait_until(
            lambda name=name: team.step(name),
            f"{name}: the first step",
            JOB_SECONDS,
            lambda name=name: team.describe(name),
        )
    seen.pods = {name: [pod["metadata"]["uid"] for pod in team.pods(name, "train")] for name in seen.names}

    upgrade = ("upgrade", RELEASE, str(CHART), "--reuse-values", "--set", "replicas=3", "--set", "workers=8", "--wait")
    release.helm(*upgrade)
    release.ready()
    seen.replicas.append(release.replicas())
    seen.killed, seen.successor = _take_over(box)
    release.helm("rollback", RELEASE, "1", "--wait")
    release.ready()
    seen.replicas.append(release.replicas())
    for name in seen.names:
        (pod,) = team.pods(name, "train")
        faults.let_go(team, pod["metadata"]["name"])
    seen.revisions = [str(one["chart"]) for one in yaml.safe_load(release.helm("history", RELEASE, "--output", "json"))]
    seen.statuses = {name: team.succeeds(name) for name in seen.names}
    return seen


def _take_over(box: Box) -> tuple[str, str]:
    """Kill the acting replica, which can neither release its Lease nor start again, and wait until another one acts;
    return the names of both.
    """
    before = wait_until(lambda: faults.acting_operator(box), "one of the replicas acts")
    faults.kill_operator(box, "acting")
    box.kubectl("delete", "pod", before, "-n", NAMESPACE, "--grace-period=0", "--force")

    def another() -> str | None:
        now = faults.acting_operator(box)
        return now if now is not None and now != before else None

    return before, wait_until(another, "another replica acts", detail=lambda: box.operator_log())


def test_the_chart_installs_an_operator_that_trains(story: Story) -> None:
    assert {name: status["phase"] for name, status in story.statuses.items()} == dict.fromkeys(story.names, "Succeeded")
    assert len(story.names) == JOBS


def test_upgrade_and_rollback_happen_for_real(story: Story) -> None:
    assert story.replicas == [2, 3, 2]
    assert [chart.rpartition("-")[2] for chart in story.revisions] == ["0.0.1", "0.1.0", "0.0.1"]


def test_no_running_job_is_disturbed_by_either(story: Story, team: Team) -> None:
    for name, status in story.statuses.items():
        assert [(one["name"], one["attempt"]) for one in status["stages"]] == [(stage, 1) for stage in STAGES], name
        assert status.get("restarts", 0) == 0, name
        pods = [pod["metadata"]["uid"] for pod in team.pods(name, "train")]
        assert pods == story.pods[name], "the very pods that ran before"


def test_another_replica_takes_over_and_nothing_is_made_twice(story: Story, box: Box) -> None:
    """tests/benchmarks/takeover.py measures the time that it takes."""
    assert story.successor not in ("", story.killed)
    plurals = {plural for _, plural in CHILD_KINDS}
    made = [
        entry["objectRef"].get("name") or entry["responseObject"]["metadata"]["name"]
        for entry in box.cluster.audit(story.mark, USER)
        if entry["verb"] == "create"
        and entry["objectRef"]["resource"] in plurals
        and entry["responseStatus"].get("code") == 201
    ]
    assert sorted(made) == sorted(f"{name}-{stage}-1" for name in story.names for stage in STAGES)


def test_the_release_s_own_test_makes_a_job_and_sees_it_planned(story: Story, release: Release) -> None:
    output = release.helm("test", RELEASE, "--logs", "--timeout", f"{patient(180):.0f}s")
    assert "Phase:          Succeeded" in output
    assert "\nPlanned: " in output


def test_it_trains_a_tiny_job_where_the_values_have_one(
    story: Story, release: Release, team: Team, tmp_path: Path
) -> None:
    spec = tiny_spec(
        training={"maxSteps": 4, "globalBatchSize": 8, "learningRate": 0.002, "precision": "fp32"},
        parallelism={"strategy": "single"},
        resources={"nodes": 1, "processesPerNode": 1, "cpu": "1", "memory": "2Gi"},
    )
    tests = {
        "namespace": team.namespace,
        "waitFor": "Succeeded",
        "timeoutSeconds": math.ceil(patient(240)),
        "spec": spec,
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"tests": tests}))
    release.helm("upgrade", RELEASE, str(CHART), "--reuse-values", "--values", str(tmp_path / "values.yaml"), "--wait")
    output = release.helm("test", RELEASE, "--logs", "--timeout", f"{patient(360):.0f}s")
    assert "\nSucceeded: " in output
    assert team.box.api.get(path_of(API_VERSION, PLURAL, team.namespace, "finetune-operator-test")) is None


def test_api_server_calls_the_webhook_through_its_service(story: Story, release: Release, team: Team) -> None:
    closed = ("--set", "webhook.enabled=true", "--set", "webhook.failurePolicy=Fail")
    release.helm("upgrade", RELEASE, str(CHART), "--reuse-values", *closed, "--wait")
    release.ready()
    name = team.new_name("asked")
    elsewhere = {"script": {"git": {"url": "https://elsewhere.example.com/programs"}, "entryPoint": "train.py"}}
    document = {
        "apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name},
        "spec": {key: value for key, value in tiny_spec(training=elsewhere).items() if key != "parallelism"},
    }  # fmt: skip

    def refused() -> str | None:
        ran = team.box.cluster.kubectl("apply", "-n", team.namespace, "-f", "-", stdin=yaml.safe_dump(document))
        assert ran.returncode != 0, ran.stdout
        # Nobody answers until the Service has the new replicas and the configuration their authority.
        return None if "failed calling webhook" in ran.stderr else ran.stderr

    error = wait_until(refused, "the webhook answers", detail=lambda: release.box.operator_log())
    assert "spec.training.script.git.url: is on a host that is not allowed" in error
    team.apply(name, tiny_spec(runPolicy={"suspend": True}))
    team.delete(name)
    release.helm("upgrade", RELEASE, str(CHART), "--reuse-values", "--set", "webhook.enabled=false", "--wait")
    assert RELEASE not in release.box.kubectl("get", "validatingwebhookconfigurations", "-o", "name")


def test_uninstalling_leaves_jobs_results_and_their_kind(story: Story, release: Release, team: Team) -> None:
    release.helm("uninstall", RELEASE, "--wait")
    assert release.box.cluster.kubectl("get", "deployment", RELEASE, "-n", NAMESPACE).returncode != 0
    for name in story.names:
        assert stage_of(team.status(name), "train")["state"] == "Succeeded"
        assert (team.results(name) / "model" / "model.safetensors").is_file()
    # Installed again, it adopts the jobs as they are: they have ended, and nothing is created for them.
    mark = release.box.cluster.audit_mark()
    values = ("--set-json", "settings={}")
    release.helm("install", RELEASE, str(CHART), *values, "--wait")
    release.ready()
    assert [entry for entry in release.box.cluster.audit(mark, USER) if _makes_a_child(entry)] == []
    assert {team.status(name)["phase"] for name in story.names} == {"Succeeded"}


def _makes_a_child(entry: Object) -> bool:
    return entry["verb"] == "create" and entry["objectRef"]["resource"] in {plural for _, plural in CHILD_KINDS}

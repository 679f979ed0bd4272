"""`finetune status`, `logs` and `watch` against a real API server, with statuses as the operator writes them.

Most need no kubelet: their pods are gone or have not started, as for a command that comes too late or too early. The
last ones have the operator at work, and pods of a stand-in kubelet.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_support.api_access import PATIENCE_SECONDS, kubeconfig_text, wait_until
from cluster_support.jobs_with_status import FAILED, JOB, NOW, SUCCEEDED, TRAINING, Jobs
from cluster_support.plays import PREEMPTED, RUNS, SUCCEEDS, WRONG_COLUMN
from cluster_support.world import World
from suite_plugins.patience import patient

# -------------------------------------------------------------------------------------------------------------- status


def test_status_of_running_job_shows_progress_plan_and_stages(jobs: Jobs) -> None:
    jobs.make("reviews", TRAINING)
    code, out, err = jobs.finetune("status", "reviews")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert lines[0].startswith(f"reviews Training namespace {jobs.namespace}, created ")
    assert lines[0].endswith(" ago, 1 restart")
    assert lines[1].startswith("progress ━")
    assert lines[1].endswith(" 45 % step 450/1,000 loss 0.412 5 min left")
    assert lines[2:6] == [
        "plan deepspeed-zero2 by job, 2 processes, batch 32 = 8 x 2 x 2",
        "2.1 GiB a process, training expected to take 12 min",
        "Stages",
        "prepare Succeeded attempt 1 0:42 Job reviews-prepare-1",
    ]
    assert lines[6].startswith("train Running attempt 2 ")
    assert lines[7:] == [
        "evaluate Pending",
        "Next",
        f"finetune watch reviews -n {jobs.namespace}",
        f"finetune logs reviews -n {jobs.namespace} -f",
    ]
    assert all(line == line.rstrip() for line in out.splitlines())


def test_status_of_failed_job_shows_first_cause_hint_and_log_tail(jobs: Jobs) -> None:
    jobs.make("reviews", FAILED)
    code, out, _ = jobs.finetune("status", "reviews")
    lines = [line.strip() for line in out.splitlines()]
    at = lines.index("Failure")
    assert code == 0
    assert ", ran 10 min, " in lines[0]
    assert lines[at + 1 : at + 6] == [
        "DataError (ColumnMissing) in train, attempt 2, pod reviews-train-2-0, node node-7, rank 0, exit code 12",
        "dataset.columns.label: the data have no column label.",
        "Name one of text, stars.",
        "reading rows",
        "KeyError: 'label'",
    ]
    assert f"finetune logs reviews -n {jobs.namespace}" in lines


def test_status_of_refused_spec_shows_problem_and_edit_command(jobs: Jobs) -> None:
    message = "spec.training.epochs: value 0: must be above 0. Set it to 1."
    refused = {"status": "False", "reason": "InvalidSpec", "message": message, "lastTransitionTime": NOW}
    conditions = [{**refused, "type": "Accepted"}, {**refused, "type": "Stalled", "status": "True"}]
    jobs.make("reviews", {"observedGeneration": 1, "phase": "Pending", "conditions": conditions})
    lines = [" ".join(line.split()) for line in jobs.finetune("status", "reviews")[1].splitlines()]
    assert lines[1:] == [
        "Conditions",
        f"Accepted=False InvalidSpec: {message}",
        "Next",
        f"kubectl -n {jobs.namespace} edit ftj reviews # or fix the file and apply it again",
    ]


def test_the_newest_five_events_of_this_job_and_no_other_are_shown(jobs: Jobs) -> None:
    jobs.make("reviews", TRAINING)
    uid = jobs.api.must("get", "ftj", "reviews", "-n", jobs.namespace, "-o", "jsonpath={.metadata.uid}")
    for number in range(7):
        involved = {
            "apiVersion": JOB["apiVersion"],
            "kind": "FineTuneJob",
            "name": "reviews",
            "uid": uid if number else "x",
        }
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"reviews.{number}", "namespace": jobs.namespace},
            "involvedObject": {**involved, "namespace": jobs.namespace},
            "type": "Normal",
            "reason": "StageStarted",
            "message": f"event {number}",
            "lastTimestamp": f"2026-01-05T10:00:0{number}Z",
        }
        jobs.api.must("create", "-f", "-", stdin=json.dumps(event))
    out = jobs.finetune("status", "reviews")[1]
    shown = [line.split()[-1] for line in out.splitlines() if "StageStarted" in line]
    assert shown == ["2", "3", "4", "5", "6"]


def test_several_jobs_are_a_table_and_data_for_programs(jobs: Jobs) -> None:
    jobs.make("reviews", TRAINING)
    jobs.make("untouched")
    table = [line.split() for line in jobs.finetune("status")[1].splitlines()]
    assert " ".join(table[0]) == "NAME PHASE STAGE REASON PROGRESS LOSS ETA ROWS/S RESULT RESTARTS AGE"
    assert table[1][:9] == ["reviews", "Training", "train", "45", "%", "0.412", "5", "min", "1"]
    assert table[2][:3] == ["untouched", "New", "0"]
    listed = json.loads(jobs.finetune("status", "-o", "json")[1])
    assert [item["metadata"]["name"] for item in listed["items"]] == ["reviews", "untouched"]
    one = yaml.safe_load(jobs.finetune("status", "reviews", "-o", "yaml")[1])
    assert one == json.loads(jobs.api.must("get", "ftj", "reviews", "-n", jobs.namespace, "-o", "json"))


def test_empty_list_of_jobs_is_noted(jobs: Jobs) -> None:
    assert jobs.finetune("status") == (0, "", f"Note: there is no FineTuneJob in namespace {jobs.namespace}.\n")


# -------------------------------------------------------------------------------------------- refused by a cluster


def test_missing_job_is_reported_with_the_existing_ones(jobs: Jobs) -> None:
    jobs.make("reviews")
    expected = f"Error: there is no FineTuneJob revs in namespace {jobs.namespace}; there are reviews.\n"
    for command in ("status", "logs", "watch"):
        assert jobs.finetune(command, "revs") == (1, "", expected)


def test_unknown_context_is_reported_with_the_existing_ones(jobs: Jobs) -> None:
    contexts = jobs.api.must("config", "get-contexts", "-o", "name").split()
    code, out, err = jobs.finetune("status", "--context", "elsewhere")
    assert (code, out) == (1, "")
    assert f"has no context elsewhere; it has {', '.join(contexts)}." in err


def test_missing_permission_of_a_user_is_reported(jobs: Jobs, tmp_path: Path) -> None:
    jobs.make("reviews", TRAINING)
    jobs.api.must("create", "serviceaccount", "visitor", "-n", jobs.namespace)
    token = jobs.api.must("create", "token", "visitor", "-n", jobs.namespace).strip()
    config = yaml.safe_load(jobs.api.kubeconfig.read_text())
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    (tmp_path / "visitor").write_text(yaml.safe_dump(config))
    code, out, err = jobs.finetune("status", "reviews", "--kubeconfig", str(tmp_path / "visitor"))
    assert (code, out) == (1, "")
    assert err.startswith('Error: not allowed: finetunejobs.finetune.dev "reviews" is forbidden: ')
    assert "Ask the cluster's administrator" in err

    role = ("--verb=get,list,watch", "--resource=finetunejobs.finetune.dev", "-n", jobs.namespace)
    jobs.api.must("create", "role", "reader", *role)
    bound = ("--role=reader", f"--serviceaccount={jobs.namespace}:visitor", "-n", jobs.namespace)
    jobs.api.must("create", "rolebinding", "reader", *bound)
    code, out, err = jobs.finetune("status", "reviews", "--kubeconfig", str(tmp_path / "visitor"))
    assert (code, err) == (0, "")
    assert "No permission to read events in this namespace." in out


# ---------------------------------------------------------------------------------------------------------------- logs


def test_logs_of_deleted_pods_show_the_tail_from_the_status(jobs: Jobs) -> None:
    jobs.make("reviews", FAILED)
    note = "Note: the pods of train-2 are deleted; this is the end of the log in the job's status.\n"
    prefix = "[reviews-train-2-0] "
    whole = f"{prefix}reading rows\n{prefix}KeyError: 'label'\n"
    assert jobs.finetune("logs", "reviews") == (0, whole, note)
    assert jobs.finetune("logs", "reviews", "-f", "--tail", "1") == (0, f"{prefix}KeyError: 'label'\n", note)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(["--stage", "prepare"], "the pods of prepare-1 and their logs are deleted", id="deleted"),
        pytest.param(["--previous"], "the pods of train-1 and their logs are deleted", id="previous attempt"),
        pytest.param(["--stage", "prepare", "--previous"], "--previous: prepare is in its first attempt", id="first"),
        pytest.param(["--stage", "evaluate"], "--stage evaluate: has not started; started stages: prepare, train",
                     id="later"),
        pytest.param([], "no pod of train-2 has started yet", id="not started"),
        pytest.param(["--pod", "7"], "--pod 7: train-2 has no such pod, or it was deleted or has not started",
                     id="no pod"),
    ],
)  # fmt: skip
def test_unavailable_log_is_reported_with_the_reason(jobs: Jobs, arguments: list[str], error: str) -> None:
    jobs.make("reviews", TRAINING)
    assert jobs.finetune("logs", "reviews", *arguments) == (1, "", f"Error: {error}.\n")


# --------------------------------------------------------------------------------------------------------------- watch


def until(process: subprocess.Popen[str], matches: Callable[[str], bool]) -> list[str]:
    """Return the lines up to the first for which `matches` is true."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if matches(line):
            return lines
    raise AssertionError(f"ended without it: {lines}")


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        pytest.param(SUCCEEDED, 0, "Succeeded", id="a success is exit code 0"),
        pytest.param(FAILED, 1, "Name one of text, stars.", id="a failure is exit code 1"),
    ],
)
def test_watch_writes_a_line_for_each_change_and_ends_with_the_job(
    jobs: Jobs, end: dict[str, Any], code: int, text: str
) -> None:
    jobs.make("reviews")
    process = jobs.start("watch", "reviews")
    assert len(until(process, lambda line: "New" in line)) == 1
    jobs.write_status("reviews", TRAINING)
    until(process, lambda line: "Training  train running, attempt 2  45 %" in line)
    jobs.write_status("reviews", {**TRAINING, "progress": {**TRAINING["progress"], "step": 460, "percent": 46}})
    jobs.write_status("reviews", end)
    out, err = process.communicate(timeout=patient(PATIENCE_SECONDS))
    assert (process.returncode, err) == (code, "")
    assert out.count("\n") == 1, "one percent more is no line of its own"
    assert text in out


def test_watch_ends_with_1_when_the_job_is_deleted(jobs: Jobs) -> None:
    jobs.make("reviews", TRAINING)
    process = jobs.start("watch", "reviews")
    until(process, lambda line: "Training" in line)
    jobs.api.must("delete", "ftj", "reviews", "-n", jobs.namespace)
    _, err = process.communicate(timeout=patient(PATIENCE_SECONDS))
    assert (process.returncode, err) == (1, "Error: FineTuneJob reviews was deleted.\n")


@pytest.mark.parametrize(
    ("end", "code", "shown", "error"),
    [
        pytest.param(FAILED, 0, "[reviews-train-2-0] reading rows\n[reviews-train-2-0] KeyError: 'label'\n",
                     "Note: the pods of train-2 are deleted; this is the end of the log in the job's status.\n",
                     id="a failure leaves the end of its log"),
        pytest.param(SUCCEEDED, 1, "", "Error: the pods of train-2 and their logs are deleted.\n",
                     id="a success leaves none"),
    ],
)  # fmt: skip
def test_following_logs_of_pods_that_never_show_ends_with_the_job(
    jobs: Jobs, end: dict[str, Any], code: int, shown: str, error: str
) -> None:
    jobs.make("reviews", TRAINING)
    process = jobs.start("logs", "reviews", "-f")
    assert process.stderr is not None
    assert process.stderr.readline().startswith("Note: no selected pod of reviews has started yet;")
    jobs.write_status("reviews", end)
    assert (*process.communicate(timeout=patient(PATIENCE_SECONDS)), process.returncode) == (shown, error, code)


# ----------------------------------------------------------------------------------------------------- with an operator


def written(world: World, tmp_path: Path) -> Jobs:
    return Jobs(world.cluster, world.namespace, tmp_path)


def test_logs_are_followed_from_pod_to_pod_over_attempts_and_stages(world: World, tmp_path: Path) -> None:
    parts = (
        ("prepare", 1, 1, SUCCEEDS, "tokens\n"),
        ("train", 1, 2, PREEMPTED, "epoch 1\n"),
        ("train", 2, 2, SUCCEEDS, "epoch 1 again\n"),
    )
    for stage, attempt, _, _, log in parts:
        world.kubelet.playbook.set("reviews", stage, replace(RUNS, log=log), attempt=attempt)
    world.apply("reviews", {"resources": {"nodes": 2}})
    process = written(world, tmp_path).start("logs", "reviews", "-f")
    assert process.stdout is not None
    lines: list[str] = []
    for stage, attempt, pods, end, log in parts:
        # Pods of an ended attempt are removed, and their logs with them: each runs until its log is read.
        lines += [process.stdout.readline() for _ in range(pods)]
        assert world.kubelet.switch_play("reviews", stage, replace(end, log=log), attempt) == pods
    out, err = process.communicate(timeout=patient(PATIENCE_SECONDS))
    assert process.returncode == 0, err
    lines = [line.rstrip("\n") for line in lines + out.splitlines()]
    stages = [line.partition("/")[0] for line in lines]
    assert list(dict.fromkeys(stages)) == ["[prepare-1", "[train-1", "[train-2"]
    assert sorted(lines) == [
        "[prepare-1/0] tokens",
        "[train-1/0] epoch 1",
        "[train-1/1] epoch 1",
        "[train-2/0] epoch 1 again",
        "[train-2/1] epoch 1 again",
    ]
    assert world.status("reviews")["phase"] == "Succeeded"


def test_the_log_of_one_pod_of_one_rank_and_of_a_running_stage(world: World, tmp_path: Path) -> None:
    for node in (0, 1):
        world.kubelet.playbook.set("reviews", "train", replace(RUNS, log=f"hello\nfrom node {node}\n"), index=node)
    world.apply("reviews", {"resources": {"nodes": 2, "processesPerNode": 2}})
    world.wait_running("reviews", "train")
    wait_until(
        lambda: world.phases("reviews", "train") == ["Running"] * 2,
        "both pods run",
        detail=lambda: world.describe("reviews"),
    )
    jobs = written(world, tmp_path)
    wanted = (0, "[train-1/1] from node 1\n", "")
    assert jobs.finetune("logs", "reviews", "--pod", "1", "--tail", "1") == wanted
    assert jobs.finetune("logs", "reviews", "--rank", "3", "--tail", "1") == wanted
    assert jobs.finetune("logs", "reviews", "--rank", "1", "--tail", "1")[1] == "[train-1/0] from node 0\n"
    both = jobs.finetune("logs", "reviews")
    assert (both[0], both[1].count("[train-1/0]"), both[1].count("[train-1/1]")) == (0, 2, 2)


def test_commands_show_the_failure_that_the_operator_reported(world: World, tmp_path: Path) -> None:
    world.kubelet.playbook.set("reviews", "prepare", WRONG_COLUMN)
    world.apply("reviews")
    jobs = written(world, tmp_path)
    watched = jobs.finetune("watch", "reviews")
    assert watched[0] == 1
    world.wait_event("reviews", "why", lambda _, reason, __: reason == "StageFailed")
    assert "DataError (MissingColumn): dataset.columns.text: 'text' is not a column" in watched[1].splitlines()[-1]
    shown = jobs.finetune("status", "reviews")[1]
    assert "DataError (MissingColumn) in prepare, attempt 1, pod reviews-prepare-1-" in shown
    assert "set dataset.columns.text" in shown
    assert "KeyError: 'text'" in shown
    assert "StageFailed" in shown
    logs = jobs.finetune("logs", "reviews")
    assert [line.partition("] ")[2] for line in logs[1].splitlines()] == ["reading rows", "KeyError: 'text'"]


# ------------------------------------------------------------------------------------------------ what a job names


def write_job(jobs: Jobs, **spec: Any) -> str:
    """Write a job file with these fields; return its name."""
    document = {**JOB, "metadata": {"name": "reviews"}, "spec": {**JOB["spec"], **spec}}
    (jobs.folder / "job.yaml").write_text(yaml.safe_dump(document))
    return str(jobs.folder / "job.yaml")


def make_objects(jobs: Jobs) -> None:
    """Create a claim for one node, and a Secret whose value must appear nowhere."""
    size = {"resources": {"requests": {"storage": "1Gi"}}}
    claim = {"accessModes": ["ReadWriteOnce"], **size}
    for kind, name, body in (
        ("PersistentVolumeClaim", "work", {"spec": claim}),
        ("Secret", "hub", {"stringData": {"HF_TOKEN": "a-secret-value"}}),
    ):
        document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": jobs.namespace}, **body}
        jobs.api.must("create", "-f", "-", stdin=json.dumps(document))


NAMES = {
    "secrets": {"hubToken": {"name": "hub"}, "storage": {"name": "keys"}},
    "template": {"serviceAccountName": "trainer"},
}


def test_validate_for_a_cluster_notes_absent_objects_and_keys(jobs: Jobs) -> None:
    make_objects(jobs)
    file = write_job(jobs, **NAMES, storage={"storageClassName": "none-such"}, model={"uri": "pvc://models"})
    code, out, err = jobs.finetune("validate", "--cluster", file)
    assert (code, "reviews is valid" in out) == (0, True)
    for text in (
        f'spec.model.uri: value "models": namespace {jobs.namespace} has no PersistentVolumeClaim of this name',
        'spec.storage.storageClassName: value "none-such": the cluster has no StorageClass of this name',
        f'spec.template.serviceAccountName: value "trainer": namespace {jobs.namespace} has no ServiceAccount',
        'spec.secrets.hubToken.name: value "token": Secret "hub" has no such key; it has HF_TOKEN',
        f'spec.secrets.storage.name: value "keys": namespace {jobs.namespace} has no Secret of this name',
    ):
        assert text in err
    assert err.count("Note:") == 5
    assert "a-secret-value" not in out + err


def test_validate_for_a_cluster_refuses_two_nodes_on_a_claim_for_one(jobs: Jobs) -> None:
    make_objects(jobs)
    file = write_job(jobs, resources={"nodes": 2}, storage={"workspace": "pvc://work"})
    code, _, err = jobs.finetune("validate", "--cluster", file)
    assert code == 1
    assert 'spec.storage.workspace: value "work": 2 pods mount the claim (spec.resources.nodes), which is' in err
    write_job(jobs, resources={"nodes": 1}, storage={"workspace": "pvc://work"})
    assert jobs.finetune("validate", "--cluster", file)[0] == 0


def test_doctor_reports_what_a_job_names_as_gaps(jobs: Jobs) -> None:
    make_objects(jobs)
    file = write_job(jobs, **NAMES, storage={"workspace": "pvc://work"})
    code, out, err = jobs.finetune("doctor", file, "-o", "json")
    found = {one["what"]: one for one in json.loads(out)["findings"]}
    assert code == 1
    assert found["named objects"]["found"] == "PersistentVolumeClaim work"
    gaps = {path for path, one in found.items() if one["state"] == "gap" and path.startswith("spec.")}
    assert gaps == {"spec.secrets.hubToken.name", "spec.secrets.storage.name", "spec.template.serviceAccountName"}
    assert "a-secret-value" not in out + err


def test_lookups_say_what_the_caller_may_not_read(jobs: Jobs, tmp_path: Path) -> None:
    api = jobs.api
    api.must("create", "serviceaccount", "somebody", "-n", jobs.namespace)
    token = api.must("create", "token", "somebody", "-n", jobs.namespace).strip()
    access = api.access  # type: ignore[attr-defined]
    config = tmp_path / "somebody.kubeconfig"
    config.write_text(kubeconfig_text(access.host, str(access.ca) if access.ca else None, token))
    file = write_job(jobs, **NAMES)
    code, _, err = jobs.finetune("validate", "--cluster", file, "--kubeconfig", str(config))
    assert code == 0
    assert "not looked up: Secret hub: no permission to read secrets." in err
    assert "has no Secret" not in err


def test_validate_for_a_cluster_needs_no_cluster(jobs: Jobs, tmp_path: Path) -> None:
    file = write_job(jobs, **NAMES)
    gone = tmp_path / "gone.kubeconfig"
    gone.write_text(kubeconfig_text("https://127.0.0.1:1", None, "token"))
    code, out, err = jobs.finetune("validate", "--cluster", file, "--kubeconfig", str(gone))
    assert (code, "reviews is valid" in out) == (0, True)
    assert "The objects that the jobs name were not looked up: the API server at https://127.0.0.1:1 cannot be" in err

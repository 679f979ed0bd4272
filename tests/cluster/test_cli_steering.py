"""`finetune wait`, `suspend`, `resume`, `restart`, `cancel`, `cost` and `debug` against a real API server."""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_support.api_access import PATIENCE_SECONDS, wait_until
from cluster_support.control_plane import Cluster
from cluster_support.jobs_with_status import FAILED, NOW, SUCCEEDED, TRAINING, Jobs
from suite_plugins.patience import patient

CANARY = "canary-4f1c9b2e77"
READY = {"type": "Ready", "status": "True", "reason": "EndpointReady", "lastTransitionTime": NOW}
_SERVED = {"digest": "d", "startTime": NOW, "readyTime": NOW}
SERVING: dict[str, Any] = {
    **TRAINING,
    "phase": "Serving",
    "conditions": [*TRAINING["conditions"], READY],
    "endpoint": {
        "revision": 2,
        "target": 2,
        "revisions": [
            {"number": 1, "state": "Ended", "endTime": NOW, "endpoint": {"maxQueue": 5}, **_SERVED},
            {"number": 2, "state": "Serving", "endpoint": {"maxQueue": 7}, **_SERVED},
        ],
    },
}
"""A job whose second revision answers."""


def stored(jobs: Jobs, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(jobs.api.must("get", "ftj", name, "-n", jobs.namespace, "-o", "json"))
    return found


# ------------------------------------------------------------------------------------------------- suspend and resume


def test_suspend_and_resume_write_the_run_policy_and_nothing_else(jobs: Jobs) -> None:
    jobs.make("reviews", TRAINING)
    before = stored(jobs, "reviews")["spec"]
    code, out, err = jobs.finetune("suspend", "reviews")
    assert (code, out, err) == (
        0,
        "FineTuneJob reviews is suspended: a running attempt saves a checkpoint and stops.\n",
        "",
    )
    assert stored(jobs, "reviews")["spec"] == {**before, "runPolicy": {**before.get("runPolicy", {}), "suspend": True}}
    assert jobs.finetune("suspend", "reviews")[:2] == (0, "FineTuneJob reviews is already suspended.\n")
    assert jobs.finetune("resume", "reviews")[:2] == (0, "FineTuneJob reviews is resumed.\n")
    assert stored(jobs, "reviews")["spec"]["runPolicy"]["suspend"] is False


def test_dry_run_sends_a_request_and_changes_nothing(jobs: Jobs) -> None:
    jobs.make("reviews", TRAINING)
    before = stored(jobs, "reviews")
    for verb in ("suspend", "restart", "cancel"):
        code, out, _ = jobs.finetune(verb, "reviews", "--dry-run")
        assert (code, out.endswith("(dry run: nothing was changed).\n")) == (0, True), out
    assert stored(jobs, "reviews") == before


def test_one_job_that_is_not_there_keeps_no_other_from_being_changed(jobs: Jobs) -> None:
    jobs.make("one", TRAINING)
    jobs.make("two", TRAINING)
    code, out, err = jobs.finetune("suspend", "one", "none", "two", "-o", "json")
    assert code == 1
    assert "there is no FineTuneJob none" in err
    assert [(one["name"], one["change"]) for one in json.loads(out)] == [("one", "suspended"), ("two", "suspended")]


def test_ended_job_cannot_be_suspended_and_gets_a_hint(jobs: Jobs) -> None:
    jobs.make("reviews", FAILED)
    code, out, err = jobs.finetune("suspend", "reviews")
    assert (code, out) == (1, "")
    assert "has ended (Failed) and cannot be suspended; finetune restart reviews runs it from the beginning" in err


# ------------------------------------------------------------------------------------------------- restart and cancel


def test_a_job_that_has_ended_is_made_again_as_it_was_applied(jobs: Jobs) -> None:
    jobs.make("reviews", FAILED)
    jobs.api.must("label", "ftj", "reviews", "-n", jobs.namespace, "team=search")
    jobs.api.must("annotate", "ftj", "reviews", "-n", jobs.namespace, "note=kept")
    before = stored(jobs, "reviews")
    code, out, err = jobs.finetune("restart", "reviews")
    assert (code, err) == (0, "")
    assert out.startswith("FineTuneJob reviews runs from the beginning;")
    after = stored(jobs, "reviews")
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert (after["spec"], after["metadata"]["labels"]) == (before["spec"], {"team": "search"})
    assert after["metadata"]["annotations"] == {"note": "kept"}
    assert "status" not in after


def test_a_job_that_the_api_server_would_not_take_again_is_not_deleted(jobs: Jobs) -> None:
    jobs.make("reviews", FAILED)
    quota = {"count/finetunejobs.finetune.dev": "1"}
    manifest = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": quota}}
    jobs.api.must("create", "-n", jobs.namespace, "-f", "-", stdin=json.dumps(manifest))
    uid = stored(jobs, "reviews")["metadata"]["uid"]
    code, _, err = jobs.finetune("restart", "reviews")
    assert code == 1
    assert "quota" in err
    assert stored(jobs, "reviews")["metadata"]["uid"] == uid


def test_a_running_job_is_stopped_and_goes_on_as_another_attempt(jobs: Jobs) -> None:
    jobs.make("reviews", TRAINING)
    with jobs.start("restart", "reviews") as process:
        wait_until(lambda: stored(jobs, "reviews")["spec"].get("runPolicy", {}).get("suspend"), "the job is suspended")
        # The operator's part: the attempt has saved its checkpoint and is deleted.
        jobs.write_status("reviews", {**TRAINING, "phase": "Suspended", "observedGeneration": 2})
        out, err = process.communicate(timeout=patient(PATIENCE_SECONDS))
    assert (process.returncode, err) == (0, "")
    assert out == "FineTuneJob reviews starts another attempt from its last checkpoint.\n"
    assert stored(jobs, "reviews")["spec"]["runPolicy"]["suspend"] is False


def test_cancel_deletes_running_jobs_and_keeps_ended_ones(jobs: Jobs) -> None:
    jobs.make("running", TRAINING)
    jobs.make("done", SUCCEEDED)
    code, out, _ = jobs.finetune("cancel", "running", "done")
    assert (code, out.splitlines()) == (
        0,
        [
            "FineTuneJob running is deleted; its results stay on its claim.",
            "FineTuneJob done has already ended (Succeeded).",
        ],
    )
    assert jobs.api.must("get", "ftj", "-n", jobs.namespace, "-o", "name").split() == ["finetunejob.finetune.dev/done"]


# ----------------------------------------------------------------------------------------------------------- rollback


def test_rollback_annotates_the_job_and_leaves_its_spec(jobs: Jobs) -> None:
    jobs.make("reviews", SERVING)
    before = stored(jobs, "reviews")
    code, _, err = jobs.finetune("rollback", "reviews")
    assert code == 1
    missing = re.search(r"claim (\S+) with its model does not exist; restore it first", err)
    assert missing is not None, err
    size = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": missing[1]}, "spec": size}
    jobs.api.must("create", "-n", jobs.namespace, "-f", "-", stdin=json.dumps(claim))
    code, out, err = jobs.finetune("rollback", "reviews", "--dry-run", "-o", "json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["change"], result["from"], result["to"]) == ("rolledBack", 2, 1)
    assert stored(jobs, "reviews") == before
    code, out, _ = jobs.finetune("rollback", "reviews")
    assert (code, out) == (0, "FineTuneJob reviews is rolled back from revision 2 to 1 until spec.endpoint changes.\n")
    after = stored(jobs, "reviews")
    assert after["metadata"]["annotations"] == {"finetune.dev/rollback": "2:1"}
    assert after["spec"] == before["spec"]
    code, _, err = jobs.finetune("rollback", "reviews", "--to", "7")
    assert code == 1
    assert "has no revision 7 of its endpoint; its history has 1, 2." in err


# --------------------------------------------------------------------------------------------------------------- wait


@pytest.mark.parametrize(
    ("status", "goal", "code", "result"),
    [
        pytest.param(SUCCEEDED, "succeeded", 0, "is succeeded", id="it has succeeded"),
        pytest.param(FAILED, "succeeded", 1, "has failed and can no longer be succeeded", id="it cannot any more"),
        pytest.param(FAILED, "ended", 0, "is ended", id="either end"),
        pytest.param(TRAINING, "running", 0, "is running", id="it runs"),
        pytest.param(SERVING, "ready", 0, "is ready", id="its endpoint answers"),
        pytest.param(TRAINING, "succeeded", 124, "is not succeeded after 1 s", id="the time is over"),
    ],
)
def test_wait_ends_with_the_result(jobs: Jobs, status: Any, goal: str, code: int, result: str) -> None:
    jobs.make("reviews", status)
    found, out, err = jobs.finetune(
        "wait", "reviews", "--for", goal, "--timeout", "1s" if code == 124 else f"{patient(60):.0f}s"
    )
    assert (found, (out + err).strip()) == (code, f"FineTuneJob reviews {result}.")


def watches(cluster: Cluster, namespace: str) -> bool:
    """Return whether any client watches jobs there, by the audit log."""
    requests = [(entry["verb"], entry.get("objectRef", {})) for entry in cluster.audit()]
    return any(
        verb == "watch" and (of.get("resource"), of.get("namespace")) == ("finetunejobs", namespace)
        for verb, of in requests
    )


def test_waiting_for_several_jobs_ends_with_the_last_of_them(jobs: Jobs, cluster: Cluster) -> None:
    jobs.make("one", TRAINING)
    jobs.make("two", SUCCEEDED)
    with jobs.start("wait", "one", "two", "--timeout", f"{patient(120):.0f}s", "-o", "json") as process:
        if cluster.folder is not None:
            wait_until(lambda: watches(cluster, jobs.namespace), "the command watches")
        assert process.poll() is None
        jobs.write_status("one", SUCCEEDED)
        out, _ = process.communicate(timeout=patient(PATIENCE_SECONDS))
    assert process.returncode == 0
    assert [(one["name"], one["reached"], one["phase"]) for one in json.loads(out)] == [
        ("one", True, "Succeeded"),
        ("two", True, "Succeeded"),
    ]


def test_wait_for_deletion_ends_once_the_job_is_deleted(jobs: Jobs) -> None:
    assert jobs.finetune("wait", "never-there", "--for", "deleted")[0] == 0
    jobs.make("reviews", TRAINING)
    with jobs.start("wait", "reviews", "never-there", "--for", "deleted") as process:
        assert process.stdout is not None
        # Both are looked up at the same time: by now the command knows that the other one exists.
        assert process.stdout.readline() == "FineTuneJob never-there does not exist.\n"
        jobs.api.must("delete", "ftj", "reviews", "-n", jobs.namespace)
        out, _ = process.communicate(timeout=patient(PATIENCE_SECONDS))
    assert (process.returncode, out) == (0, "FineTuneJob reviews was deleted.\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param(("--for", "finished"), "--for finished: unknown state", id="no such state"),
        pytest.param(("--timeout", "soon"), "--timeout soon: not a duration", id="no time"),
    ],
)
def test_a_call_that_is_wrong_ends_with_2(jobs: Jobs, arguments: tuple[str, ...], error: str) -> None:
    code, _, err = jobs.finetune("wait", "reviews", *arguments)
    assert code == 2
    assert error in err


# --------------------------------------------------------------------------------------------------------------- cost


def test_costs_are_a_table_with_sums_by_currency_and_data_for_programs(jobs: Jobs) -> None:
    used = {"nodeSeconds": 3600, "billableSeconds": 3900}
    jobs.make("dear", {**SUCCEEDED, "cost": {**used, "currency": "EUR", "amount": 12.5, "saved": 7.5}})
    jobs.make("dollars", {**SUCCEEDED, "cost": {**used, "currency": "USD", "amount": 1.0}})
    jobs.make("unpriced", {**TRAINING, "cost": used})
    code, out, _ = jobs.finetune("cost")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert rows[1] == "dear Succeeded 60 min 65 min 12.50 EUR 7.50 EUR 12 min"
    assert rows[4:] == [
        "total 1 job 60 min 65 min 12.50 EUR 7.50 EUR",
        "total 1 job 60 min 65 min 1.00 USD 0.00 USD",
        "total 1 job 60 min 65 min - -",
    ]
    data = json.loads(jobs.finetune("cost", "-o", "json")[1])
    assert [(one["currency"], one["amount"]) for one in data["totals"]] == [("EUR", 12.5), ("USD", 1.0), (None, None)]
    one = yaml.safe_load(jobs.finetune("cost", "dear", "-o", "yaml")[1])
    assert (one["amount"], one["saved"], one["estimated"]["seconds"]) == (12.5, 7.5, 750.0)


# -------------------------------------------------------------------------------------------------------------- debug


def test_debug_collects_all_that_may_be_read_and_no_secret(jobs: Jobs, tmp_path: Path) -> None:
    jobs.make("reviews", TRAINING)
    uid = stored(jobs, "reviews")["metadata"]["uid"]
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": CANARY}}
    labels = {
        "finetune.dev/job": "reviews",
        "finetune.dev/job-uid": uid,
        "finetune.dev/stage": "train",
        "finetune.dev/attempt": "2",
    }
    variables = [
        {"name": "MY_TOKEN", "value": CANARY},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reviews-train-2-0", "labels": labels},
        "spec": {
            "automountServiceAccountToken": False,
            # A controller creates the default account a moment after the namespace.
            "serviceAccountName": "trainer",
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "pytorch",
                    "image": "trainer",
                    "env": variables,
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "reviews.1"},
        "involvedObject": {"kind": "FineTuneJob", "name": "reviews", "uid": uid, "namespace": jobs.namespace},
        "reason": "StageFailed",
        "message": f"the Hub did not take {CANARY}",
        "lastTimestamp": "2026-01-05T10:00:00Z",
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer"}}
    for manifest in (account, secret, pod, event):
        jobs.api.must("create", "-n", jobs.namespace, "-f", "-", stdin=json.dumps(manifest))
    file = tmp_path / "found.tar.gz"
    code, out, err = jobs.finetune("debug", "reviews", "--file", str(file))
    assert code == 0, err
    assert "review them before you share it" in out
    with tarfile.open(file) as archive:
        texts = {
            name.removeprefix("reviews/"): content.read().decode()
            for name in archive.getnames()
            if (content := archive.extractfile(name)) is not None
        }
    assert set(texts) == {"README.txt", "events.json", "job.json", "pods.json", "status.txt", "versions.json"}
    assert not [name for name, text in texts.items() if CANARY in text]
    assert json.loads(texts["events.json"])[0]["message"] == "the Hub did not take (hidden)"
    assert json.loads(texts["pods.json"])[0]["spec"]["containers"][0]["env"][1] == variables[1], "names of Secrets stay"
    assert "train" in texts["status.txt"]
    assert "the log of reviews-train-2-0" in texts["README.txt"], "a pod without a node has no log, and that is said"
    assert jobs.finetune("debug", "reviews", "--file", str(file))[0] == 2, "what is there is not written over"


# --------------------------------------------------------------------------------------------------------- completion


def test_a_shell_completes_commands_and_names_of_jobs(jobs: Jobs) -> None:
    jobs.make("reviews", TRAINING)
    jobs.make("ratings", TRAINING)
    command_line = f"finetune status -n {jobs.namespace} ra"
    typed = f'COMP_WORDS=({command_line}); COMP_CWORD=4; _finetune_completion finetune; echo "${{COMPREPLY[@]}}"'
    script = f"source <(finetune completion bash); {typed}"

    def completed() -> list[str]:
        ran = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=patient(PATIENCE_SECONDS),
            check=True,
            env=jobs.environment(),
        )
        return ran.stdout.split()

    # A completion waits three seconds for the API server, then offers nothing: a user presses Tab again.
    assert wait_until(completed, "the shell completes a name", PATIENCE_SECONDS) == ["ratings"]

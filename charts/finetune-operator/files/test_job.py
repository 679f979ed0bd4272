"""Program of `helm test`: creates a FineTuneJob, waits until one of its conditions is true, and deletes it.

Exits with 0, or with 1 and the status of the job.
"""

import json
import os
import sys
import time

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

JOB = json.loads(os.environ["JOB"])
WAIT_FOR = os.environ["WAIT_FOR"]
TIMEOUT_SECONDS = float(os.environ["TIMEOUT_SECONDS"])
NAME, NAMESPACE = JOB["metadata"]["name"], JOB["metadata"]["namespace"]
KIND = {"group": "finetune.dev", "version": "v1alpha1", "plural": "finetunejobs", "namespace": NAMESPACE}
POLL_SECONDS = 1.0


def main() -> int:
    """Run the test and return its exit code."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    config.load_config()
    jobs = client.CustomObjectsApi()
    status: dict = {}
    try:
        remove(jobs, deadline)
        create(jobs, deadline)
        print(f"Created {NAMESPACE}/{NAME}; waiting up to {TIMEOUT_SECONDS:g} s for condition {WAIT_FOR}", flush=True)
        while time.monotonic() < deadline:
            status = jobs.get_namespaced_custom_object(**KIND, name=NAME).get("status") or {}
            conditions = {each["type"]: each for each in status.get("conditions", [])}
            if conditions.get(WAIT_FOR, {}).get("status") == "True":
                print(f"{WAIT_FOR}: {conditions[WAIT_FOR].get('message', '')}")
                return 0
            ended = conditions.get("Failed", {}).get("status") == "True"
            refused = any(conditions.get(name, {}).get("status") == "False" for name in ("Accepted", "Planned"))
            if ended or refused:
                return failed(f"the job cannot reach condition {WAIT_FOR}", status)
            time.sleep(POLL_SECONDS)
        if not status:
            return failed("the operator has not set a status: check that it runs and watches this namespace", status)
        return failed("the test timed out", status)
    except ApiException as error:
        return failed(f"the API server answered {error.status} {error.reason}: {error.body}", status)
    finally:
        clean_up(jobs)


def create(jobs: client.CustomObjectsApi, deadline: float) -> None:
    """Create the job, with retries until the permissions that were just granted take effect."""
    while True:
        try:
            jobs.create_namespaced_custom_object(**KIND, body=JOB)
        except ApiException as error:
            if error.status != 403 or time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return


def remove(jobs: client.CustomObjectsApi, deadline: float) -> None:
    """Delete the job of an earlier test, and wait until it is deleted."""
    while time.monotonic() < deadline:
        try:
            jobs.delete_namespaced_custom_object(**KIND, name=NAME)
        except ApiException as error:
            if error.status == 404:
                return
            if error.status != 403:
                raise
        time.sleep(POLL_SECONDS)


def clean_up(jobs: client.CustomObjectsApi) -> None:
    """Delete the job and the claim with its results."""
    for name, delete in (
        (f"FineTuneJob {NAMESPACE}/{NAME}", lambda: jobs.delete_namespaced_custom_object(**KIND, name=NAME)),
        (
            f"claim {NAMESPACE}/{NAME}-workspace",
            lambda: client.CoreV1Api().delete_namespaced_persistent_volume_claim(f"{NAME}-workspace", NAMESPACE),
        ),
    ):
        try:
            delete()
        except ApiException as error:
            if error.status != 404:
                print(f"{name} could not be deleted: {error.status} {error.reason}")


def failed(cause: str, status: dict) -> int:
    """Print the failure and the status of the job; return the exit code."""
    print(f"FAILED: {cause}")
    for each in status.get("conditions", []):
        print(f"  {each['type']}={each['status']} {each.get('reason', '')}: {each.get('message', '')}")
    if "failure" in status:
        print(f"  failure: {json.dumps(status['failure'])}")
    print(f"Log: kubectl --namespace {os.environ['OPERATOR_NAMESPACE']} logs deployment/finetune-operator")
    return 1


sys.exit(main())

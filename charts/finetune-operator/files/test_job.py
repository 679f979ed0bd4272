"""What `helm test` runs: makes a FineTuneJob, waits until one of its conditions is true, and deletes it.

Ends with 0, or with 1 and everything that is known about the job.
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
AGAIN_SECONDS = 1.0


def main() -> int:
    """The exit code."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    config.load_config()
    jobs = client.CustomObjectsApi()
    status: dict = {}
    try:
        remove(jobs, deadline)
        create(jobs, deadline)
        print(f"{NAMESPACE}/{NAME} is made; it has to become {WAIT_FOR} within {TIMEOUT_SECONDS:g} s", flush=True)
        while time.monotonic() < deadline:
            status = jobs.get_namespaced_custom_object(**KIND, name=NAME).get("status") or {}
            conditions = {each["type"]: each for each in status.get("conditions", [])}
            if conditions.get(WAIT_FOR, {}).get("status") == "True":
                print(f"{WAIT_FOR}: {conditions[WAIT_FOR].get('message', '')}")
                return 0
            over = conditions.get("Failed", {}).get("status") == "True"
            refused = any(conditions.get(name, {}).get("status") == "False" for name in ("Accepted", "Planned"))
            if over or refused:
                return failed(f"the job will not become {WAIT_FOR}", status)
            time.sleep(AGAIN_SECONDS)
        if not status:
            return failed("the operator has said nothing about the job: does it run, and for this namespace?", status)
        return failed("the time is over", status)
    except ApiException as error:
        return failed(f"the API server answered {error.status} {error.reason}: {error.body}", status)
    finally:
        clean_up(jobs)


def create(jobs: client.CustomObjectsApi, deadline: float) -> None:
    """Make the job; rights that were granted a moment ago may take another to hold."""
    while True:
        try:
            jobs.create_namespaced_custom_object(**KIND, body=JOB)
        except ApiException as error:
            if error.status != 403 or time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_SECONDS)
        else:
            return


def remove(jobs: client.CustomObjectsApi, deadline: float) -> None:
    """Delete what an earlier test has left, and wait until it is gone."""
    while time.monotonic() < deadline:
        try:
            jobs.delete_namespaced_custom_object(**KIND, name=NAME)
        except ApiException as error:
            if error.status == 404:
                return
            if error.status != 403:
                raise
        time.sleep(AGAIN_SECONDS)


def clean_up(jobs: client.CustomObjectsApi) -> None:
    """Delete the job and the claim with its results."""
    for what, delete in (
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
                print(f"{what} is left behind: {error.status} {error.reason}")


def failed(why: str, status: dict) -> int:
    """Tell what is known."""
    print(f"FAILED: {why}")
    for each in status.get("conditions", []):
        print(f"  {each['type']}={each['status']} {each.get('reason', '')}: {each.get('message', '')}")
    if "failure" in status:
        print(f"  failure: {json.dumps(status['failure'])}")
    print(f"See: kubectl --namespace {os.environ['OPERATOR_NAMESPACE']} logs deployment/finetune-operator")
    return 1


sys.exit(main())

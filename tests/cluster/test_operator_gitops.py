"""A job from git: the operator and a tool that applies its file again and again never fight over it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster_support.api_access import wait_until
from cluster_support.plays import RUNS, SUCCEEDS
from cluster_support.world import BASE, World, merged, states
from finetune_operator.spec.types import API_VERSION, KIND, PLURAL

TIMES = 20
FROM_GIT = ("--server-side", "--field-manager=argocd-controller", "--force-conflicts")
CLIENT_SIDE: tuple[str, ...] = ()


def manifest(world: World, name: str) -> str:
    """Return the file, with a label and an annotation as such tools add."""
    metadata = {
        "name": name,
        "namespace": world.namespace,
        "labels": {"app.kubernetes.io/instance": "finetune-jobs"},
        "annotations": {"argocd.argoproj.io/tracking-id": f"finetune-jobs:finetune.dev/{KIND}:{name}"},
    }
    spec = merged(BASE, {"runPolicy": {"maxRestarts": 1}})
    return json.dumps({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec})


def stored(world: World, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        world.cluster.must("get", PLURAL, name, "-n", world.namespace, "-o", "json", "--show-managed-fields")
    )
    return found


@pytest.mark.parametrize("options", [FROM_GIT, CLIENT_SIDE], ids=["server-side", "client-side"])
def test_applying_a_file_again_restarts_nothing_in_a_running_job(world: World, options: tuple[str, ...]) -> None:
    name = "from-git" if options else "by-hand"
    text = manifest(world, name)
    world.kubelet.playbook.set(name, "train", RUNS)
    world.cluster.must("apply", *options, "-f", "-", stdin=text)
    world.wait_running(name, "train")
    before, pods = stored(world, name), [pod["metadata"]["uid"] for pod in world.pods(name, "train")]
    for _ in range(TIMES):
        output = world.cluster.must("apply", *options, "-f", "-", stdin=text)
        # The operator writes the status meanwhile, and none of the file's fields.
        assert "unchanged" in output or "serverside-applied" in output
    drift = world.cluster.kubectl("diff", *options, "-f", "-", stdin=text)
    assert (drift.returncode, drift.stdout) == (0, ""), drift.stderr
    world.kubelet.switch_play(name, "train", SUCCEEDS)
    status = world.wait_phase(name, "Succeeded")
    after = stored(world, name)
    assert (after["spec"], after["metadata"]["generation"]) == (before["spec"], 1)
    assert (states(status)["train"], status["restarts"]) == (("Succeeded", 1), 0)
    assert [pod["metadata"]["uid"] for pod in world.pods(name, "train")] == pods
    assert world.children(name) == [f"{name}-{stage}-1" for stage in ("prepare", "train", "evaluate", "predict")]


def test_operator_owns_the_status_and_no_field_of_the_manifest(world: World) -> None:
    world.cluster.must("apply", *FROM_GIT, "-f", "-", stdin=manifest(world, "owned"))
    world.wait_phase("owned", "Succeeded")
    owners = {
        entry["manager"]: (entry.get("subresource", ""), sorted(entry["fieldsV1"]))
        for entry in stored(world, "owned")["metadata"]["managedFields"]
    }
    assert owners == {
        "argocd-controller": ("", ["f:metadata", "f:spec"]),
        "finetune-operator": ("status", ["f:status"]),
    }


def test_a_file_that_goes_takes_its_job_and_comes_back_as_another(world: World) -> None:
    text = manifest(world, "moved")
    world.cluster.must("apply", *FROM_GIT, "-f", "-", stdin=text)
    world.wait_phase("moved", "Succeeded")
    uid = stored(world, "moved")["metadata"]["uid"]
    world.cluster.must("delete", PLURAL, "moved", "-n", world.namespace)
    world.cluster.must("apply", *FROM_GIT, "-f", "-", stdin=text)
    wait_until(lambda: stored(world, "moved")["metadata"]["uid"] != uid, "it is another job")
    assert states(world.wait_phase("moved", "Succeeded"))["train"] == ("Succeeded", 1)

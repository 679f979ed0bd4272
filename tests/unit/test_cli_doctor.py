"""Conclusions of `finetune doctor` from its facts; tests/cluster/test_operator_nodes.py asks a real cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_operator.cli.cluster.doctor_findings import Finding, Known, Surroundings, judge
from finetune_operator.spec.checks.settings_check import check_settings
from planning_support.cases import job

IMAGE = "registry.example.com/trainer:1"
SETTINGS, _ = check_settings({"defaults": {"image": IMAGE}})


def operator(tag: str = "0.1.0", ready: int = 2) -> dict[str, Any]:
    container = {"image": f"registry.example.com/finetune-operator:{tag}"}
    return {
        "metadata": {"name": "finetune-operator", "namespace": "finetune-system"},
        "spec": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
        "status": {"readyReplicas": ready},
    }


def storage_class(provisioner: str, default: bool = False) -> dict[str, Any]:
    annotations = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {"metadata": {"name": provisioner.partition(".")[0], "annotations": annotations}, "provisioner": provisioner}


WHOLE = Surroundings(
    server="https://cluster.example.com",
    namespace="team",
    version=Known("v1.36.0"),
    own_version="0.1.0",
    served=Known(("pytorchjob", "job")),
    serves_jobs=Known(True),
    lacking=Known(()),
    groups=Known(("apps", "cilium.io")),
    queues=Known(()),
    operators=Known((operator(),)),
    nodes=Known(({"metadata": {"name": "a"}, "status": {"images": [{"names": [IMAGE]}]}},)),
    classes=Known((storage_class("efs.csi.aws.com", default=True),)),
    namespace_labels=Known({}),
    quotas=Known(()),
)
"""A cluster that lacks nothing."""


def found(spec: dict[str, Any] | None = None, **changes: Any) -> dict[str, Finding]:
    assert SETTINGS is not None
    checked = None if spec is None else job(spec)
    return {one.topic: one for one in judge(replace(WHOLE, **changes), checked, SETTINGS)}


def test_where_nothing_is_lacking_nothing_is_hinted_at():
    rows = found({"resources": {"nodes": 2}})
    assert [one for one in rows.values() if one.state in ("gap", "unknown") or one.hint] == []


@pytest.mark.parametrize(
    ("changes", "topic", "state", "message"),
    [
        ({"operators": Known((operator("0.0.9"),))}, "operator", "gap", "this command has version 0.1.0"),
        ({"operators": Known((operator(ready=0),))}, "operator", "gap", "0 of 2 replicas ready"),
        ({"operators": Known(())}, "operator", "gap", "no Deployment"),
        ({"serves_jobs": Known(False)}, "FineTuneJob", "gap", "is not served"),
        ({"lacking": Known(("spec.queue",))}, "FineTuneJob", "gap", "is served without spec.queue"),
        (
            {"lacking": Known(("spec.a", "status.b"))},
            "FineTuneJob",
            "gap",
            "status.b, which the operator of this version",
        ),
        ({"served": Known(("job",))}, "launcher pytorchjob", "gap", "the job requires it"),
        ({"groups": Known(("apps",))}, "network policies", "unknown", "no network plugin"),
        ({"groups": Known(("kueue.x-k8s.io",)), "queues": Known(("gpus",))}, "queue", "note", "queues of team: gpus"),
        ({"classes": Known((storage_class("ebs.csi.aws.com", True),))}, "storage", "gap", "only one node can write"),
        ({"classes": Known((storage_class("new.example.com", True),))}, "storage", "unknown", "is unknown"),
        ({"classes": Known((storage_class("efs.csi.aws.com"),))}, "storage", "gap", "no default storage class"),
        ({"nodes": Known(())}, "image", "unknown", "no node is known to have it"),
        ({"nodes": Known(None, "no permission to read nodes")}, "GPU nodes", "unknown", "no permission"),
        ({"quotas": Known(None, "no permission to read quotas")}, "quota", "unknown", "no permission"),
        ({"leftover_claims": Known((2**30,))}, "claims of deleted jobs", "note", "1 claim with 1.0 GiB"),
        ({"leftover_claims": Known(None, "no permission")}, "claims of deleted jobs", "unknown", "no permission"),
    ],
)
def test_doctor_reports_each_gap_and_unknown(changes, topic, state, message):
    row = found({"resources": {"nodes": 2}, "launcher": "pytorchjob"}, **changes)[topic]
    assert row.state == state
    assert message in row.found
    assert row.hint or state != "gap"


def test_gpus_without_a_label_are_a_gap_with_a_hint():
    node = {"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    row = found(nodes=Known((node,)))["GPU nodes, nvidia.com/gpu"]
    assert (row.state, row.found.partition(" of ")[0]) == ("gap", "1 node with 4 x unknown GPU")
    assert "GPU feature discovery" in row.hint


def test_quota_on_resources_that_the_job_leaves_unset_is_a_gap():
    quota = {"metadata": {"name": "bound"}, "status": {"hard": {"limits.cpu": "8"}, "used": {"limits.cpu": "0"}}}
    rows = found({}, quotas=Known((quota,)))
    assert rows["quota bound"].state == "gap"
    assert found({"resources": {"cpu": "4", "memory": "8Gi"}}, quotas=Known((quota,)))["quota bound"].state == "ok"
    assert found({"resources": {"cpu": "16"}}, quotas=Known((quota,)))["quota bound"].found.endswith("16 limits.cpu")


H100: dict[str, str] = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


def gpu_nodes(*there: dict[str, str], **labels: str) -> Known[tuple[Any, ...]]:
    """Return nodes with 8 GPUs each, by what they advertise beside them."""
    made = [
        {
            "metadata": {"name": f"n{index}", "labels": {**H100, **labels}},
            "status": {"allocatable": {"nvidia.com/gpu": "8", **resources}},
        }
        for index, resources in enumerate(there)
    ]
    return Known(tuple(made))


@pytest.mark.parametrize(
    ("network", "nodes", "state", "message"),
    [
        ("auto", [{"rdma/ib": "8"}] * 2, "ok", "auto requests rdma/ib, which all its nodes have"),
        ("auto", [{"rdma/ib": "8"}, {}], "gap", "auto uses TCP: not all of its nodes have the devices"),
        ("auto", [{}, {}], "note", "auto uses TCP: its nodes advertise no devices"),
        ("rdma", [{"rdma/ib": "8"}, {}], "ok", "rdma requests rdma/ib"),
        ("rdma", [{}, {}], "gap", "the job requires rdma, and its nodes advertise none"),
    ],
)
def test_doctor_shows_the_network_devices_that_a_job_gets(network, nodes, state, message):
    spec = {"resources": {"nodes": 2, "gpusPerNode": 8, "network": network}}
    row = found(spec, nodes=gpu_nodes(*nodes))["network of the job"]
    assert (row.state, row.found) == (state, message)
    assert bool(row.hint) is (state == "gap")


def test_doctor_lists_network_devices_and_the_gaps_of_efa():
    efa = {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "2Gi"}
    rows = found(nodes=gpu_nodes(efa, {}, **{"node.kubernetes.io/instance-type": "p5.48xlarge"}))
    assert rows["network between nodes"].found == "of 2 nodes with GPUs: vpc.amazonaws.com/efa on 1 (at least 32 each)"
    assert (rows["EFA, p5.48xlarge"].state, rows["EFA, huge pages"].state) == ("gap", "gap")
    assert rows["EFA, huge pages"].found == "a node with EFA has 2.0 GiB of hugepages-2Mi, and pods use 5120Mi"
    assert found(nodes=gpu_nodes({}))["network between nodes"].state == "note"

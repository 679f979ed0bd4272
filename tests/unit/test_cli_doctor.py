"""Conclusions of `finetune doctor` from its facts; tests/cluster/test_operator_nodes.py asks a real cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_operator.api.settings import CLUSTER_SETTINGS
from finetune_operator.api.settings_check import check_settings
from finetune_operator.cli.doctor_findings import Finding, Known, Surroundings, judge
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
        ({"served": Known(("job",))}, "launcher pytorchjob", "gap", "the job requires it"),
        ({"groups": Known(("apps",))}, "network policies", "unknown", "no network plugin"),
        ({"groups": Known(("kueue.x-k8s.io",)), "queues": Known(("gpus",))}, "queue", "note", "queues of team: gpus"),
        ({"classes": Known((storage_class("ebs.csi.aws.com", True),))}, "storage", "gap", "only one node can write"),
        ({"classes": Known((storage_class("new.example.com", True),))}, "storage", "unknown", "is unknown"),
        ({"classes": Known((storage_class("efs.csi.aws.com"),))}, "storage", "gap", "no default storage class"),
        ({"nodes": Known(())}, "image", "unknown", "no node is known to have it"),
        ({"nodes": Known(None, "no permission to read nodes")}, "GPU nodes", "unknown", "no permission"),
        ({"quotas": Known(None, "no permission to read quotas")}, "quota", "unknown", "no permission"),
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


def test_network_auto_is_a_gap_if_nodes_offer_unused_devices():
    node = {"metadata": {"name": "a"}, "status": {"allocatable": {"rdma/ib": "8"}}}
    spec = {"resources": {"nodes": 2, "gpusPerNode": 1}}
    row = found(spec, nodes=Known((node,)))["network between nodes"]
    assert (row.state, row.found) == ("gap", "nodes offer rdma/ib")
    assert CLUSTER_SETTINGS.defaults.rdma_resource == "rdma/ib"

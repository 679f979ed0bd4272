"""A training whose image does not see the GPU of its node: it fails, and never runs on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from box_support.box import Box
from box_support.team import Team, tiny_spec
from cluster_support.api_access import Object, path_of

GPU = "nvidia.com/gpu"


@contextmanager
def pretended_gpu(box: Box, node: str) -> Iterator[None]:
    """Give the node a GPU in its status, with none behind it."""
    box.own("a pretended GPU")
    status = path_of("v1", "nodes", name=node, sub="status")
    resources = {"capacity": {GPU: "1"}, "allocatable": {GPU: "1"}}
    box.api.patch(status, {"status": resources})
    try:
        yield
    finally:
        box.api.patch(status, {"status": {part: {GPU: None} for part in resources}})


def test_gpu_invisible_to_the_image_fails_instead_of_training_on_the_cpu(box: Box, team: Team) -> None:
    name = team.new_name("unseen")
    resources: Object = {"nodes": 1, "gpusPerNode": 1, "accelerator": {"memory": "80Gi"}}
    with pretended_gpu(box, box.nodes[0]):
        team.apply(name, tiny_spec(parallelism={"strategy": "single"}, resources=resources))
        failure = team.fails(name)
    (pod,) = team.pods(name, "train")
    fields = ("class", "reason", "stage", "attempt", "rank", "exitCode", "pod", "node")
    assert [failure.get(field) for field in fields] == [
        "StrategyNotInEffect", "DeviceMissing", "train", 1, 0, 13, pod["metadata"]["name"], pod["spec"]["nodeName"],
    ]  # fmt: skip
    assert "sees 0 of them" in failure["message"]
    assert "image" in failure["hint"]
    assert "DeviceMissing" in failure["logTail"]
    assert not (team.results(name) / "history.jsonl").exists()

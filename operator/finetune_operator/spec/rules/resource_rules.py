"""Rules on nodes, GPUs, sizes, spot nodes, endpoints and pods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from finetune_operator.spec.launcher_rows import SUPPORTED
from finetune_operator.spec.quantities import parse_quantity, size_hint, too_small_rule
from finetune_operator.spec.rules.rule import Rule, chosen_cel, value_of
from finetune_operator.spec.types import FineTuneJobSpec

RESERVED_PREFIXES = (
    "finetune.dev/",
    *dict.fromkeys(prefix for launcher in SUPPORTED for prefix in launcher.reserved.label_prefixes),
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/component",
)
"""Prefixes of labels and annotations by which operators find their pods."""
MUTABLE = {"runPolicy": ("suspend", "ttlSecondsAfterFinished"), "endpoint": ()}
"""Fields that may change after the first stage has started: named fields of a block, or (empty) the whole block."""


def _reserved_rule(block: Literal["labels", "annotations"]) -> Rule:
    """Return the rule on keys by which operators find their pods."""
    reserved = " || ".join(f"key.startsWith('{prefix}')" for prefix in RESERVED_PREFIXES)
    return Rule(
        f"template-{block}-are-the-users",
        f"template.{block}",
        f"!has(self.template.{block}) || !self.template.{block}.exists(key, {reserved})",
        f"must not use the prefixes {', '.join(RESERVED_PREFIXES)}, which are reserved",
        "choose another prefix",
    )


SIZES: Mapping[str, tuple[str, str]] = {
    "resources.memory": ("64Mi", "16Gi"),
    "resources.sharedMemory": ("1Mi", "8Gi"),
    "resources.accelerator.memory": ("1Gi", "80Gi"),
    "endpoint.resources.memory": ("64Mi", "4Gi"),
    "storage.size": ("1Mi", "100Gi"),
}
"""Field -> the smallest plausible value, and a usual one. An interpreter that has imported torch takes 200 MiB."""
MOST_CORES = 2048
"""Maximum cores: above the largest machines of the clouds, which have 1,920."""


def _size_rule(path: str, least: str, usual: str) -> Rule:
    """Return the rule on a size too small to be meant: its unit is missing, or is `m`, a thousandth."""

    def holds(spec: FineTuneJobSpec) -> bool:
        size = value_of(spec, path)
        return size in (None, "auto") or parse_quantity(size) >= parse_quantity(least)

    return Rule(
        f"{path}-has-a-unit",
        path,
        None,
        too_small_rule(least),
        f"write a size such as {usual}",
        test=holds,
        advice=lambda spec: size_hint(value_of(spec, path), least, usual),
        reads=(path,),
    )


RULES: tuple[Rule, ...] = (
    Rule(
        "one-process-per-gpu",
        "resources.processesPerNode",
        "type(self.resources.processesPerNode) != int || type(self.resources.gpusPerNode) != int"
        " || int(self.resources.gpusPerNode) == 0"
        " || int(self.resources.processesPerNode) <= int(self.resources.gpusPerNode)",
        "must not exceed spec.resources.gpusPerNode: each GPU runs one process",
        "set it to auto or to the number of GPUs",
    ),
    Rule(
        "mig-is-one-a-pod",
        "resources.accelerator.resource",
        f"!({chosen_cel('resources.accelerator.resource')})"
        " || !self.resources.accelerator.resource.startsWith('nvidia.com/mig-')"
        " || type(self.resources.gpusPerNode) != int || int(self.resources.gpusPerNode) <= 1",
        "is a MIG profile, of which a process can use one instance only: spec.resources.gpusPerNode must be 1",
        "set spec.resources.gpusPerNode to 1 and use a larger profile, or leave it out for whole GPUs",
    ),
    Rule(
        "spot-wait-covers-run",
        "spot.maxWaitSeconds",
        "!has(self.spot.maxRunSeconds) || !has(self.spot.maxWaitSeconds)"
        " || self.spot.maxWaitSeconds >= self.spot.maxRunSeconds",
        "includes the run, so it must be at least spec.spot.maxRunSeconds",
        "increase it, or reduce spec.spot.maxRunSeconds",
    ),
    Rule(
        "replicas-within-bounds",
        "endpoint.maxReplicas",
        f"!({chosen_cel('endpoint.maxReplicas')}) || self.endpoint.maxReplicas >= self.endpoint.replicas",
        "must be at least spec.endpoint.replicas",
        "increase it, or reduce spec.endpoint.replicas",
    ),
    Rule(
        "request-target-scales",
        "endpoint.targetRequestsInFlight",
        f"!({chosen_cel('endpoint.targetRequestsInFlight')})"
        " || (has(self.endpoint.maxReplicas) && self.endpoint.maxReplicas > self.endpoint.replicas)",
        "needs spec.endpoint.maxReplicas above spec.endpoint.replicas, as servers are not added otherwise",
        "set spec.endpoint.maxReplicas, or leave it out",
    ),
    Rule(
        "adapters-have-names-of-their-own",
        "endpoint.adapters",
        f"!({chosen_cel('endpoint.adapters')}) || self.endpoint.adapters.all(each, "
        "self.endpoint.adapters.exists_one(other, other.name == each.name))",
        "must have different names, by which requests choose",
        "rename the adapters that share a name",
        reads=("endpoint.adapters",),
    ),
    *(_size_rule(path, least, usual) for path, (least, usual) in SIZES.items()),
    Rule(
        "cpu-counts-cores",
        "resources.cpu",
        None,
        f"counts cores, and must be at most {MOST_CORES:,}",
        "write a number of cores such as 4, or of thousandths of a core such as 4000m",
        test=lambda spec: spec.resources.cpu is None or parse_quantity(spec.resources.cpu) <= MOST_CORES,
        reads=("resources.cpu",),
    ),
    *(_reserved_rule(block) for block in ("labels", "annotations")),
)

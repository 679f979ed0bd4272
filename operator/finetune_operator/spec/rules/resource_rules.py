"""Rules on nodes, GPUs, sizes, spot nodes, endpoints and pods."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from pydantic.alias_generators import to_snake

from finetune_contract.choices import RUNG_TASKS
from finetune_operator.spec.launcher_rows import SUPPORTED
from finetune_operator.spec.quantities import parse_quantity, size_hint, too_small_rule
from finetune_operator.spec.rules.rule import Rule, is_one_of
from finetune_operator.spec.types import FineTuneJobSpec

RESERVED_PREFIXES = (
    "finetune.dev/",
    *dict.fromkeys(prefix for each in SUPPORTED for prefix in each.reserved.label_prefixes),
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
        name=f"template-{block}-are-the-users",
        path=f"template.{block}",
        cel=f"!has(self.template.{block}) || !self.template.{block}.exists(key, {reserved})",
        text=f"must not use the prefixes {', '.join(RESERVED_PREFIXES)}, which are reserved",
        hint="choose another prefix",
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


def _size_of(spec: FineTuneJobSpec, path: str) -> str | None:
    value: object = spec
    for part in path.split("."):
        value = getattr(value, to_snake(part), None)
    return value if isinstance(value, str) and value != "auto" else None


def _size_rule(path: str, least: str, usual: str) -> Rule:
    """Return the rule on a size too small to be meant: its unit is missing, or is `m`, a thousandth."""

    def advice(spec: FineTuneJobSpec) -> str:
        return size_hint(_size_of(spec, path) or "", least, usual)

    def holds(spec: FineTuneJobSpec) -> bool:
        size = _size_of(spec, path)
        return size is None or parse_quantity(size) >= parse_quantity(least)

    return Rule(
        name=f"{path}-has-a-unit",
        path=path,
        cel=None,
        test=holds,
        text=too_small_rule(least),
        hint=f"write a size such as {usual}",
        advice=advice,
        reads=(path,),
    )


def _cores_advice(spec: FineTuneJobSpec) -> str:
    found = re.fullmatch(r"([0-9]+)", spec.resources.cpu or "")
    return f"write {found[1]}m, which is {int(found[1]) / 1000:g}" if found else "write a number of cores such as 4"


RULES: tuple[Rule, ...] = (
    Rule(
        "one-process-per-gpu",
        "resources.processesPerNode",
        "type(self.resources.processesPerNode) != int || type(self.resources.gpusPerNode) != int"
        " || int(self.resources.gpusPerNode) == 0"
        " || int(self.resources.processesPerNode) <= int(self.resources.gpusPerNode)",
        "must not exceed spec.resources.gpusPerNode: each GPU runs one process",
        "set it to auto or to the number of GPUs",
        advice=lambda spec: f"set it to auto, which is {spec.resources.gpus_per_node}: one process per GPU",
    ),
    Rule(
        "accelerator-needs-gpus",
        "resources.accelerator",
        "(!has(self.resources.accelerator.product) && !has(self.resources.accelerator.memory)"
        " && !has(self.resources.accelerator.resource))"
        " || self.resources.gpusPerNode != 0",
        "has no effect while spec.resources.gpusPerNode is 0",
        "set spec.resources.gpusPerNode, or leave spec.resources.accelerator out",
    ),
    Rule(
        "mig-is-one-a-pod",
        "resources.accelerator.resource",
        "!has(self.resources.accelerator.resource)"
        " || !self.resources.accelerator.resource.startsWith('nvidia.com/mig-')"
        " || type(self.resources.gpusPerNode) != int || int(self.resources.gpusPerNode) <= 1",
        "is a MIG profile, of which a process can use one instance only: spec.resources.gpusPerNode must be 1",
        "set spec.resources.gpusPerNode to 1 and use a larger profile, or leave it out for whole GPUs",
    ),
    Rule(
        "spot-is-enabled",
        "spot.enabled",
        "self.spot.enabled || (!has(self.spot.maxRunSeconds) && !has(self.spot.maxWaitSeconds)"
        " && !self.spot.fallbackToOnDemand)",
        "must be true if other fields of spec.spot are set",
        "set it to true, or leave spec.spot out",
    ),
    Rule(
        "spot-is-for-training",
        "spot.enabled",
        "!self.spot.enabled || has(self.training)",
        "applies to training, and spec.training is not set",
        "leave spec.spot out, or add spec.training",
    ),
    Rule(
        "spot-resumes",
        "checkpoints.resume",
        "!self.spot.enabled || self.checkpoints.resume == 'auto'",
        "must be auto with spec.spot: otherwise each preemption restarts the training from the beginning",
        "set it to auto, or leave spec.spot out",
    ),
    Rule(
        "spot-wait-covers-run",
        "spot.maxWaitSeconds",
        "!has(self.spot.maxRunSeconds) || !has(self.spot.maxWaitSeconds)"
        " || self.spot.maxWaitSeconds >= self.spot.maxRunSeconds",
        "includes the run, so it must be at least spec.spot.maxRunSeconds",
        "increase it",
        advice=lambda spec: (
            f"set it to more than {spec.spot.max_run_seconds}, e.g. {(spec.spot.max_run_seconds or 0) * 2}"
        ),
    ),
    Rule(
        "replicas-within-bounds",
        "endpoint.maxReplicas",
        "!has(self.endpoint) || !has(self.endpoint.maxReplicas) || self.endpoint.maxReplicas >= self.endpoint.replicas",
        "must be at least spec.endpoint.replicas",
        "increase it, or reduce spec.endpoint.replicas",
    ),
    Rule(
        "request-target-scales",
        "endpoint.targetRequestsInFlight",
        "!has(self.endpoint) || !has(self.endpoint.targetRequestsInFlight)"
        " || (has(self.endpoint.maxReplicas) && self.endpoint.maxReplicas > self.endpoint.replicas)",
        "needs spec.endpoint.maxReplicas above spec.endpoint.replicas, as servers are not added otherwise",
        "set spec.endpoint.maxReplicas, or leave it out",
    ),
    Rule(
        "no-served-rungs-for-texts",
        "endpoint.optimization",
        f"!has(self.endpoint) || self.endpoint.optimization in ['auto', 'none', 'vllm'] || {is_one_of(RUNG_TASKS)}",
        f"applies to {', '.join(RUNG_TASKS)} only",
        "leave it out",
    ),
    Rule(
        "no-served-rungs-on-gpus",
        "endpoint.optimization",
        "!has(self.endpoint) || self.endpoint.optimization in ['auto', 'none', 'vllm']"
        " || type(self.resources.gpusPerNode) != int || int(self.resources.gpusPerNode) == 0",
        "is supported on CPUs only in this version",
        "leave it out, or set spec.resources.gpusPerNode to 0",
    ),
    Rule(
        "served-tolerance-is-measured",
        "endpoint.tolerance",
        "!has(self.endpoint) || !has(self.endpoint.tolerance) || !(self.endpoint.optimization in ['none', 'vllm'])",
        "has no effect while spec.endpoint.optimization is none or vllm",
        "leave one of the two out",
    ),
    Rule(
        "adapters-have-names-of-their-own",
        "endpoint.adapters",
        "!has(self.endpoint) || !has(self.endpoint.adapters) || self.endpoint.adapters.all(each, "
        "self.endpoint.adapters.exists_one(other, other.name == each.name))",
        "must have different names, by which requests choose",
        "rename the adapters that share a name",
        reads=("endpoint.adapters",),
    ),
    Rule(
        "adapters-of-an-untrained-model",
        "endpoint.adapters",
        "!has(self.endpoint) || !has(self.endpoint.adapters) || size(self.endpoint.adapters) == 0"
        " || !has(self.training)",
        "is for jobs without spec.training: adapters belong to the model of spec.model.uri",
        "leave it out, or serve the adapters in a job of their own",
        reads=("endpoint.adapters", "training"),
    ),
    Rule(
        "adapters-without-rungs",
        "endpoint.adapters",
        "!has(self.endpoint) || !has(self.endpoint.adapters) || size(self.endpoint.adapters) == 0"
        " || self.endpoint.optimization in ['none', 'vllm']",
        "needs spec.endpoint.optimization none or vllm: others convert a model without adapters",
        "leave one of the two out",
        reads=("endpoint.adapters", "endpoint.optimization"),
    ),
    Rule(
        "hostnames-are-those-of-a-route",
        "endpoint.traffic.hostnames",
        "!has(self.endpoint) || !has(self.endpoint.traffic) || !has(self.endpoint.traffic.hostnames)"
        " || size(self.endpoint.traffic.hostnames) == 0 || has(self.endpoint.traffic.gateway)",
        "has no effect without spec.endpoint.traffic.gateway",
        "set spec.endpoint.traffic.gateway, or leave it out",
        reads=("endpoint.traffic.hostnames", "endpoint.traffic.gateway"),
    ),
    Rule(
        "no-route-to-kserve",
        "endpoint.traffic",
        "!has(self.endpoint) || !has(self.endpoint.traffic) || self.endpoint.runtime != 'kserve'",
        "needs a Deployment: an HTTPRoute does not lead to servers of KServe in this version",
        "leave it out, or set spec.endpoint.runtime to deployment",
    ),
    Rule(
        "no-idle-by-kserve",
        "endpoint.idle",
        "!has(self.endpoint) || !has(self.endpoint.idle) || self.endpoint.runtime != 'kserve'",
        "needs a Deployment: KServe does not scale to zero in Standard mode, the only one that is supported",
        "leave it out, or set spec.endpoint.runtime to deployment",
    ),
    Rule(
        "no-route-to-idle-servers",
        "endpoint.idle",
        "!has(self.endpoint) || !has(self.endpoint.idle) || !has(self.endpoint.traffic)",
        "cannot go with spec.endpoint.traffic: the Gateway's requests would reach no server, and start none",
        "leave one of the two out",
        reads=("endpoint.idle", "endpoint.traffic"),
    ),
    Rule(
        "idle-starts-with-one-server",
        "endpoint.replicas",
        "!has(self.endpoint) || !has(self.endpoint.idle) || self.endpoint.replicas == 1",
        "must be 1 with spec.endpoint.idle, which starts with one server after none",
        "set spec.endpoint.maxReplicas for more servers under load, or leave out spec.endpoint.idle",
        reads=("endpoint.idle", "endpoint.replicas"),
    ),
    *(_size_rule(path, least, usual) for path, (least, usual) in SIZES.items()),
    Rule(
        "cpu-counts-cores",
        "resources.cpu",
        None,
        f"counts cores, and must be at most {MOST_CORES:,}",
        "write a number of cores such as 4, or of thousandths of a core such as 4000m",
        test=lambda spec: spec.resources.cpu is None or parse_quantity(spec.resources.cpu) <= MOST_CORES,
        advice=_cores_advice,
        reads=("resources.cpu",),
    ),
    *(_reserved_rule(block) for block in ("labels", "annotations")),
)

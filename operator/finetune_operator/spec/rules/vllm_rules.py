"""Rules on endpoints that vLLM's own server serves."""

from __future__ import annotations

from finetune_contract.choices import VLLM_TASKS
from finetune_operator.spec.rules.rule import Rule, is_one_of
from finetune_operator.spec.types import EndpointSpec, FineTuneJobSpec

_NOT_BY_VLLM = "!has(self.endpoint) || self.endpoint.optimization != 'vllm'"
_LATENCY = EndpointSpec.model_fields["max_latency_milliseconds"].default


def serves_by_vllm(spec: FineTuneJobSpec) -> bool:
    """Return whether the endpoint's servers are vLLM's own."""
    return spec.endpoint is not None and spec.endpoint.optimization == "vllm"


_NO_RUNTIME = "!has(self.endpoint) || !has(self.endpoint.kserveRuntime)"
_QUEUE = EndpointSpec.model_fields["max_queue"].default
_WITHOUT_RUNTIME = "leave it out, or leave out spec.endpoint.kserveRuntime"


RULES = (
    Rule(
        "served-vllm-writes-texts",
        "endpoint.optimization",
        f"{_NOT_BY_VLLM} || {is_one_of(VLLM_TASKS)}",
        f"vllm applies to {', '.join(VLLM_TASKS)} only",
        "leave it out",
    ),
    Rule(
        "served-vllm-needs-gpus",
        "endpoint.optimization",
        f"{_NOT_BY_VLLM} || type(self.resources.gpusPerNode) != int || int(self.resources.gpusPerNode) > 0",
        "vllm needs GPUs, and spec.resources.gpusPerNode is 0",
        "set spec.resources.gpusPerNode to 1 or more, or leave it out",
    ),
    Rule(
        "served-vllm-has-no-beams",
        "generation.numBeams",
        f"{_NOT_BY_VLLM} || self.generation.numBeams == 1",
        "must be 1 with spec.endpoint.optimization vllm, which serves no beam search",
        "leave it out, or set spec.endpoint.optimization to none",
    ),
    Rule(
        "served-vllm-has-no-latency-target",
        "endpoint.maxLatencyMilliseconds",
        f"{_NOT_BY_VLLM} || self.endpoint.maxLatencyMilliseconds == {_LATENCY}",
        "has no effect with spec.endpoint.optimization vllm, which changes its batch at each token",
        "leave it out, or set spec.endpoint.optimization to none",
    ),
    Rule(
        "adapter-rank-is-for-vllm",
        "endpoint.maxAdapterRank",
        "!has(self.endpoint) || !has(self.endpoint.maxAdapterRank) || (self.endpoint.optimization == 'vllm'"
        " && has(self.endpoint.adapters) && size(self.endpoint.adapters) > 0)",
        "has no effect without spec.endpoint.optimization vllm and spec.endpoint.adapters",
        "leave it out",
    ),
    Rule(
        "kserve-runtime-needs-kserve-and-vllm",
        "endpoint.kserveRuntime",
        f"{_NO_RUNTIME} || (self.endpoint.runtime == 'kserve' && self.endpoint.optimization == 'vllm')",
        "needs spec.endpoint.runtime kserve and spec.endpoint.optimization vllm",
        "leave it out",
    ),
    Rule(
        "kserve-runtime-reads-a-claim",
        "model.uri",
        f"{_NO_RUNTIME} || has(self.training) || self.model.uri.startsWith('pvc://')",
        "must be in a claim (pvc://) with spec.endpoint.kserveRuntime, or be trained by the job",
        "use pvc://",
    ),
    Rule(
        "kserve-runtime-checks-no-token",
        "endpoint.token",
        f"{_NO_RUNTIME} || !has(self.endpoint.token)",
        "has no effect with spec.endpoint.kserveRuntime, whose servers check no token",
        _WITHOUT_RUNTIME,
    ),
    Rule(
        "kserve-runtime-serves-no-adapters",
        "endpoint.adapters",
        f"{_NO_RUNTIME} || !has(self.endpoint.adapters) || size(self.endpoint.adapters) == 0",
        "is not supported with spec.endpoint.kserveRuntime, for which KServe mounts the model alone",
        _WITHOUT_RUNTIME,
    ),
    Rule(
        "kserve-runtime-has-no-queue-limit",
        "endpoint.maxQueue",
        f"{_NO_RUNTIME} || self.endpoint.maxQueue == {_QUEUE}",
        "has no effect with spec.endpoint.kserveRuntime, whose servers have no limit of waiting requests",
        _WITHOUT_RUNTIME,
    ),
)

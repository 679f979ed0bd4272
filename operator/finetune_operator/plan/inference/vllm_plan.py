"""vLLM servers of an endpoint: the GPUs of one, its memory, and the choices of its command.

vLLM's own server computes in place of ours, in its own image. It takes a fixed share of each GPU, and what the weights
leave of that holds keys and values. So a model fits if one row with its answer does. vLLM measures the rest when it
starts, and ends with the reason if the plan was too optimistic.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import Stage
from finetune_operator.endpoints.kinds import ADAPTER_RANKS, RUNTIME_PREFIX, VLLM_KEY
from finetune_operator.plan.models.assumed_models import is_well_known
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import VllmServer
from finetune_operator.spec.types import EndpointSpec

PATH = ("endpoint", "optimization")
GPU_SHARE = 0.9
"""Share of a GPU's memory that a server takes (`--gpu-memory-utilization`)."""
OTHER_BYTES = 3 << 30
"""Assumed memory of a server beside weights, adapters, keys and values, of each GPU: CUDA's context, graphs and
activations. Not measured here; vLLM measures it when it starts.
"""
WIDTH = 2
"""Bytes of an element in bf16."""
CONCURRENT_ROWS = 16
"""Rows whose keys and values should fit beside the weights. vLLM works with fewer, but computes few texts at a time."""
USUAL_RANK = 64
"""Rank of adapters that memory is reserved for by default; that of a training is 16."""
CONCURRENT_ADAPTERS = 8
"""Most adapters in one batch, whose weights are on the GPU; the others wait in the host's memory."""
ADAPTER_SHARE = 190
"""Weights of the model for each weight of an adapter of rank 16 on all linear layers, as in Llama 8B, if the layers are
not known.
"""
PROCESS_BYTES = 4 << 30
"""Assumed host memory of each process of a server: one serves HTTP, one schedules, and one computes on each GPU."""


def by_vllm(draft: Draft) -> bool:
    """Return whether vLLM serves the endpoint."""
    endpoint = draft.spec.endpoint
    return endpoint is not None and endpoint.optimization == "vllm" and Stage.SERVE in draft.stages


def choose_vllm(draft: Draft, endpoint: EndpointSpec) -> tuple[Draft, VllmServer | None]:
    """Return the choices for a vLLM server; None if something else serves, or vLLM cannot."""
    if not by_vllm(draft):
        return draft, None
    known = len(draft.problems)
    draft = _checked(draft)
    if len(draft.problems) > known:
        return draft, None
    server = VllmServer(
        gpus=_gpus(draft, endpoint),
        gpu_share=GPU_SHARE,
        max_batch_tokens=endpoint.max_batch_tokens,
        max_queue=endpoint.max_queue,
        adapter_rank=_rank(endpoint),
        concurrent_adapters=min(CONCURRENT_ADAPTERS, len(endpoint.adapters)),
        temperature=draft.spec.generation.temperature,
        top_p=draft.spec.generation.top_p,
        kserve_runtime=endpoint.kserve_runtime,
    )
    draft = _checked_gpus(draft, endpoint, server.gpus)
    if server.kserve_runtime is not None:
        draft = draft.because(
            f"each server is one of KServe's runtime {server.kserve_runtime}, with OpenAI's API below "
            f"{RUNTIME_PREFIX}/v1 and no token (spec.endpoint.kserveRuntime)"
        )
    draft = draft.because(
        f"each server is vLLM's own, in bf16 on {server.gpus} GPU{'s' * (server.gpus > 1)}: "
        f"{_room(draft, endpoint, server.gpus)} (spec.endpoint.optimization is vllm)"
    )
    return _with_gate_reason(draft), server


def host_memory_bytes(server: VllmServer) -> int:
    """Return the expected host memory of one server, in bytes. Weights are mapped from files and need no memory."""
    return (2 + server.gpus) * PROCESS_BYTES


def check_vllm_memory(draft: Draft) -> Draft:
    """Refuse a model that does not fit the GPUs of one server."""
    endpoint, servers = decided(draft.spec.endpoint), decided(draft.inference.servers)
    if servers.vllm is None:
        return draft
    memory = _memory(draft, endpoint, servers.vllm.gpus)
    if memory.tokens >= memory.needed_tokens:
        return draft
    held = memory.weights + memory.adapters + OTHER_BYTES
    unit = " of each GPU" if servers.vllm.gpus > 1 else ""
    return draft.refusing(
        ("endpoint",),
        None,
        f"does not fit: a vLLM server takes {human_bytes(held)} of {human_bytes(memory.there)}{unit}, beside "
        f"{human_bytes(memory.needed_tokens * memory.token_bytes)} for one row of {memory.needed_tokens:,} tokens",
        "increase spec.resources.gpusPerNode, or use larger GPUs",
        "NotSupported",
    )


def _checked(draft: Draft) -> Draft:
    """Refuse devices that vLLM servers of this version do not run on, and variables that would replace theirs."""
    if draft.inference_device == "cpu":
        hint = "leave it out, or use nodes with GPUs"
        return draft.refusing(PATH, "vllm", "needs a GPU, and the job serves on CPUs", hint, "NotSupported")
    gpu = decided(draft.hardware.gpu)
    if not gpu.bf16:
        rule = f"vLLM servers compute in bf16, and {gpu.product} does not"
        return draft.refusing(PATH, "vllm", rule, "leave it out, or use another GPU", "NotSupported")
    for at, variable in enumerate(draft.spec.template.env):
        if variable.get("name") == VLLM_KEY:
            rule = "is set by the operator with spec.endpoint.optimization vllm"
            hint = "leave it out, and name the Secret in spec.endpoint.token"
            return draft.refusing(("template", "env", at, "name"), VLLM_KEY, rule, hint)
    return draft


def _checked_gpus(draft: Draft, endpoint: EndpointSpec, gpus: int) -> Draft:
    """Refuse more GPUs than the settings allow; validation counts one for each server."""
    servers, most = max(endpoint.replicas, endpoint.max_replicas or 0), draft.settings.allow.max_gpus
    if most is None or gpus == 1 or servers * gpus <= most:
        return draft
    larger = "maxReplicas" if servers > endpoint.replicas else "replicas"
    rule = f"requests {servers * gpus} GPUs for servers, {gpus} each; the settings allow {most}"
    hint = f"set it to {most // gpus}" if most >= gpus else "leave spec.endpoint out, or ask the administrator"
    return draft.refusing(("endpoint", larger), servers, rule, hint, "Forbidden")


def _is_known(draft: Draft) -> bool:
    """Return whether the model's shape is known, at least by its name."""
    return draft.model_known or is_well_known(draft.spec.model.uri)


def _room(draft: Draft, endpoint: EndpointSpec, gpus: int) -> str:
    """Describe what the weights leave for keys and values."""
    if not _is_known(draft):
        return "all of spec.resources.gpusPerNode, as the model is not known; vLLM ends if it does not fit them"
    memory = _memory(draft, endpoint, gpus)
    unit = " of each" if gpus > 1 else ""
    return (
        f"the weights take {human_bytes(memory.weights)} of {human_bytes(memory.there)}{unit}, which leaves keys and "
        f"values of about {max(0, memory.tokens):,} tokens; vLLM measures the exact number"
    )


def _with_gate_reason(draft: Draft) -> Draft:
    evaluation = draft.spec.evaluation
    if evaluation is None or evaluation.gate is None or Stage.EVALUATE not in draft.stages:
        return draft
    return draft.because(
        "the gate is judged by the job's own process in bf16, on the weights that vLLM serves; vLLM's kernels sum in "
        "another order, so that single texts can differ"
    )


def _gpus(draft: Draft, endpoint: EndpointSpec) -> int:
    """Return the least GPUs of a node that hold the model and `CONCURRENT_ROWS`, or the most that can divide it; all of
    them if the model is not known. Each has whole attention heads (`vllm/config/model.py`,
    `verify_with_parallel_config`), and whole key and value heads or copies of one.
    """
    if not _is_known(draft):
        return max(1, draft.gpus_per_node)
    heads, pairs = draft.model.attention_heads, draft.model.key_value_heads or draft.model.attention_heads
    counts = [
        count
        for count in range(1, max(1, draft.gpus_per_node) + 1)
        if heads % count == 0 and (pairs % count == 0 or count % pairs == 0)
    ]
    rows = CONCURRENT_ROWS
    memories = ((count, _memory(draft, endpoint, count)) for count in counts)
    return next((count for count, memory in memories if memory.tokens >= rows * memory.needed_tokens), counts[-1])


def _rank(endpoint: EndpointSpec) -> int | None:
    """Return the rank that vLLM reserves memory for: the least of its values that holds `maxAdapterRank`."""
    if not endpoint.adapters:
        return None
    asked = endpoint.max_adapter_rank or USUAL_RANK
    return next(rank for rank in ADAPTER_RANKS if rank >= asked)


@dataclass(frozen=True)
class _Memory:
    """Memory of one of a server's GPUs, in bytes."""

    there: int
    """Share that vLLM takes."""
    weights: int
    adapters: int
    token_bytes: int
    """Keys and values of one token."""
    needed_tokens: int
    """Tokens of the longest row with its answer."""

    @property
    def tokens(self) -> int:
        """Return the tokens whose keys and values fit; negative if the weights do not."""
        return (self.there - self.weights - self.adapters - OTHER_BYTES) // self.token_bytes


def _memory(draft: Draft, endpoint: EndpointSpec, gpus: int) -> _Memory:
    model = draft.model
    width = max(
        model.key_value_width // gpus, model.key_value_width // (model.key_value_heads or model.attention_heads)
    )
    return _Memory(
        there=int(GPU_SHARE * decided(draft.hardware.gpu).memory_bytes),
        weights=WIDTH * model.parameters // gpus,
        adapters=_adapter_bytes(draft, endpoint),
        token_bytes=WIDTH * 2 * model.layers * width,
        needed_tokens=draft.length_limit + draft.spec.generation.max_new_tokens,
    )


def _adapter_bytes(draft: Draft, endpoint: EndpointSpec) -> int:
    """Return the bytes that a GPU reserves for adapters. vLLM divides only half of each between GPUs by default, which
    is not counted.
    """
    rank, widths = _rank(endpoint), draft.model.linear_layers.values()
    if rank is None:
        return 0
    known = rank * sum(width.inputs + width.outputs for width in widths)
    parameters = known or rank * draft.model.parameters // (16 * ADAPTER_SHARE)
    return min(CONCURRENT_ADAPTERS, len(endpoint.adapters)) * WIDTH * parameters

"""Memory limits that a job sets for its evaluation, prediction and servers, compared with what a process takes.

On CPU that is the whole process, as inference_memory.py counts it. On a GPU it is the host's part: libraries, and the
weights once, as they are read before they are moved. A limit below it is refused with a sufficient one: on CPU it has
room for the allocator's unused blocks (a server of 23 million parameters took 1.0 GiB at first, 1.5 GiB after 100,000
requests), on a GPU it is the request of a pod without a limit.
"""

from __future__ import annotations

from finetune_contract.byte_text import GIB, human_bytes
from finetune_contract.choices import Stage
from finetune_operator.plan.inference.inference_memory import process_bytes
from finetune_operator.plan.inference.inference_processes import pod_devices
from finetune_operator.plan.inference.vllm_plan import by_vllm, host_memory_bytes
from finetune_operator.plan.memory.host_memory import INFERENCE_BATCH_BYTES, inference_bytes, memory_request
from finetune_operator.plan.memory.process_memory import CPU_PROCESS_BYTES
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.quantities import parse_quantity

LEAST_SERVER_BYTES = GIB
"""Limit at which a server of any model stalls. Of a tiny classifier 498 MiB are anonymous and 400 MiB mapped files,
measured; with page tables and sockets it is at this limit, and Linux drops its code and reads it again.
"""
UNREAD_SLACK = 1.25
"""Factor by which an unread model may exceed the memory before it is refused: its size follows from its name, and a
batch that does not fit after all is halved.
"""
SERVER_PATH = ("endpoint", "resources", "memory")
STAGE_PATH = ("resources", "memory")


def check_server_limit(draft: Draft, *, known: bool) -> Draft:
    """Refuse a limit of the servers' memory that is below what one takes. `known`: the model is known; otherwise only a
    limit at which no server works is refused.
    """
    endpoint = draft.spec.endpoint
    limit = None if endpoint is None else endpoint.resources.memory
    if limit is None:
        return draft
    there = int(parse_quantity(limit))
    if by_vllm(draft):
        return _with_vllm_reason(draft, there)
    takes = _process_takes(draft)
    hint = f"write {_enough(draft, takes)}, or leave it out"
    if known and takes > _slack(draft) * there:
        rule = f"does not fit: one server takes {human_bytes(takes)}{_part(draft)} with the whole model"
        return draft.refusing(SERVER_PATH, limit, rule, hint, "NotSupported")
    if there <= LEAST_SERVER_BYTES:
        rule = f"does not fit: one server takes more than {human_bytes(LEAST_SERVER_BYTES)} with any model"
        return draft.refusing(SERVER_PATH, limit, rule, hint, "NotSupported")
    return draft


def check_stage_limit(draft: Draft) -> Draft:
    """Refuse `resources.memory` if it limits a requested evaluation or prediction to less than its process takes."""
    limit, takes = draft.spec.resources.memory, _process_takes(draft)
    if limit is None or takes <= _slack(draft) * int(parse_quantity(limit)):
        return draft
    stages = [name for name in ("evaluation", "predict") if _is_limited(draft, name)]
    if not stages:
        return draft
    rule = (
        f"does not fit: one process of spec.{' and spec.'.join(stages)} takes {human_bytes(takes)}{_part(draft)} with "
        "the whole model"
    )
    hint = f"write {_enough(draft, takes)}, or leave it out"
    return draft.refusing(STAGE_PATH, limit, rule, hint, "NotSupported")


def limits_stages(draft: Draft) -> bool:
    """Return whether `resources.memory`, and not the node, decides the memory of a process on CPU."""
    limit = draft.spec.resources.memory
    return (
        limit is not None
        and draft.inference_device == "cpu"
        and int(parse_quantity(limit)) <= draft.hardware.memory_bytes
    )


def _is_limited(draft: Draft, name: str) -> bool:
    """Return whether a requested stage's container has the limit: on GPUs only if it takes all of a node's."""
    choices = draft.inference
    requested = {
        "evaluation": (draft.spec.evaluation, Stage.EVALUATE, choices.evaluate_processes),
        "predict": (draft.spec.predict, Stage.PREDICT, choices.predict_processes),
    }
    spec, stage, processes = requested[name]
    if spec is None or stage not in draft.stages:
        return False
    if draft.inference_device == "cpu":
        return limits_stages(draft)
    return processes * choices.devices == pod_devices(draft)


def _process_takes(draft: Draft) -> int:
    """Return the least host memory, in bytes, of one process with the whole model."""
    if draft.inference_device == "cpu":
        return process_bytes(draft, "fp32")
    width = 2 if draft.inference.precision == "bf16" else 4
    return CPU_PROCESS_BYTES + width * draft.model.parameters // draft.inference.devices


def _enough(draft: Draft, takes: int) -> str:
    """Return a sufficient memory limit for a process that takes at least `takes` bytes."""
    if draft.inference_device == "cuda":
        return memory_request(max(takes, inference_bytes(draft.model.parameters)))
    return memory_request(max(takes, LEAST_SERVER_BYTES) + INFERENCE_BATCH_BYTES)


def _part(draft: Draft) -> str:
    return "" if draft.inference_device == "cpu" else " of the host's memory"


def _slack(draft: Draft) -> float:
    return 1 if draft.model_known else UNREAD_SLACK


def _with_vllm_reason(draft: Draft, limit: int) -> Draft:
    """Advise against a limit below what a vLLM server is assumed to take; it is not measured, so it is not refused."""
    server = decided(draft.inference.servers).vllm
    if server is None or limit >= host_memory_bytes(server):
        return draft
    takes = host_memory_bytes(server)
    return draft.because(
        f"spec.endpoint.resources.memory is {human_bytes(limit)}, and a vLLM server is assumed to take "
        f"{human_bytes(takes)} of the host's memory: write {memory_request(takes)} if its processes are killed"
    )

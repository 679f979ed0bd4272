"""Resources of a stage's container: CPU, memory, GPUs, /dev/shm and network devices.

`resources.cpu` and `resources.memory` are those of one node's training pod. A stage with as many GPUs as that pod (on
CPU: every stage) gets them as requests and limits. Any other, such as inference on one GPU of eight, requests the
memory that it is expected to need, without a limit: a whole node's share would keep it from nodes that it fits.
"""

from __future__ import annotations

from finetune_contract.byte_text import MIB
from finetune_contract.choices import Device, Stage
from finetune_operator.jobs.render.pod_parts import Resources
from finetune_operator.plan.hardware.gpu_nodes import gpu_resource
from finetune_operator.plan.memory.host_memory import inference_bytes, memory_request
from finetune_operator.plan.memory.process_memory import CPU_PROCESS_BYTES
from finetune_operator.plan.types.plan_types import JobPlan
from finetune_operator.spec.settings.settings import Defaults
from finetune_operator.spec.types import FineTuneJobSpec

SHARED_MEMORY_BYTES: dict[Device, int] = {"cuda": 1024 * MIB, "cpu": 256 * MIB}
"""Bytes of /dev/shm for a process. NCCL takes up to some 10 MiB for each channel and peer if GPUs have no direct link,
DeepSpeed's collectives on CPU two buffers of 32 MiB a process; the rest is for data loaders' batches. It is an upper
bound: only written pages take memory.
"""


def node_gpus(plan: JobPlan, spec: FineTuneJobSpec) -> int:
    """Return the GPUs that the job takes on each node."""
    requested = spec.resources.gpus_per_node
    if requested != "auto":
        return requested
    world = plan.trainer.world
    if world is None:
        return plan.hardware.gpus_per_node
    return world.processes_per_node if world.device == "cuda" else 0


def stage_gpus(plan: JobPlan, spec: FineTuneJobSpec, stage: Stage) -> int:
    """Return the GPUs of one pod of `stage`."""
    return gpus_of_stage(stage, node_gpus(plan, spec), plan.trainer.inference(stage).devices)


def gpus_of_stage(stage: Stage, of_node: int, planned: int) -> int:
    """Return the GPUs of one pod of `stage`: `of_node` to train, none to prepare, at most 1 to serve, and to evaluate
    or predict as many as `planned`.
    """
    match stage:
        case Stage.PREPARE:
            return 0
        case Stage.TRAIN:
            return of_node
        case Stage.SERVE:
            return min(1, of_node)
        case Stage.EVALUATE | Stage.PREDICT:
            return min(planned, of_node)


def stage_device(plan: JobPlan, spec: FineTuneJobSpec, stage: Stage) -> Device:
    """Return the device of `stage`."""
    return "cuda" if stage_gpus(plan, spec, stage) else "cpu"


def stage_threads(plan: JobPlan, stage: Stage) -> int:
    """Return the CPU threads of one process of `stage`."""
    world = plan.trainer.world
    if stage is Stage.SERVE and plan.servers is not None:
        return plan.servers.threads
    if stage is Stage.TRAIN and world is not None:
        return world.threads_per_process
    sharing = max(1, plan.hardware.gpus_per_node, plan.trainer.inference(stage).processes)
    return max(1, plan.hardware.cpu_cores // sharing)


def stage_resources(
    plan: JobPlan, spec: FineTuneJobSpec, defaults: Defaults, stage: Stage, offloads_to_files: bool = False
) -> Resources:
    """Return the resources of one pod of `stage` (one worker of an MPIJob), with disk space if state is in files."""
    if stage is Stage.SERVE and plan.servers is not None:
        return Resources(plan.servers.requests, plan.servers.limits, plan.servers.ceilings)
    gpus, requested = stage_gpus(plan, spec, stage), spec.resources
    limits: dict[str, str] = {}
    if gpus == node_gpus(plan, spec):
        limits = {
            name: text for name, text in (("cpu", requested.cpu), ("memory", requested.memory)) if text is not None
        }
    requests = {} if "memory" in limits else {"memory": memory_request(_expected_bytes(plan, stage))}
    if offloads_to_files and plan.memory is not None:
        requests["ephemeral-storage"] = memory_request(plan.memory.disk_bytes)
    if gpus:
        limits[gpu_resource(spec, defaults)] = str(gpus)
    if stage is Stage.TRAIN and plan.network is not None:
        # RDMA locks memory. PodSecurity `restricted` refuses the capability IPC_LOCK, which lifts the limit on it, so
        # that the container runtime's own limit has to be high enough (docs/network.md).
        limits |= plan.network.limits
    return Resources(requests, limits)


def _expected_bytes(plan: JobPlan, stage: Stage) -> int:
    """Return the expected host memory of one pod, in bytes."""
    if stage is Stage.TRAIN and plan.trainer.script is not None:
        # The program's need is not known, but it is at least the weights.
        return plan.trainer.script.world.processes_per_node * (CPU_PROCESS_BYTES + 4 * plan.model.parameters)
    if stage is Stage.TRAIN:
        assert plan.memory is not None, "a plan that trains has an estimate of its memory"
        return plan.memory.host_bytes
    if stage is Stage.PREPARE:
        # One process reads; each pod of an Indexed Job has one process that tokenises.
        return (1 + plan.trainer.preparation.workers // plan.trainer.preparation.pods) * CPU_PROCESS_BYTES
    pod = plan.trainer.inference(stage)
    # A model on several GPUs is read weight by weight, into the memory of each. Processes that split its layers read
    # their slices alone.
    return pod.processes * inference_bytes(plan.model.parameters // pod.devices_per_model // pod.tensor)


def shared_memory(plan: JobPlan, spec: FineTuneJobSpec, stage: Stage) -> str:
    """Return the size of /dev/shm: the spec's, or `SHARED_MEMORY_BYTES` for each process."""
    if spec.resources.shared_memory != "auto":
        return spec.resources.shared_memory
    world = plan.trainer.world
    processes = world.processes_per_node if stage is Stage.TRAIN and world is not None else 1
    return f"{processes * SHARED_MEMORY_BYTES[stage_device(plan, spec, stage)] // MIB}Mi"

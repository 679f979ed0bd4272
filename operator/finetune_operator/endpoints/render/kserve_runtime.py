"""Servers of an endpoint that a serving runtime of the cluster runs: KServe's own for Hugging Face models.

The runtime has the image and the command, and KServe mounts the model. Labels, placement, resources and security
context are those of a pod with the operator's vLLM image. Paths and options were read in KServe 0.20.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from finetune_contract.layout import JobPaths
from finetune_operator.endpoints.kinds import MODEL_FOLDER, MODEL_FORMAT
from finetune_operator.endpoints.render.vllm_server import MAX_SEQUENCES, vllm_pod
from finetune_operator.jobs.render.claims import workspace_place
from finetune_operator.jobs.render.pod_parts import EnvVar, Pod
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.jobs.render.trainer_pod import HOME, SHARED_MEMORY, StagePods
from finetune_operator.plan.types.plan_types import VllmServer

_OF_THE_RUNTIME = frozenset({"name", "image", "imagePullPolicy", "command"})
"""Fields of a container that the runtime has."""
_SCRATCH = (SHARED_MEMORY, "tmp")
"""Volumes that a server writes to. KServe adds the claim with the model."""


def runtime_pod(pods: StagePods, server: VllmServer, drain_seconds: int) -> Pod:
    """Return the pod template of a server, with the arguments of the runtime as its command; `drain_seconds`: time
    after SIGTERM in which accepted requests are answered.
    """
    pod = vllm_pod(pods, server, drain_seconds)
    home = EnvVar("HF_HOME", f"{HOME}/huggingface")
    container = replace(
        pod.container,
        command=_arguments(pods, server),
        env=tuple(home if variable.name == home.name else variable for variable in pod.container.env),
        mounts=tuple(mount for mount in pod.container.mounts if mount.volume in _SCRATCH),
        working_folder=None,
    )
    volumes = tuple(volume for volume in pod.volumes if volume.name in _SCRATCH)
    return replace(pod, container=container, volumes=volumes)


def runtime_template(template: Manifest, pods: StagePods, runtime: str) -> Manifest:
    """Return the manifest of `runtime_pod` as a predictor of KServe has it: `model` in place of the container."""
    spec = template["spec"]
    assert isinstance(spec, dict), "a pod template has a spec"
    containers = spec["containers"]
    assert isinstance(containers, list), "a pod spec has containers"
    (container,) = containers
    assert isinstance(container, dict), "a container is an object"
    model: Manifest = {
        "modelFormat": {"name": MODEL_FORMAT},
        "runtime": runtime,
        "storageUri": _storage_uri(pods),
        "args": container["command"],
        **{name: value for name, value in container.items() if name not in _OF_THE_RUNTIME},
    }
    rest = {name: value for name, value in spec.items() if name != "containers"}
    return {**template, "spec": {**rest, "model": model}}


def _arguments(pods: StagePods, server: VllmServer) -> tuple[str, ...]:
    """Return the arguments that KServe appends to those of the runtime; the last one of a name counts."""
    sampling = json.dumps({"temperature": server.temperature, "top_p": server.top_p})
    options = {
        "model_name": pods.plan.name,
        "model_dir": MODEL_FOLDER,
        "backend": "vllm",
        "dtype": "bfloat16",
        "tensor-parallel-size": str(server.gpus),
        "gpu-memory-utilization": f"{server.gpu_share:g}",
        "max-num-seqs": str(MAX_SEQUENCES),
        # Without these, requests that set no sampling follow a file of the model, and not spec.generation.
        "generation-config": "vllm",
        "override-generation-config": sampling,
    }
    if server.max_batch_tokens is not None:
        options["max-num-batched-tokens"] = str(server.max_batch_tokens)
    trust = ("--trust_remote_code",) if pods.plan.trainer.model.trust_remote_code else ()
    return (*(f"--{name}={value}" for name, value in options.items()), *trust)


def _storage_uri(pods: StagePods) -> str:
    """Return the claim of the model and its path there, as KServe takes it."""
    trainer = pods.plan.trainer
    if not trainer.trains:
        return trainer.model.uri
    place = workspace_place(pods.context.spec, pods.names)
    return f"pvc://{place.claim}/{JobPaths.of(Path(place.path), pods.plan.name).model}"

"""Pod of an endpoint's server that is vLLM's own: its command, environment, volumes and probes.

It has the name, labels, placement, claims and port of our server's pod, so that Service, autoscaler, NetworkPolicy and
rollouts are the same. It reads no job.json: all choices are options of its command. The only file beside it is a
middleware, which closes the paths that vLLM serves without its key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import JsonValue

from finetune_contract.byte_text import MIB
from finetune_contract.layout import ENV_ENDPOINT_REVISION, SERVE_PORT, JobPaths
from finetune_operator.endpoints.kinds import VLLM_COMMAND, VLLM_HEALTH_PATH, VLLM_KEY
from finetune_operator.jobs.render.claims import CLAIMS, ClaimPath, Storage, storage
from finetune_operator.jobs.render.contract import GUARD
from finetune_operator.jobs.render.pod_parts import EnvVar, Pod, PodLabel, memory_volume
from finetune_operator.jobs.render.render_types import ATTEMPT_LABEL, Manifest
from finetune_operator.jobs.render.sizes import SHARED_MEMORY_BYTES
from finetune_operator.jobs.render.trainer_pod import CONFIG, HOME, SHARED_MEMORY, StagePods, stage_pod
from finetune_operator.plan.types.plan_types import VllmServer

LOAD_SECONDS = 3600
"""Longest time until the server answers: it listens once it has read its weights and compiled its kernels."""
LOAD_PERIOD_SECONDS = 5
MAX_SEQUENCES = 256
"""Most requests of one batch. vLLM's limit of its queue counts those as well."""


def vllm_pod(pods: StagePods, server: VllmServer, drain_seconds: int) -> Pod:
    """Return the pod template of a vLLM server, without the name of its container, its port and its preStop hook;
    `drain_seconds`: time after SIGTERM in which accepted requests are answered.
    """
    folders = storage(pods.context.spec, pods.names, pods.stage)
    pod = stage_pod(pods)
    container = replace(
        pod.container,
        image=pods.context.settings.defaults.vllm_image,
        command=vllm_command(pods, server, folders, drain_seconds),
        env=_environment(pods, folders),
        env_from_secret=None,
        working_folder=CONFIG,
        message_policy="FallbackToLogsOnError",
    )
    memory = memory_volume(SHARED_MEMORY, _shared_memory(pods, server))
    volumes = tuple(memory if volume.name == SHARED_MEMORY else volume for volume in pod.volumes)
    return replace(pod, container=container, volumes=volumes)


def vllm_command(pods: StagePods, server: VllmServer, folders: Storage, drain_seconds: int) -> tuple[str, ...]:
    """Return the argument vector of the server."""
    options: dict[str, str] = {
        "--served-model-name": pods.plan.name,
        "--port": str(SERVE_PORT),
        "--dtype": "bfloat16",
        "--max-model-len": "auto",
        "--tensor-parallel-size": str(server.gpus),
        "--gpu-memory-utilization": f"{server.gpu_share:g}",
        "--shutdown-timeout": str(drain_seconds),
        "--max-num-seqs": str(MAX_SEQUENCES),
        "--max-num-queued-reqs": str(MAX_SEQUENCES + server.max_queue),
        "--middleware": f"{GUARD}.EndpointGuard",
        # Without these, requests that set no sampling follow a file of the model, and not spec.generation.
        "--generation-config": "vllm",
        "--override-generation-config": json.dumps({"temperature": server.temperature, "top_p": server.top_p}),
    }
    if server.max_batch_tokens is not None:
        options["--max-num-batched-tokens"] = str(server.max_batch_tokens)
    model, more = _model(pods, folders)
    return (*VLLM_COMMAND, model, *_flat(options | more), *_trust(pods), *_adapters(pods, server))


def vllm_probes(path: str = VLLM_HEALTH_PATH) -> Manifest:
    """Return the probes: the server listens once it is ready, and fails its probe when its engine has failed."""
    answers: JsonValue = {"path": path, "port": SERVE_PORT}
    return {
        "startupProbe": {
            "httpGet": answers,
            "periodSeconds": LOAD_PERIOD_SECONDS,
            "timeoutSeconds": 2,
            "failureThreshold": LOAD_SECONDS // LOAD_PERIOD_SECONDS,
        },
        "readinessProbe": {"httpGet": answers, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 5},
        "livenessProbe": {"httpGet": answers, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def _model(pods: StagePods, folders: Storage) -> tuple[str, dict[str, str]]:
    """Return the model as the command takes it, and further options for it."""
    trainer = pods.plan.trainer
    if trainer.trains:
        return str(JobPaths.of(Path(folders.workspace), pods.plan.name).model), {}
    if _from_hub(pods):
        return trainer.model.uri.removeprefix("hf://"), {"--revision": trainer.model.revision}
    return _in_pod(trainer.model.uri, "spec.model.uri"), {}


def _in_pod(uri: str, field: str) -> str:
    place = ClaimPath.parse(uri, field)
    return place.mounted_at(f"{CLAIMS}/{place.claim}")


def _from_hub(pods: StagePods) -> bool:
    return not pods.plan.trainer.trains and pods.plan.trainer.model.uri.startswith("hf://")


def _trust(pods: StagePods) -> tuple[str, ...]:
    return ("--trust-remote-code",) if pods.plan.trainer.model.trust_remote_code else ()


def _adapters(pods: StagePods, server: VllmServer) -> tuple[str, ...]:
    endpoint = pods.context.spec.endpoint
    if endpoint is None or not endpoint.adapters:
        return ()
    places = (
        f"{adapter.name}={_in_pod(adapter.uri, f'spec.endpoint.adapters[{at}].uri')}"
        for at, adapter in enumerate(endpoint.adapters)
    )
    options = {
        "--max-loras": str(server.concurrent_adapters),
        "--max-cpu-loras": str(len(endpoint.adapters)),
        "--max-lora-rank": str(server.adapter_rank),
    }
    return ("--enable-lora", *_flat(options), "--lora-modules", *places)


def _flat(options: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(text for option in options.items() for text in option)


def _environment(pods: StagePods, folders: Storage) -> tuple[EnvVar, ...]:
    """Return the variables: every cache of vLLM, torch and Triton is below HOME, and nothing is sent or fetched."""
    variables = {
        "HOME": HOME,
        # Caches are named by the user, and the pod's user id has no name in the image.
        "USER": "vllm",
        "HF_HOME": folders.cache or f"{HOME}/huggingface",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    spec = pods.context.spec
    secrets = {"HF_TOKEN": spec.secrets.hub_token} if _from_hub(pods) else {}
    if not _from_hub(pods):
        variables["HF_HUB_OFFLINE"] = "1"
    if spec.endpoint is not None:
        secrets[VLLM_KEY] = spec.endpoint.token
    named = (EnvVar(name, key) for name, key in secrets.items() if key is not None)
    revision = EnvVar(ENV_ENDPOINT_REVISION, PodLabel(ATTEMPT_LABEL))
    return (*(EnvVar(name, value) for name, value in variables.items()), revision, *named)


def _shared_memory(pods: StagePods, server: VllmServer) -> str:
    """Return the size of /dev/shm, by which a server's processes exchange requests and results."""
    asked = pods.context.spec.resources.shared_memory
    return asked if asked != "auto" else f"{server.gpus * SHARED_MEMORY_BYTES['cuda'] // MIB}Mi"

"""Pods of vLLM's servers: their command line, which a stand-in with vLLM's options accepts, and what surrounds it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster_support.control_plane import free_port
from finetune_operator.jobs.launchers.launcher_registry import render
from finetune_operator.jobs.render.render_types import Manifest, Owner, RenderContext
from finetune_operator.jobs.render.templates import program
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from planning_support.cases import job, llama_1b
from process_support.vllm_stand_in import options
from reconcile_world import World
from rollout_world import led_to, revision, roll_back, stands, status
from suite_plugins.waiting import wait_until

MODEL = llama_1b("text-generation", max_position_embeddings=8192)
SERVES: dict[str, Any] = {
    "task": "text-generation",
    "model": {"uri": "pvc://models/llama"},
    "dataset": None,
    "training": None,
    "resources": {"gpusPerNode": 1},
}
ADAPTERS = [{"name": "mails", "uri": "pvc://tuned/mails/adapter"}, {"name": "notes", "uri": "pvc://tuned/notes"}]
TOKEN = {"name": "chat", "key": "token"}


def rendered(facts: dict[str, Any] | None = None, endpoint: dict[str, Any] | None = None, **spec: Any) -> list[Any]:
    """Return all objects of a job that vLLM serves."""
    wanted = job({**SERVES, "endpoint": {"optimization": "vllm", **(endpoint or {})}, **spec}, "chat")
    hardware = parse_hardware("gpu=H100,gpus=2,cpu=16,hostMemory=128Gi")
    known = replace(Facts(hardware=hardware, model=MODEL), **(facts or {}))
    context = RenderContext("team-a", wanted.spec, CLUSTER_SETTINGS, Owner("chat", "uid-1"))
    return list(render(plan(wanted, known, CLUSTER_SETTINGS), context))


def of(objects: list[Manifest], kind: str, name: str = "chat-endpoint-1") -> Any:
    (found,) = [one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name]  # type: ignore[index, call-overload]
    return found


def pod_of(objects: list[Manifest]) -> dict[str, Any]:
    spec: dict[str, Any] = of(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def container_of(objects: list[Manifest]) -> dict[str, Any]:
    (container,) = pod_of(objects)["containers"]
    return dict(container)


def values(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


# -------------------------------------------------------------------------------------------------------- the command


def test_command_has_an_option_for_each_choice_of_the_plan() -> None:
    endpoint = {"adapters": ADAPTERS, "maxQueue": 64, "maxBatchTokens": 4096, "maxAdapterRank": 16}
    container = container_of(rendered(endpoint=endpoint, generation={"temperature": 0.5, "topP": 0.9}))
    assert container["image"] == "vllm/vllm-openai:v0.33.0"
    assert container["command"][:5] == ["python3", "-m", "vllm.entrypoints.cli.main", "serve", "/claims/models/llama"]
    assert container["workingDir"] == "/etc/finetune"
    parsed = options(container["command"][3:])
    assert vars(parsed) == {
        "model_tag": "/claims/models/llama",
        "served_model_name": "chat",
        "port": 8080,
        "dtype": "bfloat16",
        "max_model_len": -1,
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.9,
        "shutdown_timeout": 30,
        "max_num_seqs": 256,
        "max_num_queued_reqs": 320,
        "max_num_batched_tokens": 4096,
        "middleware": ["endpoint_guard.EndpointGuard"],
        "generation_config": "vllm",
        "override_generation_config": {"temperature": 0.5, "top_p": 0.9},
        "revision": None,
        "trust_remote_code": None,
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 2,
        "max_lora_rank": 16,
        "lora_modules": [("mails", "/claims/tuned/mails/adapter"), ("notes", "/claims/tuned/notes")],
    }


def test_stand_in_refuses_an_option_that_vllm_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(["serve", "model", "--max-queue", "8"])
    assert "unrecognized arguments: --max-queue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "model", "more"),
    [
        pytest.param({"model": {"uri": "pvc://models"}}, "/claims/models", {}, id="a claim's root"),
        pytest.param(
            {"training": {"maxSteps": 5}, "dataset": {"uri": "hf://org/texts"}},
            "/workspace/chat/model", {"HF_HUB_OFFLINE": "1"}, id="trained",
        ),
        pytest.param(
            {"model": {"uri": "hf://org/llama", "revision": "v1"}, "secrets": {"hubToken": TOKEN}},
            "org/llama", {"HF_TOKEN": {"secretKeyRef": TOKEN}, "HF_HUB_OFFLINE": None}, id="of the Hub",
        ),
        pytest.param(
            {"storage": {"cache": "pvc://shared/hub"}}, "/claims/models/llama", {"HF_HOME": "/cache/hub"}, id="a cache"
        ),
    ],
)  # fmt: skip
def test_model_is_read_where_the_job_has_it(spec: dict[str, Any], model: str, more: dict[str, Any]) -> None:
    container = container_of(rendered(**spec))
    parsed = options(container["command"][3:])
    assert (parsed.model_tag, parsed.revision) == (model, spec.get("model", {}).get("revision"))
    assert {name: values(container).get(name) for name in more} == more


# ------------------------------------------------------------------------------------------------------ what surrounds


def test_pod_is_restricted_and_writes_in_home_only() -> None:
    objects = rendered(endpoint={"token": TOKEN}, resources={"gpusPerNode": 1})
    pod, container = pod_of(objects), container_of(objects)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
    }  # fmt: skip
    assert values(container) == {
        "HOME": "/tmp/home",
        "USER": "vllm",
        "HF_HOME": "/tmp/home/huggingface",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_API_KEY": {"secretKeyRef": TOKEN},
        "FINETUNE_ENDPOINT_REVISION": {"fieldRef": {"fieldPath": "metadata.labels['finetune.dev/attempt']"}},
    }
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes["shared-memory"] == {"emptyDir": {"medium": "Memory", "sizeLimit": "1024Mi"}}
    assert volumes["config"] == {"configMap": {"name": "chat-endpoint-1"}}
    read_only = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert read_only == {
        "/etc/finetune": True, "/workspace": False, "/claims/models": True, "/dev/shm": False, "/tmp": False,
    }  # fmt: skip
    assert of(objects, "ConfigMap")["data"] == {"endpoint_guard.py": program("endpoint_guard")}


def test_probes_wait_for_the_model_and_the_drain_fits_the_grace_period() -> None:
    objects = rendered()
    pod, container = pod_of(objects), container_of(objects)
    probes = {name: container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {probe["httpGet"]["path"] for probe in probes.values()} == {"/health"}
    assert probes["startupProbe"]["periodSeconds"] * probes["startupProbe"]["failureThreshold"] == 3600
    parsed = options(container["command"][3:])
    leaving = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert leaving + parsed.shutdown_timeout < pod["terminationGracePeriodSeconds"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_autoscaler_reads_the_gauge_of_vllm() -> None:
    scaled = {"maxReplicas": 3, "targetRequestsInFlight": 32}
    objects = rendered({"custom_metrics": True}, scaled)
    (metric,) = of(objects, "HorizontalPodAutoscaler", "chat-endpoint")["spec"]["metrics"]
    assert metric["pods"]["metric"] == {"name": "vllm:num_requests_running"}


def test_kserve_runs_the_same_container_as_a_custom_predictor() -> None:
    predictor = of(rendered({"kserve": True}), "InferenceService")["spec"]["predictor"]
    (container,) = predictor["containers"]
    ours = container_of(rendered())
    assert container["name"] == "kserve-container"
    assert [container[name] for name in ("image", "command", "env")] == [ours[n] for n in ("image", "command", "env")]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "model" not in predictor


def test_server_shares_memory_for_each_of_its_gpus() -> None:
    def size(**spec: Any) -> str:
        objects = rendered({"model": None}, **spec)
        assert container_of(objects)["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        (volume,) = [one for one in pod_of(objects)["volumes"] if one["name"] == "shared-memory"]
        return str(volume["emptyDir"]["sizeLimit"])

    assert size(resources={"gpusPerNode": 2}) == "2048Mi"
    assert size(resources={"gpusPerNode": 2, "sharedMemory": "8Gi"}) == "8Gi"


# ------------------------------------------------------------------------------------------------------------ rollouts


def test_endpoint_rolls_from_our_server_to_vllm_and_back() -> None:
    spec = {key: value for key, value in SERVES.items() if value is not None}
    world = World(spec={**spec, "endpoint": {}})
    world.settle()
    stands(world, 1, 1)
    world.spec = {**world.spec, "endpoint": {"optimization": "vllm"}}
    world.generation += 1
    world.settle()
    assert (status(world).target, led_to(world)) == (2, 1)
    stands(world, 2, 1)
    assert led_to(world) == 2
    assert revision(world, 2).endpoint == {"optimization": "vllm"}
    command = world.servers["reviews-endpoint-2"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert "vllm.entrypoints.cli.main" in command
    roll_back(world, "2:1")
    target = status(world).target
    assert target is not None
    stands(world, target, 1)
    command = world.servers[f"reviews-endpoint-{target}"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:4] == ["python", "-P", "-m", "finetune_trainer"]
    assert led_to(world) == target


# ------------------------------------------------------------------------------------------------------- a real process


@contextmanager
def started(objects: list[Manifest], folder: Path) -> Iterator[str]:
    """Start the rendered command in its working folder, with the stand-in in place of vLLM, and yield its URL."""
    container, port = container_of(objects), free_port()
    config, package = folder / "config", folder / "image" / "vllm" / "entrypoints" / "cli"
    config.mkdir()
    for name, text in of(objects, "ConfigMap")["data"].items():
        (config / name).write_text(text, encoding="utf-8")
    package.mkdir(parents=True)
    (package / "main.py").write_text(
        "import sys\nfrom process_support.vllm_stand_in import main\nmain(sys.argv[1:])\n", encoding="utf-8"
    )
    command = [text.replace("/claims/", f"{folder}/claims/") for text in container["command"]]
    for text in (command[4], *(item.partition("=")[2] for item in command if "=" in item)):
        Path(text).mkdir(parents=True)
    command[0], command[command.index("--port") + 1] = sys.executable, str(port)
    paths = os.pathsep.join([str(folder / "image"), *sys.path])
    environment = {"PYTHONPATH": paths, "VLLM_API_KEY": "secret", "FINETUNE_ENDPOINT_REVISION": "7"}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=config, env=environment, stdout=output, stderr=output)
    try:
        wait_until(lambda: _answers(port) or process.poll() is not None, "the server listens")
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_rendered_command_starts_a_server_that_needs_the_token(tmp_path: Path) -> None:
    objects = rendered(endpoint={"adapters": ADAPTERS, "token": TOKEN})
    with started(objects, tmp_path) as url, httpx.Client(base_url=url) as client:
        assert client.get("/v1/models").status_code == 401
        key = {"Authorization": "Bearer secret"}
        listed = client.get("/v1/models", headers=key)
        assert [model["id"] for model in listed.json()["data"]] == ["chat", "mails", "notes"]
        assert listed.headers["x-endpoint-revision"] == "7"
        written = client.post("/v1/completions", json={"model": "notes"}, headers=key)
        assert written.json()["model"] == "notes"
        # vLLM computes texts at this path without a key.
        hidden = client.post("/invocations", json={"model": "chat"})
        assert (hidden.status_code, hidden.json()) == (404, {"error": "Not Found"})
        assert "vllm:num_requests_running" in client.get("/metrics").text


@pytest.mark.parametrize("path", ["/", "/v1", "/docs", "/tokenize", "/metrics/x", "/v2/embed", "//v1/models"])
def test_guard_answers_no_other_path(path: str) -> None:
    assert _passed({"type": "http", "path": path}) == ([], [404])


def test_guard_closes_websockets_and_passes_the_start_on() -> None:
    assert _passed({"type": "lifespan"}) == (["lifespan"], [])
    assert _passed({"type": "websocket", "path": "/v1/realtime"}) == ([], [1008])
    assert _passed({"type": "http", "path": "/v1/chat/completions"}) == (["http"], [])


def _passed(scope: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Return the types of scopes that reach the server, and the codes that the guard sends itself."""
    names: dict[str, Any] = {"__name__": "endpoint_guard"}
    exec(compile(program("endpoint_guard"), "endpoint_guard.py", "exec"), names)
    reached: list[str] = []
    codes: list[int] = []

    async def app(inner: Any, _receive: Any, _send: Any) -> None:
        reached.append(inner["type"])

    async def send(message: Any) -> None:
        codes.extend(message[name] for name in ("status", "code") if name in message)

    asyncio.run(names["EndpointGuard"](app)(scope, None, send))
    return reached, codes

"""Servers of the endpoint: their number, resources and serving options.

A server is one process with the whole model on its device, as in evaluation and prediction; inference.py refuses a
model that needs several devices. vLLM's own server is planned in vllm_plan.py.
"""

from __future__ import annotations

import math
from typing import Any

from finetune_contract.choices import BACKEND_TASKS, Optimization, Stage
from finetune_contract.inference_settings import ServedAdapter, Serving
from finetune_operator.endpoints.kinds import (
    IDLE_API,
    IDLE_KIND,
    KSERVE_API,
    KSERVE_GROUP,
    KSERVE_KIND,
    RESERVED_LABELS,
    RESERVED_VARIABLES,
    ROUTE_API,
    ROUTE_KIND,
)
from finetune_operator.plan.hardware.gpu_nodes import gpu_resource
from finetune_operator.plan.inference.inference_memory import inference_tokens
from finetune_operator.plan.inference.vllm_plan import by_vllm, choose_vllm, host_memory_bytes
from finetune_operator.plan.memory.host_memory import inference_bytes, memory_request
from finetune_operator.plan.time.cost import find_price
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.names import LABEL_LIMIT, JobNames
from finetune_operator.plan.types.plan_types import EndpointRuntime, Servers, VllmServer
from finetune_operator.spec.quantities import parse_quantity
from finetune_operator.spec.types import EndpointSpec

USUAL_CORES = 2
"""CPU request of one server: more servers answer more requests than larger servers do."""
ADAPTER_PART = 50
"""Weights of the model for each weight of an adapter, at least: rank 16 on all linear layers of Llama 8B is 1 in
190; small models have larger parts.
"""
MEMORY_CEILING = 2
"""Ratio of a server's memory limit to its request, where KServe would set a limit regardless of the model."""
DRAIN_SECONDS = 30
"""Seconds after SIGTERM in which accepted requests are still answered."""


def choose_servers(draft: Draft) -> Draft:
    """Size the servers, and choose their runtime and optimization."""
    endpoint = draft.spec.endpoint
    if endpoint is None or Stage.SERVE not in draft.stages:
        return draft
    draft = _choose_optimization(_with_fetch_reason(draft), endpoint)
    draft = _checked_adapters(draft, endpoint)
    draft = _checked_idle(_checked_route(draft), endpoint)
    draft, vllm = choose_vllm(draft, endpoint)
    draft, runtime, why = choose_runtime(draft, endpoint)
    requests, limits, threads = _takes(draft, endpoint, vllm)
    cost = _cost_per_hour(draft, endpoint.replicas, 1 if vllm is None else vllm.gpus)
    most = max(endpoint.replicas, endpoint.max_replicas or 0)
    idle = endpoint.idle
    # The interceptor counts requests itself.
    counted = draft.inputs.facts.custom_metrics or idle is not None
    target = endpoint.target_requests_in_flight if counted else None
    servers = Servers(
        runtime=runtime,
        replicas=endpoint.replicas,
        most=most,
        target_requests=target,
        idle_seconds=None if idle is None else idle.scale_to_zero_after_seconds,
        requests=requests,
        limits=limits,
        ceilings=_ceilings(requests, limits) if runtime == "kserve" else {},
        threads=threads,
        vllm=vllm,
        cost_per_hour=cost,
        currency=None if cost is None else draft.settings.currency,
    )
    scaled = f", up to {most} under load" if most > endpoint.replicas else ""
    if endpoint.target_requests_in_flight is not None and target is None:
        draft = draft.because(
            "servers are added by CPU use: the cluster does not serve the custom metrics API "
            f"(spec.endpoint.targetRequestsInFlight is {endpoint.target_requests_in_flight})"
        )
    count = f"{endpoint.replicas} server{'s' * (endpoint.replicas > 1)}"
    by = f"by KServe in an {KSERVE_KIND}" if runtime == "kserve" else "in a Deployment"
    return draft.with_inference(servers=servers).because(f"{count} {by}{scaled}: {why}")


def _with_fetch_reason(draft: Draft) -> Draft:
    """Report that each server fetches a model of the Hub, if no cache is shared; a trained one is in the workspace."""
    spec = draft.spec
    if spec.training is not None or spec.storage.cache is not None or not spec.model.uri.startswith("hf://"):
        return draft
    return draft.because(
        "each server fetches the model from the Hub when it starts: a claim in spec.storage.cache that all nodes can "
        "mount has it fetched once"
    )


def _choose_optimization(draft: Draft, endpoint: EndpointSpec) -> Draft:
    """Choose the servers' optimization; `auto` becomes `measured` if there are alternatives to measure."""
    asked, on_cpu = endpoint.optimization, draft.inference_device == "cpu"
    if asked == "none":
        return draft
    if asked == "vllm":
        return draft
    if asked != "auto" and not on_cpu:
        return draft.refusing(
            ("endpoint", "optimization"),
            asked,
            "is for CPUs in this version, and the job serves on a GPU",
            "leave it out, or set spec.resources.gpusPerNode to 0",
            "NotSupported",
        )
    optimization: Optimization = "measured" if asked == "auto" else asked
    if asked == "auto" and not (on_cpu and draft.spec.task in BACKEND_TASKS):
        why = "the job serves on a GPU" if not on_cpu else f"only {', '.join(BACKEND_TASKS)} can be computed otherwise"
        return draft.because(f"servers compute the model as it is: {why} (spec.endpoint.optimization is auto)")
    draft = draft.with_inference(serve_optimization=optimization)
    if not judged_optimization(draft):
        return draft
    how = "the optimization that the evaluation chooses" if asked == "auto" else f"the optimization {asked}"
    return draft.because(f"the gate is judged with {how}, as servers compute (spec.endpoint.optimization is {asked})")


def judged_optimization(draft: Draft) -> dict[str, Any]:
    """Return the optimization fields of the evaluation: those of the servers if a gate decides on them, else none."""
    endpoint, evaluation, optimization = draft.spec.endpoint, draft.spec.evaluation, draft.inference.serve_optimization
    if endpoint is None or optimization == "none" or evaluation is None or evaluation.gate is None:
        return {}
    if not {Stage.EVALUATE, Stage.SERVE} <= set(draft.stages):
        return {}
    return {"optimization": optimization, "tolerance": endpoint.tolerance}


def _checked_adapters(draft: Draft, endpoint: EndpointSpec) -> Draft:
    """Refuse an adapter with the name of the model, which is the job's."""
    names = [adapter.name for adapter in endpoint.adapters]
    if draft.job.name in names:
        at = names.index(draft.job.name)
        return draft.refusing(
            ("endpoint", "adapters", at, "name"),
            draft.job.name,
            "is the name of the job, by which requests choose the model itself",
            "give the adapter another name",
        )
    if not names:
        return draft
    return draft.because(
        f"each server holds the model once, and {len(names)} adapter{'s' * (len(names) > 1)} beside it: "
        f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
    )


def _checked_route(draft: Draft) -> Draft:
    """Refuse an HTTPRoute where the cluster does not serve that kind."""
    traffic = draft.spec.routed_traffic
    if traffic is None:
        return draft
    if not draft.inputs.facts.http_routes:
        return draft.refusing(
            ("endpoint", "traffic", "gateway"),
            traffic.gateway,
            f"the cluster has to serve {ROUTE_KIND} ({ROUTE_API})",
            "install the Gateway API, or leave it out",
            "NotSupported",
        )
    led = f"an {ROUTE_KIND} leads requests of Gateway {traffic.gateway} to the endpoint"
    if traffic.canary_percent is None:
        return draft.because(led)
    return draft.because(
        f"{led}, and {traffic.canary_percent} % of them to a new revision until "
        "spec.endpoint.traffic.canaryPercent is unset"
    )


def _checked_idle(draft: Draft, endpoint: EndpointSpec) -> Draft:
    """Refuse scaling to zero where the cluster does not serve the kind that does it."""
    if endpoint.idle is None:
        return draft
    seconds = endpoint.idle.scale_to_zero_after_seconds
    if not draft.inputs.facts.http_scaled_objects:
        return draft.refusing(
            ("endpoint", "idle"),
            f"scaleToZeroAfterSeconds {seconds}",
            f"the cluster has to serve {IDLE_KIND} ({IDLE_API})",
            "install KEDA and its HTTP add-on, or leave it out",
            "NotSupported",
        )
    return draft.because(
        f"all servers end after {seconds:,} s without requests, by an {IDLE_KIND} of KEDA's HTTP add-on"
    )


def _takes(draft: Draft, endpoint: EndpointSpec, vllm: VllmServer | None) -> tuple[dict[str, str], dict[str, str], int]:
    """Return requests, limits and threads of one server."""
    asked = endpoint.resources
    given = {"cpu": asked.cpu, "memory": asked.memory}
    limits = {name: text for name, text in given.items() if text is not None}
    cores = min(USUAL_CORES + (0 if vllm is None else vllm.gpus), draft.hardware.cpu_cores)
    if asked.cpu is not None:
        cores = max(1, math.ceil(parse_quantity(asked.cpu)))
    adapters = len(endpoint.adapters) * (4 * draft.model.parameters // ADAPTER_PART)
    process = inference_bytes(draft.model.parameters) if vllm is None else host_memory_bytes(vllm)
    usual = {"cpu": str(cores), "memory": memory_request(process + adapters)}
    if draft.inference_device == "cuda":
        limits[gpu_resource(draft.spec, draft.settings.defaults)] = "1" if vllm is None else str(vllm.gpus)
    return {name: text for name, text in usual.items() if name not in limits}, limits, cores


def _ceilings(requests: dict[str, str], limits: dict[str, str]) -> dict[str, str]:
    """Return limits for resources without any. KServe would set 1 CPU and 2Gi, which may be below the requests."""
    ceilings = {name: requests[name] for name in ("cpu",) if name not in limits}
    if "memory" not in limits:
        ceilings["memory"] = memory_request(MEMORY_CEILING * math.ceil(parse_quantity(requests["memory"])))
    return ceilings


def _cost_per_hour(draft: Draft, replicas: int, server_gpus: int) -> float | None:
    """Return the hourly cost: a node without GPUs for each server, or its GPUs' share of a node."""
    settings, gpus = draft.settings, draft.gpus_per_node
    if draft.inference_device == "cpu":
        price, share = find_price(settings, "cpu", 0), 1.0
    else:
        product = decided(draft.hardware.gpu).product
        price, share = find_price(settings, product, server_gpus), 1.0
        if price is None and gpus > server_gpus:
            price, share = find_price(settings, product, gpus), server_gpus / gpus
    return None if price is None else price.per_hour * share * replicas


def serving_order(draft: Draft) -> Serving | None:
    """Return the trainer's serving options; None without the stage serve, or if vLLM serves."""
    endpoint = draft.spec.endpoint
    if endpoint is None or Stage.SERVE not in draft.stages or by_vllm(draft):
        return None
    return Serving(
        model_name=draft.job.name,
        adapters=tuple(ServedAdapter(name=adapter.name, uri=adapter.uri) for adapter in endpoint.adapters),
        device=draft.inference_device,
        precision=draft.inference.precision,
        optimization=draft.inference.serve_optimization,
        tolerance=None if draft.inference.serve_optimization == "none" else endpoint.tolerance,
        max_latency_seconds=endpoint.max_latency_milliseconds / 1000,
        max_batch_tokens=endpoint.max_batch_tokens or inference_tokens(draft),
        max_queue=endpoint.max_queue,
        drain_seconds=DRAIN_SECONDS,
    )


# -------------------------------------------------------------------------------------------------------------- runtime
# KServe copies labels and annotations to pods and reads some variables of a container as its own settings. A job that
# uses those itself is served by a Deployment.


def choose_runtime(draft: Draft, endpoint: EndpointSpec) -> tuple[Draft, EndpointRuntime, str]:
    """Return the runtime of the servers, and the reason."""
    asked, obstacle = endpoint.runtime, _obstacle(draft)
    path, there = ("endpoint", "runtime"), draft.inputs.facts.runtime_there
    match asked:
        case "deployment":
            return draft, "deployment", "as asked"
        case "kserve":
            known = len(draft.problems)
            if not draft.inputs.facts.kserve:
                rule, hint = f"the cluster has to serve {KSERVE_KIND} ({KSERVE_API})", "install KServe, or set it to"
                draft = draft.refusing(path, asked, rule, f"{hint} auto or deployment", "NotSupported")
            elif obstacle is not None:
                draft = draft.refusing(path, asked, obstacle, "set it to deployment", "NotSupported")
            if len(draft.problems) > known and endpoint.kserve_runtime is not None:
                named = ("endpoint", "kserveRuntime")
                rule = "needs KServe, by which this job cannot be served"
                draft = draft.refusing(named, endpoint.kserve_runtime, rule, "leave it out", "NotSupported")
            return draft, "kserve", "as asked"
        case "auto":
            automatic = "(spec.endpoint.runtime is auto)"
            if not draft.inputs.facts.kserve:
                return draft, "deployment", f"the cluster is not known to serve KServe's {KSERVE_KIND} {automatic}"
            if obstacle is not None:
                return draft, "deployment", f"not by KServe, as {obstacle} {automatic}"
            if there == "deployment":
                return draft, "deployment", f"the endpoint runs so already, and KServe came later {automatic}"
            return draft, "kserve", f"the cluster serves {KSERVE_KIND} {automatic}"


def _obstacle(draft: Draft) -> str | None:
    """Return the first requested setting that conflicts with KServe; None if there is none."""
    if draft.spec.endpoint is not None and draft.spec.endpoint.traffic is not None:
        return "spec.endpoint.traffic needs a Deployment"
    if draft.spec.endpoint is not None and draft.spec.endpoint.idle is not None:
        return "spec.endpoint.idle needs a Deployment"
    template = draft.spec.template
    variables = [name for one in template.env if (name := one.get("name")) in RESERVED_VARIABLES]
    if variables:
        return f"KServe takes the variable {variables[0]} of spec.template.env for itself"
    named = (*template.labels, *template.annotations)
    labels = [name for name in named if name.startswith(f"{KSERVE_GROUP}/") or name in RESERVED_LABELS]
    if labels:
        return f"KServe sets {labels[0]} of spec.template on pods itself"
    # 99: room for two digits of the revision.
    namespace, name = draft.job.metadata.namespace or "", JobNames.of(draft.job.name).predictor(99)
    if len(name) + 1 + len(namespace) > LABEL_LIMIT:
        return f"the host {name}-{namespace} that KServe names is longer than {LABEL_LIMIT} characters"
    return None

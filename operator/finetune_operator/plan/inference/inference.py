"""Inference of evaluation, prediction and serving: devices, precision, optimization, and the check that the model fits.

Each process has the whole model, regardless of the training's parallelism. It is on one device; where it does not fit
one, several processes of the pod split each of its layers (tensor parallelism), if its family has a plan for it, or one
process places its layers on several GPUs. The pod holds as many models as its devices have room for. A server has one
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import BACKEND_TASKS, GPU_BACKENDS, VLLM_TASKS, PredictBackend, Stage
from finetune_operator.plan.inference.inference_memory import inference_need
from finetune_operator.plan.inference.inference_processes import pod_devices
from finetune_operator.plan.inference.memory_limits import (
    UNREAD_SLACK,
    check_server_limit,
    check_stage_limit,
    limits_stages,
)
from finetune_operator.plan.inference.vllm_plan import by_vllm, check_vllm_memory
from finetune_operator.plan.models.assumed_models import is_well_known
from finetune_operator.plan.types.draft import Draft
from finetune_operator.spec.problems import any_of
from finetune_operator.spec.types import PredictSpec

MOST_GPUS_OF_NODE = 16
"""Most GPUs of a node that hints suggest: those of an a2-megagpu-16g of Google Cloud."""


def devices_of_model(fits: Callable[[int], bool], devices: int) -> int | None:
    """Return the devices for one model: the least number of which `fits` is true, raised until as many models on as
    many devices each use most of `devices`. None if it does not fit all `devices` together.
    """
    least = next((count for count in range(1, devices + 1) if fits(count)), None)
    return None if least is None else devices // (devices // least)


def choose_inference(draft: Draft) -> Draft:
    """Choose precision and devices of one process: fp32 on one device if that fits, else bf16 on one if the GPU has
    units for it, else the fewest GPUs of a pod that hold the model together. If they do not, an evaluation that was not
    requested is left out, and `check_inference` refuses requested stages.

    The stages of a running job stay as they are: prepare's measurements change only their precision and devices.
    """
    if not {Stage.EVALUATE, Stage.PREDICT, Stage.SERVE} & set(draft.stages):
        return draft
    draft, need = _as_vllm_computes(draft), inference_need(draft)
    if need.fits(wide=draft.inference.precision == "fp32"):
        return draft
    several = pod_devices(draft) if {Stage.EVALUATE, Stage.PREDICT} & set(draft.stages) else 1
    spread = devices_of_model(lambda count: inference_need(draft, count).fits(), several)
    known = _is_known(draft)
    if need.narrow is not None and (spread is not None or not known):
        names = {Stage.EVALUATE: "evaluation", Stage.PREDICT: "prediction", Stage.SERVE: "servers"}
        what = [name for stage, name in names.items() if stage in draft.stages]
        draft = draft.with_inference(precision="bf16").because(
            f"{' and '.join(what)} compute{'s' * (len(what) == 1)} in bf16: in fp32 one process with the whole model "
            f"takes {human_bytes(need.wide)} of {human_bytes(need.there)} "
            f"({human_bytes(4 * draft.model.parameters)} for its weights), in bf16 {human_bytes(need.narrow)}"
        )
    devices = several if spread is None else spread
    if devices > 1 and (spread is not None or not known):
        per_gpu = human_bytes(inference_need(draft, devices).least)
        draft = draft.with_inference(devices=devices).because(
            f"the model of an evaluation or prediction is on {devices} GPUs: on one it takes {human_bytes(need.least)} "
            f"of {human_bytes(need.there)}, on {devices} at most {per_gpu} of each"
        )
    if spread is not None or not known or Stage.EVALUATE not in draft.stages or draft.spec.evaluation is not None:
        return draft
    need = inference_need(draft, several)
    left = tuple(stage for stage in draft.stages if stage is not Stage.EVALUATE)
    return replace(draft, stages=left).because(
        f"no evaluation at the end: {need.rule(draft)}; the training measures its loss"
    )


def _as_vllm_computes(draft: Draft) -> Draft:
    """Choose bf16 for all inference of a job that vLLM serves, so that the evaluated model is the served one."""
    gpu = draft.hardware.gpu
    if not by_vllm(draft) or draft.inference_device == "cpu" or gpu is None or not gpu.bf16:
        return draft
    draft = draft.with_inference(precision="bf16")
    stages = [name for name in (Stage.EVALUATE, Stage.PREDICT) if name in draft.stages]
    if not stages:
        return draft
    return draft.because(f"{' and '.join(stages)} in bf16, as the vLLM servers compute")


def choose_optimization(draft: Draft) -> Draft:
    """Choose predict's optimization; `auto` becomes `measured` if there are alternatives to measure."""
    asked = draft.spec.predict
    if asked is None or Stage.PREDICT not in draft.stages or asked.optimization == "none":
        return draft
    on_cpu = draft.inference_device == "cpu"
    if asked.optimization != "auto":
        if not on_cpu and asked.optimization != "vllm":
            draft = _checked_on_gpu(draft, asked.optimization)
        return draft.with_inference(predict_optimization=asked.optimization)
    if asked.server is not None and draft.spec.task in VLLM_TASKS:
        draft = _texts_by_server(draft, asked)
        if draft.inference.predict_optimization != "none":
            return draft
    if _slots_generate(draft, asked):
        return draft.with_inference(predict_optimization="measured").because(
            "texts are generated by continuous batching where it is faster on a sample of many rows, else in batches "
            "(spec.predict.optimization is auto)"
        )
    if asked.server is not None and draft.spec.task in VLLM_TASKS:
        return draft
    devices, why = draft.inference.devices, None
    if devices > 1:
        why = f"the layers of the model are on {devices} GPUs"
    if draft.spec.task not in BACKEND_TASKS:
        why = f"only {', '.join(BACKEND_TASKS)} can be computed otherwise"
    if why is None:
        where = "" if on_cpu else " on the GPU"
        return draft.with_inference(predict_optimization="measured").because(
            f"predictions are computed in the way that is fastest on a sample of the rows{where}, in a small job by "
            "the model as it is (spec.predict.optimization is auto)"
        )
    limits = {"tolerance": asked.tolerance, "metricTolerance": asked.metric_tolerance, "server": asked.server}
    for name in [name for name, value in limits.items() if value is not None]:
        draft = draft.because(f"spec.predict.{name} has no effect: {why}, and the model as it is predicts")
    return draft


def _slots_generate(draft: Draft, asked: PredictSpec) -> bool:
    """Return whether continuous batching can generate the texts: the likeliest ones, of a model in one process. A
    metric's tolerance needs references, and these texts equal the model's own.
    """
    generation, inference = draft.spec.generation, draft.inference
    greedy = generation.num_beams == 1 and generation.temperature == 0
    whole = inference.devices == 1 and inference.predict_tensor == 1
    return draft.spec.task in VLLM_TASKS and greedy and whole and asked.metric_tolerance is None


def _texts_by_server(draft: Draft, asked: PredictSpec) -> Draft:
    """Choose the optimization of texts for `auto` and a server: rounding changes texts, so it needs a tolerance."""
    bounded = asked.tolerance is not None or asked.metric_tolerance is not None
    if not bounded or draft.spec.generation.num_beams > 1:
        why = "a server has no beam search" if bounded else "spec.predict.tolerance is not set, nor metricTolerance"
        return draft.because(f"spec.predict.server has no effect: {why}, and the job's own model predicts")
    return draft.with_inference(predict_optimization="measured").because(
        "texts are generated by spec.predict.server where it is faster on a sample of the rows and within the "
        "tolerance, in a small job by the model as it is (spec.predict.optimization is auto)"
    )


def _checked_on_gpu(draft: Draft, optimization: PredictBackend) -> Draft:
    """Refuse an optimization that is not for the GPUs of the job."""
    path = ("predict", "optimization")
    if optimization not in (*GPU_BACKENDS, "continuous-batching"):
        rule = "is for CPUs, and the job predicts on a GPU"
        hint = f"leave it out, use {any_of(GPU_BACKENDS)}, or set spec.resources.gpusPerNode to 0"
        return draft.refusing(path, optimization, rule, hint, "NotSupported")
    if draft.inference.devices > 1:
        rule = f"is for a model on one GPU, and the layers of this one are on {draft.inference.devices}"
        return draft.refusing(path, optimization, rule, "leave it out", "NotSupported")
    return draft


def check_inference(draft: Draft) -> Draft:
    """Refuse a requested evaluation, prediction or endpoint that does not fit."""
    asked = {"evaluation": draft.spec.evaluation, "predict": draft.spec.predict, "endpoint": draft.spec.endpoint}
    paths = [path for path, given in asked.items() if given is not None and (path != "endpoint" or not draft.local)]
    known = _is_known(draft)
    if "endpoint" in paths and Stage.SERVE in draft.stages:
        draft = check_server_limit(draft, known=known)
    if not paths or not known:
        return draft
    draft = check_stage_limit(draft)
    for path in paths:
        if path == "endpoint" and by_vllm(draft):
            draft = check_vllm_memory(draft)
            continue
        if path == "endpoint" and draft.inference_device == "cpu" and _own_memory(draft):
            continue
        if path != "endpoint" and limits_stages(draft):
            continue
        need = inference_need(draft, 1 if path == "endpoint" else pod_devices(draft))
        room = need if draft.model_known else replace(need, there=int(UNREAD_SLACK * need.there))
        if room.fits():
            continue
        hint = f"leave it out, or use {need.enough(draft)}"
        if path != "endpoint" and (count := _enough_gpus(draft)) is not None:
            hint += f", or set spec.resources.gpusPerNode to {count}: the GPUs of one node hold the model"
        draft = draft.refusing((path,), None, f"does not fit: {need.rule(draft)}", hint, "NotSupported")
    return draft


def _enough_gpus(draft: Draft) -> int | None:
    """Return the least GPUs of a node that hold the model together; None on CPUs, and if no usual node has as many."""
    if draft.inference_device == "cpu":
        return None
    counts = range(pod_devices(draft) + 1, MOST_GPUS_OF_NODE + 1)
    return next((count for count in counts if inference_need(draft, count).fits()), None)


def _own_memory(draft: Draft) -> bool:
    """Return whether `resources.memory` says nothing about servers: they have a limit of their own, or none at all."""
    endpoint = draft.spec.endpoint
    return draft.spec.resources.memory is not None or (endpoint is not None and endpoint.resources.memory is not None)


def _is_known(draft: Draft) -> bool:
    """Return whether prepare will not measure another model; the stages of a running job stay, unless `as_known` asks
    for a plan by the known facts.
    """
    if draft.inputs.as_known:
        return True
    return draft.model_known and (draft.data is None or is_well_known(draft.spec.model.uri))

"""Inference of evaluation, prediction and serving: batch size, precision, processes, workers, and the check that the
model fits.

Each process has the whole model, regardless of the training's parallelism. It is on one device; where it does not fit
one, several processes of the pod split each of its layers (tensor parallelism), if its family has a plan for it, or one
process places its layers on several GPUs. The pod holds as many models as its devices have room for. A server has one
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import (
    GPU_RUNGS,
    LANGUAGE_TASKS,
    RUNG_TASKS,
    VLLM_TASKS,
    WRITING_TASKS,
    InferencePrecision,
    PredictRung,
    Stage,
)
from finetune_contract.plans import REQUESTED_LOGITS, tensor_families
from finetune_operator.api.problems import any_of
from finetune_operator.api.quantities import human_seconds, parse_quantity
from finetune_operator.api.types import PredictSpec
from finetune_operator.planning.assumed_facts import is_well_known
from finetune_operator.planning.cost import (
    CPU_FLOPS_PER_CORE,
    CPU_UTILISATION,
    GPU_UTILISATION,
    forward_flops,
    tied_head,
)
from finetune_operator.planning.devices import find_gpu
from finetune_operator.planning.draft import Draft, decided
from finetune_operator.planning.host_memory import inference_bytes as host_bytes
from finetune_operator.planning.host_memory import memory_request
from finetune_operator.planning.memory import inference_bytes
from finetune_operator.planning.model_parallel_plan import shared_counts
from finetune_operator.planning.vllm_plan import by_vllm, check_vllm_memory

GPU_BATCH_TOKENS = 16_384
"""Padded tokens of one inference batch: enough to fill any GPU of the table, and below 1 GB of activations up to 2,048
wide.
"""
GPU_BATCH_TOKENS_WIDE = 4_096
"""Padded tokens of one inference batch for wider models."""
UNREAD_SLACK = 1.25
"""Factor by which an unread model may exceed the memory before it is refused: its size follows from its name, and a
batch that does not fit after all is halved.
"""
PROCESSES_HERE = (
    "without a cluster spec.predict.workers is the number of processes on this machine (auto: one for each GPU), and "
    "spec.predict.engine has no effect"
)
WORKER_SECONDS = 300
"""Least seconds of work for a worker with `predict.workers: auto`: a pod starts and loads a model in 20 to 60 s."""
PROCESS_SECONDS = 60
"""Least seconds of work for each of several processes of a pod: a process loads libraries and a model in about as many.
"""
CPU_BATCH_TOKENS = 2_048
"""Padded tokens of one batch on CPU; larger ones gain nothing and exceed the caches; see `batch.CPU_TOKENS`."""


def inference_tokens(draft: Draft) -> int:
    """Return the padded tokens of one inference batch; at least those of the longest row."""
    if draft.inference_device == "cpu":
        tokens = CPU_BATCH_TOKENS
    else:
        tokens = GPU_BATCH_TOKENS if draft.model.hidden_size <= 2048 else GPU_BATCH_TOKENS_WIDE
    if draft.spec.task in LANGUAGE_TASKS:
        tokens = min(tokens, REQUESTED_LOGITS // draft.model.vocabulary_size)
    return max(tokens, draft.length_limit)


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
    draft, need = _as_vllm_computes(draft), _need(draft)
    if need.fits(wide=draft.inference.precision == "fp32"):
        return draft
    several = _pod_devices(draft) if {Stage.EVALUATE, Stage.PREDICT} & set(draft.stages) else 1
    spread = devices_of_model(lambda count: _need(draft, count).fits(), several)
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
        draft = draft.with_inference(devices=devices).because(
            f"the model of an evaluation or prediction is on {devices} GPUs: on one it takes {human_bytes(need.least)} "
            f"of {human_bytes(need.there)}, on {devices} at most {human_bytes(_need(draft, devices).least)} of each"
        )
    if spread is not None or not known or Stage.EVALUATE not in draft.stages or draft.spec.evaluation is not None:
        return draft
    need = _need(draft, several)
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


def choose_workers(draft: Draft) -> Draft:
    """Choose the number of processes that share the rows to predict. It makes no difference to the result.

    With `auto`: one for each GPU of the job's nodes (for each node without GPUs), but no more than the settings allow,
    and than have `WORKER_SECONDS` of work each, if the rows are known.
    """
    if draft.spec.predict is None or Stage.PREDICT not in draft.stages:
        return draft
    asked = draft.spec.predict.workers
    if asked == 1:
        return draft
    if draft.local:
        return draft.because(f"prediction without pods: {PROCESSES_HERE}")
    if draft.script is not None and asked != "auto":
        return draft.refusing(
            ("predict", "workers"),
            asked,
            "the rows for a program's model are prepared by the stage that predicts, in one pod",
            "set it to 1 or auto",
            "NotSupported",
        )
    if asked != "auto":
        return draft.with_inference(predict_workers=asked).because(
            f"prediction by {asked} pods, as asked: they share the rows part by part, each with a copy of the model, "
            "and write to one claim, which the nodes have to share"
        )
    count, why = _automatic_workers(draft)
    return draft.with_inference(predict_workers=count).because(
        f"prediction by {count} pod{'s' * (count > 1)} (spec.predict.workers is auto): {why}"
    )


def choose_tensor(draft: Draft) -> Draft:
    """Choose how the GPUs of a model that does not fit one divide it: each layer among as many processes, which compute
    together, or whole layers in one process, whose GPUs compute one after the other.
    """
    degree, stages = draft.inference.devices, draft.stages
    if degree == 1:
        return draft
    whole = _why_not_tensor(draft, degree)
    rows: tuple[tuple[str, Stage, str, str | None], ...] = (
        ("evaluation", Stage.EVALUATE, "evaluate_tensor", whole),
        ("prediction", Stage.PREDICT, "predict_tensor", whole or _why_not_in_predict(draft)),
    )
    for what, _, field, why in (row for row in rows if row[1] in stages):
        if why is None:
            draft = draft.with_inference(**{field: degree}).because(
                f"{what} splits each layer of the model over {degree} processes with a GPU each (tensor parallelism), "
                "which compute together"
            )
        else:
            draft = draft.because(
                f"{what} places whole layers on each of {degree} GPUs, which compute one after the other: {why}"
            )
    return draft


def _why_not_tensor(draft: Draft, degree: int) -> str | None:
    """Return why several processes cannot split the layers of the model; None if they can."""
    model = draft.model
    if draft.script is not None:
        return "a program's model has one process"
    if model.model_type not in tensor_families():
        return f"there is no tensor-parallel plan for models of type {model.model_type}"
    uneven = [f"its {count} {what}" for count, what in shared_counts(model) if count % degree]
    if uneven:
        return f"{degree} processes cannot share {uneven[0]} equally"
    return None  # it takes less memory than whole layers on each GPU


def _why_not_in_predict(draft: Draft) -> str | None:
    """Return why a prediction in particular has one process for each model; None if it may have several."""
    if draft.inference.predict_workers > 1:
        return "of several pods each has one process"
    if draft.spec.predict is not None and draft.spec.predict.server is not None:
        return "texts of spec.predict.server are compared with those of one process"
    return None


def choose_processes(draft: Draft) -> Draft:
    """Choose the processes of one pod that evaluates or predicts. It makes no difference to the result.

    One for each GPU of a pod, or for each group of GPUs that holds a model, but no more than the host memory holds
    while they load their models, and than have `PROCESS_SECONDS` of work each, if the rows are known. Of several pods
    that predict, each has one process. Without a cluster `predict.workers` is the number of processes that predict.
    """
    if draft.script is not None:
        return draft
    groups = _pod_devices(draft) // draft.inference.devices
    asked = requested_processes(draft.spec.predict) if draft.local else None
    if asked is not None and Stage.PREDICT in draft.stages:
        draft = _processes_here(draft, asked, groups)
    if groups == 1:
        return draft
    each = _bytes_of_process(draft)
    there = min(groups, max(1, draft.hardware.memory_bytes // each))
    if there < groups:
        draft = draft.because(
            f"the host memory holds {there} inference process{'es' * (there > 1)} of a pod, not {groups}: each takes "
            f"up to {human_bytes(each)} of {human_bytes(draft.hardware.memory_bytes)} while it loads its model"
        )
    if Stage.EVALUATE in draft.stages:
        count = _enough_processes(there, _seconds_to_evaluate(draft))
        draft = draft.with_inference(evaluate_processes=count).because(
            _processes_reason("evaluation", draft, there, count, draft.inference.evaluate_tensor)
        )
    if Stage.PREDICT in draft.stages and draft.inference.predict_workers == 1 and asked is None:
        count = _enough_processes(there, _seconds_to_predict(draft))
        draft = draft.with_inference(predict_processes=count).because(
            _processes_reason("prediction", draft, there, count, draft.inference.predict_tensor)
        )
    return draft


def requested_processes(predict: PredictSpec | None) -> int | None:
    """Return the number of processes that a prediction without a cluster requests; None if the plan chooses it."""
    return None if predict is None or predict.workers == "auto" or predict.workers == 1 else predict.workers


def _processes_here(draft: Draft, asked: int, groups: int) -> Draft:
    """Choose `asked` processes to predict on this machine, but no more than its cores (or `groups` of GPUs) and its
    memory hold.
    """
    on_cpu = draft.inference_device == "cpu"
    places = draft.hardware.cpu_cores if on_cpu else groups
    each = _bytes_of_process(draft)
    held = draft.hardware.memory_bytes // each
    count = max(1, min(asked, places, held))
    if count == asked:
        why = f"as asked: they share the rows{' and the cores' * on_cpu}"
    elif count == places:
        kind = (
            "core" if on_cpu else "GPU" if draft.inference.devices == 1 else f"group of {draft.inference.devices} GPUs"
        )
        why = f"and not {asked}: one for each {kind}"
    else:
        memory = human_bytes(draft.hardware.memory_bytes)
        why = f"and not {asked}: each takes up to {human_bytes(each)} of {memory} of memory while it loads its model"
    return draft.with_inference(predict_processes=count).because(
        f"prediction by {count} process{'es' * (count > 1)} on this machine, {why}"
    )


def _bytes_of_process(draft: Draft) -> int:
    """Return the host memory, in bytes, of one process while it loads its model, or of all that load slices of it."""
    choices = draft.inference
    together = max(choices.evaluate_tensor, choices.predict_tensor)
    return together * host_bytes(draft.model.parameters // choices.devices // together)


def _enough_processes(there: int, seconds: float | None) -> int:
    return there if seconds is None else min(there, max(1, math.ceil(seconds / PROCESS_SECONDS)))


def _processes_reason(what: str, draft: Draft, there: int, count: int, tensor: int) -> str:
    each = f"process{'es' * (count > 1)}" if tensor == 1 else f"group{'s' * (count > 1)} of {tensor} processes"
    text, kind = f"{what} by {count} {each}", _gpus_of_process(draft)
    if count == there < _pod_devices(draft) // draft.inference.devices:
        return f"{text}, as many as the host memory holds: they share the rows"
    if count == there:
        return f"{text}, one for each {kind} of a pod: they share the rows"
    return f"{text}, and not {there}, one for each {kind}: each has at least {PROCESS_SECONDS} s of work"


def _gpus_of_process(draft: Draft) -> str:
    return "GPU" if draft.inference.devices == 1 else f"group of {draft.inference.devices} GPUs"


def _pod_devices(draft: Draft) -> int:
    """Return the devices of one pod that its processes can divide."""
    return 1 if draft.inference_device == "cpu" else max(1, draft.gpus_per_node)


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
    why = "the job predicts on a GPU" if not on_cpu else None
    if draft.spec.task not in RUNG_TASKS:
        why = f"only {', '.join(RUNG_TASKS)} can be computed otherwise"
    if why is None:
        return draft.with_inference(predict_optimization="measured").because(
            "predictions are computed in the way that is fastest on a sample of the rows, in a small job by the model "
            "as it is (spec.predict.optimization is auto)"
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


def _checked_on_gpu(draft: Draft, optimization: PredictRung) -> Draft:
    """Refuse an optimization that is not for the GPUs of the job."""
    path = ("predict", "optimization")
    if optimization not in (*GPU_RUNGS, "continuous-batching"):
        rule = "is for CPUs, and the job predicts on a GPU"
        hint = f"leave it out, use {any_of(GPU_RUNGS)}, or set spec.resources.gpusPerNode to 0"
        return draft.refusing(path, optimization, rule, hint, "NotSupported")
    if draft.inference.devices > 1:
        rule = f"is for a model on one GPU, and the layers of this one are on {draft.inference.devices}"
        return draft.refusing(path, optimization, rule, "leave it out", "NotSupported")
    return draft


def _automatic_workers(draft: Draft) -> tuple[int, str]:
    """Return the number, and the part of the rule that decides it."""
    if draft.script is not None:
        return 1, "the rows for a program's model are prepared by the stage that predicts"
    nodes, gpus = draft.spec.resources.nodes, draft.gpus_per_node
    devices = draft.inference.devices
    there = nodes * max(1, gpus // devices)
    kind = _gpus_of_process(draft) if gpus else "node"
    found = [(there, f"one for each {kind} that spec.resources asks for")]
    most = draft.settings.allow.max_workers
    if most is not None:
        found.append((most, "the operator's settings allow no more (allow.maxWorkers)"))
    seconds = _seconds_to_predict(draft)
    if seconds is not None:
        enough = max(1, math.ceil(seconds / WORKER_SECONDS))
        takes = "less than a second" if seconds < 1 else f"about {human_seconds(seconds)}"
        least = human_seconds(WORKER_SECONDS)
        found.append((enough, f"all rows take one pod {takes}, and another one pays from {least} of work"))
    return min(found, key=lambda one: one[0])


def _seconds_to_predict(draft: Draft) -> float | None:
    """Return the seconds that one worker takes for all rows; None if their number, the device's speed or the length of
    generated text is not known.
    """
    predict = decided(draft.spec.predict)
    if predict.dataset is not None or draft.spec.task in WRITING_TASKS:
        return None
    return _seconds_of_rows(draft, draft.inference.predict_tensor)


def _seconds_to_evaluate(draft: Draft) -> float | None:
    """Return the same for an evaluation, in which a task with comparison has a second model answer the rows."""
    writes = draft.spec.task in ("summarization", "translation")
    seconds = None if writes else _seconds_of_rows(draft, draft.inference.evaluate_tensor)
    return seconds if seconds is None or not draft.compares else 2 * seconds


def _seconds_of_rows(draft: Draft, together: int) -> float | None:
    """Return the seconds in which one model reads all rows of the split that is evaluated and predicted, on a GPU or on
    several that compute `together`.
    """
    if draft.data is None:
        return None
    split = draft.data.splits.get("test") or draft.data.splits.get("validation")
    if split is None or not split.rows:
        return None
    operations = forward_flops(draft.model, split.tokens, split.tokens / split.rows, tied_head(draft))
    if draft.hardware.gpu is None or draft.inference_device == "cpu":
        return operations / (draft.hardware.cpu_cores * CPU_FLOPS_PER_CORE * CPU_UTILISATION)
    gpu = find_gpu(draft.hardware.gpu.product, draft.settings.hardware)
    peak = 0.0 if gpu is None else gpu.peak_flops(draft.inference.precision)
    return operations / (together * peak * GPU_UTILISATION) if peak else None


def check_inference(draft: Draft) -> Draft:
    """Refuse a requested evaluation, prediction or endpoint that does not fit."""
    asked = {"evaluation": draft.spec.evaluation, "predict": draft.spec.predict, "endpoint": draft.spec.endpoint}
    paths = [path for path, given in asked.items() if given is not None and (path != "endpoint" or not draft.local)]
    if not paths or not _is_known(draft):
        return draft
    for path in paths:
        if path == "endpoint" and by_vllm(draft):
            draft = check_vllm_memory(draft)
            continue
        if path == "endpoint" and draft.inference_device == "cpu" and _own_memory(draft):
            draft = _check_server_memory(draft)
            continue
        need = _need(draft, 1 if path == "endpoint" else _pod_devices(draft))
        room = need if draft.model_known else replace(need, there=int(UNREAD_SLACK * need.there))
        if room.fits():
            continue
        hint = f"leave it out, or use {need.enough(draft)}"
        draft = draft.refusing((path,), None, f"does not fit: {need.rule(draft)}", hint, "NotSupported")
    return draft


def _own_memory(draft: Draft) -> bool:
    """Return whether `resources.memory` says nothing about servers: they have a limit of their own, or none at all."""
    endpoint = draft.spec.endpoint
    return draft.spec.resources.memory is not None or (endpoint is not None and endpoint.resources.memory is not None)


def _check_server_memory(draft: Draft) -> Draft:
    """Refuse a limit of the servers' memory that is below what one takes."""
    limit = None if draft.spec.endpoint is None else draft.spec.endpoint.resources.memory
    takes = _takes(draft, "fp32")
    slack = 1 if draft.model_known else UNREAD_SLACK
    if limit is None or takes <= slack * int(parse_quantity(limit)):
        return draft
    rule = f"does not fit: one server takes {human_bytes(takes)} with the whole model"
    hint = f"write {memory_request(takes)}, or leave it out"
    return draft.refusing(("endpoint", "resources", "memory"), limit, rule, hint, "NotSupported")


def _is_known(draft: Draft) -> bool:
    """Return whether prepare will not measure another model; the stages of a running job stay, unless `as_known` asks
    for a plan by the known facts.
    """
    if draft.inputs.as_known:
        return True
    return draft.model_known and (draft.data is None or is_well_known(draft.spec.model.uri))


@dataclass(frozen=True)
class _Need:
    """Memory of the device that one process takes with the whole model, in bytes."""

    wide: int
    """Bytes in fp32."""
    narrow: int | None
    """Bytes in bf16; None if the device does not compute in it."""
    there: int
    devices: int = 1
    """Devices that hold the model; the bytes are those of each."""

    @property
    def least(self) -> int:
        """Return the bytes in the precision that takes fewer."""
        return self.wide if self.narrow is None else min(self.wide, self.narrow)

    def fits(self, *, wide: bool = False) -> bool:
        """Return whether it fits; `wide`: in fp32."""
        return (self.wide if wide else self.least) <= self.there

    def rule(self, draft: Draft) -> str:
        """Describe the needed and the available memory."""
        of = human_bytes(self.there)
        who = "one process with the whole model does it, which"
        if self.devices > 1:
            who, of = f"one process on all {self.devices} GPUs of a pod", f"{of} of each"
        rule = f"{who} takes {human_bytes(self.wide)} of {of} in fp32"
        if self.narrow is not None:
            return f"{rule} and {human_bytes(self.narrow)} in bf16"
        if draft.inference_device == "cpu":
            return f"{rule} of the node's memory"
        return f"{rule}, and {decided(draft.hardware.gpu).product} does not compute in bf16"

    def enough(self, draft: Draft) -> str:
        """Describe devices on which it would fit."""
        if draft.inference_device == "cpu":
            return f"nodes with more than {human_bytes(self.wide)} of memory"
        if self.narrow is not None:
            return f"devices of more than {human_bytes(self.narrow)}"
        narrow = human_bytes(_takes(draft, "bf16", self.devices))
        return f"devices of more than {human_bytes(self.wide)}, or of {narrow} that compute in bf16"


def _need(draft: Draft, devices: int = 1) -> _Need:
    if draft.inference_device == "cpu":
        return _Need(_takes(draft, "fp32"), None, draft.hardware.memory_bytes)
    gpu = decided(draft.hardware.gpu)
    narrow = _takes(draft, "bf16", devices) if gpu.bf16 else None
    return _Need(_takes(draft, "fp32", devices), narrow, gpu.memory_bytes, devices)


def _takes(draft: Draft, precision: InferencePrecision, devices: int = 1, *, tensor: bool = False) -> int:
    """Return the bytes that one process takes of each of its devices."""
    task, sequences, generation = draft.spec.task, draft.lengths.sequences, draft.spec.generation
    # A batch has at least one row.
    tokens, cached = max(inference_tokens(draft), sequences * draft.length_limit), 0
    if task in WRITING_TASKS:
        cached = max(tokens, (draft.length_limit + generation.max_new_tokens) * generation.num_beams)
    length = draft.length_limit
    return inference_bytes(
        draft.model, task, precision, tokens=tokens, length=length, cached=cached, devices=devices, tensor=tensor
    )

"""Processes and pods of evaluation and prediction, which share the rows or the layers of a model."""

from __future__ import annotations

import math

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import BACKEND_TASKS, WRITING_TASKS, Stage
from finetune_contract.plans import tensor_families
from finetune_operator.plan.hardware.devices import find_gpu
from finetune_operator.plan.memory.host_memory import inference_bytes as host_bytes
from finetune_operator.plan.memory.model_parallel_plan import shared_counts
from finetune_operator.plan.time.cost import (
    CPU_FLOPS_PER_CORE,
    CPU_UTILISATION,
    GPU_UTILISATION,
    forward_flops,
    tied_head,
)
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.types import PredictSpec

PROCESSES_HERE = (
    "without a cluster spec.predict.workers is the number of processes on this machine (auto: one for each GPU), and "
    "spec.predict.engine has no effect"
)
WORKER_SECONDS = 300
"""Least seconds of work for a worker with `predict.workers: auto`: a pod starts and loads a model in 20 to 60 s."""
PROCESS_SECONDS = 60
"""Least seconds of work for each of several processes of a pod: one loads libraries and a model in about as many."""
CORES_OF_PROCESS = 4
"""Cores of a process that predicts on CPUs. On 2 idle cores 2 processes answer 6 % more rows than one, which is not
worth a second model in memory (tests/benchmarks/predict_threads.py); that 4 threads share a layer well is assumed.
"""
BYTES_PER_TOKEN = 4
"""Bytes of a text file for one token: 4 to 5 for English text with subword tokens, its markup left out."""


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
    while they load their models, and than have `PROCESS_SECONDS` of work each, if the rows are known. On CPUs: see
    `_processes_on_cores`. Of several pods that predict, each has one process. Without a cluster `predict.workers` is
    the number of processes that predict.
    """
    if draft.script is not None:
        return draft
    groups = pod_devices(draft) // draft.inference.devices
    asked = requested_processes(draft.spec.predict) if draft.local else None
    if asked is not None and Stage.PREDICT in draft.stages:
        draft = _processes_here(draft, asked, groups)
    elif draft.inference_device == "cpu":
        draft = _processes_on_cores(draft)
    if groups == 1:
        return draft
    size = _bytes_of_process(draft)
    there = min(groups, max(1, draft.hardware.memory_bytes // size))
    if there < groups:
        draft = draft.because(
            f"the host memory holds {there} inference process{'es' * (there > 1)} of a pod, not {groups}: each takes "
            f"up to {human_bytes(size)} of {human_bytes(draft.hardware.memory_bytes)} while it loads its model"
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


def _processes_on_cores(draft: Draft) -> Draft:
    """Choose one process for each CORES_OF_PROCESS cores to predict on CPUs with `predict.optimization: auto`, but no
    more than the memory holds; one process if it ends soon, or if prepare has yet to count the rows.
    """
    predict, cores = draft.spec.predict, draft.hardware.cpu_cores
    if predict is None or Stage.PREDICT not in draft.stages or predict.optimization != "auto":
        return draft
    alone = draft.inference.predict_workers == 1 and draft.inference.predict_engine == "job"
    # Without a request, a pod may get fewer cores than its node has.
    known_cores = draft.local or draft.spec.resources.cpu is not None
    counted = predict.dataset is not None or draft.data is not None
    if draft.spec.task not in BACKEND_TASKS or not (alone and known_cores and counted):
        return draft
    seconds = _seconds_to_predict(draft)
    wanted = cores // CORES_OF_PROCESS
    if wanted < 2 or (seconds is not None and seconds < PROCESS_SECONDS):
        return draft
    size = _bytes_of_process(draft)
    held = min(wanted, draft.hardware.memory_bytes // size)
    if held < 2:
        return draft
    # With memory for 3 on 16 cores, 2 processes with 8 threads use all of them.
    count = max(range(2, held + 1), key=lambda several: (cores // several * several, several))
    why = f"one for each {CORES_OF_PROCESS} of {cores} cores"
    if count < wanted:
        why = f"and not {wanted}: each takes up to {human_bytes(size)} of {human_bytes(draft.hardware.memory_bytes)}"
    return draft.with_inference(predict_processes=count).because(
        f"prediction by {count} processes that share the rows (spec.predict.optimization is auto), {why}"
    )


def requested_processes(predict: PredictSpec | None) -> int | None:
    """Return the number of processes that a prediction without a cluster requests; None if the plan chooses it."""
    return None if predict is None or predict.workers == "auto" or predict.workers == 1 else predict.workers


def _processes_here(draft: Draft, asked: int, groups: int) -> Draft:
    """Choose `asked` processes to predict on this machine, but no more than its cores (or `groups` of GPUs) and its
    memory hold.
    """
    on_cpu = draft.inference_device == "cpu"
    places = draft.hardware.cpu_cores if on_cpu else groups
    size = _bytes_of_process(draft)
    held = draft.hardware.memory_bytes // size
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
        why = f"and not {asked}: each takes up to {human_bytes(size)} of {memory} of memory while it loads its model"
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
    processes = f"process{'es' * (count > 1)}" if tensor == 1 else f"group{'s' * (count > 1)} of {tensor} processes"
    text, kind = f"{what} by {count} {processes}", _gpus_of_process(draft)
    if count == there < pod_devices(draft) // draft.inference.devices:
        return f"{text}, as many as the host memory holds: they share the rows"
    if count == there:
        return f"{text}, one for each {kind} of a pod: they share the rows"
    return f"{text}, and not {there}, one for each {kind}: each has at least {PROCESS_SECONDS} s of work"


def _gpus_of_process(draft: Draft) -> str:
    return "GPU" if draft.inference.devices == 1 else f"group of {draft.inference.devices} GPUs"


def pod_devices(draft: Draft) -> int:
    """Return the devices of one pod that its processes can divide."""
    return 1 if draft.inference_device == "cpu" else max(1, draft.gpus_per_node)


def _automatic_workers(draft: Draft) -> tuple[int, str]:
    """Return the number, and the part of the rule that decides it."""
    if draft.script is not None:
        return 1, "the rows for a program's model are prepared by the stage that predicts"
    nodes, gpus = draft.spec.resources.nodes, draft.gpus_per_node
    devices = draft.inference.devices
    there = nodes * max(1, gpus // devices)
    kind = _gpus_of_process(draft) if gpus else "node"
    limits = [(there, f"one for each {kind} that spec.resources asks for")]
    most = draft.settings.allow.max_workers
    if most is not None:
        limits.append((most, "the operator's settings allow no more (allow.maxWorkers)"))
    seconds = _seconds_to_predict(draft)
    if seconds is not None:
        enough = max(1, math.ceil(seconds / WORKER_SECONDS))
        takes = "less than a second" if seconds < 1 else f"about {human_seconds(seconds)}"
        least = human_seconds(WORKER_SECONDS)
        limits.append((enough, f"all rows take one pod {takes}, and another one pays from {least} of work"))
    return min(limits, key=lambda one: one[0])


def _seconds_to_predict(draft: Draft) -> float | None:
    """Return the seconds that one worker takes for all rows; None if their number, the device's speed or the length of
    generated text is not known.
    """
    predict = decided(draft.spec.predict)
    if draft.spec.task in WRITING_TASKS:
        return None
    if predict.dataset is None:
        return _seconds_of_rows(draft, draft.inference.predict_tensor)
    count = draft.inputs.facts.predict_bytes
    if count is None:
        return None
    tokens = count / BYTES_PER_TOKEN
    return _seconds_of_tokens(draft, tokens, min(_USUAL_LENGTH, draft.length_limit), draft.inference.predict_tensor)


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
    return _seconds_of_tokens(draft, split.tokens, split.tokens / split.rows, together)


_USUAL_LENGTH = 128
"""Tokens of a row that is not counted; the quadratic part of a forward pass is small at this length."""


def _seconds_of_tokens(draft: Draft, tokens: float, length: float, together: int) -> float | None:
    """Return the seconds in which one model reads `tokens` tokens in rows of about `length`; see `_seconds_of_rows`."""
    operations = forward_flops(draft.model, tokens, length, tied_head(draft))
    if draft.hardware.gpu is None or draft.inference_device == "cpu":
        return operations / (draft.hardware.cpu_cores * CPU_FLOPS_PER_CORE * CPU_UTILISATION)
    gpu = find_gpu(draft.hardware.gpu.product, draft.settings.hardware)
    peak = 0.0 if gpu is None else gpu.peak_flops(draft.inference.precision)
    return operations / (together * peak * GPU_UTILISATION) if peak else None

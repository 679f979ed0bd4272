"""Plan as rows for people: job, batch arithmetic, memory, time and cost, reasons, assumptions.

It returns data; the command line draws the rows.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import Stage
from finetune_contract.inference_settings import Serving
from finetune_contract.trainer_job import Adapter, Training
from finetune_operator.plan.memory.adapter_sizes import trained_parameters
from finetune_operator.plan.strategy.batch import batch_arithmetic
from finetune_operator.plan.types.plan_types import Estimate, JobPlan, MemoryEstimate, Servers
from finetune_operator.spec.quantities import human_count, human_seconds

MEMORY_SECTION = "Memory of one process"


@dataclass(frozen=True)
class Row:
    """Line of a section: a label (empty in lists of sentences), a value, and a remark."""

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True)
class Section:
    """Rows under a title; a section without rows is left out."""

    title: str
    rows: tuple[Row, ...]


def summarise(plan: JobPlan) -> tuple[Section, ...]:
    """Return the sections of `plan` in reading order."""
    training = plan.trainer.training
    sections = (
        Section("What runs", _stage_rows(plan)),
        Section("Training", () if training is None else _training(plan, training)),
        Section(MEMORY_SECTION, () if plan.memory is None else _memory(plan.memory)),
        Section("Endpoint", _endpoint(plan)),
        Section("Estimate", _estimate(plan.estimate)),
        Section("Reasons", tuple(Row("", reason) for reason in plan.reasons)),
        Section("Assumptions", tuple(Row("", assumption) for assumption in plan.assumptions)),
    )
    return tuple(section for section in sections if section.rows)


def _stage_rows(plan: JobPlan) -> tuple[Row, ...]:
    trainer, model = plan.trainer, plan.model
    rows = [
        Row("job", plan.name),
        Row("task", trainer.task),
        Row("stages", " -> ".join(stage.value for stage in plan.stages)),
        Row("model", trainer.model.uri, f"{model.model_type}, {human_count(model.parameters)} parameters"),
    ]
    if trainer.dataset is not None:
        rows.append(Row("data", trainer.dataset.uri, _rows_note(plan)))
    if trainer.script is not None:
        program = f"{trainer.script.entry_point} {shlex.join(trainer.script.arguments)}".strip()
        rows.append(Row("program", program, f"{trainer.script.url} at {trainer.script.ref}"))
    rows.append(Row("launcher", plan.launcher))
    if plan.capacity is not None:
        rows.append(Row("capacity", plan.capacity, "nodes of the training"))
    if (world := trainer.world) is not None:
        processes = f"{world.size} = {world.nodes} node{'s' * (world.nodes > 1)} x {world.processes_per_node}"
        threads = f"{world.threads_per_process} thread{'s' * (world.threads_per_process > 1)} each"
        rows += [Row("strategy", plan.strategy), Row("processes", processes, f"{world.device}, {threads}")]
    for stage in plan.on_several_devices:
        pod, pods = trainer.inference(stage), plan.predict_workers if stage is Stage.PREDICT else 1
        shared = f"{pods} pods, each " if pods > 1 else ""
        settings = trainer.evaluation if stage is Stage.EVALUATE else trainer.predict
        devices = 0 if settings is None or settings.device == "cpu" else pod.devices_per_process
        rows.append(Row(stage.value, shared + processes_text(pod.processes, devices, pod.tensor)))
    return tuple(rows)


def processes_text(processes: int, devices: int, tensor: int) -> str:
    """Describe the processes of a pod that evaluates or predicts, e.g. `2 processes x 4 GPUs`, or `8 processes x 1 GPU,
    4 for each model`; without GPUs if there are no `devices`.
    """
    gpus = f" x {devices} GPU{'s' * (devices > 1)}" if devices else ""
    together = f", {tensor} for each model" if tensor > 1 else ""
    return f"{processes} process{'es' * (processes > 1)}{gpus}{together}"


def _rows_note(plan: JobPlan) -> str:
    if plan.data is None:
        return "not prepared yet"
    return ", ".join(f"{role} {split.rows:,}" for role, split in plan.data.splits.items()) + " rows"


def _adapter(plan: JobPlan, adapter: Adapter | None) -> tuple[Row, ...]:
    """Return rows about the adapter; none if all weights are trained."""
    if adapter is None:
        return ()
    trained, total = trained_parameters(plan.model, adapter).trained, plan.model.parameters
    layers = "all linear layers of the blocks" if adapter.target_modules is None else ", ".join(adapter.target_modules)
    words = f"rank {adapter.rank}, alpha {adapter.alpha:g}, dropout {adapter.dropout:g}, on {layers}"
    share = f"{trained / total:.2%} of {human_count(total)} parameters"
    known = (Row("trainable", human_count(trained), share),) if plan.model.linear_layers else ()
    return (Row("adapter", adapter.method, words), *known)


def _training(plan: JobPlan, training: Training) -> tuple[Row, ...]:
    schedule = training.checkpoints
    every = (
        f"{schedule.every_steps:,} steps" if schedule.every_minutes is None else f"{schedule.every_minutes:g} minutes"
    )
    beside = ", written beside the training" if schedule.asynchronous else ""
    return (
        Row("batch", batch_arithmetic(training.batch)),
        Row("steps", f"{training.max_steps:,}", f"{training.steps_per_epoch:,} an epoch"),
        Row("precision", training.precision),
        *(() if plan.recipe is None else (Row("recipe", plan.recipe.text),)),
        *_adapter(plan, training.adapter),
        Row("optimizer", training.optimizer, f"learning rate {training.learning_rate:g}, {training.scheduler}"),
        Row("checkpoints", f"every {every}", f"{schedule.keep} kept{beside}"),
    )


def _memory(memory: MemoryEstimate) -> tuple[Row, ...]:
    terms = tuple(Row(term.name, human_bytes(term.bytes), term.formula) for term in memory.terms)
    files = (Row("disk", human_bytes(memory.disk_bytes), "state in files, all processes of a node"),)
    share = memory.total_bytes / memory.capacity_bytes if memory.capacity_bytes else 0.0
    return (
        *terms,
        Row("total", human_bytes(memory.total_bytes), f"{share:.0%} of {human_bytes(memory.capacity_bytes)}"),
        Row("host", human_bytes(memory.host_bytes), "all processes of a node"),
        *(files if memory.disk_bytes else ()),
    )


def _endpoint(plan: JobPlan) -> tuple[Row, ...]:
    servers = plan.servers
    if servers is None:
        return ()
    limited = {name: f"{text}, limited to it" for name, text in servers.limits.items()}
    limited |= {name: f"{servers.requests[name]}, limited to {text}" for name, text in servers.ceilings.items()}
    takes = "; ".join(f"{name} {text}" for name, text in sorted((servers.requests | limited).items()))
    cost = "unknown" if servers.cost_per_hour is None else f"{servers.cost_per_hour:,.2f} {servers.currency}"
    by = "KServe" if servers.runtime == "kserve" else "a Deployment"
    by_what = "CPU use" if servers.target_requests is None else f"{servers.target_requests:,} requests in flight each"
    scaled = f"up to {servers.most} under load, by {by_what}" if servers.most > servers.replicas else "not scaled"
    return (
        Row("servers", f"{servers.replicas}", f"{scaled}, by {by}"),
        Row("one takes", takes, "cuda" if plan.trainer.serving is None else plan.trainer.serving.device),
        _batches(servers, plan.trainer.serving),
        Row("cost an hour", cost, f"of {servers.replicas} server{'s' * (servers.replicas > 1)}"),
    )


def _batches(servers: Servers, order: Serving | None) -> Row:
    if order is not None:
        text = f"{order.max_batch_tokens:,} padded tokens, or {order.max_latency_seconds:g} s after the first request"
        return Row("a batch", text, f"computed by {order.optimization}" if order.optimization != "none" else "")
    vllm = servers.vllm
    tokens = (
        "of vLLM's own size" if vllm is None or vllm.max_batch_tokens is None else f"{vllm.max_batch_tokens:,} tokens"
    )
    return Row("a batch", tokens, "changed by vLLM at each token")


def _estimate(estimate: Estimate) -> tuple[Row, ...]:
    time = "unknown" if estimate.seconds is None else human_seconds(estimate.seconds)
    cost = "unknown" if estimate.cost is None else f"{estimate.cost:,.2f} {estimate.currency}"
    pauses = tuple(
        Row(name, human_seconds(seconds), f"{seconds / estimate.seconds:.0%} of the time, between steps")
        for name, seconds in estimate.pauses.items()
        if estimate.seconds and seconds >= 1
    )
    return (Row("time", time, estimate.basis), *pauses, Row("cost", cost))

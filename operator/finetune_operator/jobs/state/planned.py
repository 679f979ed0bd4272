"""The job's plan: computed when it is needed, from values that are all in the job and its status.

So a plan never has to be stored whole: after a restart of the operator the same values give the same plan. It is
computed again when the spec changes before anything has started, after prepare has measured, and after memory ran out.
The launcher stays that of the job's start, whatever is installed later.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from finetune_contract.byte_text import human_bytes
from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts, DeviceFacts, ModelFacts
from finetune_contract.measured_devices import PlannedDevice, plan_change, same_kind
from finetune_contract.report import MeasuredFacts, TrainerReport, shortened
from finetune_contract.trainer_job import CheckpointSchedule
from finetune_operator.jobs.render.contract import fingerprint, stage_files
from finetune_operator.jobs.render.render_types import Attempt, Owner, RenderContext
from finetune_operator.jobs.state.decision_state import ReconcileState
from finetune_operator.jobs.state.decision_types import Findings
from finetune_operator.jobs.state.plan_checks import TOTAL
from finetune_operator.jobs.state.results import communication_status
from finetune_operator.plan.hardware.gpu_nodes import facts_of_nodes
from finetune_operator.plan.strategy.batch import batch_arithmetic
from finetune_operator.plan.types.plan_types import (
    Adaptation,
    EndpointRuntime,
    Facts,
    JobPlan,
    LearnedRatios,
    NodesFacts,
    PlanRefused,
    PlanRequest,
)
from finetune_operator.spec.launcher_rows import ENGINES, TRAINING, LauncherName
from finetune_operator.spec.printable import printable
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.redaction import Redactor
from finetune_operator.spec.status_times import seconds_since
from finetune_operator.spec.types import (
    MOST_NOTE,
    AdaptationStatus,
    EstimateStatus,
    InferenceStatus,
    MeasuredStatus,
    PlanStatus,
    StageStatus,
)

MOST_REASONS = 64
MOST_ADAPTATIONS = 32
MOST_KINDS = 8
"""Kinds of GPUs for which a job is planned again; the status holds no more."""
Model = TypeVar("Model", bound=BaseModel)


def plan_now(state: ReconcileState) -> JobPlan:
    """Return the plan in force; PlanRefused as `plan` does, NotPlannedError where it is computed elsewhere first.

    An endpoint may change while the job trains. Problems with it alone are reported when its turn comes.
    """
    facts, adaptation = _facts(state), _adaptation(state)
    try:
        return state.inputs.find_plan(PlanRequest(state.accepted, facts, adaptation))
    except PlanRefused as refused:
        current = state.current
        serves = current is None or current.name is Stage.SERVE
        about_endpoint = all(one.path.startswith("spec.endpoint") for one in refused.problems)
        if not state.started or serves or not about_endpoint:
            raise
    spec = state.spec.model_copy(update={"endpoint": None})
    job = state.accepted.model_copy(update={"spec": spec})
    return state.inputs.find_plan(PlanRequest(job, facts, adaptation))


def context(state: ReconcileState) -> RenderContext:
    """Return the surroundings that rendering needs."""
    owner = Owner(state.job.name, state.job.uid)
    return RenderContext(state.job.namespace, state.spec, state.settings, owner, state.inputs.endpoint)


def configuration(state: ReconcileState, attempt: Attempt) -> str:
    """Return the sha256 of the configuration of an attempt's pods by the plan in force; PlanRefused as `plan` does."""
    return fingerprint(stage_files(plan_now(state), context(state), attempt.stage))


def _facts(state: ReconcileState) -> Facts:
    measured = state.status.measured or MeasuredStatus()
    return Facts(
        model=_read(ModelFacts, measured.model),
        data=_read(DataFacts, measured.data),
        nodes=_read(NodesFacts, measured.nodes),
        learned=tuple(one for raw in measured.learned if (one := _read(LearnedRatios, raw)) is not None),
        devices=_replanned_for(measured),
        model_revision=None if state.status.artifacts is None else state.status.artifacts.model_revision,
        served=_launchers(state),
        kserve=state.observed.kserve,
        custom_metrics=state.observed.custom_metrics,
        http_routes=state.observed.http_routes,
        http_scaled_objects=state.observed.http_scaled_objects,
        runtime_there=_runtime_there(state),
        prepared=_succeeded(state, Stage.PREPARE),
        predicted=_succeeded(state, Stage.PREDICT),
    )


def _replanned_for(measured: MeasuredStatus) -> tuple[DeviceFacts, ...]:
    """Return the kinds of GPUs for which the job was planned again."""
    read = (_read(DeviceFacts, value) for value in measured.replanned_for)
    return tuple(device for device in read if device is not None)


def _succeeded(state: ReconcileState, stage: Stage) -> bool:
    return any((one.name, one.state) == (stage, "Succeeded") for one in state.status.stages)


def _runtime_there(state: ReconcileState) -> EndpointRuntime | None:
    """Return the runtime of the servers that the URL leads to; of any revision if there are none."""
    status = state.status.endpoint
    there = [one for one in state.observed.endpoints if not one.deleting]
    leading = [one for one in there if status is not None and one.revision == status.revision]
    return next((one.runtime for one in (*leading, *there)), None)


def _launchers(state: ReconcileState) -> tuple[LauncherName, ...]:
    """Return the launchers of the plan: a job that has begun keeps its own, whatever is removed later."""
    served = state.observed.served
    if not state.started:
        return served
    launcher = None if state.status.plan is None else state.status.plan.launcher
    return (*(tuple(name for name in TRAINING if name == launcher) or served), *ENGINES)


def _read(model: type[Model], value: dict[str, JsonValue] | None) -> Model | None:
    """Parse measured facts; those in an older operator's form count as not measured, and the plan says so."""
    if value is None:
        return None
    try:
        return model.model_validate(value)
    except ValidationError:
        return None


def _adaptation(state: ReconcileState) -> Adaptation:
    adaptation = state.status.adaptation
    if adaptation is None:
        return Adaptation()
    return Adaptation(adaptation.micro_batch_limit, adaptation.skipped_strategies, adaptation.checkpoint_form)


def with_nodes(state: ReconcileState) -> ReconcileState:
    """Store the nodes' facts about their GPUs until the first stage begins: plans of later stages use the same ones."""
    read, gpus = state.observed.nodes, state.spec.resources.gpus_per_node
    nodes_facts: NodesFacts | None = None
    if gpus == 0 or (read is None and not state.settings.nodes.read):
        nodes_facts = None
    elif read is None:
        return state  # not requested yet
    elif read.failure is not None:
        nodes_facts = NodesFacts(words=read.failure)
    else:
        nodes_facts = facts_of_nodes(read.nodes, state.spec, state.settings)
    kept = None if nodes_facts is None else nodes_facts.model_dump(mode="json", by_alias=True, exclude_none=True)
    before = state.status.measured
    if kept == (None if before is None else before.nodes):
        return state
    return state.with_status(measured=(before or MeasuredStatus()).model_copy(update={"nodes": kept}))


def with_learned(state: ReconcileState) -> ReconcileState:
    """Store the ratios of finished jobs until the first stage begins: plans of later stages use the same ones, so that
    the end of another job changes nothing that runs.
    """
    before = state.status.measured or MeasuredStatus()
    kept = tuple(one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in state.observed.learned)
    if kept == before.learned:
        return state
    return state.with_status(measured=before.model_copy(update={"learned": kept}))


def measured_status(measured: MeasuredFacts, before: MeasuredStatus | None = None) -> MeasuredStatus:
    """Return the measurements as the status holds them, beside the facts of nodes, GPUs and finished jobs."""
    model = None if measured.model is None else _dumped(measured.model)
    data = None if measured.data is None else _dumped(measured.data)
    return (before or MeasuredStatus()).model_copy(update={"model": model, "data": data})


def _dumped(facts: BaseModel) -> dict[str, JsonValue]:
    return facts.model_dump(mode="json", by_alias=True, exclude_none=True)


def with_findings(state: ReconcileState, findings: Findings | TrainerReport | None) -> ReconcileState:
    """Store the GPUs, the transports and the remark of an attempt at train, if it reports them."""
    if findings is None:
        return state
    if findings.devices is not None:
        before = state.status.measured or MeasuredStatus()
        state = state.with_status(measured=before.model_copy(update={"device": _dumped(findings.devices)}))
    if findings.communication is not None:
        state = state.with_status(communication=communication_status(findings.communication))
    if findings.note is not None:
        # Whoever runs in a pod may report any text.
        state = state.with_status(note=shortened(printable(Redactor().text(findings.note)), MOST_NOTE))
    return state


def plan_status(job_plan: JobPlan) -> PlanStatus:
    """Return the part of a plan that the status shows."""
    training, world, memory = job_plan.trainer.training, job_plan.trainer.world, job_plan.memory
    undecided = None if job_plan.trainer.script is not None else 1
    terms = {} if memory is None else {term.name: term.bytes for term in memory.terms} | {TOTAL: memory.total_bytes}
    return PlanStatus(
        strategy=job_plan.strategy,
        launcher=job_plan.launcher,
        capacity=job_plan.capacity,
        network=None if job_plan.network is None else job_plan.network.transport,
        world_size=1 if world is None else world.size,
        product=_product(job_plan),
        micro_batch_size=undecided if training is None else training.batch.micro_batch_size,
        gradient_accumulation=undecided if training is None else training.batch.gradient_accumulation,
        data_parallel=None
        if training is None or training.strategy.replica_ranks == 1
        else training.batch.data_parallel,
        predict_workers=job_plan.predict_workers if job_plan.predict_workers > 1 else None,
        inference=tuple(_inference_status(job_plan, stage) for stage in job_plan.on_several_devices),
        memory_per_device=terms,
        estimated=EstimateStatus(
            duration_seconds=job_plan.estimate.seconds,
            cost=job_plan.estimate.cost,
            currency=job_plan.estimate.currency,
            step_seconds=job_plan.estimate.step_seconds,
            step_parts=job_plan.estimate.step_parts,
            pauses=job_plan.estimate.pauses,
            time_factor=job_plan.estimate.time_factor,
        ),
        device=_planned_for(job_plan.trainer.device),
        reasons=(*job_plan.reasons, *job_plan.assumptions)[:MOST_REASONS],
    )


def _product(job_plan: JobPlan) -> str | None:
    """Return the product of the training's GPU, or `cpu`; None if nothing is trained."""
    world, gpu = job_plan.trainer.world, job_plan.hardware.gpu
    if world is None:
        return None
    return "cpu" if world.device == "cpu" or gpu is None else gpu.product


def _inference_status(job_plan: JobPlan, stage: Stage) -> InferenceStatus:
    pod = job_plan.trainer.inference(stage)
    return InferenceStatus(
        stage=stage,
        processes=pod.processes,
        gpus_per_process=pod.devices_per_process,
        processes_per_model=pod.tensor if pod.tensor > 1 else None,
    )


def _planned_for(device: PlannedDevice | None) -> str | None:
    """Describe the GPU of unknown nodes, e.g. `unknown GPU with 15.0 GiB and bf16, assumed`."""
    if device is None:
        return None
    units = " and bf16" if device.bf16 else ", without bf16"
    return f"{device.product} with {human_bytes(device.memory_bytes)}{units}, {device.source}"


def plan_sentence(job_plan: JobPlan) -> str:
    """Return the plan in one sentence."""
    stages = " -> ".join(stage.value for stage in job_plan.stages)
    training, world = job_plan.trainer.training, job_plan.trainer.world
    if world is None:
        return f"{stages}: nothing is trained."
    kind = "spot " if job_plan.capacity == "spot" else ""
    nodes = f"{world.nodes} {kind}node{'s' * (world.nodes > 1)} x {world.processes_per_node} process"
    nodes += "es" * (world.processes_per_node > 1)
    if training is None:
        return f"{stages}: runs your program by {job_plan.launcher} on {nodes}."
    return (
        f"{stages}: trains with {job_plan.strategy} by {job_plan.launcher} on {nodes}; "
        f"batch {batch_arithmetic(training.batch)}."
    )


def problems_text(problems: tuple[Problem, ...]) -> str:
    """Return all problems in sentences: field, value, rule, hint."""
    return " ".join(_sentence(problem) for problem in problems)


def _sentence(problem: Problem) -> str:
    value = "" if problem.value is None else f" (value {problem.value})"
    rule, hint = problem.rule.rstrip("."), problem.hint.rstrip(".")
    return f"{problem.path}{value}: {rule}; {hint}." if problem.path else f"{rule}{value}; {hint}."


class NothingLeftToAdapt(Exception):  # noqa: N818 - an answer, not a defect
    """Error with the reason that no plan needs less memory."""


def _has_saved(state: ReconcileState, schedule: CheckpointSchedule) -> bool:
    """Return whether the attempt that ran last got far enough that there is a checkpoint to resume from."""
    progress, stage = state.status.progress, state.current
    if not schedule.resume or progress is None or not progress.step or stage is None:
        return False
    minutes = schedule.every_minutes or schedule.within_minutes
    if schedule.every_minutes is None and progress.step >= schedule.every_steps:
        return True
    return minutes is not None and seconds_since(stage.start_time, state.now) >= 60 * minutes


class NoReasonToReplan(Exception):  # noqa: N818 - an answer, not a defect
    """Error with the reason that an attempt which ended for another plan gets none."""


def replan(state: ReconcileState, report: TrainerReport | None) -> tuple[ReconcileState, str]:
    """Return the state with a plan for the GPUs that an attempt measured, and a sentence with the old and the new plan.

    Raise NoReasonToReplan where the job was planned for such GPUs already, or the report does not call for another
    plan; PlanRefused where the job does not fit them.
    """
    measured = None if report is None else report.devices
    if measured is None:
        raise NoReasonToReplan("its report has no measured GPUs")
    status = state.status.measured or MeasuredStatus()
    known = _replanned_for(status)
    if any(same_kind(measured.device, one) for one in known):
        raise NoReasonToReplan(f"the job was planned for {measured.device.product} already")
    if len(known) >= MOST_KINDS:
        raise NoReasonToReplan(f"the job was planned again for {len(known)} kinds of GPUs already")
    before = plan_now(state)
    training, planned = before.trainer.training, before.trainer.device
    why = None if training is None or planned is None else plan_change(planned, measured, training.precision)
    if why is None:
        raise NoReasonToReplan(f"the plan suits the reported {measured.text}")
    kinds = (*status.replanned_for, _dumped(measured.device))
    tried = state.with_status(measured=status.model_copy(update={"replanned_for": kinds}))
    after = plan_now(tried)
    sentence = f"{why[:1].upper()}{why[1:]}: {_form_of(before)} -> {_form_of(after)}."
    return _with_stages_of(tried.with_status(plan=plan_status(after)), after), sentence


def _with_stages_of(state: ReconcileState, job_plan: JobPlan) -> ReconcileState:
    """Return the state with the stages of a new plan, which may find room for an evaluation, or none any more. Those
    that have begun stay, and an endpoint has a stage of its own.
    """
    stored = {stage.name: stage for stage in state.status.stages}
    planned = set(job_plan.stages)
    stages = []
    for stage in Stage:
        status = stored.get(stage)
        if stage is Stage.SERVE or (status is not None and status.attempt):
            stages += [] if status is None else [status]
        elif stage in planned:
            stages.append(status or _pending(stage))
    return state.with_status(stages=tuple(stages))


def _pending(stage: Stage) -> StageStatus:
    return StageStatus(name=stage, state="Pending", attempt=0)


def _form_of(job_plan: JobPlan) -> str:
    """Return strategy, batch and precision of a training in a few words."""
    training = job_plan.trainer.training
    assert training is not None, "the same job trains or does not"
    return f"{job_plan.strategy} in {training.precision}, batch {batch_arithmetic(training.batch)}"


def adapt(state: ReconcileState, attempt: int) -> tuple[ReconcileState, str]:
    """Return the state with a plan that needs less memory, and the sentence why; raises NothingLeftToAdapt."""
    before = plan_now(state)
    was = _adaptation(state)
    if before.trainer.training is None:
        raise NothingLeftToAdapt("nothing is trained, so there is no micro-batch to halve")
    if was.checkpoint_form is None and _has_saved(state, before.trainer.training.checkpoints):
        was = replace(was, checkpoint_form=before.trainer.training.strategy.checkpoint_form)
    step = next_adaptation(before, was)
    earlier = state.status.adaptation or AdaptationStatus()
    changed = earlier.model_copy(update=asdict(step))
    tried = state.with_status(adaptation=changed)
    try:
        after = plan_now(tried)
    except PlanRefused as refused:
        raise NothingLeftToAdapt(problems_text(refused.problems)) from refused
    assert after.trainer.training is not None, "the same job trains or does not"
    batch = after.trainer.training.batch
    reason = (
        f"Attempt {attempt} of train ran out of memory with {before.strategy} and a micro-batch of "
        f"{before.trainer.training.batch.micro_batch_size}: the next one uses {after.strategy}, batch "
        f"{batch_arithmetic(batch)}."
    )
    final = changed.model_copy(update={"reasons": (*earlier.reasons, reason)[-MOST_ADAPTATIONS:]})
    return tried.with_status(adaptation=final, plan=plan_status(after)), reason


# ------------------------------------------------------------------------------------------------------------- adaption
# First the micro-batch is halved down to 1, with the global batch kept by accumulation; then the next strategy of the
# ladder (once there are checkpoints, the next that can resume from them) starts again at the micro-batch estimated to
# fit it. Each step removes an option, so that it terminates: `plan` refuses when none is left. Other modules determine
# the cause of a failure.


def next_adaptation(plan: JobPlan, current: Adaptation) -> Adaptation:
    """Return the adaptation that follows `current` after `plan` ran out of memory; ValueError if it trains nothing."""
    if plan.trainer.training is None:
        raise ValueError("nothing is trained, so there is no micro-batch to halve and no strategy to leave out")
    micro = plan.trainer.training.batch.micro_batch_size
    if micro > 1:
        return replace(current, micro_batch_limit=micro // 2)
    return replace(current, micro_batch_limit=None, skipped_strategies=(*current.skipped_strategies, plan.strategy))

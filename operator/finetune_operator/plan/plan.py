"""Create the complete plan from a job, facts and settings, with reasons and assumptions.

`plan` is pure: the same values give the same plan, on a laptop and in the operator. Requests are met exactly or refused
with all their problems; nothing is replaced silently. The phases are in the order in which decisions depend on each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from finetune_contract.arguments import compiles
from finetune_contract.choices import Stage
from finetune_contract.metrics import JUDGED_AFTER_TRAINING, WRITING
from finetune_operator.endpoints.endpoint_plan import choose_servers
from finetune_operator.plan.draft_start import begin
from finetune_operator.plan.engines import choose_engine, choose_predict_engine
from finetune_operator.plan.hardware.capacity import choose_capacity
from finetune_operator.plan.hardware.network_choice import choose_network
from finetune_operator.plan.hardware.planned_devices import with_planned_device, with_sufficient_memory
from finetune_operator.plan.inference.inference import check_inference, choose_inference, choose_optimization
from finetune_operator.plan.inference.inference_memory import inference_tokens
from finetune_operator.plan.inference.inference_processes import choose_processes, choose_tensor, choose_workers
from finetune_operator.plan.memory.adapter_sizes import choose_adapter
from finetune_operator.plan.memory.memory_workload import Workload
from finetune_operator.plan.memory.model_parallel_plan import check_model_parallel
from finetune_operator.plan.memory.process_memory import loss_chunk_tokens, reshards_head
from finetune_operator.plan.memory.sequence_plan import check_sequence
from finetune_operator.plan.placement import check_place, choose_launcher, choose_world
from finetune_operator.plan.schedule import choose_checkpoints, choose_steps
from finetune_operator.plan.script import SCRIPT, choose_script
from finetune_operator.plan.strategy.alternatives import Alternative, alternatives
from finetune_operator.plan.strategy.choice import is_quicker
from finetune_operator.plan.strategy.combination_checks import check_rules
from finetune_operator.plan.strategy.compilation import choose_compilation
from finetune_operator.plan.strategy.ladder import workload
from finetune_operator.plan.strategy.precision_choice import choose_precision
from finetune_operator.plan.strategy.strategy import choose_strategy
from finetune_operator.plan.time.asynchronous_saving import choose_saving
from finetune_operator.plan.time.cost import cost_problems, estimate_training
from finetune_operator.plan.time.learned import correction_reasons
from finetune_operator.plan.trainer_order import INSTEAD_OF_TEXT, trainer_job
from finetune_operator.plan.types.draft import Draft, decided
from finetune_operator.plan.types.plan_types import Adaptation, Estimate, Facts, HeadForm, JobPlan, PlanRefused, Recipe
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import Settings
from finetune_operator.spec.types import FineTuneJob, FineTuneJobSpec

Phase: TypeAlias = Callable[[Draft], Draft]

NOT_ADAPTED = Adaptation()
"""Adaptation of the first attempt: none."""


def plan(
    job: FineTuneJob,
    facts: Facts,
    settings: Settings,
    adaptation: Adaptation = NOT_ADAPTED,
    *,
    as_known: bool = False,
) -> JobPlan:
    """Plan `job`, with the adaptation to earlier attempts that ran out of memory.

    A job that does not fit, but may once prepare has measured the model and the rows, gets a provisional plan; with
    `as_known` it is refused. In a cluster a job that does not fit an unknown GPU is planned for a larger one, as the
    training measures its GPU. Raise PlanRefused with all problems of the first group of phases that found any.
    """
    draft = begin(job, facts, settings, adaptation, as_known)
    try:
        return _plan(draft)
    except PlanRefused:
        larger = None if as_known or facts.local else with_sufficient_memory(draft, _fits)
        if larger is None:
            raise
    return _plan(larger)


def _fits(draft: Draft) -> bool:
    try:
        _plan(draft)
    except PlanRefused:
        return False
    return True


def _plan(draft: Draft) -> JobPlan:
    first = (
        choose_stages,
        choose_engine,
        choose_inference,
        choose_workers,
        choose_predict_engine,
        choose_tensor,
        choose_processes,
        choose_optimization,
        choose_servers,
        check_place,
        check_lengths,
        check_answers,
    )
    draft = _walk(draft, *first, choose_packing, choose_launcher)
    if draft.script is not None:
        draft = _walk(draft, choose_world, choose_network, check_rules, choose_script, choose_capacity, check_inference)
    elif draft.loops:
        draft = with_planned_device(_walk_training(draft), draft, _walk_training)
    else:
        draft = _walk(draft, check_rules, check_inference)
    return _finish(draft)


def other_forms(job: FineTuneJob, facts: Facts, settings: Settings) -> tuple[Alternative, ...]:
    """Return the planned form of a job's training and all others that the job leaves open; none for a job without the
    built-in loop. PlanRefused.
    """
    made = plan(job, facts, settings, as_known=True)
    training = made.trainer.training
    if training is None:
        return ()
    formed = formed_draft(job, facts, settings, scaled=training.precision == "fp16")
    planned = replace(formed, strategy=training.strategy, batch=training.batch, memory=made.memory)
    return alternatives(replace(planned, checkpoints=training.checkpoints))


def formed_draft(job: FineTuneJob, facts: Facts, settings: Settings, scaled: bool = True) -> Draft:
    """Return the draft of a training with all that its strategy depends on; `scaled`: `auto` may choose fp16.

    PlanRefused.
    """
    draft = begin(job, facts, settings, NOT_ADAPTED, as_known=True)
    first = (choose_stages, choose_packing, choose_launcher, choose_world, choose_network, choose_precision)
    return _formed(_walk(replace(draft, scaled=scaled), *first))


def misfits(job: FineTuneJob, facts: Facts, settings: Settings) -> tuple[Problem, ...]:
    """Return the problems, by the known facts, of a job planned provisionally because prepare measures first."""
    try:
        plan(job, facts, settings, as_known=True)
    except PlanRefused as refused:
        return refused.problems
    return ()


def _walk_training(draft: Draft) -> Draft:
    """Run the phases of the built-in loop. Where `auto` may choose fp16, fp32 is compared: layers and stages can be
    split in it, so that it may be quicker, or the only precision that fits.
    """
    begun = _walk(draft, choose_world, choose_network, choose_precision)
    if begun.precision != "fp16" or draft.training.precision != "auto":
        return _walk_formed(_formed(begun))
    plain = replace(draft, scaled=False)
    formed = _formed(begun)
    if _is_quicker_in_fp32(plain, formed):
        return _walk_training(plain)
    try:
        return _walk_formed(formed)
    except PlanRefused:
        return _walk_training(plain)


def _walk_formed(formed: Draft) -> Draft:
    return _walk(formed, choose_strategy, choose_compilation, choose_saving, check_inference)


def _is_quicker_in_fp32(plain: Draft, in_fp16: Draft) -> bool:
    try:
        in_fp32 = _formed(_walk(plain, choose_world, choose_network, choose_precision))
    except PlanRefused:
        return False
    return is_quicker(in_fp32, in_fp16)


def _formed(draft: Draft) -> Draft:
    """Return a draft with a world and a precision with all that its strategy depends on."""
    formed = _walk(draft, check_rules, choose_adapter, choose_steps)
    return _walk(formed, check_model_parallel, check_sequence, choose_checkpoints, choose_capacity)


def _walk(draft: Draft, *phases: Phase) -> Draft:
    for phase in phases:
        draft = phase(draft)
    if draft.problems:
        raise PlanRefused(draft.problems)
    return draft


# --------------------------------------------------------------------------------------------------------------- phases


def choose_stages(draft: Draft) -> Draft:
    """Choose the stages that the job needs, in order."""
    spec = draft.spec
    stages: list[Stage] = []
    predicts = spec.predict is not None
    if spec.training is not None or spec.evaluation is not None or predicts:
        stages.append(Stage.PREPARE)
    if spec.training is not None:
        stages.append(Stage.TRAIN)
    # The model of a user's own program may not be measurable: evaluate it only on request.
    if draft.loops or spec.evaluation is not None:
        stages.append(Stage.EVALUATE)
    if predicts:
        stages.append(Stage.PREDICT)
    if spec.endpoint is not None and not draft.local:
        stages.append(Stage.SERVE)
    if spec.endpoint is not None and not stages:
        hint = "apply the job to a cluster, or add spec.evaluation"
        return draft.refusing(("endpoint",), None, "without a cluster nothing is served", hint, "NotSupported")
    if spec.endpoint is not None and draft.local:
        draft = draft.because("spec.endpoint: without a cluster nothing is served")
    return replace(draft, stages=tuple(stages)).because(
        f"stages {' -> '.join(stage.value for stage in stages)}: what the job asks for and what that needs"
    )


def check_lengths(draft: Draft) -> Draft:
    """Refuse rows longer than the model's positions, if the model is known; otherwise the trainer does."""
    asked, limit = draft.spec.preparation.max_length, draft.model.max_positions
    if not draft.model_known or asked is None or limit is None or asked <= limit:
        return draft
    return draft.refusing(
        ("preparation", "maxLength"),
        asked,
        f"the model holds at most {limit} tokens",
        f"set it to {limit} or less, or leave it out",
    )


def check_answers(draft: Draft) -> Draft:
    """Refuse longer answers than the model's positions, if the model is known and answers are written."""
    asked, limit, task = draft.spec.generation.max_new_tokens, draft.model.max_positions, draft.spec.task
    judged = Stage.EVALUATE in draft.stages and task in JUDGED_AFTER_TRAINING
    writes = judged or (Stage.PREDICT in draft.stages and task in WRITING)
    if not writes or not draft.model_known or limit is None or asked <= limit:
        return draft
    return draft.refusing(
        ("generation", "maxNewTokens"),
        asked,
        f"the model holds at most {limit} tokens",
        f"set it to {limit - 1} or less",
    )


def packs_rows(spec: FineTuneJobSpec) -> bool:
    """Return whether the rows of a training by the built-in loop share sequences. By default plain text is packed, as
    its row borders mean little, but prompts and conversations are not: there a step is a number of rows. Rows divided
    among processes are not packed either, as they are long.
    """
    asked = spec.preparation.packing
    return spec.task == "text-generation" and (
        asked == "always" or (asked == "auto" and _reads_text(spec) and spec.parallelism.sequence == 1)
    )


def _reads_text(spec: FineTuneJobSpec) -> bool:
    given = spec.dataset.columns.model_dump(exclude_none=True) if spec.dataset else {}
    return not given.keys() & INSTEAD_OF_TEXT


def choose_packing(draft: Draft) -> Draft:
    """Choose whether rows share sequences."""
    spec, asked = draft.spec, draft.spec.preparation.packing
    if not draft.loops:
        return draft
    data = draft.data
    if asked == "auto" and data is not None and data.shape is not None and "text" not in data.columns:
        return draft.because(f"rows are not packed: they are no plain text, but have the shape {data.shape}")
    if packs_rows(spec):
        what = "as asked" if asked == "always" else "rows are plain text"
        return replace(draft, packing=True).because(
            f"rows are packed into sequences of maxLength tokens, which globalBatchSize counts: {what}"
        )
    if asked == "auto" and spec.task == "text-generation" and _reads_text(spec):
        return draft.because(
            f"rows are not packed: those that {spec.parallelism.sequence} processes divide among them are long; "
            "preparation.packing always packs them"
        )
    return draft


# --------------------------------------------------------------------------------------------------------------- finish


def _no_estimate(draft: Draft) -> str:
    return "nothing is trained" if draft.script is None else "no estimate: what a program of your own does is not known"


def _recipe(draft: Draft) -> Recipe:
    work = workload(draft, decided(draft.strategy), decided(draft.batch).micro_batch_size)
    return recipe_of(work, compiles(draft.training.arguments))


def _finish(draft: Draft) -> JobPlan:
    if Stage.EVALUATE in draft.stages or Stage.PREDICT in draft.stages:
        draft = draft.because(
            f"inference batches of {inference_tokens(draft):,} padded tokens: rows of like length together, "
            "as many as fit in that"
        )
    draft = correction_reasons(draft)
    estimate = estimate_training(draft) if draft.loops else Estimate(basis=_no_estimate(draft))
    if problems := cost_problems(draft, estimate):
        raise PlanRefused(problems)
    return JobPlan(
        name=draft.job.name,
        stages=draft.stages,
        launcher=decided(draft.launcher),
        strategy=decided(draft.strategy).label if draft.loops else SCRIPT if draft.script is not None else "none",
        capacity=draft.capacity,
        trainer=trainer_job(draft),
        deepspeed_overrides=draft.spec.parallelism.deepspeed_config,
        memory=draft.memory,
        recipe=_recipe(draft) if draft.loops else None,
        servers=draft.inference.servers,
        network=draft.network,
        estimate=estimate,
        hardware=draft.hardware,
        model=draft.model,
        data=draft.data,
        reasons=draft.reasons,
        assumptions=draft.assumptions,
    )


# --------------------------------------------------------------------------------------------------------------- recipe


def recipe_of(work: Workload, compiled: bool) -> Recipe:
    """Return the recipe of a training."""
    return Recipe(loss="chunked" if loss_chunk_tokens(work) else "full", compiled=compiled, head=_head(work))


def _head(work: Workload) -> HeadForm:
    strategy = work.strategy
    if strategy.tensor > 1:
        return "split"
    if strategy.zero_stage == 3 or reshards_head(work):
        return "resharded"
    return "kept" if strategy.name == "fsdp" else "whole"

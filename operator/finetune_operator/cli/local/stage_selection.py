"""Stages that a run on this machine executes, and the inputs that they need."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_contract.choices import Stage
from finetune_operator.cli.local import hub_reach
from finetune_operator.cli.local.local_request import CannotRunError, RunRequest
from finetune_operator.cli.local.workspace import (
    AFTER_TRAINING,
    LOCAL_STAGES,
    changed_after_training,
    check_same_job,
    finished,
)
from finetune_operator.cli.terminal.console import note
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, JobPlan
from finetune_operator.spec.types import FineTuneJob


def stages_to_redo(request: RunRequest) -> tuple[Stage, ...]:
    """Return the stages to run again. With --restart: all, or the named ones and their dependents. Without it: those
    that only evaluate or predict, if their own settings changed; raise DifferentJobError if others did.
    """
    if request.restart:
        return _restarted(request)
    changed = changed_after_training(request.paths, request.job)
    checked = _up_to_last(request.stages) if request.stages else LOCAL_STAGES
    check_same_job(request.paths, request.job, [stage for stage in checked if stage not in changed])
    redone = tuple(stage for stage in changed if stage in (request.stages or LOCAL_STAGES))
    for stage in redone:
        note(f"{stage}: {'; '.join(changed[stage])}. It runs again; prepared data and the trained model are kept.")
    return redone


def _restarted(request: RunRequest) -> tuple[Stage, ...]:
    """Return, for --restart, all stages, or the named ones and their dependents."""
    if not request.stages:
        return LOCAL_STAGES
    first = min(LOCAL_STAGES.index(stage) for stage in request.stages)
    if LOCAL_STAGES[first] in AFTER_TRAINING:
        return tuple(stage for stage in LOCAL_STAGES if stage in request.stages)  # neither depends on the other
    return LOCAL_STAGES[first:]


def _up_to_last(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    last = max(LOCAL_STAGES.index(stage) for stage in stages)
    return LOCAL_STAGES[: last + 1]


def check_hub(request: RunRequest, redone: Sequence[Stage]) -> None:
    """Raise CannotRunError if a stage needs data that neither the Hub nor its cache here has."""
    stages = [stage for stage in request.stages or LOCAL_STAGES if _is_to_run(request, stage, redone)]
    absent = hub_reach.missing(uris_of(request.job, stages)) if stages else ()
    if absent:
        # Faults of the job come first. The machine was not measured; it is assumed to be as the job requests.
        plan(request.job, Facts(local=True), request.settings)
        raise CannotRunError(
            f"{' and '.join(absent)}: {hub_reach.unreachable_reason()}, and there is no copy here. {hub_reach.HINT}"
        )


def _is_to_run(request: RunRequest, stage: Stage, redone: Sequence[Stage]) -> bool:
    spec = request.job.spec
    has = {Stage.TRAIN: spec.training, Stage.EVALUATE: spec.evaluation, Stage.PREDICT: spec.predict}
    if stage in has and has[stage] is None:
        return False
    return stage in redone or finished(request.paths, stage) is None


def uris_of(job: FineTuneJob, stages: Sequence[Stage] = LOCAL_STAGES) -> dict[str, hub_reach.Kind]:
    """Return the URIs that these stages read, each with its kind."""
    spec = job.spec
    uris: dict[str, hub_reach.Kind] = {spec.model.uri: "model"}
    if spec.dataset is not None and Stage.PREPARE in stages:
        uris[spec.dataset.uri] = "dataset"
    if spec.predict is not None and spec.predict.dataset is not None and Stage.PREDICT in stages:
        uris[spec.predict.dataset.uri] = "dataset"
    return uris


def stages_to_run(request: RunRequest, planned: JobPlan) -> tuple[Stage, ...]:
    """Return the planned stages that the request names, or all; CannotRunError for one that the job lacks."""
    missing = [stage for stage in request.stages if stage not in planned.stages]
    if missing:
        raise CannotRunError(
            f"--stage {missing[0]}: the job has no such stage; it has {', '.join(planned.stages)}. "
            f"Add {_field_of(missing[0])} to the job, or name another stage"
        )
    return tuple(
        stage for stage in LOCAL_STAGES if stage in planned.stages and (not request.stages or stage in request.stages)
    )


def _field_of(stage: Stage) -> str:
    return {Stage.TRAIN: "spec.training", Stage.EVALUATE: "spec.evaluation", Stage.PREDICT: "spec.predict"}.get(
        stage, "spec.dataset"
    )


def check_inputs(request: RunRequest, planned: JobPlan, stages: Sequence[Stage], redone: Sequence[Stage]) -> None:
    """Raise CannotRunError if a named stage depends on others that are neither done nor named."""
    for stage in stages:
        needed = [
            earlier
            for earlier in LOCAL_STAGES[: LOCAL_STAGES.index(stage)]
            if earlier is not Stage.EVALUATE and earlier in planned.stages and earlier not in stages
            if earlier in redone or finished(request.paths, earlier) is None
        ]
        if needed:
            raise CannotRunError(
                f"--stage {stage}: needs the results of {' and '.join(needed)}, and {request.paths.root} has none; "
                f"add {' '.join(f'--stage {earlier}' for earlier in needed)}"
            )

"""Input of the trainer: the texts of job.json and deepspeed.json, and the arguments that name them.

Equal plans give equal bytes, so that the hash of the texts shows whether a running attempt matches the current plan.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal, TypeAlias

from finetune_contract.choices import Stage
from finetune_contract.contract_models import Order
from finetune_contract.layout import ESTIMATE_FILE
from finetune_contract.plan_check import PlannedTraining
from finetune_contract.trainer_job import Script, TrainerJob, Training
from finetune_operator.jobs.render.claims import with_mounted_paths
from finetune_operator.jobs.render.deepspeed_config import deepspeed_config
from finetune_operator.jobs.render.render_types import RenderContext
from finetune_operator.jobs.render.templates import program
from finetune_operator.plan.types.plan_types import JobPlan

JOB_FILE = "job.json"
DEEPSPEED_FILE = "deepspeed.json"
GUARD: Literal["endpoint_guard"] = "endpoint_guard"
"""Program beside vLLM's server; its file is GUARD with the suffix .py."""
Starter: TypeAlias = Literal["process", "index", "torchrun", "mpirun"]
"""Program that starts the ranks of a stage."""


def files(plan: JobPlan) -> dict[str, str]:
    """Return texts by file name, for a run on this machine; `deepspeed.json` only if the plan trains with DeepSpeed,
    `estimate.json` only if it has estimates of the training.
    """
    texts = {JOB_FILE: plan.trainer.to_json()}
    estimated = planned_training(plan)
    if estimated is not None:
        texts[ESTIMATE_FILE] = estimated.to_json()
    config = deepspeed_config(plan)
    if config is not None:
        texts[DEEPSPEED_FILE] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return texts


def stage_files(plan: JobPlan, context: RenderContext, stage: Stage) -> dict[str, str]:
    """Return the files for the pods of one stage: claims are paths there, the job has an identity, and only training
    reads `deepspeed.json` and `estimate.json`.
    """
    if stage is Stage.SERVE and plan.servers is not None and plan.servers.vllm is not None:
        # vLLM's server reads no job.json: all choices are options of its command.
        return {f"{GUARD}.py": program(GUARD)}
    run = None if context.owner is None else context.owner.uid
    # Other stages get no `serving`, so that an endpoint can change while an attempt runs.
    serving = plan.trainer.serving if stage is Stage.SERVE else None
    device = plan.trainer.device if stage is Stage.TRAIN else None
    trainer = with_mounted_paths(plan.trainer.model_copy(update={"run": run, "serving": serving, "device": device}))
    if stage is not Stage.EVALUATE and trainer.evaluation is not None:
        plain = trainer.evaluation.model_copy(update={"optimization": "none", "tolerance": None})
        trainer = trainer.model_copy(update={"evaluation": plain})
    if stage is Stage.SERVE:
        trainer = _without_processes(trainer)
    texts = files(plan.model_copy(update={"trainer": trainer}))
    if stage is not Stage.TRAIN:
        texts.pop(DEEPSPEED_FILE, None)
        texts.pop(ESTIMATE_FILE, None)
    return texts


def stage_arguments(stage: Stage, job: str, workspace: str) -> tuple[str, ...]:
    """Return the arguments of the trainer's program for one rank of `stage`."""
    return (stage.value, "--job", job, "--workspace", workspace)


def _without_processes(trainer: TrainerJob) -> TrainerJob:
    """Return the job without the processes of other stages and their network, which servers do not read: another number
    of them is no reason to replace servers.
    """
    one = {"processes": 1, "devices_per_process": 1, "tensor": 1}
    parts: dict[str, Order | None] = {
        "evaluation": None if trainer.evaluation is None else trainer.evaluation.model_copy(update=one),
        "predict": None if trainer.predict is None else trainer.predict.model_copy(update=one),
    }
    trains: tuple[tuple[str, Training | Script | None], ...] = (
        ("training", trainer.training),
        ("script", trainer.script),
    )
    for name, part in trains:
        if part is not None:
            parts[name] = part.model_copy(update={"world": part.world.model_copy(update={"network": None})})
    return trainer.model_copy(update=parts)


def launch_arguments(
    stage: Stage, job: str, workspace: str, starter: Starter, deepspeed: str | None
) -> tuple[str, ...]:
    """Return the arguments of the trainer's program that starts the ranks of `stage`, in a pod or on this machine."""
    config = () if deepspeed is None else ("--deepspeed", deepspeed)
    return ("launch", *stage_arguments(stage, job, workspace), *config, "--with", starter)


def fingerprint(texts: dict[str, str]) -> str:
    """Return the sha256 of names and texts, in the order of the names, in hexadecimal.

    Estimates are left out: they change with prices and with the operator's version, and nothing that runs with them.
    """
    digest = hashlib.sha256()
    for name in sorted(texts.keys() - {ESTIMATE_FILE}):
        digest.update(f"{name}\0{len(texts[name].encode())}\0{texts[name]}".encode())
    return digest.hexdigest()


# -------------------------------------------------------------------------------------------------------------- figures


def planned_training(plan: JobPlan) -> PlannedTraining | None:
    """Return the estimates of the plan's training; None without the built-in loop, or without estimates."""
    memory, estimate = plan.memory, plan.estimate
    if plan.trainer.training is None or (memory is None and estimate.step_seconds is None):
        return None
    return PlannedTraining(
        memory_bytes=None if memory is None else memory.total_bytes,
        memory_terms={} if memory is None else {term.name: term.bytes for term in memory.terms},
        step_seconds=estimate.step_seconds,
        step_parts=estimate.step_parts,
    )

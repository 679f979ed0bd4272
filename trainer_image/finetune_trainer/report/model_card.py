"""The model card, `README.md` beside the weights, and the settings that it shares with the report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import jinja2
import yaml

from finetune_contract.data_settings import ModelSource
from finetune_contract.facts import DataFacts
from finetune_contract.hub import is_hub_name
from finetune_contract.layout import JobPaths
from finetune_contract.report import Communication
from finetune_contract.trainer_job import Adapter, TrainerJob, Training
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import write_atomically
from finetune_trainer.core.uris import public_uri
from finetune_trainer.models.loading import MODEL_CARD, model_file


def write_model_card(paths: JobPaths, job: TrainerJob, facts: DataFacts, metrics: Mapping[str, Any]) -> None:
    """Write `model/README.md` with the front matter that the Hub reads. `metrics` is the content of metrics.json."""
    from finetune_trainer.tasks.task_registry import task_of

    evaluated = metrics.get("evaluate", {})
    scores = {name: value for name, value in evaluated.items() if isinstance(value, float) and name != "loss"}
    card = task_of(job).description.card(job, facts)
    tag = card.tag or job.task
    text = (
        page_templates(autoescape=False)
        .get_template("model_card.md.jinja")
        .render(
            front_matter=yaml.safe_dump(
                _front_matter(job, tag, scores, evaluated), sort_keys=False, allow_unicode=True
            ),
            job=job,
            adapter=job.training.adapter if job.training else None,
            facts=facts,
            scores=scores,
            evaluated=evaluated,
            majority=metrics.get("majority", {}),
            model=public_uri(job.model.uri),
            data=public_uri(job.dataset.uri) if job.dataset else None,
            folder=repr(f"{job.name}/{paths.model.name}"),
            card=card,
            tag=tag,
            settings=training_settings(job, metrics.get("train", {})),
        )
    )
    write_atomically(paths.model / MODEL_CARD, text)


def _front_matter(
    job: TrainerJob, tag: str, scores: Mapping[str, float], evaluated: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the metadata; only Hub names appear as such: a local path is no repository."""
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": tag, "tags": ["fine-tuned", job.task]}
    front |= _origin(job.model)
    dataset = job.dataset.uri if job.dataset else ""
    if dataset.startswith("hf://"):
        front["datasets"] = [dataset.removeprefix("hf://")]
    if scores:
        front["metrics"] = list(scores)
        results = [{"type": name, "value": round(value, 6)} for name, value in scores.items()]
        public = public_uri(dataset).partition("://")[2] or public_uri(dataset)
        data = {"name": public.rpartition("/")[2], "type": public, "split": evaluated.get("split")}
        front["model-index"] = [
            {"name": job.name, "results": [{"task": {"type": tag}, "dataset": data, "metrics": results}]}
        ]
    return front


def _origin(base: ModelSource) -> dict[str, Any]:
    """Return the base model's name on the Hub and its license: those that its card or config declares, for a model on
    the Hub its own name.
    """
    config, card = _declared(base, "config.json", json.loads), _declared(base, MODEL_CARD, _front_matter_of)
    # transformers' Trainer, too, takes the config's for the base (TrainingSummary.from_trainer).
    names = card.get("base_model", config.get("_name_or_path"))
    known = [name for name in (names if isinstance(names, list) else [names]) if is_hub_name(str(name or ""))]
    origin: dict[str, Any] = {"base_model": known[0] if len(known) == 1 else known}
    if base.uri.startswith("hf://"):
        origin["base_model"] = base.uri.removeprefix("hf://")
    origin |= {name: card.get(name, config.get(name)) for name in ("license", "license_name", "license_link")}
    return {name: value for name, value in origin.items() if value and isinstance(value, str | list)}


def _declared(base: ModelSource, name: str, read: Callable[[str], Any]) -> dict[str, Any]:
    """Return the content of a file of the base model; {} if it cannot be read, as the card only repeats it."""
    with suppress(OSError, ValueError, yaml.YAMLError, StageError):
        file = model_file(base, name)
        content = None if file is None else read(file.read_text(encoding="utf-8-sig"))
        return content if isinstance(content, dict) else {}
    return {}


def _front_matter_of(text: str) -> Any:
    _, mark, rest = text.partition("---\n")
    return yaml.safe_load(rest.partition("\n---")[0]) if mark else None


def training_settings(job: TrainerJob, train: Mapping[str, Any]) -> dict[str, str]:
    """Return the training settings, name -> text for people. `train`: that section of metrics.json."""
    training = job.training
    if job.script is not None:
        script, world = job.script, job.script.world
        return {
            "Program": f"{script.entry_point} of {script.url} at {script.ref}",
            "Arguments": shlex.join(script.arguments) or "none",
            "Processes": f"{world.size} on {world.device}",
        }
    if training is None:
        return {}
    batch, strategy = training.batch, training.strategy
    stage = f", ZeRO stage {strategy.zero_stage}" if strategy.zero_stage is not None else ""
    if strategy.name == "fsdp":
        stage = f", {strategy.fsdp_sharding} sharding"
    moved = {
        "optimizer": strategy.offload_optimizer,
        "parameters": strategy.offload_parameters,
        "activations": strategy.offload_activations,
    }
    offload = "".join(f", {state} offloaded to {where}" for state, where in moved.items() if where != "none")
    spread = f", tensor {strategy.tensor}" if strategy.tensor > 1 else ""
    if strategy.pipeline is not None:
        pipeline = strategy.pipeline
        spread += f", pipeline {pipeline.degree} ({pipeline.schedule}, {pipeline.micro_batches} micro-batches per pass)"
    adapter = {} if training.adapter is None else {"Adapter": _adapter_text(training.adapter)}
    arithmetic = f"{batch.micro_batch_size} x {batch.gradient_accumulation} accumulation x {batch.data_parallel} ranks"
    return {
        "Strategy": f"{strategy.name}{stage}{spread}{offload}",
        "Processes": f"{training.world.size} on {training.world.device}",
        **_communication(train.get("communication")),
        "Precision": training.precision,
        "Global batch": f"{batch.global_batch_size} = micro-batch {arithmetic}",
        "Optimizer steps": _steps_text(training, train),
        **adapter,
        "Optimizer": training.optimizer,
        "Learning rate": f"{training.learning_rate:g}",
        "Schedule": f"{training.scheduler}, {training.warmup_steps} warm-up steps",
        "Weight decay": f"{training.weight_decay:g}",
        "Gradient clipping": f"{training.max_grad_norm:g}" if training.max_grad_norm else "none",
        "Label smoothing": f"{training.label_smoothing:g}",
        "Activation checkpointing": strategy.activation_checkpointing,
        "Seed": str(training.seed),
        **{f"arguments.{name}": json.dumps(value, ensure_ascii=False) for name, value in training.arguments.items()},
    }


def _communication(stored: object) -> dict[str, str]:
    """Return the transports that NCCL chose; {} if they are not known."""
    if not isinstance(stored, dict):
        return {}
    transports = Communication.model_validate(stored)
    return {"Communication": f"NCCL {transports.library or ''}: {transports.words}"}


def _steps_text(training: Training, train: Mapping[str, Any]) -> str:
    """Name the number of steps run, and the step of the kept weights."""
    ran = train.get("steps", training.max_steps)
    text = f"{ran} ({ran / training.steps_per_epoch:.2f} epochs)"
    if ran < training.max_steps:
        text += f" of {training.max_steps} planned: stopped early"
    best = train.get("best_step")
    return text if best is None else f"{text}; weights of step {best}, the best evaluation"


def _adapter_text(adapter: Adapter) -> str:
    layers = ", ".join(adapter.target_modules or ("all linear layers of the blocks",))
    return f"{adapter.method}, rank {adapter.rank}, alpha {adapter.alpha:g}, dropout {adapter.dropout:g}, on {layers}"


def page_templates(*, autoescape: Literal[True, False]) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("finetune_trainer.report"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _markdown_cell
    return environment


def _markdown_cell(value: object) -> str:
    """Escape text for a Markdown table or list: one line, without Markdown or HTML markup."""
    text = " ".join(str(value).split())
    for mark in "\\`*_[]<>|#":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return text

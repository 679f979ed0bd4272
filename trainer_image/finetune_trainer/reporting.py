"""What a job leaves for people: metrics.json, environment.json, the model card, report.html.

Every file is written beside its place and moved there, so a reader never sees half of one. The report is one file
that loads nothing from anywhere; all text in it is escaped by the template engine.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jinja2
import yaml

from finetune_contract.facts import DataFacts
from finetune_contract.job import Adapter, TrainerJob
from finetune_contract.layout import FailureClass, JobPaths
from finetune_trainer.failures import StageError
from finetune_trainer.files import write_atomically
from finetune_trainer.training.history import History
from finetune_trainer.uris import public_uri

SAMPLES_FILE = "samples.json"
"""Some evaluated rows with their predictions, below the job's folder."""
_DISTRIBUTIONS = [
    "finetune-trainer",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "accelerate",
    "deepspeed",
    "peft",
    "safetensors",
    "numpy",
    "pyarrow",
    "scikit-learn",
]


# ------------------------------------------------------------------------------------------------- metrics, samples


def merge_metrics(paths: JobPaths, section: Mapping[str, Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Puts `section`, such as `{"train": {...}}`, into metrics.json: its keys are replaced, those in `without` go,
    others stay. Returns all of it.
    """
    found = _read_json(paths.metrics) or {}
    merged = {**{name: value for name, value in found.items() if name not in without}, **section}
    write_atomically(paths.metrics, json.dumps(merged, indent=2, ensure_ascii=False) + "\n")
    return merged


def write_samples(paths: JobPaths, samples: Sequence[Mapping[str, Any]]) -> None:
    """Keeps evaluated rows for the report: `row`, `text` (a list of texts), `label`, `predicted`, `score`."""
    write_atomically(paths.root / SAMPLES_FILE, json.dumps(samples, indent=2, ensure_ascii=False) + "\n")


def _read_json(path: Path) -> Any:
    """None when the file is not there; StageError PROGRAM when it is there and is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise StageError(
            FailureClass.PROGRAM,
            "DamagedFile",
            f"{path} is not JSON: {error}",
            f"Delete {path.name}; it is written again.",
        ) from error


# ------------------------------------------------------------------------------------------------------ environment


def write_environment(paths: JobPaths) -> None:
    """Versions and machine, without host names, user names or environment variables."""
    from finetune_trainer.facts import hardware_facts

    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "versions": {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None},
        "hardware": hardware_facts().model_dump(mode="json", by_alias=True),
    }
    cuda = _cuda_version()
    if cuda is not None:
        environment["cuda"] = cuda
    write_atomically(paths.environment, json.dumps(environment, indent=2) + "\n")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cuda_version() -> str | None:
    import torch

    return torch.version.cuda if torch.cuda.is_available() else None


# ------------------------------------------------------------------------------------------------------- model card


def write_model_card(paths: JobPaths, job: TrainerJob, facts: DataFacts, metrics: Mapping[str, Any]) -> None:
    """Writes `model/README.md` with the front matter that the Hub reads. `metrics` is the content of metrics.json."""
    from finetune_trainer.tasks.base import task_module

    evaluated = metrics.get("evaluate", {})
    scores = {name: value for name, value in evaluated.items() if isinstance(value, float) and name != "loss"}
    text = (
        _templates(autoescape=False)
        .get_template("model_card.md.jinja")
        .render(
            front_matter=yaml.safe_dump(_front_matter(job, scores, evaluated), sort_keys=False, allow_unicode=True),
            job=job,
            adapter=job.training.adapter if job.training else None,
            facts=facts,
            scores=scores,
            evaluated=evaluated,
            majority=metrics.get("majority", {}),
            model=public_uri(job.model.uri),
            data=public_uri(job.dataset.uri) if job.dataset else None,
            folder=repr(f"{job.name}/{paths.model.name}"),
            card=task_module(job.task).card(job, facts),
            settings=_training_settings(job),
        )
    )
    write_atomically(paths.model / "README.md", text)


def _front_matter(job: TrainerJob, scores: Mapping[str, float], evaluated: Mapping[str, Any]) -> dict[str, Any]:
    """Hub names appear only where they are Hub names: a local path is no repository."""
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": job.task, "tags": ["fine-tuned", job.task]}
    if job.model.uri.startswith("hf://"):
        front["base_model"] = job.model.uri.removeprefix("hf://")
    dataset = job.dataset.uri if job.dataset else ""
    if dataset.startswith("hf://"):
        front["datasets"] = [dataset.removeprefix("hf://")]
    if scores:
        front["metrics"] = list(scores)
        results = [{"type": name, "value": round(value, 6)} for name, value in scores.items()]
        public = public_uri(dataset).partition("://")[2] or public_uri(dataset)
        data = {"name": public.rpartition("/")[2], "type": public, "split": evaluated.get("split")}
        front["model-index"] = [
            {"name": job.name, "results": [{"task": {"type": job.task}, "dataset": data, "metrics": results}]}
        ]
    return front


def _training_settings(job: TrainerJob) -> dict[str, str]:
    """Name -> value of what was trained with, in words for people."""
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
    offload = f", optimizer offloaded to {strategy.offload_optimizer}" if strategy.offload_optimizer != "none" else ""
    adapter = {} if training.adapter is None else {"Adapter": _adapter_words(training.adapter)}
    arithmetic = f"{batch.micro_batch_size} x {batch.gradient_accumulation} accumulation x {batch.data_parallel} ranks"
    return {
        "Strategy": f"{strategy.name}{stage}{offload}",
        "Processes": f"{training.world.size} on {training.world.device}",
        "Precision": training.precision,
        "Global batch": f"{batch.global_batch_size} = micro-batch {arithmetic}",
        "Optimizer steps": f"{training.max_steps} ({training.max_steps / training.steps_per_epoch:.2f} epochs)",
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


def _adapter_words(adapter: Adapter) -> str:
    layers = ", ".join(adapter.target_modules or ("all linear layers of the blocks",))
    return f"{adapter.method}, rank {adapter.rank}, alpha {adapter.alpha:g}, dropout {adapter.dropout:g}, on {layers}"


# ----------------------------------------------------------------------------------------------------------- report


def write_pages(job: TrainerJob, paths: JobPaths) -> None:
    """report.html and environment.json; in a cluster there is no plan.json, for the plan is in the job's status."""
    write_environment(paths)
    write_report(job, _read_json(paths.plan), paths)


def write_report(job: TrainerJob, plan_json: Mapping[str, Any] | None, paths: JobPaths) -> None:
    """Writes report.html from what the stages left in the job's folder; what no stage has written is left out."""
    from finetune_trainer.data.prepared import FACTS_FILE  # with pyarrow, which nothing else here needs

    metrics = _read_json(paths.metrics) or {}
    plan = plan_json or {}
    facts = DataFacts.model_validate(found) if (found := _read_json(paths.prepared / FACTS_FILE)) else None
    page = (
        _templates(autoescape=True)
        .get_template("report.html.jinja")
        .render(
            job=job,
            facts=facts,
            result=_result_rows(metrics),
            split=metrics.get("evaluate", {}).get("split"),
            rows=metrics.get("evaluate", {}).get("rows"),
            run=[(_label(name), _figure(name, value)) for name, value in metrics.get("train", {}).items()],
            chart=loss_chart(History(paths.history).read()),
            settings=_training_settings(job),
            reasons=[str(reason) for reason in plan.get("reasons", ())],
            assumptions=[str(assumption) for assumption in plan.get("assumptions", ())],
            memory=_memory_rows(plan),
            samples=_read_json(paths.root / SAMPLES_FILE) or [],
            environment=_flatten(_read_json(paths.environment) or {}),
            command=_command(plan, job, paths),
        )
    )
    write_atomically(paths.report, page)


def _command(plan: Mapping[str, Any], job: TrainerJob, paths: JobPaths) -> str:
    """As the user gave it when the plan has it; else the command for the same job file."""
    command = plan.get("command")
    if isinstance(command, str):
        return command
    if isinstance(command, Sequence):
        return shlex.join(str(word) for word in command)
    if job.run is not None:
        return shlex.join(["kubectl", "apply", "-f", f"{job.name}.yaml"])
    return shlex.join(["finetune", "run", f"{job.name}.yaml", "--workspace", str(paths.root.parent), "--restart"])


def _result_rows(metrics: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Metric, the model's value, the majority class's value."""
    measured, majority = metrics.get("evaluate", {}), metrics.get("majority", {})
    figures = [(name, value) for name, value in measured.items() if isinstance(value, int | float) and name != "rows"]
    return [(name, f"{value:.4f}", f"{majority[name]:.4f}" if name in majority else "") for name, value in figures]


def _memory_rows(plan: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Term, size and formula of the plan's memory estimate for one device, and its total beside what the device has."""
    memory = plan.get("memory")
    if not memory:
        return []
    rows = [(str(term["name"]), _bytes(term["bytes"]), str(term["formula"])) for term in memory["terms"]]
    return [*rows, ("total", _bytes(memory["totalBytes"]), f"of {_bytes(memory['capacityBytes'])}")]


def _label(name: str) -> str:
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in name).replace("_", " ").strip()
    return words.removesuffix(" bytes").capitalize()


def _figure(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return _bytes(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def _flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, each in value.items():
        rows += _flatten(each, f"{prefix}{name} ") if isinstance(each, Mapping) else [(f"{prefix}{name}", str(each))]
    return rows


# ------------------------------------------------------------------------------------------------------------ chart

_WIDTH, _HEIGHT = 760, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 16, 40
"""Margins in SVG units for the axes' labels."""


@dataclass(frozen=True)
class Tick:
    """A mark of an axis: place in SVG units, and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class LossChart:
    """Everything that the template draws, in SVG units."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    line: str
    """`points` of the polyline of the training loss."""
    evaluations: tuple[tuple[float, float, str], ...]
    """x, y and text of each evaluation during training."""
    summary: str


def loss_chart(history: Iterable[Mapping[str, Any]]) -> LossChart | None:
    """The loss over the optimizer steps; None without two finite values to connect."""
    rows = list(history)
    losses, evaluations = _series(rows, "loss"), _series(rows, "eval_loss")
    if len(losses) < 2:
        return None
    both = losses + evaluations
    x_low, x_high = min(x for x, _ in both), max(x for x, _ in both)
    y_ticks = _nice_ticks(min(0.0, min(y for _, y in both)), max(y for _, y in both))
    y_low, y_high = y_ticks[0], max(y_ticks[-1], max(y for _, y in both))

    def x(step: float) -> float:
        return round(_LEFT + (step - x_low) / ((x_high - x_low) or 1) * (_WIDTH - _LEFT - _RIGHT), 2)

    def y(loss: float) -> float:
        return round(_HEIGHT - _BOTTOM - (loss - y_low) / ((y_high - y_low) or 1) * (_HEIGHT - _TOP - _BOTTOM), 2)

    x_ticks = [step for step in _nice_ticks(x_low, x_high) if x_low <= step <= x_high and step == int(step)]
    return LossChart(
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        top=_TOP,
        bottom=_HEIGHT - _BOTTOM,
        x_ticks=tuple(Tick(x(step), f"{int(step):,}") for step in x_ticks),
        y_ticks=tuple(Tick(y(loss), f"{loss:g}") for loss in y_ticks),
        line=" ".join(f"{x(step)},{y(loss)}" for step, loss in losses),
        evaluations=tuple((x(step), y(loss), f"step {step:g}: {loss:.4f}") for step, loss in evaluations),
        summary=(
            f"Training loss from {losses[0][1]:.4f} at step {losses[0][0]:g} "
            f"to {losses[-1][1]:.4f} at step {losses[-1][0]:g}"
        ),
    )


def _series(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, value) by rising step; after a resume the later log of a step counts."""
    points = {
        float(row["step"]): float(row[name])
        for row in rows
        if isinstance(row.get("step"), int | float)
        and isinstance(row.get(name), int | float)
        and math.isfinite(row[name])
    }
    return sorted(points.items())


def _nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cover low to high in about `wanted` steps."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * wanted >= span * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 12) for i in range(first, last + 1)]


# -------------------------------------------------------------------------------------------------------- templates


def _templates(*, autoescape: Literal[True, False]) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("finetune_trainer"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = _markdown_cell
    return environment


def _markdown_cell(value: object) -> str:
    """Text for a Markdown table or list: one line, without marks that Markdown or HTML would act upon."""
    text = " ".join(str(value).split())
    for mark in "\\`*_[]<>|#":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return text

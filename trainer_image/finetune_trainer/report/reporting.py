"""Files that a job writes for people: metrics.json, environment.json, the model card, report.html.

Every file is written to a temporary file and moved into place, so a reader never sees half of one. The report is one
file that loads nothing from elsewhere; the template engine escapes all text in it.
"""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_contract import charts
from finetune_contract.byte_text import human_bytes
from finetune_contract.charts import Share, shares, training_charts
from finetune_contract.choices import Stage
from finetune_contract.facts import DataFacts
from finetune_contract.layout import FACTS_FILE, FailureClass, JobPaths
from finetune_contract.metrics import BASELINE
from finetune_contract.report import TimePart, TimeSplit, shortened
from finetune_contract.trainer_job import TrainerJob, World
from finetune_trainer.core.failures import StageError
from finetune_trainer.core.files import write_atomically
from finetune_trainer.report import report_parts as parts
from finetune_trainer.report.history import History
from finetune_trainer.report.report_parts import memory_picture

if TYPE_CHECKING:
    from finetune_trainer.tasks.class_metrics import Confusion
from finetune_trainer.report.model_card import page_templates, training_settings

SAMPLES_FILE = "samples.json"
"""Some evaluated rows with their predictions, below the job's folder."""
CONFUSION_FILE = "confusion.json"
"""Counts of given classes by right class."""
_SHOWN_TEXT, _SHOWN_LABEL = 600, 200
"""Characters kept of a sample's text, and of a label."""
_CLASSES, _MISTAKES, _LABELS = 10, 10, 50
"""Limits of classes, mistakes and labels in the report."""
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
    "tensorboard",
    "mlflow-skinny",
    "mlflow",
    "wandb",
]


# ------------------------------------------------------------------------------------------------- metrics, samples


def merge_metrics(paths: JobPaths, section: Mapping[str, Any], *, without: Collection[str] = ()) -> dict[str, Any]:
    """Merge `section`, such as `{"train": {...}}`, into metrics.json: its keys are replaced, those in `without` are
    deleted, others stay. Return the whole content.
    """
    content = _read_json(paths.metrics) or {}
    merged = {**{name: value for name, value in content.items() if name not in without}, **section}
    write_atomically(paths.metrics, json.dumps(merged, indent=2, ensure_ascii=False) + "\n")
    return merged


GENERATION = "generation"
"""Section of metrics.json: stage -> number of generated tokens, and their rate."""


def merge_generation(paths: JobPaths, stage: Stage, figures: Mapping[str, float]) -> None:
    """Replace a stage's entry in the section `generation` of metrics.json; without `figures`, delete that of an earlier
    run.
    """
    before = (_read_json(paths.metrics) or {}).get(GENERATION, {})
    after = {name: entry for name, entry in before.items() if name != stage}
    if figures:
        after[str(stage)] = dict(figures)
    if after != before:
        merge_metrics(paths, {GENERATION: after} if after else {}, without=[GENERATION])


def write_samples(paths: JobPaths, samples: Sequence[Mapping[str, Any]]) -> None:
    """Keep evaluated rows for the report: `row`, `text` (a list of texts), `score`, and `label` and `predicted` where
    the task has them. Long texts lose their middle.
    """
    limits = {"label": _SHOWN_LABEL, "predicted": _SHOWN_LABEL}
    kept = [
        {
            **sample,
            "text": [shortened(text, _SHOWN_TEXT) for text in sample["text"]],
            **{name: shortened(str(sample[name]), limit) for name, limit in limits.items() if name in sample},
        }
        for sample in samples
    ]
    write_atomically(paths.root / SAMPLES_FILE, json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def write_confusion(paths: JobPaths, confusion: Confusion | None) -> None:
    """Keep for the report the counts of the largest classes and the most frequent mistakes of all. None: delete the
    file of an earlier evaluation.
    """
    path = paths.root / CONFUSION_FILE
    if confusion is None:
        path.unlink(missing_ok=True)
        return
    largest = confusion.largest(_CLASSES)
    kept = {
        "unit": confusion.unit,
        "labels": [shortened(name, _SHOWN_LABEL) for name in largest.names],
        "counts": largest.counts.tolist(),
        "mistakes": [
            [shortened(right, _SHOWN_LABEL), shortened(predicted, _SHOWN_LABEL), count]
            for right, predicted, count in confusion.mistakes(_MISTAKES)
        ],
    }
    write_atomically(path, json.dumps(kept, ensure_ascii=False) + "\n")


def _read_json(path: Path) -> Any:
    """Return the file's content, None without a file; raise StageError PROGRAM when it is no JSON."""
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


def write_environment(paths: JobPaths, training: Mapping[str, Any] | None = None) -> None:
    """Write versions and machine, without host names, user names or environment variables; and the environment of
    `training`, which is kept when a later stage, maybe on another machine, writes again.
    """
    from finetune_trainer.report.measured_facts import hardware_facts

    if training is None:
        training = (_read_json(paths.environment) or {}).get("training")
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "versions": {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None},
        "hardware": hardware_facts().model_dump(mode="json", by_alias=True),
    }
    cuda = _cuda_version()
    if cuda is not None:
        environment["cuda"] = cuda
    if training is not None:
        environment["training"] = dict(training)
    write_atomically(paths.environment, json.dumps(environment, indent=2) + "\n")


def training_environment(world: World) -> dict[str, Any]:
    """Describe the environment of this process, one of `world`, for training."""
    import torch

    device = platform.processor() or platform.machine()
    if world.device == "cuda":
        device = torch.cuda.get_device_name()
    versions = {name: _version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}
    return {
        "device": device,
        "processes": world.size,
        "nodes": world.nodes,
        "threads per process": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version is not None},
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cuda_version() -> str | None:
    import torch

    return torch.version.cuda if torch.cuda.is_available() else None


# ----------------------------------------------------------------------------------------------------------- report


def write_pages(job: TrainerJob, paths: JobPaths, command: str | None = None) -> None:
    """Write report.html and environment.json; in a cluster there is no plan.json, as the plan is in the job's status.
    `command`: the command that runs the job again.
    """
    write_environment(paths)
    write_report(job, _read_json(paths.plan), paths, command)


def write_report(
    job: TrainerJob, plan_json: Mapping[str, Any] | None, paths: JobPaths, command: str | None = None
) -> None:
    """Write report.html from the stages' results in the job's folder; missing results are left out."""
    metrics = _read_json(paths.metrics) or {}
    plan = plan_json or {}
    facts = DataFacts.model_validate(content) if (content := _read_json(paths.prepared / FACTS_FILE)) else None
    samples = _read_json(paths.root / SAMPLES_FILE)
    label_counts = sorted(facts.label_counts.items(), key=lambda pair: -pair[1]) if facts else []
    gate, cost = parts.gate_shown(job, metrics), parts.cost_shown(job, plan, paths)
    page = (
        page_templates(autoescape=True)
        .get_template("report.html.jinja")
        .render(
            job=job,
            facts=facts,
            tiles=parts.tiles(gate, metrics, facts, cost),
            gate=gate,
            result=_result_rows(metrics),
            split=metrics.get("evaluate", {}).get("split"),
            rows=metrics.get("evaluate", {}).get("rows"),
            baseline=metrics.get("evaluate", {}).get(BASELINE),
            share=parts.share,
            labels=[(shortened(name, _SHOWN_LABEL), f"{count:,}") for name, count in label_counts[:_LABELS]],
            more_labels=len(label_counts[_LABELS:]),
            computed_in=metrics.get("evaluate", {}).get("computed_in"),
            generation=_generation_rows(metrics.get(GENERATION, {})),
            run=_run_rows(metrics.get("train", {})),
            confusion=parts.confusion_shown(_read_json(paths.root / CONFUSION_FILE)),
            examples=parts.examples_shown(job, facts, samples),
            charts=training_charts({job.name: History(paths.history).read()}),
            lengths=parts.length_bars(facts),
            cost=cost,
            chart_style=charts.STYLE,
            time=_time_shown(job, metrics.get("train", {})),
            peaks=_peak_rows(metrics.get("train", {})),
            settings=training_settings(job, metrics.get("train", {})),
            reasons=[str(reason) for reason in plan.get("reasons", ())],
            assumptions=[str(assumption) for assumption in plan.get("assumptions", ())],
            memory=_memory_rows(plan),
            check=parts.check_rows(metrics.get("train", {})),
            memory_picture=memory_picture(metrics.get("train", {}), plan.get("memory") or {}),
            ways=_read_json(paths.optimization),
            backends=_backend_rows(_read_json(paths.optimization)),
            environment=_environment_rows(_read_json(paths.environment) or {}),
            command=command or _command(job, paths),
            job_file=job.to_json(),
        )
    )
    write_atomically(paths.report, page)


def _command(job: TrainerJob, paths: JobPaths) -> str:
    """Return the command for a job file named like the job: the file's real name is not known here."""
    if job.run is not None:
        return shlex.join(["kubectl", "apply", "-f", f"{job.name}.yaml"])
    return shlex.join(["finetune", "run", f"{job.name}.yaml", "--workspace", str(paths.root.parent), "--restart"])


def _result_rows(metrics: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return metric, the model's value, and the baseline's value where there is one."""
    measured, majority = metrics.get("evaluate", {}), metrics.get("majority", {})
    figures = [(name, value) for name, value in measured.items() if isinstance(value, int | float) and name != "rows"]
    if not majority:
        return [(name, f"{value:.4f}") for name, value in figures]
    return [(name, f"{value:.4f}", f"{majority[name]:.4f}" if name in majority else "") for name, value in figures]


def _memory_rows(plan: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return term, size and formula of the plan's memory estimate for one device, and its total beside the capacity."""
    memory = plan.get("memory")
    if not memory:
        return []
    rows = [(str(term["name"]), human_bytes(term["bytes"]), str(term["formula"])) for term in memory["terms"]]
    return [*rows, ("total", human_bytes(memory["totalBytes"]), f"of {human_bytes(memory['capacityBytes'])}")]


def _backend_rows(table: Mapping[str, Any] | None) -> list[tuple[str, ...]]:
    """Return name, rows and tokens a second, rows with the plain model's labels, largest difference of their scores,
    the metric that has lost most, memory, time to create it, and the reason for taking it or not.
    """

    def shown(value: Any, text: Callable[[Any], str]) -> str:
        return "" if value is None else text(value)

    return [
        (
            str(backend["name"]) + (" (used)" if backend["chosen"] else ""),
            shown(backend["rowsPerSecond"], "{:,.0f}".format),
            shown(backend.get("tokensPerSecond"), "{:,.0f}".format),
            shown(backend["agreement"], "{:.2%}".format),
            shown(backend["largestDifference"], "{:.2g}".format),
            _worst_metric(backend),
            shown(backend["memoryBytes"], human_bytes),
            shown(backend["setupSeconds"], "{:.1f} s".format),
            str(backend["why"]),
        )
        for backend in (table or {}).get("backends", ())
    ]


def _worst_metric(backend: Mapping[str, Any]) -> str:
    worse = backend.get("metricWorseBy")
    if worse is None:
        return ""
    return f"{backend['metric']} {worse:.4f} worse" if worse > 0 else "none worse"


def _generation_rows(figures: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, str]]:
    """Return stage, generated tokens, and tokens per second."""
    return [
        (stage, f"{entry['generated_tokens']:,}", f"{rate:,.1f}" if (rate := entry.get("tokens_per_second")) else "")
        for stage, entry in figures.items()
    ]


_DETAILS = frozenset({"time", "peak_memory_bytes_by_rank", "measured", "plan_check", "planned"})
"""Keys of the train section that have tables of their own."""


def _run_rows(train: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(_label(name), _figure(name, value)) for name, value in train.items() if name not in _DETAILS]


def _peak_rows(train: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the peak of each process, where there are several."""
    peaks = train.get("peak_memory_bytes_by_rank", ())
    return [(str(rank), human_bytes(peak)) for rank, peak in enumerate(peaks)] if len(peaks) > 1 else []


_PARTS: Mapping[TimePart, str] = {
    "start": "until the first step",
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward and backward, interleaved by the pipeline",
    "communication": "communication alone",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "rest": "rest",
    "finish": "writing the model",
}
_CLOCKS = {
    "host": "Measured with the clock of the host, which did the work.",
    "cuda-events": "Measured with CUDA events: a part ends when the device completes it, not when the host has "
    "launched it.",
}


@dataclass(frozen=True)
class _Time:
    """Division of a training's time, or the reason why it is not known."""

    rows: tuple[tuple[str, str, str], ...] = ()
    """Part, seconds, share; the total last."""
    bar: tuple[Share, ...] = ()
    note: str = ""


def _time_shown(job: TrainerJob, train: Mapping[str, Any]) -> _Time | None:
    """Return the time's division; None without a training."""
    if not train:
        return None
    if "time" not in train:
        why = "a program of the job trained" if job.script is not None else "an earlier version of the trainer trained"
        return _Time(note=f"Not known: {why}.")
    split = TimeSplit.model_validate(train["time"])
    total = split.total_seconds
    labels = {part: _part_label(part, split, job) for part in split.parts}
    rows = [(labels[part], f"{value:,.3f} s", f"{value / (total or 1):.1%}") for part, value in split.parts.items()]
    note = f"On process 0, over all attempts whose steps count. {_CLOCKS[split.clock]}"
    if split.with_communication:
        note += " Communication that overlaps with computation is not measured separately."
    bar = shares({labels[part]: value for part, value in split.parts.items()})
    return _Time((*rows, ("total", f"{total:,.3f} s", "100.0%")), tuple(bar), note)


def _part_label(part: TimePart, split: TimeSplit, job: TrainerJob) -> str:
    label = _PARTS[part]
    again = job.training is not None and job.training.strategy.activation_checkpointing != "none"
    if again and part in ("backward", "forward_backward"):
        label += ", with recomputed activations"
    return f"{label}, with its communication" if part in split.with_communication else label


_MEANS = {"loss_first": "Loss, first 5 % of the steps", "loss_last": "Loss, last 5 % of the steps"}


def _label(name: str) -> str:
    if name in _MEANS:
        return _MEANS[name]
    if name.startswith("eval_"):
        return f"Validation {name.removeprefix('eval_').replace('_', ' ')}"
    text = "".join(f" {c.lower()}" if c.isupper() else c for c in name).replace("_", " ").strip()
    return text.removesuffix(" bytes").capitalize()


def _figure(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return human_bytes(value)
    if name.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and value; all values of a group in one line."""
    return [
        (name, ", ".join(_flat(value)) if isinstance(value, Mapping) else str(value))
        for name, value in environment.items()
    ]


def _flat(group: Mapping[str, Any]) -> Iterator[str]:
    for name, value in group.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        elif value is not None:
            shown = human_bytes(value) if name.endswith("Bytes") else value
            yield f"{_label(name.removesuffix('Bytes')).lower()} {shown}"

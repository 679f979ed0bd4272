"""Values for the head and result sections of report.html: gate, confusion matrix, examples, lengths, cost.

Everything here turns the stages' results into text and numbers for the template; nothing is measured here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from finetune_contract.byte_text import human_bytes
from finetune_contract.charts import Bars, bars
from finetune_contract.choices import Stage, Task
from finetune_contract.facts import DataFacts, SplitFacts
from finetune_contract.inference_settings import Gate
from finetune_contract.layout import JobPaths
from finetune_contract.metrics import METRICS
from finetune_contract.plan_check import MeasuredTraining, PlanCheck, PlannedTraining, human_step, memory_groups
from finetune_contract.report import TrainerReport
from finetune_contract.trainer_job import TrainerJob

_BARS = 24
"""Limit of bars in a histogram."""


@dataclass(frozen=True)
class GateShown:
    """Requirement of a metric, and the value reached."""

    metric: str
    required: str
    reached: str
    passed: bool


def gate_shown(job: TrainerJob, metrics: Mapping[str, Any]) -> GateShown | None:
    """Return the gate with its value; None without a gate, or before it was measured."""
    gate = job.evaluation.gate if job.evaluation else None
    value = metrics.get("evaluate", {}).get(gate.metric) if gate is not None else None
    if gate is None or not isinstance(value, int | float):
        return None
    bounds = [("at least", gate.minimum), ("at most", gate.maximum)]
    required = " and ".join(f"{label} {bound:g}" for label, bound in bounds if bound is not None)
    return GateShown(gate.metric, required, f"{value:.4f}", not_met(gate, value) is None)


def not_met(gate: Gate, value: float) -> Literal["minimum", "maximum"] | None:
    """Return the bound of a gate that a value violates; NaN violates any."""
    if gate.minimum is not None and not value >= gate.minimum:
        return "minimum"
    return "maximum" if gate.maximum is not None and not value <= gate.maximum else None


@dataclass(frozen=True)
class Tile:
    """A figure at the head of the page."""

    name: str
    value: str
    note: str = ""
    state: Literal["", "good", "bad"] = ""


def tiles(gate: GateShown | None, metrics: Mapping[str, Any], facts: DataFacts | None, cost: Cost | None) -> list[Tile]:
    """Return the figures that most readers look for first; unknown ones are left out."""
    evaluated, majority, train = (metrics.get(name, {}) for name in ("evaluate", "majority", "train"))
    tiles: list[Tile] = []
    if gate is not None:
        details = f"{gate.metric} {gate.reached}, required: {gate.required}"
        tiles.append(Tile("Gate", "passed" if gate.passed else "not met", details, "good" if gate.passed else "bad"))
    figures = [(name, value) for name, value in evaluated.items() if isinstance(value, float) and name != "loss"]
    for name, value in figures[:1]:
        known = f"baseline: {majority[name]:.4f}" if name in majority else f"on {evaluated.get('split')} rows"
        tiles.append(Tile(name, f"{value:.4f}", known))
    if {"loss_first", "loss_last"} <= train.keys():
        tiles.append(
            Tile(
                "Training loss", f"{train['loss_last']:.4f}", f"last 5 % of the steps; first {train['loss_first']:.4f}"
            )
        )
    if cost is not None:
        tiles.append(Tile(*cost.tile))
    if (peak := train.get("peak_memory_bytes")) is not None:
        tiles.append(Tile("Peak memory", human_bytes(peak), "of one process"))
    cut = {role: split.truncated_rows for role, split in (facts.splits if facts else {}).items()}
    if facts is not None and any(cut.values()):
        details = ", ".join(f"{role} {share(cut[role], _rows_of(facts.splits[role]))}" for role in cut if cut[role])
        tiles.append(
            Tile("Truncated rows", f"{sum(cut.values()):,}", f"longer than {facts.max_length} tokens: {details}")
        )
    return tiles


def share(part: int, whole: int) -> str:
    """Format in percent; a part that is not zero is not shown as zero."""
    return "less than 0.1%" if 0 < part < whole / 1000 else f"{part / (whole or 1):.1%}"


def _rows_of(split: SplitFacts) -> int:
    """Count the rows of the data."""
    return split.windows_of or split.packs_of or split.rows


_MEASURES: Mapping[Task, tuple[str, str]] = {
    "text-classification": ("confidence", "The most confident wrong answers first."),
    "token-classification": (
        "confidence",
        "The most confident wrong tags first; the confidence is that of the least certain tag.",
    ),
    "question-answering": ("confidence", "The most confident wrong answers first."),
    "summarization": (METRICS["summarization"][None][-1], "The answers farthest from the expected text first."),
    "translation": (METRICS["translation"][None][-1], "The answers farthest from the expected text first."),
    "text-generation": (
        "perplexity",
        "Evaluation measures the likelihood of the given text; the least likely rows first.",
    ),
    "masked-lm": ("perplexity", "The rows with the least likely masked tokens first."),
    "preference-tuning": (
        "margin",
        "The pairs with the weakest preference for the chosen answer first; below 0 the rejected one is preferred.",
    ),
}
"""Name of an example's score, and the order of the examples."""


@dataclass(frozen=True)
class Examples:
    """Evaluated rows, for the table of examples."""

    heading: str
    note: str
    measure: str
    answered: bool
    """True if rows have a right and a given answer."""
    wrong: tuple[Mapping[str, Any], ...]
    right: tuple[Mapping[str, Any], ...]


def examples_shown(
    job: TrainerJob, facts: DataFacts | None, samples: Sequence[Mapping[str, Any]] | None
) -> Examples | None:
    """Return the examples; None where no rows were kept."""
    if not samples:
        return None
    measure, note = _MEASURES[job.task]
    if facts is not None and facts.label_form == "regression":
        measure, note = "off by", "The answers that are farthest off first."
    answered = "predicted" in samples[0]
    wrong = tuple(sample for sample in samples if not answered or sample["predicted"] != sample["label"])
    right = tuple(sample for sample in samples if answered and sample["predicted"] == sample["label"])
    heading = "Wrong answers" if answered else "Worst rows"
    return Examples(heading, note, measure, answered, wrong, right)


@dataclass(frozen=True)
class Cell:
    """Cell of a confusion matrix."""

    count: int
    heat: int
    """Share of the row, 0 to 10."""


@dataclass(frozen=True)
class ConfusionTable:
    """Confusion matrix as the report shows it."""

    unit: str
    labels: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...], str], ...]
    """Right label, its cells, its recall."""
    mistakes: tuple[tuple[str, str, str], ...]


def confusion_shown(kept: Mapping[str, Any] | None) -> ConfusionTable | None:
    """Build the table from the output of `write_confusion`."""
    if kept is None:
        return None
    rows = []
    for at, (label, counts) in enumerate(zip(kept["labels"], kept["counts"], strict=True)):
        total = sum(counts)
        cells = tuple(Cell(count, -(-10 * count // total) if total else 0) for count in counts)
        if total or at < len(counts) - 1:
            rows.append((label, cells, f"{counts[at] / total:.1%}" if total else "-"))
    mistakes = tuple((right, predicted, f"{count:,}") for right, predicted, count in kept["mistakes"])
    return ConfusionTable(kept["unit"], tuple(kept["labels"]), tuple(rows), mistakes)


def length_bars(facts: DataFacts | None) -> Bars | None:
    """Build the histogram of the training rows' lengths, else of another split's."""
    if facts is None:
        return None
    role, split = next(((role, split) for role, split in facts.splits.items() if split.length_histogram), ("", None))
    if split is None:
        return None
    edges = split.length_histogram
    width = max(1, min(edges) if len(edges) == 1 else min(b - a for a, b in itertools.pairwise(sorted(edges))))
    width *= -(-max(edges) // (width * _BARS))
    counts = [0] * (-(-max(edges) // width))
    for edge, rows in edges.items():
        counts[(edge - 1) // width] += rows
    unit = "sequences" if split.windows_of or split.packs_of else "rows"
    named = [(f"{at * width + 1} to {(at + 1) * width}", count) for at, count in enumerate(counts)]
    first = next(at for at, (_, count) in enumerate(named) if count)
    return bars(f"Lengths in {role}", named[first:], unit=unit, x_label="tokens")


@dataclass(frozen=True)
class Cost:
    """Time that the stages used."""

    rows: tuple[tuple[str, str, str], ...]
    """Stage, time, time of nodes; the sum last."""
    note: str
    tile: tuple[str, str, str]


def cost_shown(job: TrainerJob, plan: Mapping[str, Any], paths: JobPaths) -> Cost | None:
    """Sum the reports of the completed stages; None before the first."""
    world = job.training.world if job.training else job.script.world if job.script else None
    durations = {stage: seconds for stage in Stage if (seconds := _stage_seconds(paths, stage)) is not None}
    if not durations:
        return None
    nodes = {stage: world.nodes if world is not None and stage is Stage.TRAIN else 1 for stage in durations}
    used = {stage: seconds * nodes[stage] for stage, seconds in durations.items()}
    total, node_total = sum(durations.values()), sum(used.values())
    rows = [(str(stage), _duration(seconds), _duration(used[stage])) for stage, seconds in durations.items()]
    rows.append(("total", _duration(total), _duration(node_total)))
    estimate = plan.get("estimate") or {}
    if estimate.get("cost") is None or not estimate.get("seconds"):
        note = "No price of a node is known, so node time is shown without an amount."
        return Cost(tuple(rows), note, ("Node time", _duration(node_total), "no price is known"))
    per_hour = estimate["cost"] / (estimate["seconds"] / 3600 * (world.nodes if world is not None else 1))
    currency = estimate.get("currency") or ""
    amount = f"{node_total / 3600 * per_hour:,.2f} {currency}".strip()
    note = f"{amount} at {per_hour:,.2f} {currency} per node-hour, the price in the plan."
    return Cost(tuple(rows), note, ("Cost", amount, f"{_duration(node_total)} of nodes"))


def check_rows(train: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return estimate, planned and measured value and their ratio, with the ratios of parts below; none without a plan.

    `train`: that section of metrics.json.
    """
    if "plan_check" not in train:
        return []
    check = PlanCheck.model_validate(train["plan_check"])
    rows: list[tuple[str, str, str, str]] = []
    for name, comparison, text in (
        ("memory of the fullest device", check.memory, human_bytes),
        ("time of a step", check.step_time, human_step),
    ):
        if comparison is not None:
            rows.append((name, text(comparison.planned), text(comparison.measured), f"{comparison.ratio:.2f}"))
            rows += [(f"of it {term}", "", "", f"{ratio:.2f}") for term, ratio in comparison.terms.items()]
    return rows


def _stage_seconds(paths: JobPaths, stage: Stage) -> float | None:
    """Return the time of a stage that succeeded; None for others, also where an older image's report cannot be read."""
    try:
        return TrainerReport.model_validate_json((paths.state / f"{stage}.json").read_bytes()).seconds
    except (OSError, ValidationError):
        return None


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


# --------------------------------------------------------------------------------------------------------------- memory

_MOST_FREE = 4
"""Ratio of the device's memory to the plan's from which bars are drawn against the plan: others would be too short."""


@dataclass(frozen=True)
class MemoryBar:
    """A term, with its place in percent of the whole width."""

    name: str
    planned: str
    measured: str
    """Empty for a term that cannot be measured apart."""
    start: float
    width: float
    found: float
    """Width of what was measured."""


@dataclass(frozen=True)
class MemoryPicture:
    """Bars of all terms, of their sums that were measured, and of the total."""

    bars: tuple[MemoryBar, ...]
    scale: str
    """Sentence about the whole width."""

    @property
    def measured(self) -> bool:
        """Return whether any term was measured."""
        return any(bar.measured for bar in self.bars)


def memory_picture(train: Mapping[str, Any], memory: Mapping[str, Any]) -> MemoryPicture | None:
    """Return the picture; None if no plan's terms are known. Each term begins where the one before ends.

    `train`: that section of metrics.json. `memory`: that of plan.json, which only a local run has; it knows the
    device's memory, and the terms of trainings by older versions.
    """
    planned = PlannedTraining.model_validate(train["planned"]) if "planned" in train else _by_plan(memory)
    if planned is None or not planned.memory_bytes or not planned.memory_terms:
        return None
    measurement = MeasuredTraining.model_validate(train["measured"]) if "measured" in train else None
    peak, measured = (measurement.memory_bytes, measurement.memory_terms) if measurement is not None else (0, {})
    total, capacity = planned.memory_bytes, memory.get("capacityBytes", 0)
    against_device = max(total, peak) <= capacity <= _MOST_FREE * total
    scale = capacity if against_device else max(total, peak)

    def bar(name: str, begin: float, size: float, measure: int | None) -> MemoryBar:
        text = "" if measure is None else human_bytes(measure)
        widths = (round(100 * amount / scale, 2) for amount in (begin, size, measure or 0))
        return MemoryBar(name, human_bytes(size), text, *widths)

    bars, begin = [], 0
    for name, size in planned.memory_terms.items():
        bars.append(bar(name, begin, size, measured.get(name)))
        begin += size
    groups = memory_groups(planned)
    sums = [name for name in measured if name in groups and name not in planned.memory_terms]
    bars += [bar(name, 0, groups[name], measured[name]) for name in sums]
    bars.append(bar("total", 0, total, peak if measurement is not None else None))
    whole = f"{human_bytes(scale)}, {'the memory of the device' if against_device else 'the larger total'}"
    return MemoryPicture(tuple(bars), f"The whole width is {whole}.")


def _by_plan(memory: Mapping[str, Any]) -> PlannedTraining | None:
    if not memory:
        return None
    terms = {str(term["name"]): int(term["bytes"]) for term in memory["terms"]}
    return PlannedTraining(memory_bytes=memory["totalBytes"], memory_terms=terms)

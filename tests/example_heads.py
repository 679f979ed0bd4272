"""Writes the hardware and cost of each example into its head, and into a table in their README.

All figures are those of `finetune plan` before any data is read. There, the planner assumes 10,000 rows of the maximum
length; for data with a known number of rows, the time for those is given too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from examples import EXAMPLES, FOLDER, LOCAL, example_job
from finetune_contract.byte_text import human_bytes
from finetune_contract.trainer_job import Training
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.schedule import ASSUMED_ROWS
from finetune_operator.plan.types.plan_types import Facts, JobPlan
from finetune_operator.spec.quantities import human_seconds
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS

LOCAL_HARDWARE = "cpu=2,hostMemory=8Gi"
TITLE = "# Hardware, time and cost, by `finetune plan`. `make generate` writes these lines:"
DOCUMENT = "apiVersion:"
REVIEWS = FOLDER / "data" / "product-reviews" / "train.jsonl"
TRAIN_ROWS = {
    "hf://cornell-movie-review-data/rotten_tomatoes": 8_530,
    "hf://dair-ai/emotion": 16_000,
    "hf://rajpurkar/squad": 87_599,
    "hf://nyu-mll/glue mnli": 392_702,
    "hf://knkarthick/dialogsum": 12_460,
    "file://data/product-reviews": len(REVIEWS.read_text(encoding="utf-8").splitlines()),
    "pvc://inputs/reviews": len(REVIEWS.read_text(encoding="utf-8").splitlines()),
}
"""URI and configuration -> rows of the train split; for data sets of the Hub as stated on their pages."""


@dataclass(frozen=True)
class Needs:
    """Requirements of one example, as text."""

    hardware: str
    form: str
    """Strategy and precision."""
    memory: str
    time: str
    """Time of the training, with its assumptions."""
    node_hours: str
    command: str


@cache
def needs(name: str) -> Needs:
    """Return the requirements of the example, on its requested hardware."""
    made, job = _planned(name), example_job(name)
    nodes = job.spec.resources.nodes
    node = made.hardware
    gpus = (
        "" if node.gpu is None else f"{node.gpus_per_node} x {node.gpu.product} ({human_bytes(node.gpu.memory_bytes)})"
    )
    host = f"{node.cpu_cores} core{'s' * (node.cpu_cores != 1)}, {human_bytes(node.memory_bytes)} of memory"
    hardware = f"{nodes} node{'s, each' if nodes > 1 else ':'} {f'{gpus}, ' if gpus else ''}{host}"
    local = f" --hardware {LOCAL_HARDWARE}" if name in LOCAL else " --cluster"
    command = f"finetune plan manifests/examples/{name}.yaml{local} --no-measure"
    training, seconds = made.trainer.training, made.estimate.seconds
    if training is None or made.memory is None or seconds is None:
        why = made.estimate.basis.removeprefix("no estimate: ")
        return Needs(hardware, "-", "not estimated", f"not estimated: {why}", "-", command)
    unit = "GPU" if training.world.device == "cuda" else "process"
    memory = f"{human_bytes(made.memory.total_bytes)} of {human_bytes(made.memory.capacity_bytes)} a {unit}"
    taken, duration = _time(training, seconds, job.spec.preparation.max_length, name)
    form = f"{made.strategy}, {training.precision}"
    return Needs(hardware, form, memory, duration, f"{nodes * taken / 3600:.2g}", command)


def _planned(name: str) -> JobPlan:
    if name in LOCAL:
        facts = Facts(hardware=parse_hardware(LOCAL_HARDWARE), local=True)
        return plan(example_job(name), facts, LOCAL_SETTINGS)
    job = example_job(name)
    launcher = job.spec.launcher
    return plan(job, Facts(served=("job",) if launcher == "auto" else (launcher,)), CLUSTER_SETTINGS)


def _time(training: Training, seconds: float, longest: int | None, name: str) -> tuple[float, str]:
    """Return seconds, and a text: for the known number of rows of the data, or for the assumed one."""
    spec = example_job(name).spec
    length = "the model's greatest length" if longest is None else f"{longest:,} tokens"
    if spec.training is not None and spec.training.max_steps is not None:
        steps = f"{training.max_steps:,} steps of {training.batch.global_batch_size} rows"
        return seconds, f"{human_seconds(seconds)} for {steps} of {length}"
    duration = f"{human_seconds(seconds)} for {ASSUMED_ROWS:,} rows of {length}"
    data = spec.dataset
    rows = None if data is None else TRAIN_ROWS.get(f"{data.uri} {data.config or ''}".strip())
    if rows is None:
        return seconds, duration
    taken = seconds * rows / ASSUMED_ROWS
    return taken, f"{duration}, {human_seconds(taken)} for the {rows:,} of this data"


def head(name: str) -> str:
    """Return the comment of the example's file."""
    found = needs(name)
    rows = {
        "hardware": found.hardware,
        "strategy": found.form,
        "memory": found.memory,
        "training": found.time,
        "cost": f"{found.node_hours} node-hours x the price of such a node",
        "check": found.command,
    }
    if found.node_hours == "-":
        rows = {label: rows[label] for label in ("hardware", "training", "check")}
    lines = [TITLE, *(f"#   {label:<9} {text}" for label, text in rows.items())]
    return "\n".join(lines) + "\n"


def with_head(name: str) -> Callable[[], str]:
    """Return a function for the example's file with a new head."""

    def whole() -> str:
        text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
        comment, begin, document = text.partition(f"\n{DOCUMENT}")
        assert begin, f"{name}.yaml does not begin with a comment"
        comment_kept = re.sub(rf"(\n#)?\n{re.escape(TITLE)}.*\Z", "", comment, flags=re.DOTALL)
        return f"{comment_kept}\n#\n{head(name)}{DOCUMENT}{document}"

    return whole


def table() -> str:
    """Return a table of all examples with their requirements, for their README."""
    lines = ["| Example | Hardware | Memory | Training | Node-hours |", "|---|---|---|---|---|"]
    for name in EXAMPLES:
        found = needs(name)
        lines.append(f"| {name} | {found.hardware} | {found.memory} | {found.time} | {found.node_hours} |")
    return "\n".join(lines) + "\n"

"""Fields of a job on which the meaning of another field depends."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

from pydantic import JsonValue

from finetune_contract.metrics import METRICS
from finetune_operator.spec.fields.field_names import plain
from finetune_operator.spec.fields.field_values import Path, value_at
from finetune_operator.spec.fields.meant_uris import on_hub
from finetune_operator.spec.hint_values import SetTo
from finetune_operator.spec.hints.foreign_table import find_name, find_value

MICRO_BATCH, GLOBAL_BATCH = "spec.training.microBatchSize", "spec.training.globalBatchSize"


@dataclass(frozen=True)
class Around:
    """Other fields of a job."""

    task: JsonValue = None
    """Task that the job means: column names depend on it."""
    data: JsonValue = None
    """URI of the data."""
    beside: Mapping[str, JsonValue] = field(default_factory=dict)
    """Object with the field."""
    processes: int | None = None
    """Processes of the training; None: the job does not say."""

    @property
    def hub(self) -> bool:
        """True if the data are on the Hub, whose splits have slices."""
        return on_hub(self.data)


NOTHING_AROUND = Around()


def around(path: Path, spec: JsonValue) -> Around:
    """Return the fields of a spec on which the meaning of the field at `path` depends."""
    task, columns = value_at(spec, ("task",)), value_at(spec, ("dataset", "columns"))
    if task == "question-answering" and isinstance(columns, dict) and "context" not in columns and "prompt" in columns:
        task = "text-generation"  # A prompt and its answer, from a data set without texts that contain the answer.
    above = value_at(spec, path[:-1])
    beside = above if isinstance(above, dict) else {}
    return Around(meant_task(task), value_at(spec, ("dataset", "uri")), beside, _processes(spec))


def meant_task(task: JsonValue) -> JsonValue:
    """Return the task that a foreign or misspelt one, or one word of a name such as `llm-finetuning`, means; the same
    value if there is none.
    """
    row = find_value("spec.task", task)
    if row is not None:
        return row.sets.get("spec.task", task)
    words = task.lower() if isinstance(task, str) else ""
    rows = [find_value("spec.task", word) for word in re.split(r"[^a-z0-9]+", words)]
    tasks = {str(row.value) for row in rows if row is not None and row.value is not None}
    near = difflib.get_close_matches(words, METRICS, n=1, cutoff=0.6 if len(tasks) != 1 else 0.8)
    return near[0] if near else tasks.pop() if len(tasks) == 1 else task


def _processes(spec: JsonValue) -> int | None:
    """Return the number of training processes as far as a spec gives it; None: the plan decides."""
    resources = value_at(spec, ("resources",))
    given = resources if isinstance(resources, dict) else {}
    nodes, gpus, here = given.get("nodes", 1), given.get("gpusPerNode"), given.get("processesPerNode")
    of_node = here if _is_count(here) else gpus
    return nodes * of_node if _is_count(nodes) and _is_count(of_node) else None


def _is_count(value: JsonValue) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def rows_of_a_step(around: Around) -> SetTo | None:
    """Return micro-batch and rows of a step, for a micro-batch and an accumulation of other tools in one object; None:
    the micro-batch or the number of processes is not given, or the rows of a step are.
    """
    given: dict[str, int] = {}
    for name, value in around.beside.items():
        row = find_name(name, "training")
        own = plain(name) == "globalbatchsize" or (row is not None and row.field == GLOBAL_BATCH and row.same)
        if own or plain(name) == "microbatchsize":
            return None
        if row is not None and row.field in (MICRO_BATCH, GLOBAL_BATCH) and _is_count(value):
            given[row.field] = value
    if MICRO_BATCH not in given or around.processes is None:
        return None
    micro, accumulated, processes = given[MICRO_BATCH], given.get(GLOBAL_BATCH, 1), around.processes
    factors = [_counted(micro, "row"), *([f"{accumulated} steps"] if accumulated > 1 else [])]
    note = " x ".join([*factors, _counted(processes, "process", "es")])
    return SetTo({MICRO_BATCH: micro, GLOBAL_BATCH: micro * accumulated * processes}, note)


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"

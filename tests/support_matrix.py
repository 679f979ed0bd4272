"""Writes docs/support.md: combinations of task, strategy, launcher, adapter and precision that `finetune plan` accepts.

Every cell is the answer of `validate_job` and `plan` to a job with that combination; no cell is written by hand. A
refusal becomes a footnote with the message for the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, get_args

from finetune_contract.choices import AdapterMethod, Precision, Task
from finetune_contract.combinations import CONSTRAINTS
from finetune_contract.constraints import FIELDS, Term
from finetune_operator.plan.hardware.assumed_hardware import parse_hardware
from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import Facts, PlanRefused
from finetune_operator.spec import launcher_rows as launchers
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.fields.support import ROWS, served_words
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, LOCAL_SETTINGS
from finetune_operator.spec.types import API_VERSION, KIND

TASKS: tuple[Task, ...] = get_args(Task)
LAUNCHERS = tuple(each.name for each in launchers.LAUNCHERS if "train" in each.stages)
WORKING_LAUNCHERS = tuple(name for name in served_words("launcher", LAUNCHERS) if name in LAUNCHERS)
LOCAL = "`finetune run`"
"""Launcher without a value in the API: processes of the machine on which the command runs."""
ADAPTERS: tuple[AdapterMethod, ...] = get_args(AdapterMethod)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
NODES = {
    "an H100 node": "gpu=H100,gpus=4,cpu=64,hostMemory=512Gi",
    "a T4 node": "gpu=T4,gpus=4,cpu=64,hostMemory=512Gi",
    "a CPU node": "cpu=16,hostMemory=128Gi",
}
GPU_NODE, CPU_NODE = "an H100 node", "a CPU node"

MODELS: Mapping[Task, str] = {
    "text-classification": "FacebookAI/roberta-base",
    "token-classification": "google-bert/bert-base-cased",
    "question-answering": "google-bert/bert-large-uncased-whole-word-masking",
    "text-generation": "openai-community/gpt2",
    "preference-tuning": "openai-community/gpt2",
    "summarization": "google-t5/t5-base",
    "translation": "google-t5/t5-base",
    "masked-lm": "FacebookAI/roberta-base",
}
"""Task -> a typical model for it; its published shape is known to the planner."""

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "`single`": {"strategy": "single"},
    "`ddp`": {"strategy": "ddp"},
    "`fsdp`": {"strategy": "fsdp"},
    "`fsdp`, offload to CPU": {"strategy": "fsdp", "offload": {"parameters": "cpu"}},
    **{f"`deepspeed`, ZeRO-{stage}": {"strategy": "deepspeed", "zeroStage": stage} for stage in range(4)},
    "ZeRO-2, optimizer in host memory": {"strategy": "deepspeed", "zeroStage": 2, "offload": {"optimizer": "cpu"}},
    "ZeRO-3, optimizer on NVMe": {"strategy": "deepspeed", "zeroStage": 3, "offload": {"optimizer": "nvme"}},
    "`tensor: 2`": {"tensor": 2},
    "`pipeline: {degree: 2}`": {"pipeline": {"degree": 2}},
    "`sequence: 2`": {"sequence": 2},
}
"""Name in the tables -> `spec.parallelism`."""


SCRIPT = {"git": {"url": "https://github.com/acme/programs", "ref": "main"}, "entryPoint": "train.py"}


@dataclass(frozen=True)
class Combination:
    """One job of the matrix; other fields have their defaults."""

    task: Task = "text-classification"
    strategy: str = "`ddp`"
    launcher: str = "job"
    adapter: AdapterMethod = "none"
    precision: str = "auto"
    node: str = GPU_NODE
    nodes: int = 1
    script: bool = False
    """True if a program of the user's own trains."""

    def document(self) -> dict[str, Any]:
        """Return the job file."""
        parallelism = STRATEGIES[self.strategy]
        gpus = 1 if parallelism.get("strategy") == "single" else 4
        count = {"gpusPerNode": gpus} if self.node != CPU_NODE else {"gpusPerNode": 0, "processesPerNode": gpus}
        spec: dict[str, Any] = {
            "task": self.task,
            "model": {"uri": f"hf://{MODELS[self.task]}", "adapter": {"method": self.adapter}},
            "dataset": {"uri": "hf://acme/rows"},
            "training": {"epochs": 1, "globalBatchSize": 32, "precision": self.precision},
            "parallelism": dict(parallelism),
            "resources": {"nodes": self.nodes, "cpu": 16, "memory": "128Gi", **count},
            "evaluation": {},
        }
        if self.script:
            spec["training"] = {"script": SCRIPT}
            del spec["parallelism"]
        if self.launcher != LOCAL:
            spec["launcher"] = self.launcher
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "matrix"}, "spec": spec}


@cache
def refusals(combination: Combination) -> tuple[Problem, ...]:
    """Return the problems of `finetune plan` with the combination; empty if it is planned."""
    local = combination.launcher == LOCAL
    settings = LOCAL_SETTINGS if local else CLUSTER_SETTINGS
    job, problems = validate_job(combination.document(), settings)
    if job is None or problems:
        return tuple(problems)
    facts = Facts(hardware=parse_hardware(NODES[combination.node]), local=local, served=LAUNCHERS)
    try:
        plan(job, facts, settings)
    except PlanRefused as refused:
        return refused.problems
    return ()


# ------------------------------------------------------------------------------------------------------------ the page


@dataclass
class Notes:
    """Footnotes of a page, numbered in order; equal reasons share one."""

    numbers: dict[str, int] = field(default_factory=dict)

    def mark(self, problems: Sequence[Problem]) -> str:
        """Return `no`, with the numbers of its reasons."""
        found = dict.fromkeys(self.numbers.setdefault(reason(each), len(self.numbers) + 1) for each in problems)
        return "no" + " ".join(f"[^{number}]" for number in found)

    def lines(self) -> Iterator[str]:
        yield from (f"[^{number}]: {text}" for text, number in self.numbers.items())


_LONG_LIST = re.compile(r"(\w+, \w+, \w+)((?:, \w+){12,})")


def reason(problem: Problem) -> str:
    """Return the message of a refusal as Markdown, without the value; a long list is cut."""
    text = f"`{problem.path}`: {problem.rule}; {problem.hint}."
    return _LONG_LIST.sub(lambda found: f"{found[1]} and {found[2].count(',')} others", text)


def cell(notes: Notes, combinations: Mapping[str, Combination]) -> str:
    """Return `yes`, or the reason against it; if combinations differ, the names of the accepted ones."""
    refused = {name: against for name, each in combinations.items() if (against := refusals(each))}
    if not refused:
        return "yes"
    mark = notes.mark([problem for against in refused.values() for problem in against])
    return (
        mark
        if len(refused) == len(combinations)
        else f"{', '.join(name for name in combinations if name not in refused)}; {mark}"
    )


def table(notes: Notes, corner: str, rows: Mapping[str, Mapping[str, Mapping[str, Combination]]]) -> Iterator[str]:
    """Yield the lines of a table; `rows`: row -> column -> combinations of the cell."""
    columns = list(next(iter(rows.values())))
    yield f"| {corner} | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for name, cells in rows.items():
        yield f"| {name} | {' | '.join(cell(notes, cells[column]) for column in columns)} |"
    yield ""


def term_text(term: Term) -> str:
    """Return a term of a constraint as Markdown: the field of the choice, and its values."""
    name = f"`{_NAMES.get(term.choice) or ' x '.join(FIELDS[term.choice])}`"
    values = " or ".join(f"`{str(value).lower()}`" for value in term.values)
    match term.values:
        case () | (True,):
            return f"{name} set" if term.excluded or term.values else f"no {name}"
        case (1,):
            return f"{name} {'above ' * term.excluded}1"
        case _:
            return f"{name} {'other than ' * term.excluded}{values}{', by name' * term.chosen}"


_NAMES = {
    "task": "task",
    "offload": "offload.optimizer + offload.parameters",
    "torch_compile": "arguments.torch_compile",
    "liger": "arguments.use_liger_kernel",
    "device": "device",
}
"""Choices that do not correspond to one field -> their names."""


def together() -> Iterator[str]:
    """Yield the table of constraints between choices."""
    yield "| Choice | Needs |"
    yield "|---|---|"
    for constraint in CONSTRAINTS:
        yield f"| {' and '.join(map(term_text, constraint.when))} | {'; '.join(map(term_text, constraint.needs))} |"
    yield ""


PLACES = {
    **{node: Combination(node=node) for node in NODES},
    "2 nodes": Combination(nodes=2),
    "`training.script`": Combination(script=True),
}
"""Columns of the launchers' table."""


def support_matrix() -> str:
    """Return the whole page, ending in a newline; equal code gives equal text."""
    notes = Notes()
    everywhere = (LOCAL, *LAUNCHERS)
    working = (LOCAL, *WORKING_LAUNCHERS)
    lines = [
        "# What works together",
        "",
        "Find your task, strategy, launcher, adapter and precision here before you write a job file. Generated by "
        "`make generate`; do not edit.",
        "",
        "`yes`: `finetune plan` accepts the job. `no`: it refuses it, for the reason in the footnote. The jobs use one "
        "node with 4 GPUs (H100 unless a column names another), 1 for `single`, with a global batch of 32. The models "
        f"are {_models()}. No cell says that somebody has run the combination on such hardware.",
        "",
        f"## Task and strategy, for every launcher ({', '.join(working)})",
        "",
        *table(
            notes,
            "Strategy",
            {
                strategy: {
                    task: {
                        launcher: Combination(task=task, strategy=strategy, launcher=launcher) for launcher in working
                    }
                    for task in TASKS
                }
                for strategy in STRATEGIES
            },
        ),
        "## Launcher",
        "",
        *table(
            notes,
            "Launcher",
            {
                launcher: {column: {"": replace(each, launcher=launcher)} for column, each in PLACES.items()}
                for launcher in everywhere
            },
        ),
        "## Adapter and task (`ddp`)",
        "",
        *table(
            notes,
            "Adapter",
            {
                adapter: {task: {"ddp": Combination(task=task, adapter=adapter)} for task in TASKS}
                for adapter in ADAPTERS
            },
        ),
        "## Adapter and strategy (text-generation)",
        "",
        *table(
            notes,
            "Strategy",
            {
                strategy: {
                    adapter: {"job": Combination("text-generation", strategy, adapter=adapter)} for adapter in ADAPTERS
                }
                for strategy in STRATEGIES
            },
        ),
        "## Precision and strategy (text-generation)",
        "",
        *table(
            notes,
            "Strategy",
            {
                strategy: {
                    precision: {"job": Combination("text-generation", strategy, precision=precision)}
                    for precision in PRECISIONS
                }
                for strategy in STRATEGIES
            },
        ),
        "## Precision and hardware (text-generation, `ddp`)",
        "",
        *table(
            notes,
            "Hardware",
            {
                node: {
                    precision: {"job": Combination("text-generation", precision=precision, node=node)}
                    for precision in PRECISIONS
                }
                for node in NODES
            },
        ),
        "## What goes together",
        "",
        "What validation, the plan and the trainer check. A choice that is left open (`auto`) goes with everything, "
        "except where a value is needed by name. Device `cuda`: GPUs.",
        "",
        *together(),
        "## Fields without behaviour yet",
        "",
        f"{', '.join(f'`spec.{row.path}`' for row in ROWS)}: [docs/api.md](api.md#not-supported-yet) tells which "
        "values work.",
        "",
        *notes.lines(),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _models() -> str:
    by_model: dict[str, list[str]] = {}
    for task, model in MODELS.items():
        by_model.setdefault(model.partition("/")[2], []).append(task)
    return ", ".join(f"{model} ({', '.join(tasks)})" for model, tasks in by_model.items())

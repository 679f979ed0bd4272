"""The plan's memory of traced runs against their traces: a developers' tool.

    python -m tracing_support.memory_table [--trace] [--name-recipes] [NAME ...]

prints the table from the kept traces; `--trace` traces the cases again and keeps them (`make trace-memory`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune_contract.facts import ModelFacts
from finetune_operator.plan.memory.memory_workload import Workload
from finetune_operator.plan.memory.model_parallel_plan import PipelineEnd
from finetune_operator.plan.memory.process_memory import estimate
from finetune_operator.plan.plan import recipe_of
from finetune_operator.plan.types.plan_types import MemoryEstimate
from finetune_trainer.strategies.parallel.mesh import PIPELINE, MeshShape
from tracing_support.held_cases import HELD_CASES
from tracing_support.memory_cases import MEMORY_CASES
from tracing_support.traced_cases import CASES, Case

KEPT = Path(__file__).parents[1] / "tracing" / "memory_traces.json"
LIBRARIES = ("torch", "transformers", "deepspeed", "accelerate", "peft")
OVERHEAD = ("allocator", "process")
"""Terms of the plan that a trace has none of."""
GIB = 1 << 30
TRACED = (*MEMORY_CASES, *HELD_CASES, *(case for case in CASES if case.strategy.pipeline is None))
"""All cases that are compared: of the pipeline among `CASES` the traced process is in the middle, and the plan counts
the fullest one.
"""


@dataclass(frozen=True)
class KeptTrace:
    """Memory of one traced run."""

    name: str
    peak: int
    """Most bytes on the GPU."""
    phase: str
    """Phase of the peak."""
    held: Mapping[str, int]
    """Kind -> bytes at the peak."""
    kept: int
    """Bytes that a forward pass keeps for its backward pass."""
    facts: ModelFacts
    """Facts that the trainer measured of the model."""


def kept_traces(file: Path = KEPT) -> dict[str, KeptTrace]:
    """Return the kept traces by their cases' names."""
    values = json.loads(file.read_text(encoding="utf-8"))
    return {
        name: KeptTrace(
            name, each["peak"], each["phase"], each["held"], each["kept"], ModelFacts.model_validate(each["facts"])
        )
        for name, each in values.items()
    }


def workload(case: Case, facts: ModelFacts) -> Workload:
    """Return what the plan knows of the case, with these facts of its model."""
    training = case.training
    return Workload(
        model=facts,
        task=case.task,
        strategy=training.strategy,
        precision=case.precision,
        optimizer=training.optimizer,
        world=training.world,
        micro_batch=case.rows,
        length=case.tokens,
        adapter=case.adapter,
        accumulates=case.accumulation > 1,
        end=end_of(case),
    )


def end_of(case: Case) -> PipelineEnd | None:
    """Return the end of the pipeline at which the traced process is; None: there is no pipeline."""
    if case.strategy.pipeline is None:
        return None
    training = case.training
    shape = MeshShape.of(training.strategy, training.batch.data_parallel)
    return "last" if shape.coordinates(case.rank)[PIPELINE] else "first"


def planned(case: Case, trace: KeptTrace, card: int = 80 * GIB) -> MemoryEstimate:
    """Return the plan's memory of the case on a GPU of `card` bytes, with the measured facts of its model."""
    return estimate(workload(case, trace.facts), card)


def allocated(made: MemoryEstimate) -> int:
    """Return the bytes of the plan's terms that a trace has."""
    return sum(term.bytes for term in made.terms if term.name not in OVERHEAD)


def rows(cases: Iterable[Case], traces: Mapping[str, KeptTrace]) -> list[str]:
    """Return the table's lines, and for each case the terms of both sides in MiB."""
    lines = []
    for case in cases:
        if (trace := traces.get(case.name)) is None:
            continue
        made = planned(case, trace)
        ours = {term.name: term.bytes for term in made.terms}
        ratio, whole = allocated(made) / trace.peak, made.total_bytes / trace.peak
        lines.append(f"{case.name:32} plan {_gib(allocated(made))} trace {_gib(trace.peak)} {ratio:5.2f} ({whole:.2f})")
        lines.append(f"      plan:  {_parts(ours)}")
        lines.append(f"      trace: {_parts(trace.held)} in {trace.phase}; kept {_gib(trace.kept)}")
    return lines


def table() -> str:
    """Return the comparison as Markdown: traces that a formula was fitted to in a column of their own."""
    traces = kept_traces()
    ratios = {case: allocated(planned(case, traces[case.name])) / traces[case.name].peak for case in TRACED}
    lines = ["| traces | number | median error | largest error |", "|---|---|---|---|"]
    for held, name in ((False, "fitted"), (True, "held")):
        errors = [abs(ratio - 1) for case, ratio in ratios.items() if case.held is held]
        lines.append(f"| {name} | {len(errors)} | {statistics.median(errors):.1%} | {max(errors):.1%} |")
    titles = "| run | tokens | planned GiB | traced GiB | fitted: planned / traced | held: planned / traced |"
    lines += ["", titles, "|---|---|---|---|---|---|"]
    for case, ratio in ratios.items():
        ours, peak = allocated(planned(case, traces[case.name])), traces[case.name].peak
        columns = ("", f"{ratio:.2f}") if case.held else (f"{ratio:.2f}", "")
        cells = [case.name, f"{case.rows} x {case.tokens:,}", _gib(ours).strip(), _gib(peak).strip(), *columns]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size > GIB // 200)


def _gib(size: int) -> str:
    return f"{size / GIB:6.2f}"


def trace_all(cases: Iterable[Case]) -> dict[str, Any]:
    """Trace the cases, and return what is kept of them."""
    from tracing_support import stub_cuda
    from trainer_support.forking import ForkServer

    traces = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "stub"
        folder.mkdir()
        stub_cuda.build(folder)
        server = ForkServer(environment={**stub_cuda.environment(folder), "DS_ACCELERATOR": "cuda"})
        try:
            for case in cases:
                result = folder / "result.json"
                run = {"call": "tracing_support.dry_run:run", "arguments": {"name": case.name, "result": str(result)}}
                codes, printed = server.run(
                    {"processes": 1, "environment": {}, "log": str(folder / f"{case.name}.log"), **run}
                )
                if codes != [0]:
                    raise SystemExit(f"{case.name}:\n{printed}")
                traces[case.name] = _kept(case, json.loads(result.read_text(encoding="utf-8")))
                print(case.name, printed if os.environ.get("FINETUNE_TRACE_LARGEST") else "", flush=True)
        finally:
            server.stop()
    return traces


def _kept(case: Case, figures: Mapping[str, Any]) -> dict[str, Any]:
    peaks = figures["peaks"]
    phase = max(peaks, key=lambda each: peaks[each])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "commit": commit,
        "libraries": {name: version(name) for name in LIBRARIES},
        "config": case.model_config,
        "facts": figures["facts"],
        "recipe": {
            "task": case.task,
            "strategy": case.strategy.model_dump(mode="json", exclude_defaults=True),
            "processes": case.size,
            "precision": case.precision,
            "rows": case.rows,
            "tokens": case.tokens,
            "accumulation": case.accumulation,
            "adapter": None if case.adapter is None else case.adapter.model_dump(mode="json"),
            **named_recipe(case, ModelFacts.model_validate(figures["facts"])),
        },
        "fitted": not case.held,
        "peak": peaks[phase],
        "phase": phase,
        "held": dict(sorted(figures["held"].items())),
        "kept": figures["kept"],
    }


def named_recipe(case: Case, facts: ModelFacts) -> dict[str, Any]:
    """Return the form of loss, compilation and head of a traced case; `facts`: measured facts of its model."""
    return recipe_of(workload(case, facts), compiled=False).model_dump(mode="json")


def name_recipes() -> None:
    """Write the recipes into the kept traces, which stay as they are: a trace has its form of loss by its case."""
    values = json.loads(KEPT.read_text(encoding="utf-8"))
    for case in (case for case in TRACED if case.name in values):
        kept = values[case.name]
        kept["recipe"] |= named_recipe(case, ModelFacts.model_validate(kept["facts"]))
    KEPT.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _keep(made: Mapping[str, Any]) -> None:
    """Write the traces beside those of other cases, in the order of the cases."""
    before = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    found = {**before, **made}
    kept = {case.name: found[case.name] for case in TRACED if case.name in found}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Trace and print, as described in the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--name-recipes", action="store_true", help="name the recipes of kept traces again")
    options = parser.parse_args()
    if options.name_recipes:
        name_recipes()
    cases = [case for case in TRACED if not options.names or any(name in case.name for name in options.names)]
    if options.trace:
        _keep(trace_all(cases))
    print("\n".join(rows(cases, kept_traces())))


if __name__ == "__main__":
    main()

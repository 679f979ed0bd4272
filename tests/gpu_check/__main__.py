"""Tries on machines with GPUs what the test suite cannot try without one, and writes one report to send back.

Kernels (matrix products, attention, fp8, torch.compile, 4 bits), an all-reduce over all GPUs, a prediction that
measures the ways to compute, and a short training with each strategy by `finetune run`: whether it works, its memory
and time beside the plan's, and whether all strategies learn the same. Beside them is the throughput of transformers'
Trainer and of a loop in plain torch on the same rows.
What the machine cannot run is skipped with the reason. On several nodes: the same on the first one, the all-reduce over
all, and trainings over all; the same command runs on each, with a shared folder for the report.

    python -m gpu_check --out runs/gpu-check --minutes 15
    python -m gpu_check --only trainings --out runs/gpu-check
    python -m gpu_check --nodes 2 --node 0 --first 10.0.0.1:29400    # and --node 1 on the second one
    python -m gpu_check --small    # a machine without GPUs: tries the checks themselves
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from gpu_check import (
    gpu_baselines,
    gpu_facts,
    gpu_jobs,
    gpu_kernels,
    gpu_links,
    gpu_predictions,
    gpu_spread,
    several_nodes,
)
from gpu_check.gpu_jobs import Size
from gpu_check.gpu_report import Result, checked, write_report
from gpu_check.several_nodes import Nodes

GROUPS = ("kernels", "links", "predictions", "baselines", "trainings")
LONGEST = 300.0
"""Seconds of one check; the first of a training go to loading libraries and compiling DeepSpeed's operators."""


def _alone() -> ProcessPoolExecutor:
    """Return an executor with a process of its own, whose memory on a GPU ends with it.

    A training measures the memory of its GPU that is in use, and would count that of this process.
    """
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def kernels(small: bool) -> Iterator[Result]:
    with ExitStack() as stack:
        process = stack.enter_context(_alone())
        for name in gpu_kernels.KERNELS:
            yield checked("kernels", name, process.submit(gpu_kernels.run, name, small).result)
            try:
                process.submit(int).result()
            except BrokenProcessPool:
                process = stack.enter_context(_alone())


def links(small: bool, longest: float, nodes: Nodes) -> Iterator[Result]:
    processes = torch.cuda.device_count() or 2
    size = 4 if small else 256
    yield checked("links", "all-reduce", partial(gpu_links.all_reduce, processes, size, longest, nodes))


def _inputs(group: str, write: Callable[[], None]) -> Iterator[Result]:
    """Write a group's inputs; yield a result if that failed."""

    def written() -> Mapping[str, Any]:
        write()
        return {}

    result = checked(group, "inputs", written)
    if result.outcome != "ok":
        yield result


def trainings(folder: Path, ways: Sequence[str], size: Size, ends: float, longest: float) -> Iterator[Result]:
    gpus = torch.cuda.device_count()
    yield from _inputs("trainings", partial(gpu_jobs.write_inputs, folder, size))
    reference = None
    for name in ways:
        left = ends - monotonic()
        if left < 10:
            yield Result("trainings", name, "skipped", 0.0, "no time was left: --minutes is the limit of all checks")
            continue
        limit = min(left, longest)
        result = checked("trainings", name, partial(gpu_jobs.train, name, folder, size, gpus, reference, limit))
        if reference is None and result.outcome == "ok" and name in gpu_jobs.SAME_LOSSES:
            reference = result.figures["losses"]
        yield result


def baselines(folder: Path, size: Size, longest: float) -> Iterator[Result]:
    """Check the throughput of other training loops, on the inputs of the trainings."""
    gpus = torch.cuda.device_count()
    yield from _inputs("baselines", partial(gpu_jobs.write_inputs, folder, size))
    for name in gpu_baselines.BASELINES:
        yield checked("baselines", name, partial(gpu_baselines.train, name, folder, size, gpus, longest))


def predictions(folder: Path, modes: Sequence[str], small: bool, longest: float) -> Iterator[Result]:
    work = gpu_predictions.SMALL if small else gpu_predictions.LARGE
    yield from _inputs("predictions", partial(gpu_predictions.write_inputs, folder, work))
    for name in modes:
        yield checked("predictions", name, partial(gpu_predictions.predict, name, folder, work, longest))


def over_nodes(folder: Path, size: Size, longest: float, nodes: Nodes) -> Iterator[Result]:
    processes = torch.cuda.device_count() or 1
    for name in gpu_spread.SPREAD:
        run = partial(gpu_spread.train_on_nodes, name, folder, size, processes, nodes, longest)
        yield checked("trainings", name, run)


def machines(folder: Path, nodes: Nodes, longest: float) -> dict[str, Any]:
    """Return the facts of this machine, and on the first of several nodes which others differ."""
    with _alone() as process:
        found = process.submit(gpu_facts.facts).result()
    if nodes.count == 1:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    several_nodes.announce(folder / f"node-{nodes.index}.json", json.dumps(found))
    if not nodes.first:
        return found
    texts = {str(each): several_nodes.awaited(folder / f"node-{each}.json", longest) for each in range(nodes.count)}
    return {**found, "nodes": several_nodes.together(texts, nodes.count)}


def _all_trainings(options: argparse.Namespace, size: Size, ends: float, nodes: Nodes) -> Iterator[Result]:
    if nodes.first:
        yield from trainings(options.out, options.ways, size, ends, options.seconds)
    if nodes.count > 1:
        # Others wait for the first node, which trains by itself before.
        longest = options.seconds if nodes.first else 60 * options.minutes + options.seconds
        yield from over_nodes(options.out, size, longest, nodes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder for the report")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit of all checks together")
    parser.add_argument("--seconds", type=float, default=LONGEST, help="limit of one check")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="groups of checks")
    parser.add_argument("--ways", nargs="+", choices=list(gpu_jobs.WAYS), default=list(gpu_jobs.WAYS), help="to train")
    modes = list(gpu_predictions.MODES)
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes, help="to predict")
    parser.add_argument("--small", action="store_true", help="sizes for a machine without GPUs")
    parser.add_argument("--nodes", type=int, default=1, help="machines to check together")
    parser.add_argument("--node", type=int, default=0, help="number of this machine, from 0")
    parser.add_argument("--first", default="", help="host:port of machine 0, for several")
    options = parser.parse_args()
    small, nodes = options.small, Nodes(options.nodes, options.node, options.first)
    if (problem := nodes.problem()) is not None:
        sys.exit(problem)
    if nodes.count > 1 and (options.out / f"node-{nodes.index}.json").exists():
        sys.exit(f"{options.out} has the files of an earlier check of several nodes: pass another --out.")
    if not torch.cuda.is_available() and not small:
        sys.exit("torch sees no GPU here: install its CUDA build and the driver, or try the checks with --small.")
    ends = monotonic() + 60 * options.minutes
    machine = machines(options.out, nodes, options.seconds)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    size = gpu_jobs.size_of(None if small else min(machine[gpu_facts.MEMORY]))
    groups = {
        "kernels": kernels(small) if nodes.first else iter(()),
        "links": links(small, options.seconds, nodes),
        "predictions": predictions(options.out, options.modes, small, options.seconds) if nodes.first else iter(()),
        "baselines": baselines(options.out, size, options.seconds) if nodes.first else iter(()),
        "trainings": _all_trainings(options, size, ends, nodes),
    }
    results: list[Result] = []
    for group in options.only:
        for result in groups[group]:
            results.append(result)
            print(
                f"{result.outcome:8}{result.group}: {result.name} ({result.seconds:.1f} s) {result.reason}", flush=True
            )
            if nodes.first:
                write_report(options.out, machine, results)
    if not nodes.first:
        return int(any(each.outcome == "failed" for each in results))
    whole, page = write_report(options.out, machine, results)
    print(f"Report: {page} (figures: {whole})")
    return int(any(each.outcome == "failed" for each in results))


if __name__ == "__main__":
    sys.exit(main())

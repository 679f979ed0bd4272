"""Tries on one machine with GPUs what the test suite cannot try without one, and writes one report to send back.

Kernels (matrix products, attention, fp8, torch.compile, 4 bits), an all-reduce over all GPUs, and a short training with
each strategy by `finetune run`: whether it works, its memory and time beside the plan's, and whether all strategies
learn the same. What the machine cannot run is skipped with the reason. On several nodes nothing is tried.

    python -m gpu_check --out runs/gpu-check --minutes 15
    python -m gpu_check --only trainings --out runs/gpu-check
    python -m gpu_check --small    # a machine without GPUs: tries the checks themselves
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import monotonic

import torch

from gpu_check import gpu_facts, gpu_jobs, gpu_kernels, gpu_links
from gpu_check.gpu_report import Result, checked, write_report

GROUPS = ("kernels", "links", "trainings")
LONGEST = 300.0
"""Seconds of one check; the first of a training go to loading libraries and compiling DeepSpeed's operators."""


def kernels(small: bool) -> Iterator[Result]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, check in gpu_kernels.KERNELS.items():
        yield checked("kernels", name, partial(check, device, small))


def links(small: bool, longest: float) -> Iterator[Result]:
    processes = torch.cuda.device_count() or 2
    yield checked("links", "all-reduce", partial(gpu_links.all_reduce, processes, 4 if small else 256, longest))


def trainings(folder: Path, ways: Sequence[str], small: bool, ends: float, longest: float) -> Iterator[Result]:
    gpus = torch.cuda.device_count()
    memory = None if small else torch.cuda.get_device_properties(0).total_memory / gpu_facts.GIB
    size = gpu_jobs.size_of(memory)
    gpu_jobs.write_inputs(folder, size)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder for the report")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit of all checks together")
    parser.add_argument("--seconds", type=float, default=LONGEST, help="limit of one check")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="groups of checks")
    parser.add_argument("--ways", nargs="+", choices=list(gpu_jobs.WAYS), default=list(gpu_jobs.WAYS), help="to train")
    parser.add_argument("--small", action="store_true", help="sizes for a machine without GPUs")
    options = parser.parse_args()
    small = options.small
    if not torch.cuda.is_available() and not small:
        sys.exit("torch sees no GPU here: install its CUDA build and the driver, or try the checks with --small.")
    ends = monotonic() + 60 * options.minutes
    machine = gpu_facts.facts()
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    groups = {
        "kernels": kernels(small),
        "links": links(small, options.seconds),
        "trainings": trainings(options.out, options.ways, small, ends, options.seconds),
    }
    results: list[Result] = []
    for group in options.only:
        for result in groups[group]:
            results.append(result)
            print(
                f"{result.outcome:8}{result.group}: {result.name} ({result.seconds:.1f} s) {result.reason}", flush=True
            )
            write_report(options.out, machine, results)
    whole, page = write_report(options.out, machine, results)
    print(f"Report: {page} (figures: {whole})")
    return int(any(each.outcome == "failed" for each in results))


if __name__ == "__main__":
    sys.exit(main())

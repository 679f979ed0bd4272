"""Bandwidth of an all-reduce over all GPUs, as gradients are averaged.

torchrun --nproc-per-node N -m gpu_check.gpu_links MEBIBYTES
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from gpu_check.gpu_report import SkippedError
from gpu_check.several_nodes import ALONE, Nodes

ROUNDS = 10


def all_reduce(processes: int, mebibytes: int, limit: float, nodes: Nodes = ALONE) -> Mapping[str, Any]:
    """Return the bandwidth of an all-reduce, by a process for each GPU of each node (on machines without, by gloo); on
    other nodes than the first nothing.

    `limit`: seconds until it has failed.
    """
    if processes * nodes.count < 2:
        raise SkippedError("one GPU has nothing to exchange with")
    command = [sys.executable, "-m", "torch.distributed.run", *nodes.meeting("links"), f"--nproc-per-node={processes}"]
    environment = {**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "-m", "gpu_check.gpu_links", str(mebibytes)],
        capture_output=True,
        text=True,
        timeout=limit,
        env=environment,
        check=False,
    )
    lines = run.stdout.splitlines()
    if run.returncode:
        raise RuntimeError(run.stderr.strip() or f"exit code {run.returncode}")
    if not nodes.first:
        return {}
    figures: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    chosen = sorted({line.split("NCCL INFO ")[1] for line in lines if "Using network" in line})
    return {**figures, **({"NCCL": chosen} if chosen else {})}


def main(mebibytes: int) -> None:
    """Run one process of the all-reduce; rank 0 prints the figures as JSON."""
    import torch
    from torch import distributed

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    size, rank = distributed.get_world_size(), distributed.get_rank()
    values = torch.ones(mebibytes << 18, device="cuda" if cuda else "cpu")
    distributed.all_reduce(values)
    if float(values[0]) != size:
        raise SystemExit(f"the sum of {size} ones is {float(values[0])}")
    started = perf_counter()
    for _ in range(ROUNDS):
        distributed.all_reduce(values)
    if cuda:
        torch.cuda.synchronize()
    seconds = (perf_counter() - started) / ROUNDS
    # A ring sends and receives 2 (n - 1) / n of the data on each link (nccl-tests, doc/PERFORMANCE.md).
    bandwidth = values.nbytes * 2 * (size - 1) / size / seconds / 1e9
    if rank == 0:
        nodes = size // int(os.environ["LOCAL_WORLD_SIZE"])
        print(
            json.dumps({"processes": size, "nodes": nodes, "GB/s of each link": bandwidth, "ms": 1000 * seconds}),
            flush=True,
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))

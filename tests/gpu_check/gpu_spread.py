"""A short training over several nodes: ddp, and fsdp with shards over all nodes or over those of a node.

The first node runs the training of `single` by `finetune run`, which prepares the rows and plans the micro-batch. The
nodes then train with the same job in another world, each started by the trainer's launcher as a pod is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune_contract.layout import JobPaths
from finetune_contract.python_command import module_command
from finetune_contract.trainer_job import Strategy, TrainerJob
from gpu_check.gpu_jobs import Size, figures_of
from gpu_check.gpu_report import SkippedError
from gpu_check.several_nodes import Nodes, announce, awaited

BASE = "single"
"""Name of the training whose rows and plan are used."""
SPREAD: Mapping[str, Strategy] = {
    "ddp over nodes": Strategy(name="ddp"),
    "fsdp over nodes": Strategy(name="fsdp"),
    "fsdp in nodes, copies between them": Strategy(name="fsdp", fsdp_sharding="hybrid"),
}


def spread_job(job: TrainerJob, name: str, strategy: Strategy, nodes: int, processes: int) -> TrainerJob:
    """Return `job` on `nodes` with `processes` each: one micro-batch of each process is a step."""
    training = job.training
    assert training is not None
    ranks = nodes * processes
    batch = training.batch.model_copy(
        update={
            "global_batch_size": training.batch.micro_batch_size * ranks,
            "gradient_accumulation": 1,
            "data_parallel": ranks,
        }
    )
    world = training.world.model_copy(update={"nodes": nodes, "processes_per_node": processes})
    changed = training.model_copy(update={"strategy": strategy, "batch": batch, "world": world})
    return job.model_copy(update={"name": name, "training": changed})


def train_on_nodes(name: str, folder: Path, size: Size, processes: int, nodes: Nodes, limit: float) -> dict[str, Any]:
    """Train in the way `name` on all nodes; return the figures on the first node, nothing on others.

    `processes`: those of a node. `limit`: seconds. Raise SkippedError for a way that these nodes cannot take, and
    RuntimeError for a run that failed.
    """
    if SPREAD[name].fsdp_sharding == "hybrid" and processes < 2:
        raise SkippedError("needs 2 GPUs a node")
    short = name.replace(", ", "-").replace(" ", "-")
    paths = JobPaths.of(folder.resolve() / "spread", short)
    ready = folder / f"{short}.ready"
    if nodes.first:
        base = JobPaths.of(folder.resolve() / "runs", BASE)
        paths.root.mkdir(parents=True)
        shutil.copytree(base.prepared, paths.prepared)
        job = TrainerJob.model_validate_json(base.job.read_text(encoding="utf-8"))
        paths.job.write_text(spread_job(job, short, SPREAD[name], nodes.count, processes).to_json(), encoding="utf-8")
        announce(ready, short)
    else:
        awaited(ready, limit)
    command = module_command("finetune_trainer", "launch", "train", "--with", "torchrun")
    command += ["--job", str(paths.job), "--workspace", str(paths.root.parent)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=limit, check=False, env=nodes.environment(short)
    )
    if run.returncode:
        raise RuntimeError((run.stderr.strip() or run.stdout.strip())[-500:].replace("\n", " "))
    if not nodes.first:
        return {}
    figures = figures_of(paths.root, size)
    report = json.loads(paths.metrics.read_text(encoding="utf-8"))["train"]
    return {**figures, "processes": report["world_size"], "communication": report.get("communication", "unknown")}

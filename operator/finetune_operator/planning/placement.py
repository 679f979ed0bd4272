"""Where a job runs: the launcher, and the processes of the training.

Refuses more processes than GPUs, hardware that the node does not have, and a `single` strategy over several processes:
none of them could take effect as written.
"""

from __future__ import annotations

from dataclasses import replace

from finetune_contract.choices import StrategyName
from finetune_contract.job import World
from finetune_operator.api.types import LauncherName, ParallelismSpec
from finetune_operator.planning.draft import Draft

LAUNCHER_ORDER: tuple[LauncherName, ...] = ("pytorchjob", "trainjob", "jobset", "mpijob", "job")
"""What `auto` prefers: PyTorchJob is the most widely installed and restarts a gang by itself; TrainJob is its
successor; JobSet starts a gang without knowing of training; MPIJob needs an ssh server and a launcher pod beside the
workers; plain Jobs are always there.
"""


def asked_strategy(parallelism: ParallelismSpec) -> StrategyName | None:
    """The strategy that the spec fixes, by name or by a ZeRO stage, as only DeepSpeed has them; None: it is free."""
    if parallelism.strategy != "auto":
        return parallelism.strategy
    return None if parallelism.zero_stage == "auto" else "deepspeed"


def choose_launcher(draft: Draft) -> Draft:
    """`local` without a cluster, the named one if it is served, else the first served one of `LAUNCHER_ORDER`."""
    asked, served = draft.spec.launcher, draft.settings.served_launchers
    if draft.local:
        draft = replace(draft, launcher="local")
        if asked == "auto":
            return draft.because("launcher local: the stages run as processes of this machine")
        return draft.because(f"launcher local: there is no cluster here; in one, {asked} would run the training")
    if asked != "auto":
        if asked not in served:
            return draft.refusing(
                ("launcher",),
                asked,
                f"the cluster has to serve it; it serves {', '.join(served)}",
                f"install its operator, or set launcher to auto or {served[0]}" if served else "install its operator",
                "NotSupported",
            )
        return replace(draft, launcher=asked).because(f"launcher {asked}: as asked")
    chosen = next((name for name in LAUNCHER_ORDER if name in served), None)
    if chosen is None:
        return draft.refusing(
            ("launcher",),
            asked,
            "the cluster has to serve at least one launcher",
            "let the operator create Jobs",
            "NotSupported",
        )
    return replace(draft, launcher=chosen).because(
        f"launcher {chosen}: the first of {', '.join(LAUNCHER_ORDER)} that is served"
    )


def choose_world(draft: Draft) -> Draft:
    """Nodes, processes on each, their device and their CPU threads."""
    resources, hardware = draft.spec.resources, draft.hardware
    if draft.local and resources.nodes > 1:
        draft = draft.refusing(
            ("resources", "nodes"),
            resources.nodes,
            "without a cluster there is one node",
            "set nodes to 1",
            "NotSupported",
        )
    asked = asked_strategy(draft.spec.parallelism)
    gpus = hardware.gpus_per_node if resources.gpus_per_node == "auto" else resources.gpus_per_node
    if resources.gpus_per_node == "auto":
        if gpus > 1 and asked == "single":
            gpus = 1
        draft = draft.because(
            f"{gpus} GPU{'s' if gpus > 1 else ''} a node: "
            + ("what strategy single can use" if asked == "single" and gpus else "what the node has")
            if gpus
            else "CPU: the node has no GPU"
        )
    elif gpus == 0 and hardware.gpus_per_node:
        there = hardware.gpus_per_node
        draft = draft.because(
            f"CPU: resources.gpusPerNode is 0, so the node's {there} GPU{'s' if there > 1 else ''} stay"
            f"{'' if there > 1 else 's'} idle; set it to auto to train on {'them' if there > 1 else 'it'}"
        )
    if gpus > hardware.gpus_per_node:
        has, fewer = "none", "0"
        if hardware.gpus_per_node:
            has, fewer = f"{hardware.gpus_per_node}", f"{hardware.gpus_per_node} or less"
        return draft.refusing(
            ("resources", "gpusPerNode"),
            gpus,
            f"a node has to have as many GPUs as asked for, and it has {has}",
            f"set gpusPerNode to {fewer}, or plan for other hardware",
        )
    draft, processes = _processes(draft, gpus, asked)
    world_size = resources.nodes * processes
    if asked == "single" and world_size > 1:
        draft = draft.refusing(
            ("parallelism", "strategy"),
            "single",
            f"it runs one process, and {resources.nodes} node(s) x {processes} process(es) are {world_size}",
            "set strategy to auto or ddp, or ask for 1 node and 1 process",
        )
    threads = max(1, hardware.cpu_cores // processes)
    world = World(
        nodes=resources.nodes,
        processes_per_node=processes,
        device="cuda" if gpus else "cpu",
        threads_per_process=threads,
    )
    sharing = f"{hardware.cpu_cores} cores / {processes} process{'es' if processes > 1 else ''}"
    return replace(draft, world=world).because(f"{threads} thread{'s' if threads > 1 else ''} a process: {sharing}")


def _processes(draft: Draft, gpus: int, asked: StrategyName | None) -> tuple[Draft, int]:
    """Processes on each node, and why."""
    wanted, cores = draft.spec.resources.processes_per_node, draft.hardware.cpu_cores
    if wanted != "auto":
        if gpus and wanted > gpus:
            return draft.refusing(
                ("resources", "processesPerNode"),
                wanted,
                f"a GPU runs one process, and a node has {gpus}",
                f"set processesPerNode to {gpus} or to auto",
            ), wanted
        note = ""
        if gpus > wanted:
            note = f"; {gpus - wanted} of {gpus} GPUs stay idle"
        elif not gpus and wanted > cores:
            note = f"; they share {cores} core{'s' if cores > 1 else ''} and slow each other down"
        return draft.because(f"{wanted} process{'es' if wanted > 1 else ''} a node: as asked{note}"), wanted
    if gpus:
        return draft.because(f"{gpus} process{'es' if gpus > 1 else ''} a node: one a GPU"), gpus
    if asked in ("ddp", "fsdp", "deepspeed") and cores >= 2:
        return draft.because(f"2 processes a node: {asked} spreads over processes, and there are {cores} cores"), 2
    return draft.because("1 process a node: on CPU one process uses all cores by its threads"), 1

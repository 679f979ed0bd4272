"""Environment of the trainer's processes on this machine: the user's own, without variables of other launchers, plus
ours.

A shell inside a SLURM allocation, an MPI job or a pod has variables that name ranks and addresses; a stage that
inherited them would wait for processes that do not exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from finetune_contract.choices import Device
from finetune_contract.layout import ENV_KUBEFLOW_CA, ENV_KUBEFLOW_TOKEN, ENV_KUBEFLOW_URL, ENV_PROGRESS, ENV_REPORT

LAUNCHER_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"})
LAUNCHER_PREFIXES = (
    "MASTER_",
    "PET_",
    "TORCHELASTIC_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "SLURM_",
    "ACCELERATE_",
    "DEEPSPEED_",
)
KUBEFLOW_VARIABLES = frozenset({ENV_KUBEFLOW_URL, ENV_KUBEFLOW_CA, ENV_KUBEFLOW_TOKEN})


def trainer_environment(
    base: Mapping[str, str], *, device: Device, threads: int, report: Path, progress: Path | None
) -> dict[str, str]:
    """Return the variables for one stage. `report` may hold `{rank}`; `threads` is the CPU threads of one process."""
    kept = {
        name: value
        for name, value in base.items()
        if name not in LAUNCHER_VARIABLES | KUBEFLOW_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    ours = {ENV_REPORT: str(report), "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    if progress is not None:
        ours[ENV_PROGRESS] = str(progress)
    if device == "cpu":
        # DeepSpeed searches for accelerators itself; on a machine with a GPU the plan may still choose the CPU.
        ours |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return kept | ours


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""How many pods run a stage.

Apart from the models of `job.json`: whoever checks a spec needs no model of what the trainer obeys.
"""

from __future__ import annotations

from typing import Literal


def preparing_pods(engine: Literal["auto", "local", "job", "spark"], workers: int) -> int:
    """Pods that `engine` prepares with in a cluster; Spark's driver is one of them."""
    match engine:
        case "auto" | "local":
            return 1
        case "job":
            return workers
        case "spark":
            return 1 + workers

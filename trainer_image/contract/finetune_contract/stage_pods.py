"""Number of pods that run a stage.

Separate from the models of `job.json`: checking a spec needs none of the trainer's job models.
"""

from __future__ import annotations

from typing import Literal


def preparing_pods(engine: Literal["auto", "local", "job", "spark"], workers: int) -> int:
    """Return the number of pods that `engine` prepares with in a cluster; Spark's driver is one of them."""
    match engine:
        case "auto" | "local":
            return 1
        case "job":
            return workers
        case "spark":
            return 1 + workers

"""Jobs on a real API server with statuses as from the operator, and the `finetune` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster_support.api_access import PATIENCE_SECONDS
from suite_plugins.patience import patient

FINETUNE = Path(sys.executable).parent / "finetune"
NOW = "2026-01-05T10:00:00Z"
JOB: dict[str, Any] = {
    "apiVersion": "finetune.dev/v1alpha1",
    "kind": "FineTuneJob",
    "spec": {
        "task": "text-classification",
        "model": {"uri": "hf://some-org/some-model"},
        "dataset": {"uri": "hf://some-org/rows"},
        "training": {},
    },
}
TRAINING: dict[str, Any] = {
    "observedGeneration": 1,
    "phase": "Training",
    "stage": "train",
    "startTime": NOW,
    "conditions": [
        {"type": "Accepted", "status": "True", "reason": "Valid", "lastTransitionTime": NOW},
        {"type": "Running", "status": "True", "reason": "StageRunning", "lastTransitionTime": NOW},
        {"type": "Succeeded", "status": "False", "reason": "StageRunning", "lastTransitionTime": NOW},
        {"type": "Failed", "status": "False", "reason": "StageRunning", "lastTransitionTime": NOW},
    ],
    "stages": [
        {
            "name": "prepare",
            "state": "Succeeded",
            "attempt": 1,
            "startTime": "2026-01-05T09:58:00Z",
            "completionTime": "2026-01-05T09:58:42Z",
            "child": {"apiVersion": "batch/v1", "kind": "Job", "name": "reviews-prepare-1"},
        },
        {
            "name": "train",
            "state": "Running",
            "attempt": 2,
            "startTime": NOW,
            "child": {"apiVersion": "batch/v1", "kind": "Job", "name": "reviews-train-2"},
        },
        {"name": "evaluate", "state": "Pending", "attempt": 0},
    ],
    "plan": {
        "strategy": "deepspeed-zero2",
        "launcher": "job",
        "worldSize": 2,
        "microBatchSize": 8,
        "gradientAccumulation": 2,
        "memoryPerDevice": {"total": 2254857830},
        "estimated": {"durationSeconds": 750.0},
    },
    "progress": {"step": 450, "totalSteps": 1000, "percent": 45, "loss": 0.4123, "remainingSeconds": 312.0},
    "restarts": 1,
}
FAILURE: dict[str, Any] = {
    "class": "DataError",
    "reason": "ColumnMissing",
    "message": "dataset.columns.label: the data have no column label.",
    "hint": "Name one of text, stars.",
    "stage": "train",
    "attempt": 2,
    "pod": "reviews-train-2-0",
    "node": "node-7",
    "rank": 0,
    "exitCode": 12,
    "logTail": "reading rows\nKeyError: 'label'\n",
}


def ended(condition: str, **status: Any) -> dict[str, Any]:
    """Return the status TRAINING at its end."""
    conditions = [
        {**each, "status": "True" if each["type"] in ("Accepted", condition) else "False"}
        for each in TRAINING["conditions"]
    ]
    return {
        **TRAINING,
        "phase": condition,
        "conditions": conditions,
        "completionTime": "2026-01-05T10:10:00Z",
        **status,
    }


FAILED = ended(
    "Failed", failure=FAILURE, stages=[*TRAINING["stages"][:1], {**TRAINING["stages"][1], "state": "Failed"}]
)
SUCCEEDED = ended(
    "Succeeded",
    stages=[*TRAINING["stages"][:1], {**TRAINING["stages"][1], "state": "Succeeded"}],
    artifacts={"model": "pvc://reviews-workspace/reviews/model", "metrics": {"accuracy": 0.91}},
)


class Api(Protocol):
    kubeconfig: Path

    def kubectl(self, *arguments: str, stdin: str | None = None) -> Any: ...

    def must(self, *arguments: str, stdin: str | None = None) -> str: ...


@dataclass(frozen=True)
class Jobs:
    """Creates jobs in a namespace of their own, and runs the command there."""

    api: Api
    namespace: str
    folder: Path

    def make(self, name: str, status: dict[str, Any] | None = None) -> None:
        manifest = {**JOB, "metadata": {"name": name, "namespace": self.namespace}}
        self.api.must("create", "-f", "-", stdin=json.dumps(manifest))
        if status is not None:
            self.write_status(name, status)

    def write_status(self, name: str, status: dict[str, Any]) -> None:
        """Write the status as the operator does: server-side apply of the subresource."""
        manifest = {**JOB, "metadata": {"name": name, "namespace": self.namespace}, "status": status}
        del manifest["spec"]
        options = ("--server-side", "--force-conflicts", "--field-manager=finetune-operator", "--subresource=status")
        self.api.must("apply", *options, "-f", "-", stdin=json.dumps(manifest))

    def environment(self) -> dict[str, str]:
        """Return the command's environment: this cluster, and a wide terminal."""
        path = f"{FINETUNE.parent}{os.pathsep}{os.environ['PATH']}"
        here = {"KUBECONFIG": str(self.api.kubeconfig), "HOME": str(self.folder), "COLUMNS": "200", "PATH": path}
        return {**os.environ, **here}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(FINETUNE), *arguments, "-n", self.namespace],
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finetune(self, *arguments: str) -> tuple[int, str, str]:
        """Run the command; return exit code, standard output and standard error."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=patient(PATIENCE_SECONDS))
        assert "Traceback" not in err, err
        return process.returncode, out, err

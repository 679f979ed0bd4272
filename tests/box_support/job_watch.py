"""`kubectl get ftj -w` as a user runs it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from box_support.box import Box
from suite_plugins.patience import patient


@contextmanager
def watching(box: Box, namespace: str, file: Path) -> Iterator[None]:
    """Write the lines of the watch to `file` while the block runs."""
    cluster = box.cluster
    command = [cluster.kubectl_program, "--kubeconfig", str(cluster.kubeconfig), "get", "ftj", "-w", "-n", namespace]
    with file.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(patient(10))

"""`finetune debug`: one archive with the diagnostics of a job, secrets removed.

Objects that may not be read are left out, and `README.txt` in the archive lists them; nothing stops the rest. Secrets
are never requested.
"""

from __future__ import annotations

import io
import json
import platform
import tarfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from finetune_operator.cli.cluster.cluster_jobs import Cluster, ClusterError, ClusterJob, as_shown
from finetune_operator.cli.cluster.jobview import Page, print_page, utc_now
from finetune_operator.kubernetes_api import resources
from finetune_operator.spec.redaction import Redactor

T = TypeVar("T")

KINDS = (
    resources.POD,
    resources.SERVICE,
    resources.CONFIG_MAP,
    *resources.LAUNCHER_RESOURCES.values(),
    resources.NETWORK_POLICY,
)
"""Kinds of objects that belong to a job."""
LOG_LINES = 5000
"""Number of last lines of each pod's log."""
PACKAGES = ("finetune-operator", "finetune-contract", "kubernetes", "pydantic", "typer")


@dataclass
class Collected:
    """Files of the archive, by name, before secrets are removed."""

    files: dict[str, Any] = field(default_factory=dict)
    """Text, or an object that becomes JSON."""
    missing: list[str] = field(default_factory=list)


async def collect(cluster: Cluster, job: ClusterJob, report: Callable[[str], None]) -> Collected:
    """Collect everything about the job that may be read; `report` is called with the name of each part."""
    collected = Collected()

    async def request(part: str, answer: Awaitable[T]) -> T | None:
        report(part)
        try:
            return await answer
        except ClusterError as error:
            collected.missing.append(f"{part}: {error}")
            return None

    collected.files["job.json"] = job.raw
    events = await request("events", cluster.raw_events(job))
    collected.files["events.json"] = list(events or ())
    for kind in KINDS:
        objects = await request(kind.plural, cluster.objects(job, kind))
        if objects:
            collected.files[f"{kind.plural}.json"] = [as_shown(one) for one in objects]
    for pod in await request("the job's pods", cluster.pods(job)) or ():
        lines = await request(f"the log of {pod.name}", _log(cluster, job, pod))
        if lines:
            collected.files[f"logs/{pod.name}.log"] = "\n".join(lines) + "\n"
        elif lines is not None:
            collected.missing.append(f"the log of {pod.name}: it is empty")
    collected.files["versions.json"] = {
        "apiServer": await request("the API server's version", cluster.served_version()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
    }
    return collected


async def _log(cluster: Cluster, job: ClusterJob, pod: Any) -> list[str]:
    return [line async for line in cluster.log(job, pod, tail=LOG_LINES)]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def status_page(job: ClusterJob) -> str:
    """Return the page of `finetune status` as text."""
    buffer = io.StringIO()
    print_page(Console(file=buffer, width=200, highlight=False, markup=False, emoji=False), Page(job, utc_now()))
    return buffer.getvalue()


def write_archive(path: Path, job: ClusterJob, collected: Collected) -> list[str]:
    """Write the archive, with a folder of the job's name in it; return the names of its files. Raise OSError."""
    redactor = Redactor()
    for content in collected.files.values():
        redactor.learn(content)
    files = {**collected.files, "status.txt": status_page(job), "README.txt": _readme(job, collected)}
    # In JSON, texts are redacted one by one: redacting the whole could cut out half of its syntax.
    texts = {
        name: redactor.text(content)
        if isinstance(content, str)
        else json.dumps(redactor.value(content), indent=2, ensure_ascii=False)
        for name, content in files.items()
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in sorted(texts.items()):
            data = text.encode()
            entry = tarfile.TarInfo(f"{job.name}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return sorted(texts)


def _readme(job: ClusterJob, collected: Collected) -> str:
    lines = [
        f"FineTuneJob {job.name} of namespace {job.metadata.namespace}, collected {utc_now():%Y-%m-%d %H:%M:%S} UTC.",
        "",
        "Secrets were not read. Values of variables and fields that are named like secrets, and strings that look",
        "like tokens, keys or passwords, are replaced; review the files before you share them.",
        "",
    ]
    lines += ["Not collected:", *collected.missing] if collected.missing else ["Everything could be read."]
    return "\n".join(lines) + "\n"

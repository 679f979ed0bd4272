"""`finetune prune`: claims of deleted jobs, their size and age, and their deletion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune_contract.byte_text import human_bytes
from finetune_operator.cli.cluster.cluster_jobs import Cluster
from finetune_operator.cli.cluster.jobview import ago
from finetune_operator.cli.terminal.console import print_trimmed
from finetune_operator.jobs.leftover_claims import CLAIM_SELECTOR, WorkspaceClaim, claims_used, without_job
from finetune_operator.kubernetes_api.resources import CLAIM, POD
from finetune_operator.spec.status_times import stamp


@dataclass(frozen=True)
class JoblessClaim:
    """A claim whose job does not exist."""

    claim: WorkspaceClaim
    used_by: str | None
    """Another job or a pod that uses it; None: it is left over."""

    def data(self) -> dict[str, Any]:
        """Return the data for `-o json`."""
        claim = self.claim
        return {
            "name": claim.metadata.name,
            "namespace": claim.metadata.namespace,
            "uid": claim.metadata.uid,
            "job": claim.job,
            "bytes": claim.size,
            "storageClass": claim.spec.storage_class_name,
            "created": stamp(claim.metadata.creation_timestamp),
            "usedBy": self.used_by,
        }


async def jobless_claims(cluster: Cluster, everywhere: bool = False) -> tuple[JoblessClaim, ...]:
    """Return the claims of deleted jobs, largest first. Pods are read only in namespaces that have such claims."""
    raw = await cluster.listed(CLAIM, None if everywhere else cluster.namespace, CLAIM_SELECTOR)
    if not raw:
        return ()
    jobs = await cluster.jobs(everywhere)
    claims = without_job(raw, {(job.metadata.namespace, job.name) for job in jobs})
    users: dict[tuple[str, str], str] = {}
    for job in jobs:
        for name in claims_used(job.raw.get("spec")):
            users.setdefault((job.metadata.namespace, name), f"FineTuneJob {job.name}")
    for namespace in sorted({claim.metadata.namespace for claim in claims}):
        for pod in await cluster.listed(POD, namespace):
            if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
                for name in claims_used(pod["spec"]):
                    users.setdefault((namespace, name), f"pod {pod['metadata']['name']}")
    found = (JoblessClaim(claim, users.get(claim.key)) for claim in claims)
    return tuple(sorted(found, key=lambda one: (-one.claim.size, one.claim.key)))


async def delete_claim(cluster: Cluster, claim: WorkspaceClaim) -> None:
    """Delete this very claim, with everything on it. Its storage class decides whether the volume is deleted too."""
    await cluster.delete_object(CLAIM, *claim.key, claim.metadata.uid)


def print_claims(console: Console, claims: Sequence[WorkspaceClaim], now: datetime, with_namespace: bool) -> None:
    """Print a row per claim, and the sum below if there are several."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    columns = ["CLAIM", "DELETED JOB", "SIZE", "STORAGE CLASS", "AGE"]
    for column in ["NAMESPACE", *columns] if with_namespace else columns:
        table.add_column(column, no_wrap=True)
    for claim in claims:
        created = claim.metadata.creation_timestamp
        row = [claim.metadata.name, claim.job, human_bytes(claim.size), claim.spec.storage_class_name or "-"]
        row = [*([claim.metadata.namespace] if with_namespace else []), *row, ago(created, now)]
        table.add_row(*map(Text, row))
    if len(claims) > 1:
        row = ["total", f"{len(claims)} claims", human_bytes(sum(claim.size for claim in claims)), "", ""]
        table.add_row(*(["", *row] if with_namespace else row), style="bold")
    print_trimmed(console, table)

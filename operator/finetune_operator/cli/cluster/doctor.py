"""`finetune doctor`: reads a cluster with the caller's own rights, and shows its support and gaps for jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from finetune_operator.cli.cluster.cluster_jobs import Cluster, ClusterError, UnreachableError
from finetune_operator.cli.cluster.doctor_findings import Finding, Known, State, Surroundings
from finetune_operator.cli.cluster.pruning import jobless_claims
from finetune_operator.cli.terminal.console import print_trimmed
from finetune_operator.kubernetes_api.resources import (
    DEPLOYMENT,
    FINETUNE_JOB,
    LAUNCHER_RESOURCES,
    NODE,
    STORAGE_CLASS,
    Resource,
)
from finetune_operator.spec.launcher_rows import BUILT_IN, LauncherName
from finetune_operator.spec.schema.served_schema import OPENAPI_PATH, lacking

Value = TypeVar("Value")

NAMESPACE = Resource("v1", "Namespace", "namespaces", namespaced=False)
QUOTA = Resource("v1", "ResourceQuota", "resourcequotas")
QUEUE_VERSIONS = ("kueue.x-k8s.io/v1beta2", "kueue.x-k8s.io/v1beta1")
OPERATOR = "app.kubernetes.io/name=finetune-operator,app.kubernetes.io/part-of=finetune-operator"
OPERATOR_NAMESPACE = "finetune-system"
NOT_ALLOWED = 403
NOT_FOUND = 404
STYLES: Mapping[State, str] = {"ok": "green", "gap": "red", "unknown": "yellow", "note": ""}
STATE_TEXTS: Mapping[State, str] = {"ok": "ok", "gap": "missing", "unknown": "unknown", "note": ""}


async def survey(cluster: Cluster, operator_namespace: str | None) -> Surroundings:
    """Return everything that the caller may read. Raise UnreachableError if the API server does not answer."""
    groups = await _known(_groups(cluster), "the API groups")
    return Surroundings(
        server=cluster.server,
        namespace=cluster.namespace,
        version=await _known(_version(cluster), "the version"),
        own_version=version("finetune-operator"),
        served=await _known(_served(cluster), "the launchers"),
        serves_jobs=await _known(cluster.serves(FINETUNE_JOB), "FineTuneJob"),
        lacking=await _known(_lacking(cluster), "the schema of FineTuneJob"),
        groups=groups,
        queues=await _known(_queues(cluster), "local queues"),
        operators=await _known(_operators(cluster, operator_namespace), "Deployments of the operator"),
        nodes=await _known(cluster.listed(NODE), "nodes"),
        classes=await _known(cluster.listed(STORAGE_CLASS), "storage classes"),
        namespace_labels=await _known(_labels(cluster), f"namespace {cluster.namespace}"),
        quotas=await _known(cluster.listed(QUOTA, cluster.namespace), "quotas"),
        leftover_claims=await _known(_leftover_claims(cluster), "claims, jobs and pods"),
    )


async def _known(request: Awaitable[Value], part: str) -> Known[Value]:
    try:
        return Known(await request)
    except UnreachableError:
        raise
    except ClusterError as error:
        if error.code == NOT_ALLOWED:
            return Known(None, f"no permission to read {part}")
        return Known(None, f"{part} cannot be read: {error}")


async def _version(cluster: Cluster) -> str:
    return str((await cluster.served_version()).get("gitVersion", "an unknown version"))


async def _lacking(cluster: Cluster) -> tuple[str, ...]:
    return lacking(await cluster.document(OPENAPI_PATH))


async def _groups(cluster: Cluster) -> tuple[str, ...]:
    groups = (await cluster.document("/apis")).get("groups")
    return (
        tuple(str(group.get("name")) for group in groups if isinstance(group, dict)) if isinstance(groups, list) else ()
    )


async def _served(cluster: Cluster) -> tuple[LauncherName, ...]:
    return tuple([name for name, kind in LAUNCHER_RESOURCES.items() if name in BUILT_IN or await cluster.serves(kind)])


async def _queues(cluster: Cluster) -> tuple[str, ...]:
    for api_version in QUEUE_VERSIONS:
        queue = Resource(api_version, "LocalQueue", "localqueues")
        try:
            return tuple(item["metadata"]["name"] for item in await cluster.listed(queue, cluster.namespace))
        except ClusterError as error:
            if error.code != NOT_FOUND:
                raise
    return ()


async def _operators(cluster: Cluster, namespace: str | None) -> tuple[Mapping[str, Any], ...]:
    if namespace is not None:
        return await cluster.listed(DEPLOYMENT, namespace, OPERATOR)
    try:
        return await cluster.listed(DEPLOYMENT, None, OPERATOR)
    except ClusterError as error:
        if error.code != NOT_ALLOWED:
            raise
    return await cluster.listed(DEPLOYMENT, OPERATOR_NAMESPACE, OPERATOR)


async def _leftover_claims(cluster: Cluster) -> tuple[int, ...]:
    return tuple(one.claim.size for one in await jobless_claims(cluster) if one.used_by is None)


async def _labels(cluster: Cluster) -> Mapping[str, str]:
    namespace = await cluster.object(NAMESPACE, cluster.namespace)
    labels = namespace["metadata"].get("labels")
    return {key: str(value) for key, value in (labels or {}).items()}


# ------------------------------------------------------------------------------------------------------------- showing


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print a table with the hints below their rows, and the number of gaps."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in ("CHECK", "STATE", "FOUND"):
        table.add_column(column, overflow="fold", no_wrap=column == "STATE")
    for finding in findings:
        table.add_row(finding.topic, f"{STATE_TEXTS[finding.state]}", finding.found, style=STYLES[finding.state])
        if finding.hint:
            table.add_row("", "", f"-> {finding.hint}", style="dim")
    print_trimmed(console, table)
    gaps = sum(finding.state == "gap" for finding in findings)
    unknown = sum(finding.state == "unknown" for finding in findings)
    console.print(f"\n{gaps} missing, {unknown} unknown.", soft_wrap=True)


def as_data(cluster: Surroundings, job: str | None, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for programs."""
    return {
        "server": cluster.server,
        "namespace": cluster.namespace,
        "job": job,
        "findings": [
            {"what": one.topic, "state": one.state, "found": one.found, "hint": one.hint or None} for one in findings
        ],
    }

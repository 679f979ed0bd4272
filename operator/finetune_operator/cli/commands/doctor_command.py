"""`finetune doctor`: the readiness of a cluster for jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from finetune_operator.cli.commands.options import (
    ClusterSettings,
    Context,
    Filenames,
    Files,
    Form,
    Kubeconfig,
    Namespace,
)
from finetune_operator.cli.terminal.console import Output, UsageError, emit, out

if TYPE_CHECKING:
    from finetune_operator.cli.cluster.cluster_jobs import Cluster
    from finetune_operator.cli.cluster.doctor_findings import Finding, Surroundings
    from finetune_operator.jobs.missing_objects import LookUp


def doctor(
    files: Files = None,
    filename: Filenames = None,
    settings: ClusterSettings = None,
    operator_namespace: Annotated[
        str | None,
        typer.Option("--operator-namespace", help="Namespace of the operator. Default: search for it."),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Check whether a cluster is ready for jobs.

    Report launchers and queue, GPU nodes with product, memory, links and the source of these facts, shared
    storage, PodSecurity and quota of the namespace, network policies, images, and the operator with its version.
    With job files, check the needs of these jobs. The command only reads, with your own rights, and lists the
    parts that it has no permission to read. With job files, it also looks up the claims, Secret keys, ConfigMaps,
    service accounts, classes and images that they name. Exit code 0 if nothing is missing, 1 if something is or the
    cluster does not answer.

    \b
    Examples:
      finetune doctor
      finetune doctor job.yaml
      finetune doctor job.yaml -n team-a --settings settings.yaml
      finetune doctor job.yaml -o json
    """
    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.cli.cluster.doctor import as_data, print_findings, survey
    from finetune_operator.cli.cluster.doctor_findings import image_of, judge
    from finetune_operator.cli.commands.cluster_commands import in_cluster
    from finetune_operator.cli.commands.cluster_lookups import image_states, look_up_jobs
    from finetune_operator.cli.commands.steps import checked_jobs, settings_of

    limits = settings_of(settings, cluster=True)
    names = [*(files or []), *(filename or [])]
    entries = checked_jobs(names, limits, output) if names else ()
    namespaces = {entry.job.metadata.namespace for entry in entries} - {None}
    if namespace is None and len(namespaces) > 1:
        raise UsageError("the jobs are in several namespaces; select one with -n")
    connection = Connection(kubeconfig, context, namespace or next(iter(namespaces), None))

    async def read(cluster: Cluster) -> tuple[Surroundings, tuple[LookUp, ...]]:
        surroundings = await survey(cluster, operator_namespace)
        return surroundings, await look_up_jobs(cluster, (entry.job for entry in entries), limits)

    surroundings, lookups = in_cluster(connection, read)
    images = image_states(image_of(entry.job.spec, limits) for entry in entries)
    reports: list[tuple[str | None, tuple[Finding, ...]]] = [
        (entry.job.name, judge(surroundings, entry.job, limits, named, images))
        for entry, named in zip(entries, lookups, strict=True)
    ] or [(None, judge(surroundings, None, limits))]
    if output is Output.TEXT:
        for name, findings in reports:
            if name is not None:
                out().print(f"For {name}", style="bold cyan")
            print_findings(out(), findings)
    else:
        emit([as_data(surroundings, name, findings) for name, findings in reports], output)
    raise typer.Exit(1 if any(one.state == "gap" for _, findings in reports for one in findings) else 0)

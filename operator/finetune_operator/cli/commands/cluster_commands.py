"""`finetune status`, `logs` and `watch`: jobs in a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from finetune_operator.cli.commands.options import AllNamespaces, Context, Form, Kubeconfig, Namespace, RunStage
from finetune_operator.cli.console import Output, UsageError, complain, emit, list_of, note, out
from finetune_operator.cli.program_name import program_name

if TYPE_CHECKING:
    from finetune_operator.cli.cluster_jobs import Cluster, Connection

Result = TypeVar("Result")
COMPLETE_SECONDS = 3.0
"""Time limit of a shell's completion of names of jobs."""


def names_of_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return a shell's completions of JOB; none if the cluster does not answer at once."""
    import asyncio

    from finetune_operator.cli.cluster_jobs import ClusterError, Connection, connect

    given = ctx.params
    connection = Connection(given.get("kubeconfig"), given.get("context"), given.get("namespace"))

    async def names() -> list[str]:
        async with asyncio.timeout(COMPLETE_SECONDS), connect(connection) as cluster:
            return [job.name for job in await cluster.jobs() if job.name.startswith(incomplete)]

    try:
        return asyncio.run(names())
    except (ClusterError, TimeoutError):
        return []


JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name of the FineTuneJob.", autocompletion=names_of_jobs)]
OneOrAll = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="Name of the FineTuneJob; left out: all.", autocompletion=names_of_jobs),
]


def status(
    job: OneOrAll = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Show where a job in a cluster is, or all jobs in a table.

    Phase, progress, plan, stages with their attempts, what stands in the way, the first cause of a failure with
    its way out, the newest events, and what to type next.

    \b
    Examples:
      finetune status
      finetune status reviews -n team-a
      finetune status -A
      finetune status reviews -o json
    """
    from finetune_operator.cli.cluster_jobs import Connection
    from finetune_operator.cli.jobview import Page, next_commands, print_page, print_table, utc_now
    from finetune_operator.cli.watching import events_of

    refuse_job_everywhere(job, all_namespaces)
    connection = Connection(kubeconfig, context, namespace)

    async def one(cluster: Cluster, name: str) -> None:
        found = await cluster.job(name)
        if output is not Output.TEXT:
            emit([found.raw], output)
            return
        commands = next_commands(found, program_name(), _flags(connection))
        print_page(out(), Page(found, utc_now(), await events_of(cluster, found), commands))

    async def all_of_them(cluster: Cluster) -> None:
        found = await cluster.jobs(all_namespaces)
        if output is not Output.TEXT:
            emit([list_of([each.raw for each in found])], output)
        elif found:
            print_table(out(), found, utc_now(), with_namespace=all_namespaces)
        else:
            tell_no_jobs(cluster, all_namespaces)

    in_cluster(connection, all_of_them if job is None else lambda cluster: one(cluster, job))


def logs(
    job: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on, from pod to pod and stage to stage, until the job ends.")
    ] = False,
    stage: Annotated[
        RunStage | None, typer.Option("--stage", metavar="STAGE", help="Which stage. Left out: the one that ran last.")
    ] = None,
    pod: Annotated[
        str | None, typer.Option("--pod", metavar="POD", help="One pod, by name or by its part of the prefix (0).")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="The pod in which this rank of the training runs.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, metavar="N", help="The last N lines of each pod.")
    ] = None,
    previous: Annotated[bool, typer.Option("--previous", help="The attempt before the newest one.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the log of a stage, all its pods together.

    Each line begins with stage, attempt and pod: [train-1/0]. Pods are deleted with their attempt; then the end
    of the log that the status keeps of a failure is shown.

    \b
    Examples:
      finetune logs reviews
      finetune logs reviews -f
      finetune logs reviews --stage prepare --tail 50
      finetune logs reviews --previous --rank 3
    """
    from finetune_contract.choices import Stage
    from finetune_operator.cli.cluster_jobs import Connection
    from finetune_operator.cli.log_following import Wanted, follow_logs, show_logs

    for one, other, both in (
        ("--pod", "--rank", pod is not None and rank is not None),
        ("--follow", "--previous", follow and previous),
    ):
        if both:
            raise UsageError(f"{one} and {other} exclude each other")
    wanted = Wanted(None if stage is None else Stage(stage), pod, rank, tail, previous)

    async def show(cluster: Cluster) -> None:
        found = await cluster.job(job)
        if follow and found.outcome is None:
            await follow_logs(cluster, found, wanted, out())
        else:
            await show_logs(cluster, found, wanted, out())

    in_cluster(Connection(kubeconfig, context, namespace), show)


def watch(job: JobName, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Follow a job to its end.

    A page that stays up to date on a terminal, a line for each change elsewhere. Exit code 0 when the job
    succeeds, 1 when it fails or is deleted.

    \b
    Examples:
      finetune watch reviews
      finetune watch reviews -n team-a && kubectl get ftj reviews -o jsonpath={.status.artifacts.model}
    """
    from finetune_operator.cli.cluster_jobs import Connection
    from finetune_operator.cli.watching import watch_job

    connection = Connection(kubeconfig, context, namespace)
    ended = in_cluster(connection, lambda cluster: watch_job(cluster, job, out(), program_name(), _flags(connection)))
    raise typer.Exit(0 if ended.outcome == "Succeeded" else 1)


def refuse_job_everywhere(job: str | None, all_namespaces: bool) -> None:
    """UsageError for one job together with all namespaces."""
    if job is not None and all_namespaces:
        raise UsageError("--all-namespaces: a job has one namespace; name it with -n")


def tell_no_jobs(cluster: Cluster, all_namespaces: bool) -> None:
    """Why a list is empty."""
    where = "any namespace" if all_namespaces else f"namespace {cluster.namespace}"
    note(f"there is no FineTuneJob in {where}.")


def in_cluster(connection: Connection, work: Callable[[Cluster], Awaitable[Result]]) -> Result:
    """The result of `work`; ends the command with 1 when the cluster does not give what it needs."""
    import asyncio

    from finetune_operator.cli.cluster_jobs import ClusterError, connect

    async def connected() -> Result:
        async with connect(connection) as cluster:
            return await work(cluster)

    try:
        return asyncio.run(connected())
    except ClusterError as error:
        complain(f"{str(error).removesuffix('.')}.")
        raise typer.Exit(1) from None


def _flags(connection: Connection) -> str:
    """The options with which the same job is meant again."""
    words = []
    if connection.namespace is not None:
        words += ["-n", connection.namespace]
    if connection.context is not None:
        words += ["--context", connection.context]
    if connection.kubeconfig is not None:
        words += ["--kubeconfig", str(connection.kubeconfig)]
    return f" {shlex.join(words)}" if words else ""

"""`finetune status`, `logs` and `watch`: jobs in a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from finetune_operator.cli.commands.options import AllNamespaces, Context, Form, Kubeconfig, Namespace, RunStage
from finetune_operator.cli.program_name import program_name
from finetune_operator.cli.terminal.console import Output, UsageError, emit, list_of, note, out, print_error

if TYPE_CHECKING:
    from finetune_operator.cli.cluster.cluster_jobs import Cluster, Connection

Result = TypeVar("Result")
COMPLETE_SECONDS = 3.0
"""Time limit of a shell's completion of names of jobs."""


def names_of_jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return a shell's completions of JOB; none if the cluster does not answer at once."""
    import asyncio

    from finetune_operator.cli.cluster.cluster_jobs import ClusterError, Connection, connect

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
    typer.Argument(metavar="JOB", help="Name of the FineTuneJob. Default: all jobs.", autocompletion=names_of_jobs),
]


def status(
    job: OneOrAll = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Show the status of a job in a cluster, or a table of all jobs.

    For one job, show phase, progress, plan, stages with their attempts, obstacles, the first cause of a failure
    with a hint, the newest events, and the next commands.

    \b
    Examples:
      finetune status
      finetune status reviews -n team-a
      finetune status -A
      finetune status reviews -o json
    """
    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.cli.cluster.jobview import Page, next_commands, print_page, print_table, utc_now
    from finetune_operator.cli.cluster.watching import events_of

    refuse_job_everywhere(job, all_namespaces)
    connection = Connection(kubeconfig, context, namespace)

    async def one(cluster: Cluster, name: str) -> None:
        cluster_job = await cluster.job(name)
        if output is not Output.TEXT:
            emit([cluster_job.raw], output)
            return
        commands = next_commands(cluster_job, program_name(), _flags(connection))
        print_page(out(), Page(cluster_job, utc_now(), await events_of(cluster, cluster_job), commands))

    async def all_jobs(cluster: Cluster) -> None:
        jobs = await cluster.jobs(all_namespaces)
        if output is not Output.TEXT:
            emit([list_of([cluster_job.raw for cluster_job in jobs])], output)
        elif jobs:
            print_table(out(), jobs, utc_now(), with_namespace=all_namespaces)
        else:
            note_no_jobs(cluster, all_namespaces)

    in_cluster(connection, all_jobs if job is None else lambda cluster: one(cluster, job))


def logs(
    job: JobName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the logs, across pods and stages, until the job ends.")
    ] = False,
    stage: Annotated[
        RunStage | None,
        typer.Option("--stage", metavar="STAGE", help="Show this stage. Default: the stage that runs or ran last."),
    ] = None,
    pod: Annotated[
        str | None, typer.Option("--pod", metavar="POD", help="Show one pod, by name or by its part of the prefix (0).")
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Show the pod that runs this rank of the training.")
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, metavar="N", help="Show the last N lines of each pod.")
    ] = None,
    previous: Annotated[bool, typer.Option("--previous", help="Show the attempt before the newest one.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the logs of all pods of a stage.

    Each line begins with stage, attempt and pod: [train-1/0]. Pods are deleted with their attempt; after that,
    show the end of a failure's log from the job's status.

    \b
    Examples:
      finetune logs reviews
      finetune logs reviews -f
      finetune logs reviews --stage prepare --tail 50
      finetune logs reviews --previous --rank 3
    """
    from finetune_contract.choices import Stage
    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.cli.cluster.log_following import LogSelection, follow_logs, show_logs

    for one, other, both in (
        ("--pod", "--rank", pod is not None and rank is not None),
        ("--follow", "--previous", follow and previous),
    ):
        if both:
            raise UsageError(f"{one} and {other} exclude each other")
    selection = LogSelection(None if stage is None else Stage(stage), pod, rank, tail, previous)

    async def show(cluster: Cluster) -> None:
        cluster_job = await cluster.job(job)
        if follow and cluster_job.outcome is None:
            await follow_logs(cluster, cluster_job, selection, out())
        else:
            await show_logs(cluster, cluster_job, selection, out())

    in_cluster(Connection(kubeconfig, context, namespace), show)


def watch(job: JobName, namespace: Namespace = None, context: Context = None, kubeconfig: Kubeconfig = None) -> None:
    """Watch a job until it ends.

    On a terminal, show a page that is kept up to date; elsewhere, print a line for each change. Exit code 0 when
    the job succeeds, 1 when it fails or is deleted.

    \b
    Examples:
      finetune watch reviews
      finetune watch reviews -n team-a && kubectl get ftj reviews -o jsonpath={.status.artifacts.model}
    """
    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.cli.cluster.watching import watch_job

    connection = Connection(kubeconfig, context, namespace)
    ended = in_cluster(connection, lambda cluster: watch_job(cluster, job, out(), program_name(), _flags(connection)))
    raise typer.Exit(0 if ended.outcome == "Succeeded" else 1)


def refuse_job_everywhere(job: str | None, all_namespaces: bool) -> None:
    """Raise UsageError for one job together with all namespaces."""
    if job is not None and all_namespaces:
        raise UsageError("--all-namespaces cannot be used with JOB; give the job's namespace with -n")


def note_no_jobs(cluster: Cluster, all_namespaces: bool) -> None:
    """Print a note that the namespace has no jobs."""
    scope = "any namespace" if all_namespaces else f"namespace {cluster.namespace}"
    note(f"there is no FineTuneJob in {scope}.")


def in_cluster(connection: Connection, work: Callable[[Cluster], Awaitable[Result]]) -> Result:
    """Return the result of `work`; exit with 1 if a request to the cluster fails."""
    import asyncio

    from finetune_operator.cli.cluster.cluster_jobs import ClusterError, connect

    async def connected() -> Result:
        async with connect(connection) as cluster:
            return await work(cluster)

    try:
        return asyncio.run(connected())
    except ClusterError as error:
        print_error(f"{str(error).removesuffix('.')}.")
        raise typer.Exit(1) from None


def _flags(connection: Connection) -> str:
    """Return the options that select the same job again."""
    arguments = []
    if connection.namespace is not None:
        arguments += ["-n", connection.namespace]
    if connection.context is not None:
        arguments += ["--context", connection.context]
    if connection.kubeconfig is not None:
        arguments += ["--kubeconfig", str(connection.kubeconfig)]
    return f" {shlex.join(arguments)}" if arguments else ""

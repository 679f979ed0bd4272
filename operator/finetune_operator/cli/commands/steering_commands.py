"""`finetune wait`, `suspend`, `resume`, `restart`, `cancel`, `cost`, `debug`: operations on jobs in a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune_operator.cli.commands.cluster_commands import (
    JobName,
    OneOrAll,
    in_cluster,
    names_of_jobs,
    note_no_jobs,
    refuse_job_everywhere,
)
from finetune_operator.cli.commands.options import AllNamespaces, Context, Form, Kubeconfig, Namespace
from finetune_operator.cli.terminal.console import Output, UsageError, emit, err, note, out, print_error, print_line

if TYPE_CHECKING:
    from finetune_operator.cli.cluster.awaiting import Wait
    from finetune_operator.cli.cluster.cluster_jobs import Cluster
    from finetune_operator.cli.cluster.steering import Change, Steer

JobNames = Annotated[
    list[str], typer.Argument(metavar="JOB...", help="Names of FineTuneJobs.", autocompletion=names_of_jobs)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Let the API server check the change without applying it.")]


def _steering(described: Callable[[], None]) -> Callable[..., None]:
    """Return a command that applies the function of its name in `cli.steering` to each job, with the help text of
    `described`. An error of one job does not stop the others.
    """

    def command(
        jobs: JobNames,
        dry_run: DryRun = False,
        namespace: Namespace = None,
        context: Context = None,
        kubeconfig: Kubeconfig = None,
        output: Form = Output.TEXT,
    ) -> None:
        from finetune_operator.cli.cluster import steering
        from finetune_operator.cli.cluster.cluster_jobs import ClusterError, Connection, UnreachableError

        steer: Steer = getattr(steering, described.__name__)

        async def all_jobs(cluster: Cluster) -> tuple[list[Change], bool]:
            changes, refused = [], False
            for name in dict.fromkeys(jobs):
                try:
                    change = await steer(cluster, name, dry_run)
                except UnreachableError:
                    raise
                except ClusterError as error:
                    refused = True
                    print_error(f"{_error_text(error)}.")
                    continue
                changes.append(change)
                if output is Output.TEXT:
                    dry = " (dry run: nothing was changed)" if dry_run and change.verb != "unchanged" else ""
                    print_line(f"FineTuneJob {name} {change.text}{dry}.")
            return changes, refused

        changes, refused = in_cluster(Connection(kubeconfig, context, namespace), all_jobs)
        if output is not Output.TEXT:
            emit([change.data() for change in changes], output)
        if refused:
            raise typer.Exit(1)

    command.__name__, command.__doc__ = described.__name__, described.__doc__
    return command


@_steering
def suspend() -> None:
    """Save a checkpoint and stop jobs until they are resumed.

    Their pods are deleted; `finetune resume` continues from the checkpoint.

    \b
    Examples:
      finetune suspend reviews
      finetune suspend reviews ratings -n team-a
      finetune suspend reviews && finetune wait reviews --for suspended
    """


@_steering
def resume() -> None:
    """Resume suspended jobs from their last checkpoint.

    \b
    Examples:
      finetune resume reviews
      finetune resume reviews -o json
    """


@_steering
def restart() -> None:
    """Restart jobs from their last checkpoint; run ended jobs again.

    A running job starts another attempt from its last checkpoint.

    An ended job is deleted and recreated with the same spec, labels and annotations. Its claim is kept, and the
    earlier results are moved aside there; with storage.retain: delete they are deleted. If the job cannot be
    recreated, its manifest is written to JOB.yaml.

    \b
    Examples:
      finetune restart reviews
      finetune restart reviews --dry-run
    """


@_steering
def cancel() -> None:
    """Cancel jobs by deleting them.

    Their results stay on their claims, unless storage.retain is delete. Jobs that have ended are not changed.

    \b
    Examples:
      finetune cancel reviews
      finetune cancel reviews ratings --dry-run
    """


def wait(
    jobs: JobNames,
    goal: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="STATE",
            help="State to wait for: succeeded, failed, ended, planned, running, ready, suspended or deleted.",
        ),
    ] = "succeeded",
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="TIME", help="Time limit, such as 90s, 30m or 12h. Default: none."),
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Wait until jobs reach a state.

    Exit code 0 when all jobs have reached it; 1 when one can no longer reach it, for example after a failure; 124
    when the time limit is exceeded.

    \b
    Examples:
      finetune wait reviews
      finetune wait reviews ratings --for ended --timeout 2h
      finetune wait reviews --for running --timeout 10m -o json
      finetune wait reviews --for ready   # its endpoint answers; for a job without one: it has succeeded
    """
    from finetune_operator.cli.cluster.awaiting import Goal, wait_for
    from finetune_operator.cli.cluster.cluster_jobs import Connection

    goals = [one.value for one in Goal]
    if goal not in goals:
        raise UsageError(f"--for {goal}: unknown state; use one of {', '.join(goals)}")
    seconds = None if timeout is None else _seconds(timeout)
    state = Goal(goal)

    def report(one: Wait) -> None:
        if output is Output.TEXT:
            print_line(f"FineTuneJob {one.name} {one.text}.", stderr=not one.reached)

    waits = in_cluster(
        Connection(kubeconfig, context, namespace),
        lambda cluster: wait_for(cluster, list(dict.fromkeys(jobs)), state, seconds, report),
    )
    if output is not Output.TEXT:
        emit([one.data(state) for one in waits], output)
    if not all(one.reached for one in waits):
        raise typer.Exit(124 if all(one.reached or one.timed_out for one in waits) else 1)


def cost(
    job: OneOrAll = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Show the resource usage and cost of jobs.

    Amounts are at the operator's prices and are shown beside the estimates of the plans. Paid time starts when
    pods have nodes, and is multiplied by the number of nodes. Without a price table, no amounts are shown.

    \b
    Examples:
      finetune cost
      finetune cost reviews
      finetune cost -A -o json
    """
    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.cli.cluster.costs import Bill, print_costs, totals

    refuse_job_everywhere(job, all_namespaces)

    async def show(cluster: Cluster) -> None:
        cluster_jobs = await cluster.jobs(all_namespaces) if job is None else (await cluster.job(job),)
        bills = [Bill(cluster_job) for cluster_job in cluster_jobs]
        if output is not Output.TEXT:
            lines = [bill.data() for bill in bills]
            emit([lines[0] if job is not None else {"jobs": lines, "totals": totals(bills)}], output)
        elif bills:
            print_costs(out(), bills, with_namespace=all_namespaces)
        else:
            note_no_jobs(cluster, all_namespaces)

    in_cluster(Connection(kubeconfig, context, namespace), show)


def debug(
    job: JobName,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="File to write. Default: JOB-debug.tar.gz in this folder."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Collect diagnostics of a job in an archive.

    The archive contains the job with its status, its events, the objects that run it, its pods and their logs,
    and versions. Secrets are not read; values that are named like secrets or look like them are replaced.

    \b
    Examples:
      finetune debug reviews
      finetune debug reviews --file /tmp/reviews.tar.gz
    """
    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.cli.cluster.debugging import collect, write_archive

    target = file or Path(f"{job}-debug.tar.gz")
    if target.exists() and not force:
        raise UsageError(f"--file {target}: already exists; name another file, or add --force")

    async def collect_and_write(cluster: Cluster) -> list[str]:
        cluster_job = await cluster.job(job)
        console = err()
        with console.status("Reading") as status:
            collected = await collect(cluster, cluster_job, lambda part: status.update(f"Reading {part}"))
        for missing in collected.missing:
            note(f"not collected: {missing}")
        return write_archive(target, cluster_job, collected)

    try:
        names = in_cluster(Connection(kubeconfig, context, namespace), collect_and_write)
    except OSError as error:
        print_error(f"{target} cannot be written: {error.strerror or error}.")
        raise typer.Exit(1) from None
    if output is not Output.TEXT:
        emit([{"file": str(target), "contents": names}], output)
    else:
        print_line(f"{target} contains {len(names)} files; review them before you share it.")


def _error_text(error: Exception) -> str:
    """Return the error's text; first write the manifest of a job that could not be recreated to a file."""
    from finetune_operator.cli.cluster.steering import NotRecreatedError

    text = str(error).removesuffix(".")
    if isinstance(error, NotRecreatedError):
        import yaml

        file = Path(f"{error.manifest['metadata']['name']}.yaml")
        if file.exists():
            file = file.with_name(f"{file.stem}-restart.yaml")
        file.write_text(yaml.safe_dump(error.manifest, sort_keys=False, allow_unicode=True), encoding="utf-8")
        text += f"; its manifest is in {file}: kubectl apply -f {file}"
    return text


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text and text[-1] in _UNITS else (text, "s")
    if not number.isascii() or not number.isdecimal() or int(number) == 0:
        raise UsageError(f"--timeout {text}: not a duration; write it as 90s, 30m, 12h or 2d")
    return float(int(number) * _UNITS[unit])

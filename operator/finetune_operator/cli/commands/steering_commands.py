"""`finetune wait`, `suspend`, `resume`, `restart`, `cancel`, `cost`, `debug`: what one does with jobs in a cluster."""

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
    refuse_job_everywhere,
    tell_no_jobs,
)
from finetune_operator.cli.commands.options import AllNamespaces, Context, Form, Kubeconfig, Namespace
from finetune_operator.cli.console import Output, UsageError, complain, emit, err, note, out, print_line

if TYPE_CHECKING:
    from finetune_operator.cli.awaiting import Wait
    from finetune_operator.cli.cluster_jobs import Cluster
    from finetune_operator.cli.steering import Change, Steer

JobNames = Annotated[
    list[str], typer.Argument(metavar="JOB...", help="Names of FineTuneJobs.", autocompletion=names_of_jobs)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Ask the API server whether it would take the change; change nothing.")
]


def _steering(described: Callable[[], None]) -> Callable[..., None]:
    """The command that does to jobs what the function of its name in `cli.steering` does to one; its help is that of
    `described`. One job after the other: what is wrong with one does not keep the others from being changed.
    """

    def command(
        jobs: JobNames,
        dry_run: DryRun = False,
        namespace: Namespace = None,
        context: Context = None,
        kubeconfig: Kubeconfig = None,
        output: Form = Output.TEXT,
    ) -> None:
        from finetune_operator.cli import steering
        from finetune_operator.cli.cluster_jobs import ClusterError, Connection, UnreachableError

        steer: Steer = getattr(steering, described.__name__)

        async def all_of_them(cluster: Cluster) -> tuple[list[Change], bool]:
            changes, refused = [], False
            for name in dict.fromkeys(jobs):
                try:
                    change = await steer(cluster, name, dry_run)
                except UnreachableError:
                    raise
                except ClusterError as error:
                    refused = True
                    complain(f"{_kept(error)}.")
                    continue
                changes.append(change)
                if output is Output.TEXT:
                    dry = " (dry run: nothing was changed)" if dry_run and change.verb != "unchanged" else ""
                    print_line(f"FineTuneJob {name} {change.text}{dry}.")
            return changes, refused

        changes, refused = in_cluster(Connection(kubeconfig, context, namespace), all_of_them)
        if output is not Output.TEXT:
            emit([change.data() for change in changes], output)
        if refused:
            raise typer.Exit(1)

    command.__name__, command.__doc__ = described.__name__, described.__doc__
    return command


@_steering
def suspend() -> None:
    """Stop jobs after a checkpoint, until they are resumed.

    Their pods go; `finetune resume` lets them go on from there.

    \b
    Examples:
      finetune suspend reviews
      finetune suspend reviews ratings -n team-a
      finetune suspend reviews && finetune wait reviews --for suspended
    """


@_steering
def resume() -> None:
    """Let suspended jobs go on from their last checkpoint.

    \b
    Examples:
      finetune resume reviews
      finetune resume reviews -o json
    """


@_steering
def restart() -> None:
    """Begin another attempt of jobs, or run ended ones again.

    A job that runs goes on from its last checkpoint.

    A job that has ended is deleted and made again with the same spec, labels and annotations. Its claim stays, and
    what the run before has written is moved aside there, not deleted. When the job cannot be made again its
    manifest is written to JOB.yaml, and nothing is lost.

    \b
    Examples:
      finetune restart reviews
      finetune restart reviews --dry-run
    """


@_steering
def cancel() -> None:
    """End jobs for good by deleting them.

    What they have written stays on their claims. Jobs that have ended are left alone.

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
            help="succeeded, failed, ended, planned, running, ready, suspended or deleted.",
        ),
    ] = "succeeded",
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="E.g. 90s, 30m, 12h. Left out: for ever.")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Wait until all the jobs are as far as that.

    Exit code 0 when all are; 1 when one can no longer come there, e.g. has failed; 124 when the time is over.

    \b
    Examples:
      finetune wait reviews
      finetune wait reviews ratings --for ended --timeout 2h
      finetune wait reviews --for running --timeout 10m -o json
      finetune wait reviews --for ready   # its endpoint answers; without one: it has succeeded
    """
    from finetune_operator.cli.awaiting import Goal, wait_for
    from finetune_operator.cli.cluster_jobs import Connection

    goals = [one.value for one in Goal]
    if goal not in goals:
        raise UsageError(f"--for {goal}: is no state to wait for; use one of {', '.join(goals)}")
    seconds = None if timeout is None else _seconds(timeout)
    wanted = Goal(goal)

    def tell(one: Wait) -> None:
        if output is Output.TEXT:
            print_line(f"FineTuneJob {one.name} {one.text}.", stderr=not one.reached)

    found = in_cluster(
        Connection(kubeconfig, context, namespace),
        lambda cluster: wait_for(cluster, list(dict.fromkeys(jobs)), wanted, seconds, tell),
    )
    if output is not Output.TEXT:
        emit([one.data(wanted) for one in found], output)
    if not all(one.reached for one in found):
        raise typer.Exit(124 if all(one.reached or one.timed_out for one in found) else 1)


def cost(
    job: OneOrAll = None,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Show what jobs have used and what that costs.

    The amounts are at the operator's prices, beside what the plans expect. Paid time counts from when pods have
    nodes, times the nodes. Without a price table there are no amounts.

    \b
    Examples:
      finetune cost
      finetune cost reviews
      finetune cost -A -o json
    """
    from finetune_operator.cli.cluster_jobs import Connection
    from finetune_operator.cli.costs import Bill, print_costs, totals

    refuse_job_everywhere(job, all_namespaces)

    async def show(cluster: Cluster) -> None:
        found = await cluster.jobs(all_namespaces) if job is None else (await cluster.job(job),)
        bills = [Bill(each) for each in found]
        if output is not Output.TEXT:
            lines = [bill.data() for bill in bills]
            emit([lines[0] if job is not None else {"jobs": lines, "totals": totals(bills)}], output)
        elif bills:
            print_costs(out(), bills, with_namespace=all_namespaces)
        else:
            tell_no_jobs(cluster, all_namespaces)

    in_cluster(Connection(kubeconfig, context, namespace), show)


def debug(
    job: JobName,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="FILE", help="Where to write. Left out: JOB-debug.tar.gz here.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Collect what a maintainer would ask for into an archive.

    The job with its status, its events, what runs it, its pods and their logs, and versions. Secrets are not
    read; values that are called or look like secrets are replaced.

    \b
    Examples:
      finetune debug reviews
      finetune debug reviews --file /tmp/reviews.tar.gz
    """
    from finetune_operator.cli.cluster_jobs import Connection
    from finetune_operator.cli.debugging import collect, write_archive

    target = file or Path(f"{job}-debug.tar.gz")
    if target.exists() and not force:
        raise UsageError(f"--file {target}: is there already; name another one, or add --force")

    async def make(cluster: Cluster) -> list[str]:
        found_job = await cluster.job(job)
        console = err()
        with console.status("Reading") as status:
            found = await collect(cluster, found_job, lambda what: status.update(f"Reading {what}"))
        for gap in found.missing:
            note(f"left out: {gap}")
        return write_archive(target, found_job, found)

    try:
        names = in_cluster(Connection(kubeconfig, context, namespace), make)
    except OSError as error:
        complain(f"{target} cannot be written: {error.strerror or error}.")
        raise typer.Exit(1) from None
    if output is not Output.TEXT:
        emit([{"file": str(target), "contents": names}], output)
    else:
        print_line(f"{target} has {len(names)} files; look through them before you give it to others.")


def _kept(error: Exception) -> str:
    """The text; the manifest of a job that is gone is put into a file first."""
    from finetune_operator.cli.steering import NotRecreatedError

    text = str(error).removesuffix(".")
    if isinstance(error, NotRecreatedError):
        import yaml

        file = Path(f"{error.manifest['metadata']['name']}.yaml")
        if file.exists():
            file = file.with_name(f"{file.stem}-restart.yaml")
        file.write_text(yaml.safe_dump(error.manifest, sort_keys=False, allow_unicode=True), encoding="utf-8")
        text += f"; it is in {file}: kubectl apply -f {file}"
    return text


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text and text[-1] in _UNITS else (text, "s")
    if not number.isascii() or not number.isdecimal() or int(number) == 0:
        raise UsageError(f"--timeout {text}: is no time; write it as 90s, 30m, 12h or 2d")
    return float(int(number) * _UNITS[unit])

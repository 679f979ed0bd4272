"""`finetune rollback`: rolls an endpoint back to an earlier revision."""

from __future__ import annotations

from typing import Annotated

import typer

from finetune_operator.cli.commands.cluster_commands import JobName, in_cluster
from finetune_operator.cli.commands.options import Context, Form, Kubeconfig, Namespace
from finetune_operator.cli.commands.steering_commands import DryRun
from finetune_operator.cli.terminal.console import Output, emit, print_line


def rollback(
    job: JobName,
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            min=1,
            metavar="N",
            help="Number of the revision, as shown by finetune status. Default: the one that served before.",
        ),
    ] = None,
    dry_run: DryRun = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """Roll a job's endpoint back to an earlier revision.

    The current revision serves until the earlier one is ready. The spec is not changed: the annotation
    finetune.dev/rollback applies until spec.endpoint changes. To end a rollback, pass the number of the revision
    that spec.endpoint defines. Claims with the model have to exist.

    \b
    Examples:
      finetune rollback reviews
      finetune rollback reviews --to 3 --dry-run
      finetune rollback reviews && finetune wait reviews --for ready
    """
    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.cli.cluster.rolling_back import rollback as roll_back

    change = in_cluster(
        Connection(kubeconfig, context, namespace), lambda cluster: roll_back(cluster, job, to, dry_run)
    )
    if output is not Output.TEXT:
        emit([change.data()], output)
    else:
        dry = " (dry run: nothing was changed)" if dry_run and change.verb != "unchanged" else ""
        print_line(f"FineTuneJob {job} {change.text}{dry}.")

"""`finetune prune`: lists and deletes the claims of deleted jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from finetune_operator.cli.commands.cluster_commands import in_cluster
from finetune_operator.cli.commands.options import Context, Form, Kubeconfig, Namespace
from finetune_operator.cli.terminal.console import Output, UsageError, emit, note, out, print_error, print_line

if TYPE_CHECKING:
    from finetune_operator.cli.cluster.cluster_jobs import Cluster
    from finetune_operator.cli.cluster.pruning import JoblessClaim


def prune(
    claims: Annotated[
        list[str] | None, typer.Argument(metavar="CLAIM", help="Names of claims. Default: all claims of deleted jobs.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete the claims. Default: only list them.")] = False,
    namespace: Namespace = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Include the claims of all namespaces.")
    ] = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    output: Form = Output.TEXT,
) -> None:
    """List the claims of deleted jobs, or delete them with --yes.

    The operator creates a claim for a job that names none in storage.workspace. By default the claim outlives the
    job, with the trained model and all other results. This command finds claims whose job does not exist, and that
    no other job names and no pod uses. Without --yes nothing is deleted. With it, their data are deleted for good,
    unless the storage class retains volumes. Claims that you created yourself are never listed.

    Exit code 0 if all were listed or deleted; 1 if one was not deleted, or the cluster does not answer.

    \b
    Examples:
      finetune prune
      finetune prune reviews-workspace --yes
      finetune prune -n team-a --yes
      finetune prune -A -o json
    """
    from finetune_operator.cli.cluster.cluster_jobs import ClusterError, Connection, UnreachableError
    from finetune_operator.cli.cluster.jobview import utc_now
    from finetune_operator.cli.cluster.pruning import delete_claim, jobless_claims, print_claims

    if claims and all_namespaces:
        raise UsageError("--all-namespaces cannot be used with CLAIM; give the claim's namespace with -n")

    async def list_or_delete(cluster: Cluster) -> bool:
        found = await jobless_claims(cluster, all_namespaces)
        unused, failed = _selected(found, claims or [])
        deleted = []
        for one in unused if yes else ():
            try:
                await delete_claim(cluster, one.claim)
            except UnreachableError:
                raise
            except ClusterError as error:
                failed = True
                print_error(f"claim {one.claim.metadata.name} is not deleted: {str(error).removesuffix('.')}.")
                continue
            deleted.append(one)
            if output is Output.TEXT:
                where = f" of namespace {one.claim.metadata.namespace}" if all_namespaces else ""
                print_line(f"PersistentVolumeClaim {one.claim.metadata.name}{where} is deleted.")
        if output is not Output.TEXT:
            size = sum(one.claim.size for one in unused)
            rows = [{**one.data(), "deleted": one in deleted} for one in unused]
            in_use = [one.data() for one in found if one.used_by]
            emit([{"claims": rows, "inUse": in_use, "totalBytes": size}], output)
        elif not yes and unused:
            print_claims(out(), [one.claim for one in unused], utc_now(), with_namespace=all_namespaces)
            note("nothing was deleted; with --yes, these claims are deleted with everything on them.")
        elif not unused and not failed:
            note(f"no claim of a deleted job in {'any namespace' if all_namespaces else cluster.namespace}.")
        return failed

    if in_cluster(Connection(kubeconfig, context, namespace), list_or_delete):
        raise typer.Exit(1)


def _selected(found: tuple[JoblessClaim, ...], names: list[str]) -> tuple[list[JoblessClaim], bool]:
    """Return the claims that nothing uses, of those that are named, and True if one cannot be deleted."""
    by_name = {one.claim.metadata.name: one for one in found}
    failed = False
    for name in names:
        if name not in by_name:
            failed = True
            print_error(f"{name} is no claim of a deleted job: finetune prune lists those; delete others with kubectl.")
    for one in found:
        if one.used_by and (not names or one.claim.metadata.name in names):
            failed = failed or bool(names)
            note(f"claim {one.claim.metadata.name} is kept: {one.used_by} uses it.")
    return [one for one in found if one.used_by is None and (not names or one.claim.metadata.name in names)], failed

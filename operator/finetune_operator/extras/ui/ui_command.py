"""`finetune ui`: runs of this machine and jobs of a cluster in a browser."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune_contract.layout import JobPaths
from finetune_operator.cli.commands.options import AllNamespaces, Context, Kubeconfig, Namespace, Workspace
from finetune_operator.cli.terminal.console import UsageError, out, print_error

if TYPE_CHECKING:
    from finetune_operator.extras.ui.pages import Pages

PORT = 8642


def ui(
    workspace: Workspace = Path("runs"),
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="PORT", help="Port on 127.0.0.1; 0: any free port.")
    ] = PORT,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser if started in a terminal.")
    ] = True,
    cluster: Annotated[
        bool, typer.Option("--cluster/--no-cluster", help="Also show the cluster's jobs, if there is a kubeconfig.")
    ] = True,
    namespace: Namespace = None,
    all_namespaces: AllNamespaces = False,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show runs and jobs in a browser.

    The pages show curves, plans, logs and comparisons. They are read-only and update themselves. They can be
    opened only on this machine, and only with the token in the printed URL. Ctrl-C stops the server.

    \b
    Examples:
      finetune ui
      finetune ui --workspace results --port 0 --no-browser
      finetune ui -n team-a --context production
      ssh -L 8642:127.0.0.1:8642 HOST finetune ui --no-browser
    """
    named = [
        option
        for option, value in (
            ("--namespace", namespace),
            ("--all-namespaces", all_namespaces),
            ("--context", context),
            ("--kubeconfig", kubeconfig),
        )
        if value
    ]
    if named and not cluster:
        raise UsageError(f"{named[0]} and --no-cluster exclude each other")
    if workspace.exists() and not workspace.is_dir():
        raise UsageError(f"--workspace {workspace}: is a file; name a folder")
    if JobPaths(workspace).job.is_file():
        raise UsageError(f"--workspace {workspace}: is the folder of one run; name its parent folder")

    from finetune_operator.cli.cluster.cluster_jobs import Connection
    from finetune_operator.extras.ui.pages import Pages
    from finetune_operator.extras.ui.ui_jobs import ClusterJobs
    from finetune_operator.extras.ui.ui_runs import Workspace as Runs
    from finetune_operator.kubernetes_api.configuration import is_configured

    shown = cluster and (named or is_configured(kubeconfig))
    jobs = ClusterJobs(Connection(kubeconfig, context, namespace), all_namespaces) if shown else None
    pages = Pages(Runs(workspace.resolve()), jobs)
    _serve(pages, port, workspace, browser)


def _serve(pages: Pages, port: int, workspace: Path, browser: bool) -> None:
    """Print the address of the pages, and serve them until Ctrl-C."""
    from finetune_operator.extras.ui.ui_server import ADDRESS, Server

    try:
        server = Server(pages, port)
    except OSError as error:
        print_error(
            f"--port {port}: cannot listen on {ADDRESS}: {error.strerror}. "
            "Another finetune ui may be running; choose another port, or --port 0 for any free port."
        )
        raise typer.Exit(1) from None
    # A shell that starts this in the background has it ignore Ctrl-C, which is all that ends it in order.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with server:
        out().print(f"Serving {workspace} at {server.url()}\nPress Ctrl-C to stop.", soft_wrap=True)
        if browser and sys.stdout.isatty():
            _open(server.url(server.keys.for_one_use()))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _open(url: str) -> None:
    """Show the page where there is a screen; a browser for terminals would take this one away."""
    if sys.platform == "linux" and not ("DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ):
        return
    import webbrowser

    webbrowser.open(url)

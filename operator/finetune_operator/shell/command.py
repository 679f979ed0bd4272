"""The `finetune-operator` command.

Exit codes: 0 after an orderly end; 1 when there is no cluster to be had; 2 for a call or a settings file that is wrong.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from finetune_operator.api.settings import CLUSTER_SETTINGS, Settings
from finetune_operator.settings_file import SettingsError, read_settings_file
from finetune_operator.shell.leader import own_namespace

USAGE = 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


class LogFormat(StrEnum):
    """Form of the log."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def main() -> NoReturn:
    """The console script."""
    app(prog_name="finetune-operator")
    sys.exit(0)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"finetune-operator {distribution_version('finetune-operator')}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Run FineTuneJobs on a Kubernetes cluster."""


@app.command("check-settings")
def check_settings(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The settings file, as run takes it.")],
) -> None:
    """Check a settings file; needs no cluster.

    All problems are told at once.

    \b
    Examples:
      finetune-operator check-settings settings.yaml
    """
    _settings(file)
    print(f"{file} is valid")


@app.command()
def run(
    settings: Annotated[
        Path | None,
        typer.Option("--settings", metavar="FILE", help="The administrator's settings. Left out: the defaults."),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            metavar="NS",
            help="Run jobs of this namespace; repeatable. Left out: what the settings say, else all.",
        ),
    ] = None,
    own: Annotated[
        str | None,
        typer.Option(
            "--own-namespace",
            metavar="NS",
            help="Where the Lease and the progress server's certificate live. Left out: the pod's own.",
        ),
    ] = None,
    kubeconfig: Annotated[
        Path | None,
        typer.Option("--kubeconfig", metavar="FILE", help="Left out: KUBECONFIG, else the cluster around this pod."),
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig. Left out: its current.")
    ] = None,
    leader_election: Annotated[
        bool,
        typer.Option(
            "--leader-election/--no-leader-election", help="Act only while holding the Lease; no: for one process."
        ),
    ] = True,
    workers: Annotated[int, typer.Option("--workers", min=1, max=256, help="Jobs that are looked at at once.")] = 16,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="ADDRESS", help="Address to serve on. Left out: all.")
    ] = None,
    http_port: Annotated[
        int, typer.Option("--http-port", min=0, max=65535, help="Port of /healthz, /readyz, /metrics; 0: any.")
    ] = 8080,
    progress_port: Annotated[
        int, typer.Option("--progress-port", min=0, max=65535, help="Port for the progress of pods; 0: any.")
    ] = 8443,
    webhook_port: Annotated[
        int | None,
        typer.Option(
            "--webhook-port",
            min=0,
            max=65535,
            help="Answer the API server there whether a job may be stored (/validate); 0: any. Left out: not at all.",
        ),
    ] = None,
    webhook_configuration: Annotated[
        str | None,
        typer.Option(
            "--webhook-configuration",
            metavar="NAME",
            help="ValidatingWebhookConfiguration that is told of the operator's own authority. Left out: none is.",
        ),
    ] = None,
    webhook_certificate: Annotated[
        Path | None,
        typer.Option(
            "--webhook-certificate",
            metavar="DIR",
            help="Folder with the webhook's tls.crt and tls.key, as cert-manager keeps it. Left out: one of our own.",
        ),
    ] = None,
    webhook_clients: Annotated[
        Path | None,
        typer.Option(
            "--webhook-client-authorities",
            metavar="FILE",
            help="Authorities (PEM) by which clients of the webhook need a certificate; the API server shows one only "
            "where its admission configuration names one. Left out: whoever reaches the port may ask.",
        ),
    ] = None,
    webhook_client_name: Annotated[
        list[str] | None,
        typer.Option(
            "--webhook-client-name",
            metavar="NAME",
            help="Common name of a client that may ask, by --webhook-client-authorities; repeatable. Left out: any.",
        ),
    ] = None,
    log_format: Annotated[LogFormat, typer.Option("--log-format", help="Form of the log.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option("--log-level", help="The least that is logged.")] = LogLevel.INFO,
) -> None:
    """Watch FineTuneJobs and run them, until SIGTERM or SIGINT.

    \b
    Examples:
      finetune-operator run --settings /etc/finetune-operator/settings.yaml
      finetune-operator run --namespace team-a --namespace team-b
      finetune-operator run --kubeconfig ~/.kube/config --context kind-test --no-leader-election
    """
    _set_up_logs(log_format, log_level)
    chosen = _settings(settings) if settings is not None else CLUSTER_SETTINGS
    if namespace:
        chosen = chosen.model_copy(update={"namespaces": tuple(dict.fromkeys(namespace))})
    home = own or own_namespace()
    if home is None and leader_election:
        _usage("outside of a cluster, give --own-namespace, or --no-leader-election for a single process")
    # The Kubernetes client takes a second to import; check-settings and --help do without.
    from finetune_operator.kubernetes_api.errors import ApiError, NoClusterError
    from finetune_operator.reconcile.decide import decide
    from finetune_operator.shell.startup import Options
    from finetune_operator.shell.startup import run as run_operator
    from finetune_operator.shell.webhook import WebhookOptions

    webhook = None
    if webhook_port is not None:
        names = tuple(webhook_client_name or ())
        webhook = WebhookOptions(webhook_port, webhook_configuration, webhook_certificate, webhook_clients, names)
    elif any((webhook_configuration, webhook_certificate, webhook_clients, webhook_client_name)):
        _usage("the options --webhook-... are for a webhook: give --webhook-port, too")
    if webhook_client_name and webhook_clients is None:
        _usage("--webhook-client-name needs --webhook-client-authorities: without a certificate nobody has a name")
    if webhook_configuration is not None and webhook_certificate is not None:
        _usage("--webhook-configuration and --webhook-certificate exclude each other: who makes the one tells of it")
    options = Options(
        chosen, home or "", kubeconfig, context, leader_election, workers, listen, http_port, progress_port, webhook
    )
    try:
        asyncio.run(run_operator(options, decide))
    except NoClusterError as error:
        _fail(f"there is no cluster to be had: {error}", error)
    except (ApiError, OSError) as error:
        _fail(str(error), error)


def _settings(file: Path) -> Settings:
    try:
        return read_settings_file(file)
    except SettingsError as error:
        _usage(*error.problems)


def _usage(*problems: str) -> NoReturn:
    for problem in problems:
        print(f"Error: {problem}", file=sys.stderr)
    raise typer.Exit(USAGE)


def _fail(why: str, error: Exception) -> NoReturn:
    print(f"Error: {why}", file=sys.stderr)
    raise typer.Exit(1) from error


# ----------------------------------------------------------------------------------------------------------------- logs


class _JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record with the names that log collectors know."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


QUIET: Sequence[tuple[str, int]] = (
    # Told of every try; what it means for us is told by kube.py and leader.py.
    ("kubernetes", logging.ERROR),
    ("aiohttp", logging.WARNING),
    ("asyncio", logging.WARNING),
)


def _set_up_logs(form: LogFormat, level: LogLevel) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if form is LogFormat.JSON:
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level is not LogLevel.DEBUG:
        for name, least in QUIET:
            logging.getLogger(name).setLevel(least)

"""The `finetune-operator` command.

Exit codes: 0 after an orderly end; 1 when no cluster can be used; 2 for a wrong call or a wrong settings file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from finetune_operator.controller.cluster.leader import own_namespace
from finetune_operator.controller.operator_options import (
    Context,
    HttpPort,
    Kubeconfig,
    LeaderElection,
    Listen,
    LogForm,
    LogFormat,
    LogLevel,
    LowestLevel,
    Namespaces,
    OwnNamespace,
    ProgressPort,
    SettingsFile,
    WebhookCertificate,
    WebhookClientNames,
    WebhookClients,
    WebhookConfiguration,
    WebhookPort,
    Workers,
)
from finetune_operator.documents.settings_file import SettingsError, read_settings_file
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS, Settings

if TYPE_CHECKING:
    from finetune_operator.controller.servers.webhook import WebhookOptions

USAGE = 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def main() -> NoReturn:
    """Run the console script."""
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Settings file, as for run --settings.")],
) -> None:
    """Check a settings file; needs no cluster.

    All problems are reported at once.

    \b
    Examples:
      finetune-operator check-settings settings.yaml
    """
    _settings(file)
    print(f"{file} is valid")


@app.command()
def run(
    settings: SettingsFile = None,
    namespace: Namespaces = None,
    own: OwnNamespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    leader_election: LeaderElection = True,
    workers: Workers = 16,
    listen: Listen = None,
    http_port: HttpPort = 8080,
    progress_port: ProgressPort = 8443,
    webhook_port: WebhookPort = None,
    webhook_configuration: WebhookConfiguration = None,
    webhook_certificate: WebhookCertificate = None,
    webhook_clients: WebhookClients = None,
    webhook_client_name: WebhookClientNames = None,
    log_format: LogForm = LogFormat.TEXT,
    log_level: LowestLevel = LogLevel.INFO,
) -> None:
    """Watch FineTuneJobs and run them, until SIGTERM or SIGINT.

    \b
    Examples:
      finetune-operator run --settings /etc/finetune-operator/settings.yaml
      finetune-operator run --namespace team-a --namespace team-b
      finetune-operator run --kubeconfig ~/.kube/config --context kind-test --no-leader-election
    """
    _set_up_logs(log_format, log_level)
    effective = _settings(settings) if settings is not None else CLUSTER_SETTINGS
    if namespace:
        effective = effective.model_copy(update={"namespaces": tuple(dict.fromkeys(namespace))})
    home = own or own_namespace()
    if home is None and leader_election:
        _usage("outside of a cluster, give --own-namespace, or --no-leader-election for a single process")
    # The Kubernetes client takes a second to import; check-settings and --help do without.
    from finetune_operator.controller.lifecycle import Options
    from finetune_operator.controller.process import run as run_operator
    from finetune_operator.jobs.decide.decide import decide
    from finetune_operator.kubernetes_api.errors import ApiError, NoClusterError

    webhook = _webhook_options(
        webhook_port, webhook_configuration, webhook_certificate, webhook_clients, tuple(webhook_client_name or ())
    )
    options = Options(
        effective, home or "", kubeconfig, context, leader_election, workers, listen, http_port, progress_port, webhook
    )
    try:
        asyncio.run(run_operator(options, decide))
    except NoClusterError as error:
        _fail(f"no cluster can be used: {error}", error)
    except (ApiError, OSError) as error:
        _fail(str(error), error)


def _webhook_options(
    port: int | None,
    configuration: str | None,
    certificate: Path | None,
    clients: Path | None,
    client_names: tuple[str, ...],
) -> WebhookOptions | None:
    """Return the options of the webhook; None: no port was given, so there is none."""
    from finetune_operator.controller.servers.webhook import WebhookOptions

    if port is None and any((configuration, certificate, clients, client_names)):
        _usage("the options --webhook-... need --webhook-port")
    if client_names and clients is None:
        _usage("--webhook-client-name needs --webhook-client-authorities: names are read from client certificates")
    if configuration is not None and certificate is not None:
        _usage(
            "--webhook-configuration and --webhook-certificate exclude each other: the operator writes only its own CA"
        )
    return None if port is None else WebhookOptions(port, configuration, certificate, clients, client_names)


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
    """Formatter of one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record with the names that log collectors know."""
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
    # It logs every try; kube.py and leader.py log the consequences for us.
    ("kubernetes", logging.ERROR),
    ("aiohttp", logging.WARNING),
    ("asyncio", logging.WARNING),
    ("kopf", logging.WARNING),
    # Failed requests are those of our client, which logs outages; kinds that are not served are logged by discovery.py.
    ("kopf._cogs.clients.api", logging.CRITICAL),
    ("kopf._core.reactor.observation", logging.ERROR),
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
            logging.getLogger(name).setLevel(max(least, logging.getLogger().level))

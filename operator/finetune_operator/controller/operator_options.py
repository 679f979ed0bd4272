"""Options of the `finetune-operator` command, each described once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer


class LogFormat(StrEnum):
    """Format of the log."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """Lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


SettingsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE", help="The administrator's settings. Default: the built-in ones."),
]
Namespaces: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace",
        metavar="NS",
        help="Run jobs of this namespace; repeatable. Default: those of the settings, else all.",
    ),
]
OwnNamespace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--own-namespace",
        metavar="NS",
        help="Namespace of the Lease and of the progress server's certificate. Default: the pod's.",
    ),
]
Kubeconfig: TypeAlias = Annotated[
    Path | None,
    typer.Option("--kubeconfig", metavar="FILE", help="Default: KUBECONFIG, else the cluster of this pod."),
]
Context: TypeAlias = Annotated[
    str | None,
    typer.Option("--context", metavar="NAME", help="Context of the kubeconfig. Default: its current context."),
]
LeaderElection: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--leader-election/--no-leader-election",
        help="Act only while holding the Lease; disable it for a single process.",
    ),
]
Workers: TypeAlias = Annotated[
    int, typer.Option("--workers", min=1, max=256, help="Jobs that are reconciled in parallel.")
]
Listen: TypeAlias = Annotated[
    str | None, typer.Option("--listen", metavar="ADDRESS", help="Address to serve on. Default: all.")
]
HttpPort: TypeAlias = Annotated[
    int, typer.Option("--http-port", min=0, max=65535, help="Port of /healthz, /readyz, /metrics; 0: any.")
]
ProgressPort: TypeAlias = Annotated[
    int, typer.Option("--progress-port", min=0, max=65535, help="Port for progress reports of pods; 0: any.")
]
WebhookPort: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--webhook-port",
        min=0,
        max=65535,
        help="Port of the validating webhook for jobs (/validate); 0: any. Default: no webhook.",
    ),
]
WebhookConfiguration: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--webhook-configuration",
        metavar="NAME",
        help="ValidatingWebhookConfiguration to write the operator's CA certificate to. Default: none.",
    ),
]
WebhookCertificate: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--webhook-certificate",
        metavar="DIR",
        help="Folder with the webhook's tls.crt and tls.key, e.g. from cert-manager. Default: the operator's own.",
    ),
]
WebhookClients: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--webhook-client-authorities",
        metavar="FILE",
        help="CA certificates (PEM) that sign the certificates of the webhook's clients; the API server presents one "
        "only if its admission configuration names one. Default: clients need no certificate.",
    ),
]
WebhookClientNames: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--webhook-client-name",
        metavar="NAME",
        help="Common name of a permitted client, with --webhook-client-authorities; repeatable. Default: any.",
    ),
]
LogForm: TypeAlias = Annotated[LogFormat, typer.Option("--log-format", help="Format of the log.")]
LowestLevel: TypeAlias = Annotated[LogLevel, typer.Option("--log-level", help="Lowest level that is logged.")]

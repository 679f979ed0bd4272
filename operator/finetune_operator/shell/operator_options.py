"""Options of the `finetune-operator` command, each described once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer


class LogFormat(StrEnum):
    """Form of the log."""

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
    typer.Option("--settings", metavar="FILE", help="The administrator's settings. Left out: the defaults."),
]
Namespaces: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace",
        metavar="NS",
        help="Run jobs of this namespace; repeatable. Left out: what the settings say, else all.",
    ),
]
OwnNamespace: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--own-namespace",
        metavar="NS",
        help="Where the Lease and the progress server's certificate live. Left out: the pod's own.",
    ),
]
Kubeconfig: TypeAlias = Annotated[
    Path | None,
    typer.Option("--kubeconfig", metavar="FILE", help="Left out: KUBECONFIG, else the cluster around this pod."),
]
Context: TypeAlias = Annotated[
    str | None, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig. Left out: its current.")
]
LeaderElection: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--leader-election/--no-leader-election", help="Act only while holding the Lease; no: for one process."
    ),
]
Workers: TypeAlias = Annotated[int, typer.Option("--workers", min=1, max=256, help="Jobs that are looked at at once.")]
Listen: TypeAlias = Annotated[
    str | None, typer.Option("--listen", metavar="ADDRESS", help="Address to serve on. Left out: all.")
]
HttpPort: TypeAlias = Annotated[
    int, typer.Option("--http-port", min=0, max=65535, help="Port of /healthz, /readyz, /metrics; 0: any.")
]
ProgressPort: TypeAlias = Annotated[
    int, typer.Option("--progress-port", min=0, max=65535, help="Port for the progress of pods; 0: any.")
]
WebhookPort: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--webhook-port",
        min=0,
        max=65535,
        help="Answer the API server there whether a job may be stored (/validate); 0: any. Left out: not at all.",
    ),
]
WebhookConfiguration: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--webhook-configuration",
        metavar="NAME",
        help="ValidatingWebhookConfiguration that is told of the operator's own authority. Left out: none is.",
    ),
]
WebhookCertificate: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--webhook-certificate",
        metavar="DIR",
        help="Folder with the webhook's tls.crt and tls.key, as cert-manager keeps it. Left out: one of our own.",
    ),
]
WebhookClients: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--webhook-client-authorities",
        metavar="FILE",
        help="Authorities (PEM) by which clients of the webhook need a certificate; the API server shows one only "
        "where its admission configuration names one. Left out: whoever reaches the port may ask.",
    ),
]
WebhookClientNames: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--webhook-client-name",
        metavar="NAME",
        help="Common name of a client that may ask, by --webhook-client-authorities; repeatable. Left out: any.",
    ),
]
LogForm: TypeAlias = Annotated[LogFormat, typer.Option("--log-format", help="Form of the log.")]
LeastLogged: TypeAlias = Annotated[LogLevel, typer.Option("--log-level", help="The least that is logged.")]

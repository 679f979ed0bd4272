"""Arguments and options that several commands share, each described once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from finetune_operator.cli.terminal.console import DocumentOutput, Output


class RunStage(StrEnum):
    """Stages that can be named: those of the contract's that run in this version."""

    PREPARE = "prepare"
    TRAIN = "train"
    EVALUATE = "evaluate"
    PREDICT = "predict"


Files: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="FILE", help="Job files or folders; - reads standard input.")
]
Filenames: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--filename", "-f", metavar="FILE", help="Job file or folder, as in kubectl; repeatable."),
]
Form: TypeAlias = Annotated[Output, typer.Option("--output", "-o", help="Output format.")]
DocumentForm: TypeAlias = Annotated[DocumentOutput, typer.Option("--output", "-o", help="Output format.")]
LocalSettings: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        help="Settings of an administrator (allow-lists, prices). Default: those of a local run.",
    ),
]
ClusterSettings: TypeAlias = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE", help="The operator's settings. Default: its built-in settings."),
]
ForCluster: TypeAlias = Annotated[
    bool, typer.Option("--cluster", help="Apply the operator's rules for a cluster instead of those for a local run.")
]
Hardware: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="KEY=VALUE,...",
        help="Plan for nodes like this; keys: gpu, memory, gpus, bf16, cpu, hostMemory, cpuBf16, network (Gbit/s).",
    ),
]
Workspace: TypeAlias = Annotated[
    Path, typer.Option("--workspace", metavar="DIR", help="Folder for results; each job has a folder in it.")
]
EarlierWorkspace: TypeAlias = Annotated[
    Path | None,
    typer.Option("--workspace", metavar="DIR", help="Use the facts of data that a local run prepared in this folder."),
]
Measure: TypeAlias = Annotated[
    bool, typer.Option("--measure/--no-measure", help="Measure the model's size with the trainer, or assume it.")
]

Namespace: TypeAlias = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace. Default: that of the kubeconfig's context.")
]
AllNamespaces: TypeAlias = Annotated[
    bool, typer.Option("--all-namespaces", "-A", help="Show the jobs of all namespaces.")
]
Context: TypeAlias = Annotated[
    str | None, typer.Option("--context", help="Kubeconfig context. Default: the current context.")
]
Kubeconfig: TypeAlias = Annotated[
    Path | None,
    typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig file. Default: KUBECONFIG, else ~/.kube/config."),
]

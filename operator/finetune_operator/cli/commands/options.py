"""Arguments and options that several commands share, each described once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from finetune_operator.cli.console import DocumentOutput, Output


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
    list[str] | None, typer.Option("--filename", "-f", metavar="FILE", help="The same, as kubectl has it; repeatable.")
]
Form: TypeAlias = Annotated[Output, typer.Option("--output", "-o", help="Form of the result.")]
DocumentForm: TypeAlias = Annotated[DocumentOutput, typer.Option("--output", "-o", help="Form of the result.")]
LocalSettings: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        help="An administrator's settings (allow-lists, prices). Left out: those of a local run.",
    ),
]
ClusterSettings: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--settings", metavar="FILE", help="The operator's settings. Left out: those that it has without a file."
    ),
]
ForCluster: TypeAlias = Annotated[
    bool, typer.Option("--cluster", help="As the operator does it in a cluster, instead of a run on this machine.")
]
Hardware: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="KEY=VALUE,...",
        help="Plan for one such node: gpu, memory, gpus, bf16, cpu, hostMemory, cpuBf16, network (Gbit/s).",
    ),
]
Workspace: TypeAlias = Annotated[
    Path, typer.Option("--workspace", metavar="DIR", help="Folder for results, one folder a job in it.")
]
EarlierWorkspace: TypeAlias = Annotated[
    Path | None,
    typer.Option("--workspace", metavar="DIR", help="Take data into account that a local run prepared in this folder."),
]
Measure: TypeAlias = Annotated[
    bool, typer.Option("--measure/--no-measure", help="Ask the trainer for the model's size, or assume it.")
]

Namespace: TypeAlias = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace. Left out: that of the kubeconfig's context.")
]
AllNamespaces: TypeAlias = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of every namespace.")]
Context: TypeAlias = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig. Left out: the current one.")
]
Kubeconfig: TypeAlias = Annotated[
    Path | None,
    typer.Option("--kubeconfig", metavar="FILE", help="Kubeconfig. Left out: KUBECONFIG, else ~/.kube/config."),
]

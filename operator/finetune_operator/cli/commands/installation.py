"""`finetune images`: the images that a cluster pulls."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune_operator.cli.commands.options import ClusterSettings, Filenames, Files, Form
from finetune_operator.cli.terminal.console import Output, UsageError, emit, note

if TYPE_CHECKING:
    from finetune_operator.cli.files.images import Installation


def images(
    files: Files = None,
    filename: Filenames = None,
    values: Annotated[
        Path | None,
        typer.Option("--values", metavar="FILE", help="Values file of the chart. Default: the chart's own values."),
    ] = None,
    settings: ClusterSettings = None,
    registry: Annotated[
        str | None,
        typer.Option(
            "--registry",
            metavar="PREFIX",
            help="Also print each image's name in this registry. Default: global.imageRegistry of --values.",
        ),
    ] = None,
    output: Form = Output.TEXT,
) -> None:
    """List every image that an installation and its jobs can pull.

    List the operator's image, the default trainer image, that of vLLM's servers, the images that the settings allow
    one by one, and the images of the job files, one per line. With a registry, add each image's name there, so that
    a loop can copy the images for a cluster without access to other registries.

    \b
    Examples:
      finetune images
      finetune images -f jobs/ --settings settings.yaml
      finetune images --values values.yaml -o json
      finetune images --registry registry.example.com/mirror |
        while read -r from to; do skopeo copy docker://$from docker://$to; done
    """
    from finetune_operator.cli.commands.steps import checked_jobs
    from finetune_operator.cli.files.images import patterns, pulled_images

    installation = _installation(values, settings, registry)
    names = [*(files or []), *(filename or [])]
    pulled = pulled_images(installation, checked_jobs(names, installation.settings, output) if names else ())
    if globs := patterns(installation.settings):
        note(f"jobs may also use images that match {', '.join(globs)}; name the job files to list theirs")
    if output is Output.TEXT:
        for image in pulled:
            print(f"{image.image} {image.target}" if installation.registry else image.image)
        return
    listed = [
        {
            "image": image.image,
            **({"target": image.target} if installation.registry else {}),
            "usedBy": list(image.used_by),
        }
        for image in pulled
    ]
    emit([{"images": listed}], output)


def _installation(values: Path | None, settings: Path | None, registry: str | None) -> Installation:
    """Return the installation that the chart's values or the settings describe."""
    from dataclasses import replace

    from finetune_operator.cli.commands.steps import settings_of
    from finetune_operator.cli.files.images import Installation, read_values
    from finetune_operator.spec.settings.settings import OPERATOR_IMAGE

    if values is not None and settings is not None:
        raise UsageError("--values and --settings exclude each other: the chart's values contain the settings")
    if values is not None:
        installation = read_values(values)
    else:
        limits = settings_of(settings, cluster=True)
        installation = Installation(OPERATOR_IMAGE, limits.defaults.image, limits.defaults.vllm_image, limits)
    return installation if registry is None else replace(installation, registry=registry)

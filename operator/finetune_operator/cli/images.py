"""Every image that an installation and its jobs can pull, where it comes from and where a cluster takes it from.

The names are those that the chart and the manifests make: a registry for all takes the place of an image's own. What
jobs name by themselves is known only of the jobs that are given, and of settings that list images one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from finetune_operator.api.settings import OPERATOR_IMAGE, TRAINER_IMAGE, Settings
from finetune_operator.api.settings_check import check_settings
from finetune_operator.cli.console import UsageError, described
from finetune_operator.cli.job_files import JobEntry
from finetune_operator.documents import read_documents
from finetune_operator.input_file import UnreadableFileError, read_input

OPERATOR_REPOSITORY, _, VERSION = OPERATOR_IMAGE.partition(":")
TRAINER_REPOSITORY = TRAINER_IMAGE.partition(":")[0]
_WILD = re.compile(r"[*?[]")
_HOST = re.compile(r"^(localhost|[^/]*[.:][^/]*)/")
"""As container engines tell a registry from the first part of a name: by its dot or port."""


class _Values(BaseModel):
    """Of the chart's values only what names images is read; the chart's schema checks all of them."""

    model_config = ConfigDict(extra="ignore", strict=True)


class ImageValues(_Values):
    """One image."""

    registry: str = ""
    repository: str = ""
    tag: str = ""
    digest: str = ""

    def reference(self, repository: str) -> str:
        """As the chart writes it, without a registry for all."""
        host = f"{self.registry.rstrip('/')}/" if self.registry else ""
        tag = f":{self.tag or VERSION}" if self.tag or not self.digest else ""
        return f"{host}{self.repository or repository}{tag}{f'@{self.digest}' if self.digest else ''}"


class GlobalValues(_Values):
    """What charts share."""

    image_registry: str = Field(default="", alias="imageRegistry")


class TrainerValues(_Values):
    """What runs the stages."""

    image: ImageValues = ImageValues()


class ChartValues(_Values):
    """Values of the chart, in part."""

    shared: GlobalValues = Field(default=GlobalValues(), alias="global")
    image: ImageValues = ImageValues()
    trainer: TrainerValues = TrainerValues()
    settings: dict[str, JsonValue] = {}

    @property
    def defaults(self) -> dict[str, JsonValue]:
        """Of the settings."""
        defaults = self.settings.get("defaults")
        return defaults if isinstance(defaults, dict) else {}


@dataclass(frozen=True)
class Installation:
    """What names the images of an installation."""

    operator: str
    trainer: str
    """Of jobs that name none."""
    settings: Settings
    registry: str = ""
    """Registry for all, perhaps with a path; empty: each image's own."""


@dataclass(frozen=True)
class PulledImage:
    """One image."""

    image: str
    """Where it is published."""
    target: str
    """What the cluster pulls."""
    used_by: tuple[str, ...]


def read_values(file: Path) -> Installation:
    """The installation that these values of the chart make. UsageError for values that say nothing about it."""
    try:
        documents, unreadable = read_documents(read_input(file))
    except UnreadableFileError as error:
        raise UsageError(f"--values: {error}") from error
    if unreadable:
        raise UsageError("; ".join(f"--values: {described(problem, str(file))}" for problem in unreadable))
    if len(documents) > 1:
        raise UsageError(f"--values: {file}: one document is expected, and there are {len(documents)}")
    try:
        values = ChartValues.model_validate((documents[0].value if documents else None) or {})
    except ValidationError as error:
        wrong = error.errors()[0]
        path = ".".join(str(part) for part in wrong["loc"])
        raise UsageError(f"--values: {file}: {path}: {wrong['msg']}") from error
    registry, trainer = values.shared.image_registry, values.trainer.image.reference(TRAINER_REPOSITORY)
    # As the chart writes them: what the settings allow is about images as they are pulled.
    written = {**values.settings, "defaults": {**values.defaults, "image": moved(trainer, registry)}}
    settings, problems = check_settings(written)
    if settings is None:
        raise UsageError("; ".join(f"--values: {described(problem, f'{file}: settings')}" for problem in problems))
    return Installation(values.image.reference(OPERATOR_REPOSITORY), trainer, settings, registry)


def pulled_images(installation: Installation, jobs: Iterable[JobEntry] = ()) -> tuple[PulledImage, ...]:
    """All images, each once, in the order in which they are found."""
    users: dict[str, list[str]] = {}
    for image, user in _found(installation, jobs):
        known = users.setdefault(image, [])
        if user not in known:
            known.append(user)
    return tuple(
        PulledImage(image, moved(image, installation.registry), tuple(names)) for image, names in users.items()
    )


def patterns(settings: Settings) -> tuple[str, ...]:
    """The settings' globs, which allow images that nobody can list."""
    return tuple(glob for glob in settings.images if _WILD.search(glob))


def moved(image: str, registry: str) -> str:
    """The image in another registry, in place of its own."""
    registry = registry.rstrip("/")
    if not registry or image.startswith(f"{registry}/"):
        return image
    return f"{registry}/{_HOST.sub('', image)}"


def _found(installation: Installation, jobs: Iterable[JobEntry]) -> Iterator[tuple[str, str]]:
    yield installation.operator, "operator"
    yield installation.trainer, "jobs that name no image"
    for image in installation.settings.images:
        if not _WILD.search(image):
            yield image, "images in the settings"
    for entry in jobs:
        if entry.job.spec.image is not None:
            yield entry.job.spec.image, f"job {entry.job.name}"

"""Images that an installation and its jobs can pull, with their source and the address the cluster pulls from.

The names are those of the chart and the manifests: a global registry replaces an image's own. Images that jobs name
themselves are known only for the given jobs, and from settings that list images one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from finetune_operator.cli.files.job_files import JobEntry
from finetune_operator.cli.terminal.console import UsageError, described
from finetune_operator.documents import read_documents
from finetune_operator.documents.input_file import UnreadableFileError, read_input
from finetune_operator.spec.checks.settings_check import check_settings
from finetune_operator.spec.settings.settings import OPERATOR_IMAGE, TRAINER_IMAGE, VLLM_IMAGE, Settings

OPERATOR_REPOSITORY, _, VERSION = OPERATOR_IMAGE.partition(":")
TRAINER_REPOSITORY = TRAINER_IMAGE.partition(":")[0]
VLLM_REPOSITORY, _, VLLM_TAG = VLLM_IMAGE.partition(":")
_WILD = re.compile(r"[*?[]")
_HOST = re.compile(r"^(localhost|[^/]*[.:][^/]*)/")
"""Registry in the first part of a name, recognised as by container engines: by its dot or port."""


class _Values(BaseModel):
    """Base of chart values. Only those that name images are read; the chart's schema checks all of them."""

    model_config = ConfigDict(extra="ignore", strict=True)


class ImageValues(_Values):
    """Values of one image."""

    registry: str = ""
    repository: str = ""
    tag: str = ""
    digest: str = ""

    def reference(self, repository: str, usual_tag: str = VERSION) -> str:
        """Return the reference that the chart writes, without a global registry; `usual_tag`: tag in place of none."""
        host = f"{self.registry.rstrip('/')}/" if self.registry else ""
        tag = f":{self.tag or usual_tag}" if self.tag or not self.digest else ""
        return f"{host}{self.repository or repository}{tag}{f'@{self.digest}' if self.digest else ''}"


class GlobalValues(_Values):
    """Values that charts share."""

    image_registry: str = Field(default="", alias="imageRegistry")


class ProgramValues(_Values):
    """Values of an image that jobs run: the trainer, or vLLM."""

    image: ImageValues = ImageValues()


class ChartValues(_Values):
    """Values of the chart, in part."""

    shared: GlobalValues = Field(default=GlobalValues(), alias="global")
    image: ImageValues = ImageValues()
    trainer: ProgramValues = ProgramValues()
    vllm: ProgramValues = ProgramValues()
    settings: dict[str, JsonValue] = {}

    @property
    def defaults(self) -> dict[str, JsonValue]:
        """Defaults of the settings."""
        defaults = self.settings.get("defaults")
        return defaults if isinstance(defaults, dict) else {}


@dataclass(frozen=True)
class Installation:
    """Names of the images of an installation."""

    operator: str
    trainer: str
    """Trainer image of jobs that name none."""
    vllm: str
    """Image of the servers of endpoints with optimization vllm."""
    settings: Settings
    registry: str = ""
    """Global registry, perhaps with a path; empty: each image's own."""


@dataclass(frozen=True)
class PulledImage:
    """An image to pull."""

    image: str
    """Address at which it is published."""
    target: str
    """Address that the cluster pulls."""
    used_by: tuple[str, ...]


def read_values(file: Path) -> Installation:
    """Return the installation that these chart values describe. Raise UsageError for unusable values."""
    try:
        documents, unreadable = read_documents(read_input(file))
    except UnreadableFileError as error:
        raise UsageError(f"--values: {error}") from error
    if unreadable:
        raise UsageError("; ".join(f"--values: {described(problem, str(file))}" for problem in unreadable))
    if len(documents) > 1:
        raise UsageError(f"--values: {file}: expected one document, found {len(documents)}")
    try:
        values = ChartValues.model_validate((documents[0].value if documents else None) or {})
    except ValidationError as error:
        wrong = error.errors()[0]
        path = ".".join(str(part) for part in wrong["loc"])
        raise UsageError(f"--values: {file}: {path}: {wrong['msg']}") from error
    registry, trainer = values.shared.image_registry, values.trainer.image.reference(TRAINER_REPOSITORY)
    vllm = values.vllm.image.reference(VLLM_REPOSITORY, VLLM_TAG)
    # As the chart writes them: the settings allow images by their pulled names.
    ours: dict[str, JsonValue] = {"image": moved(trainer, registry), "vllmImage": moved(vllm, registry)}
    written = {**values.settings, "defaults": {**values.defaults, **ours}}
    settings, problems = check_settings(written)
    if settings is None:
        raise UsageError("; ".join(f"--values: {described(problem, f'{file}: settings')}" for problem in problems))
    return Installation(values.image.reference(OPERATOR_REPOSITORY), trainer, vllm, settings, registry)


def pulled_images(installation: Installation, jobs: Iterable[JobEntry] = ()) -> tuple[PulledImage, ...]:
    """Return all images, each once, in the order in which they are found."""
    users: dict[str, list[str]] = {}
    for image, user in _found(installation, jobs):
        known = users.setdefault(image, [])
        if user not in known:
            known.append(user)
    return tuple(
        PulledImage(image, moved(image, installation.registry), tuple(names)) for image, names in users.items()
    )


def patterns(settings: Settings) -> tuple[str, ...]:
    """Return the settings' globs, which allow images that cannot be listed."""
    return tuple(glob for glob in settings.images if _WILD.search(glob))


def moved(image: str, registry: str) -> str:
    """Return the image in another registry, in place of its own."""
    registry = registry.rstrip("/")
    if not registry or image.startswith(f"{registry}/"):
        return image
    return f"{registry}/{_HOST.sub('', image)}"


def _found(installation: Installation, jobs: Iterable[JobEntry]) -> Iterator[tuple[str, str]]:
    yield installation.operator, "operator"
    yield installation.trainer, "jobs that name no image"
    yield installation.vllm, "endpoints with optimization vllm"
    for image in installation.settings.images:
        if not _WILD.search(image):
            yield image, "images in the settings"
    for entry in jobs:
        if entry.job.spec.image is not None:
            yield entry.job.spec.image, f"job {entry.job.name}"

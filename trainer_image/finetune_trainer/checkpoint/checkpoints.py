"""Checkpoints on disk: written to a partial folder, sealed by a manifest with hashes, moved into place, read back, and
only then made the latest.

This module does not know a checkpoint's content. A folder whose manifest is missing or does not match its files is not
used; a damaged checkpoint is skipped with a warning and the one before it is taken. The last good one is never deleted.

Anybody who can write to the job's volume can write a checkpoint with a matching manifest. So hashes detect damage, and
a signature, whose key is not on the volume, detects forgery as well. Files outside of the checkpoint's folder are never
read: paths in a manifest cannot leave it, and symbolic links and files that the manifest does not list are refused.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from finetune_contract.arguments import COMPILATION
from finetune_contract.contract_models import Message
from finetune_contract.layout import FailureClass
from finetune_contract.trainer_job import TrainerJob, Training
from finetune_trainer.checkpoint.signing import Signer
from finetune_trainer.core.failures import StageError, other_settings
from finetune_trainer.core.files import (
    ALONE,
    EntryName,
    FileEntry,
    FileHashing,
    difference,
    first_unlisted,
    write_atomically,
    write_synced,
)

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SIGNATURE = "manifest.hmac-sha256"
"""Signature of the manifest's bytes in hexadecimal digits; absent where nothing is signed."""
LATEST = "latest"
_NAME = re.compile(r"step-(\d+)")
_LARGEST_MANIFEST_BYTES = 64 << 20
"""Limit of a manifest's size, enough for 10,000 ranks: a file takes some 200 bytes, and a rank writes a few files."""


class Manifest(Message):
    """Description of a checkpoint and list of its files."""

    step: int
    strategy: str
    """Name with the ZeRO stage, e.g. `deepspeed-zero2`."""
    world_size: int
    job: dict[str, Any]
    """Settings that must be equal for a run to resume from here; see `identity`. Earlier images wrote defaults too."""
    written: float
    """Unix time in seconds."""
    files: dict[EntryName, FileEntry]
    """Path below the checkpoint's folder -> size and hash."""


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    folder: Path
    manifest: Manifest

    def part(self, name: str) -> CheckpointPart:
        """Return its folder `name`."""
        return CheckpointPart(self, self.folder / name)


@dataclass(frozen=True)
class CheckpointPart:
    """A folder inside of a checkpoint."""

    checkpoint: Checkpoint
    folder: Path

    def checked(self, path: Path) -> Path:
        """Return `path` after verifying that file again, as time has passed since the checkpoint was verified. Raise
        StageError CHECKPOINT when it is not a file of the manifest, or no longer matches it. Reads the file once.
        """
        root, name = self.checkpoint.folder.absolute(), self._name(path)
        different = difference(root, name, self.checkpoint.manifest.files[name])
        if different is not None:
            raise _damaged(self.checkpoint.folder, *different)
        return root / name

    def listed(self, path: Path) -> Path:
        """Return `path`; raise StageError CHECKPOINT when it is not a file of the manifest."""
        return self.checkpoint.folder.absolute() / self._name(path)

    def _name(self, path: Path) -> str:
        """Return the name of `path` in the manifest; raise StageError CHECKPOINT when it has none."""
        root, path = self.checkpoint.folder.absolute(), path.absolute()
        name = str(path.relative_to(root)) if path.is_relative_to(root) else ""
        if name not in self.checkpoint.manifest.files:
            raise _damaged(self.checkpoint.folder, path, "is not in its manifest")
        return name


def identity(job: TrainerJob, fingerprint: str, of_task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the course of training, flat. `of_task`: see `Head.identity`.

    Left out are the distribution of the work (strategy, world, micro-batch, checkpointing) and the plan's own choice of
    torch.compile, so that a run resumes after its memory was adapted or its node was lost, and the trackers that it
    reports to; and fields at their defaults, so that a run resumes with an image that has fields more.
    """
    assert job.training is not None
    spread = {"strategy", "world", "checkpoints", "batch", "compiles_by_plan"}
    without = {"report_to", *(COMPILATION if job.training.compiles_by_plan else ())}
    arguments = {name: value for name, value in job.training.arguments.items() if name not in without}
    fields: dict[str, Any] = {
        "task": job.task,
        "model": job.model.model_dump(mode="json"),
        "data": fingerprint,
        **job.training.model_dump(mode="json", exclude=spread),
        "arguments": arguments,
        "global_batch_size": job.training.batch.global_batch_size,
        **of_task,
    }
    return json.loads(json.dumps(_without_defaults(fields), sort_keys=True))  # type: ignore[no-any-return]


def _without_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of `identity` without those at their defaults, inner ones included."""
    fields = {**TrainerJob.model_fields, **Training.model_fields}
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        kept[name] = value
        if name in fields:
            kind: TypeAdapter[Any] = TypeAdapter(cast(Any, fields[name].annotation))
            with suppress(ValidationError):  # of an image with other fields
                setting = kind.validate_python(value)
                kept[name] = kind.dump_python(setting, mode="json", exclude_defaults=True)
                if setting == fields[name].get_default(call_default_factory=True):
                    del kept[name]
    return kept


class CheckpointStore:
    """Checkpoints of one job, `step-<n>/` below one folder. For rank 0; the other ranks only write into the folder of
    `begin`.
    """

    def __init__(self, folder: Path, keep: int, signer: Signer | None = None, hashing: FileHashing = ALONE) -> None:
        """Create a store that signs with `signer` and requires its signature when it reads; None: neither. `hashing`
        reads the files for their hashes.
        """
        self._folder = folder
        self._keep = keep
        self._signer = signer
        self._hashing = hashing

    def partial(self, step: int) -> Path:
        """Return the folder in which the checkpoint of `step` is written before `commit`."""
        return self._folder / f"step-{step}.partial"

    def begin(self, step: int) -> None:
        """Create an empty `partial(step)`; remove the leftovers of an interrupted attempt."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob("*.partial"):
            shutil.rmtree(leftover)
        self.partial(step).mkdir()

    def abandon(self, step: int) -> None:
        """Free the space of a checkpoint that could not be written."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def commit(
        self, step: int, *, strategy: str, world_size: int, job: dict[str, Any], first_of_run: bool
    ) -> Checkpoint:
        """Seal `partial(step)`, move it into place, read it back, make it the latest, and delete the ones beyond
        `keep`.

        `first_of_run`: all older ones belong to a run that was not resumed, and are deleted.
        """
        source, target = self.partial(step), self._folder / f"step-{step}"
        manifest = Manifest(
            step=step,
            strategy=strategy,
            world_size=world_size,
            job=job,
            written=time.time(),
            files=self._hashing.entries_of(source),
        )
        text = manifest.to_json()
        write_synced(source / MANIFEST, text)
        if self._signer is not None:
            write_synced(source / SIGNATURE, self._signer.sign(text.encode()) + "\n")
        if target.exists():
            shutil.rmtree(target)
        os.replace(source, target)
        checkpoint = verify(target, self._signer, self._hashing)
        write_atomically(self._folder / LATEST, target.name + "\n")
        self._prune(0 if first_of_run else self._keep - 1, newest=target)
        return checkpoint

    def _prune(self, others: int, *, newest: Path) -> None:
        older = [folder for folder in self._folders() if folder != newest]
        for folder in older[others:]:
            # Delete the manifest first: half a deleted checkpoint must not look whole.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        """Return the `step-<n>` folders, newest first."""
        if not self._folder.is_dir():
            return []
        named = [(int(match[1]), path) for path in self._folder.iterdir() if (match := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(named, reverse=True)]

    def size_bytes(self) -> int:
        """Count the bytes of all files in the folder, without following links."""
        return sum(path.lstat().st_size for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink())

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that verifies; None when there is none. Raise StageError CHECKPOINT when all are
        damaged, or when the store's folder is a symbolic link.
        """
        if self._folder.is_symlink():
            raise StageError(
                FailureClass.CHECKPOINT,
                "CheckpointsElsewhere",
                f"{self._folder} is a symbolic link; checkpoints are read from the job's own folder only.",
                "Replace the link by a folder.",
            )
        folders = self._folders()
        for folder in folders:
            try:
                return verify(folder, self._signer, self._hashing)
            except StageError as error:
                log.warning("%s %s Trying the previous one.", error.message, "It is skipped.")
        if folders:
            signed = "" if self._signer is None else " and signed with the key of checkpoints.signingKey"
            raise StageError(
                FailureClass.CHECKPOINT,
                "NoWholeCheckpoint",
                f"None of the {len(folders)} checkpoints in {self._folder} is intact{signed}; the warnings name the "
                "files.",
                "Delete them, or set checkpoints.resume to never, to train from the beginning.",
            )
        return None


def refuse_other_job(checkpoint: Checkpoint, job: Mapping[str, Any]) -> None:
    """Raise StageError CHECKPOINT that names the differing settings, when the checkpoint's are not those of `job`."""
    theirs, ours = _without_defaults(checkpoint.manifest.job), _without_defaults(job)
    if theirs != ours:
        raise other_settings(f"{checkpoint.folder} was", theirs, ours)


def verify(folder: Path, signer: Signer | None = None, hashing: FileHashing = ALONE) -> Checkpoint:
    """Return the checkpoint in `folder`. Raise StageError CHECKPOINT naming the first file that is missing, differs
    from the manifest, is not listed there or leads elsewhere; with `signer` also for a manifest without its signature.
    """
    if folder.is_symlink():
        raise _damaged(folder, folder, "is a symbolic link")
    content = _small_file(folder, MANIFEST)
    if signer is not None:
        signature = _small_file(folder, SIGNATURE).decode(errors="replace").strip()
        if not signer.has_signed(content, signature):
            raise _damaged(folder, folder / SIGNATURE, "does not belong to the manifest and the job's signing key")
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        raise _damaged(folder, folder / MANIFEST, "cannot be read") from error
    if folder.name != f"step-{manifest.step}":
        raise _damaged(folder, folder / MANIFEST, f"belongs to step {manifest.step}")
    unlisted = first_unlisted(folder, {*manifest.files, MANIFEST, SIGNATURE})
    if unlisted is not None:
        raise _damaged(folder, unlisted, "is not in its manifest")
    different = hashing.first_difference(folder, manifest.files)
    if different is not None:
        raise _damaged(folder, *different)
    return Checkpoint(folder, manifest)


def _small_file(folder: Path, name: str) -> bytes:
    """Return the content of a regular file; raise StageError CHECKPOINT otherwise."""
    path = folder / name
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_MANIFEST_BYTES:
            raise _damaged(folder, path, f"is not a file of at most {_LARGEST_MANIFEST_BYTES >> 20} MiB")
        return path.read_bytes()
    except FileNotFoundError:
        raise _damaged(folder, path, "is missing") from None
    except OSError as error:
        raise _damaged(folder, path, "cannot be read") from error


def _damaged(folder: Path, path: Path, problem: str) -> StageError:
    message = f"Checkpoint {folder.name} is damaged: {path} {problem}."
    return StageError(FailureClass.CHECKPOINT, "DamagedCheckpoint", message, "Use an older checkpoint.")

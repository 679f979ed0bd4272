"""Parts of the API without behaviour: one row per field, deleted when the behaviour is implemented.

A field without behaviour is refused with reason `NotYetSupported` as soon as it is set to a value that would need it.
Every leaf of the spec is either in `SUPPORTED` or has a row; a test compares the two lists with the models, so that a
new field cannot be accepted and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from pydantic import JsonValue

from finetune_operator.api.problems import Problem, any_of, describe_value
from finetune_operator.api.shapes import Fields, find, spec_shape
from finetune_operator.api.types import FineTuneJobSpec, Scheme
from finetune_operator.launchers.launcher_rows import TRAINING

SUPPORTED: tuple[str, ...] = (
    "task",
    "model.revision",
    "model.trustRemoteCode",
    "model.adapter",
    "dataset",
    "preparation.engine",
    "preparation.workers",
    "preparation.maxLength",
    "preparation.stride",
    "preparation.packing",
    "training.epochs",
    "training.maxSteps",
    "training.globalBatchSize",
    "training.microBatchSize",
    "training.learningRate",
    "training.scheduler",
    "training.warmupSteps",
    "training.weightDecay",
    "training.maxGradNorm",
    "training.optimizer",
    "training.seed",
    "training.labelSmoothing",
    "training.earlyStopping",
    "training.precision",
    "training.arguments",
    "training.script",
    "parallelism.strategy",
    "parallelism.zeroStage",
    "parallelism.sharding",
    "parallelism.offload",
    "parallelism.activationCheckpointing",
    "parallelism.deepspeedConfig",
    "parallelism.tensor",
    "parallelism.pipeline",
    "parallelism.sequence",
    "parallelism.placement",
    "resources.nodes",
    "resources.gpusPerNode",
    "resources.processesPerNode",
    "resources.cpu",
    "resources.memory",
    "resources.sharedMemory",
    "resources.accelerator",
    "resources.network",
    "storage",
    "checkpoints.every",
    "checkpoints.keep",
    "checkpoints.onPreemption",
    "checkpoints.resume",
    "checkpoints.afterSuccess",
    "checkpoints.signingKey",
    "spot",
    "evaluation",
    "predict.dataset",
    "predict.columns",
    "predict.engine",
    "predict.format",
    "predict.idColumn",
    "predict.maxBadRows",
    "predict.metricTolerance",
    "predict.optimization",
    "predict.server",
    "predict.tolerance",
    "predict.workers",
    "endpoint",
    "generation",
    "preference",
    "secrets",
    "template",
    "image",
    "imagePullPolicy",
    "runPolicy",
)
"""Fields, or blocks of fields, with behaviour for all values; rows below may exclude single fields of a block."""


@dataclass(frozen=True)
class Row:
    """A field that is not supported yet, in whole or in part."""

    path: str
    """Path from `spec`; a block stands for everything in it."""
    values: tuple[JsonValue, ...] = ()
    """Values that are supported, in addition to the default."""
    schemes: tuple[str, ...] = ()
    """Supported schemes of a URI."""

    @property
    def works(self) -> str:
        """Supported values, as a sentence for documentation."""
        return f"use {', '.join(f'{scheme}://' for scheme in self.schemes)}" if self.schemes else self.hint(())

    def hint(self, schemes: Sequence[str]) -> str:
        """Return the hint with the supported values, if these schemes may be used."""
        if self.schemes:
            from finetune_operator.api.meant_uris import copy_hint  # only a problem needs it

            return copy_hint(self.path, [f"{scheme}://" for scheme in schemes])
        if self.values:
            return f"use {any_of(self.values)}"
        return "leave it out"


ROWS: tuple[Row, ...] = (
    Row("model.uri", schemes=("hf", "file", "pkg", "pvc")),
    Row("dataset.uri", schemes=("hf", "file", "pkg", "pvc")),
    Row("resources.elastic"),
    Row("launcher", values=("auto", *TRAINING)),
    Row("storage.workspace", schemes=("pvc",)),
    Row("storage.cache", schemes=("pvc",)),
    Row("checkpoints.uri"),
    Row("predict.dataset.uri", schemes=("hf", "file", "pkg", "pvc")),
    Row("predict.output", schemes=("file", "pvc")),
    Row("endpoint.adapters.uri", schemes=("file", "pvc")),
    Row("runPolicy.queue"),
)


_POSITION = re.compile(r"\[\d+\]|\.\d+(?=\.|$)")
"""A position in a list, as messages and as paths have it."""


def row_of(path: str) -> Row | None:
    """Return the row of a field, or of the block that contains it; positions in lists do not matter."""
    path = _POSITION.sub("", path)
    return next((row for row in ROWS if path == row.path or path.startswith(f"{row.path}.")), None)


def works(path: str) -> bool:
    """Return True if the field at `path` (from `spec`) may be set to anything but its default."""
    row = row_of(path)
    return row is None or bool(row.values or row.schemes)


def served_words(path: str, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return those words of the field at `path` (from `spec`) that have behaviour."""
    row = row_of(path)
    return words if row is None or not row.values else tuple(word for word in words if word in row.values)


def served_schemes(path: str, allowed: Sequence[str] | None) -> tuple[str, ...]:
    """Return the allowed schemes (None: any) that the URI at `path` may have in this version."""
    row = row_of(path)
    schemes = get_args(Scheme) if row is None else row.schemes
    return tuple(scheme for scheme in schemes if allowed is None or scheme in allowed)


def unsupported(spec: FineTuneJobSpec, schemes: Sequence[str] | None = None) -> list[Problem]:
    """Return a problem for each field set to a value without behaviour; the hint names only `schemes`."""
    value = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    problems: list[Problem] = []
    for row in ROWS:
        for path, given in _values(value, row.path.split(".")):
            if not _is_supported(row, given):
                problems.extend(_problems(row, path, given, schemes))
    return problems


def _is_supported(row: Row, value: JsonValue) -> bool:
    """Return True if the value is supported whatever the default is, which is read from shapes: they take long."""
    scheme = value.partition("://")[0] if isinstance(value, str) else None
    return value is None or value in row.values or scheme in row.schemes


def _values(value: JsonValue, parts: list[str], before: str = "") -> Iterator[tuple[str, JsonValue]]:
    """Yield path and value of the field; for a field of a list's elements, of each of them."""
    if isinstance(value, list) and parts:
        for at, each in enumerate(value):
            yield from _values(each, parts, f"{before}[{at}]")
    elif not parts:
        yield before, value
    else:
        inner = value.get(parts[0]) if isinstance(value, Mapping) else None
        yield from _values(inner, parts[1:], f"{before}.{parts[0]}" if before else parts[0])


def _problems(row: Row, path: str, value: JsonValue, schemes: Sequence[str] | None) -> list[Problem]:
    """Refuse a block that is there by default field by field, an optional one as a whole."""
    shape = find(spec_shape(), _POSITION.sub(".0", path).split("."))
    if shape is None:
        raise LookupError(f"the API has no field spec.{path}")
    if isinstance(shape.body, Fields) and isinstance(value, Mapping) and shape.default is not None:
        return [
            found for name in shape.body.fields for found in _problems(row, f"{path}.{name}", value.get(name), schemes)
        ]
    if value == shape.default or _is_supported(row, value):
        return []
    return [
        Problem(
            f"spec.{path}",
            describe_value(value, path.split(".")),
            "is not supported in this version",
            row.hint(served_schemes(row.path, schemes)),
            reason="NotYetSupported",
        )
    ]

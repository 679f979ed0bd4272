"""The progress protocol as values: the path of an attempt, and the content of a body in terms of the status.

Bodies come from users' programs: parts that do not fit are left out or refused by the name of their field, and no value
of theirs is repeated in an error. The time of an update is the time of its arrival, since clocks of nodes differ.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from pydantic import ValidationError

from finetune_contract.choices import Stage
from finetune_contract.contract_models import Message
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.report import COMMUNICATION, DEVICES, NOTE, Communication, KubeflowStatus, KubeflowUpdate
from finetune_operator.jobs.state.decision_types import Findings
from finetune_operator.spec.types import ProgressStatus

BODY_LIMIT_BYTES = 64 * 1024
_NAME = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_PATH = re.compile(
    rf"/v1alpha1/namespaces/({_NAME})/finetunejobs/({_NAME})/stages/({'|'.join(Stage)})/attempts/([1-9][0-9]{{0,4}})"
)
DIGITS = 4
"""Significant digits of figures that change while people look on; metrics at the end are kept whole."""
MOST_FOUND = 2048
"""Longest text of a measurement: half of a termination message, which holds both."""
Kind = TypeVar("Kind", bound=Message)
_MOST_STEPS = 2**53
"""Beyond it a JSON number is not exact."""

# Field -> names under which it is sent, best first: ours, then those of transformers' KubeflowCallback and Trainer.
_STEP = ("step", "current_step", "global_step")
_TOTAL = ("total_steps", "max_steps")
_EPOCH = ("epoch", "current_epoch")
_LOSS = ("loss", "train_loss")
_SAMPLES = ("rows_per_second", "samples_per_second", "train_samples_per_second")
_TOKENS = ("tokens_per_second", "train_tokens_per_second")
_REPLACED = ("replaced_pods",)


_RATES = frozenset({*_SAMPLES, *_TOKENS})


class BadBodyError(ValueError):
    """The body does not follow the protocol."""


@dataclass(frozen=True)
class AttemptKey:
    """One attempt at a stage of one job."""

    namespace: str
    job: str
    stage: Stage
    attempt: int


def attempt_of(path: str) -> AttemptKey | None:
    """Return the attempt that a path names; None if it names none."""
    match = _PATH.fullmatch(path)
    return AttemptKey(match[1], match[2], Stage(match[3]), int(match[4])) if match else None


def update_of(body: bytes) -> KubeflowStatus:
    """Parse `body`. Raises BadBodyError."""
    try:
        update = KubeflowUpdate.model_validate_json(body)
    except ValidationError as error:
        # Only places and rules: values are the sender's, and may be anything.
        problems = [f"{_place(item['loc'])}: {item['msg']}" for item in error.errors(include_input=False)[:5]]
        raise BadBodyError("the body is not a progress update: " + "; ".join(problems)) from error
    return update.trainer_status


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "body"


def mark_of(update: KubeflowStatus) -> str:
    """Return a mark that is equal for two updates without progress between them.

    Steps, figures and all other counts of a program are progress. Rates and remaining times are not: they change with
    the clock while nothing else does.
    """
    figures = sorted((metric.name, metric.value) for metric in update.metrics if metric.name not in _RATES)
    return hashlib.sha256(json.dumps([update.progress_percentage, figures]).encode()).hexdigest()


def progress_of(update: KubeflowStatus, now: datetime) -> ProgressStatus:
    """Convert an update that arrived at `now` (UTC) to the terms of the status."""
    values = {metric.name: metric.value for metric in update.metrics}
    step, total = _steps(values, _STEP), _steps(values, _TOTAL)
    percent = update.progress_percentage
    if percent is None and step is not None and total:
        percent = min(100, 100 * step // total)
    remaining = update.estimated_remaining_seconds
    return ProgressStatus(
        step=step,
        total_steps=total,
        epoch=_number(values, _EPOCH, least=0.0),
        percent=percent,
        loss=_number(values, _LOSS),
        samples_per_second=_number(values, _SAMPLES, least=0.0),
        tokens_per_second=_number(values, _TOKENS, least=0.0),
        replaced_pods=_steps(values, _REPLACED),
        remaining_seconds=None if remaining is None else float(min(remaining, _MOST_STEPS)),
        last_update_time=now,
    )


def findings_of(update: KubeflowStatus) -> Findings:
    """Return the measurements in an update. Those that cannot be read, or are longer than any of ours, are left out."""
    values = {metric.name: metric.value for metric in update.metrics}
    return Findings(
        _found(values, DEVICES, MeasuredDevices), _found(values, COMMUNICATION, Communication), values.get(NOTE)
    )


def _found(values: Mapping[str, str], name: str, kind: type[Kind]) -> Kind | None:
    text = values.get(name, "")
    if not 0 < len(text) <= MOST_FOUND:
        return None
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None


def _number(values: Mapping[str, str], names: tuple[str, ...], least: float = -math.inf) -> float | None:
    """Return a number, rounded for a column."""
    number = _first(values, names, least)
    return None if number is None else float(f"{number:.{DIGITS}g}")


def _steps(values: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    number = _first(values, names, 0.0, _MOST_STEPS)
    return None if number is None else int(number)


def _first(values: Mapping[str, str], names: tuple[str, ...], least: float, most: float = math.inf) -> float | None:
    """Return the first finite number from `least` to `most` under one of `names`."""
    for name in names:
        try:
            number = float(values.get(name, ""))
        except ValueError:
            continue
        if math.isfinite(number) and least <= number <= most:
            return number
    return None


def merged_progress(before: ProgressStatus | None, now: ProgressStatus) -> ProgressStatus:
    """Return `now`, with the fields that it leaves out as they were `before` in the same attempt.

    The last update of transformers' callback has 100 percent and no step.
    """
    return now if before is None else before.model_copy(update=now.model_dump(exclude_none=True))

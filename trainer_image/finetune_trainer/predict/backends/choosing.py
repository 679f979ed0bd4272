"""Choice of the backend for the rows, by measuring on a sample of them.

Every backend answers the same rows as the plain model, and two figures count: its time for the remaining rows, and the
share of its labels that equal those of the plain model. Measuring takes time itself, mostly for building the backends.
So a small job takes the plain model at once, and measuring ends after `MEASURING_SHARE` of the plain model's time for
all rows. A backend that fails, as for lack of memory, is refused with the reason: the plain model has answered the same
rows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.predict.backends.answer_agreement import (
    Rows,
    agreement,
    largest_difference,
    worst_metric,
)
from finetune_trainer.predict.backends.backend_protocol import (
    Backend,
    Batch,
    ForwardPass,
    Machine,
    NotAvailable,
    Substitute,
    TextSettings,
    extremes,
)
from finetune_trainer.predict.backends.backend_table import BackendRow, BackendTable
from finetune_trainer.predict.backends.backends import backend_by_name, backends_of
from finetune_trainer.predict.backends.device_meter import DeviceMeter, HostMeter, timed
from finetune_trainer.predict.backends.text_server import ServerUnavailableError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

T = TypeVar("T")

SAMPLE_ROWS = 1000
TEXT_SAMPLE_ROWS = 64
"""Rows of a sample whose answers are generated texts: each takes seconds on a CPU."""
TEXT_SAMPLE_BATCHES = 4
"""Batches of a sample of texts, if `TEXT_SAMPLE_SHARE` of the rows suffices for them. In a single batch no slot would
be used twice.
"""
TEXT_SAMPLE_SHARE = 0.05
"""Largest share of a worker's rows in a sample of texts. Fewer rows than this leaves `TEXT_SAMPLE_ROWS` are not
measured, unless a server could generate them.
"""
SMALL_SECONDS = 60.0
"""A job that the plain model finishes within this time is not measured: export alone takes some 10 s."""
GPU_SMALL_SECONDS = 300.0
"""The same on a GPU, except for texts: torch.compile takes up to a minute there (assumed; nothing was measured)."""
NO_ROOM = "its weights and a batch do not fit the GPU's memory beside the model"
MEASURING_SHARE = 0.15
"""Share of the plain model's time for all rows that measuring takes at most, roughly."""
ROUNDS = 2
"""Further rounds over all backends, each in reverse order; a backend's best time counts, or other load on the machine
would decide. The first round times the plain model last: its earlier run, on a cold machine, only sets the budget for
measuring.
"""


@dataclass(frozen=True)
class Sample:
    """Rows of the job that backends are measured with."""

    rows: int
    batches: Sequence[Batch]
    answers: Callable[[Substitute | None], Rows]
    """Answer all rows by a forward pass; None: by the model. torch.OutOfMemoryError if a planned batch does not fit the
    GPU beside the model, whose own batches are halved.
    """
    metrics: Callable[[Substitute | None], Mapping[str, float]] | None = None
    """Measure the task's metrics by a forward pass, on labelled rows; None: not requested."""
    tokens: Callable[[Rows], int] | None = None
    """Count the generated tokens of answers; None if they are no texts."""


@dataclass(frozen=True)
class BackendRequest:
    """Optimization and tolerances that the job requests."""

    optimization: str
    tolerance: float | None
    """Share of labels that must be equal; None: lossy backends are excluded, unless `metric_tolerance` is set."""
    metric_tolerance: float | None = None
    """Largest amount by which a metric may be worse than the plain model's."""
    texts: TextSettings | None = None
    """Settings of generated texts; None if the answers are none."""

    @property
    def tolerates(self) -> bool:
        """True if labels may differ."""
        return self.tolerance is not None or self.metric_tolerance is not None

    @property
    def share(self) -> float:
        """Share of labels that must be equal."""
        return self.tolerance if self.tolerance is not None else 1.0 if self.metric_tolerance is None else 0.0


@dataclass(frozen=True)
class Chosen:
    """Backend that answers the rows."""

    name: str
    forward: Substitute | None
    """None: the model itself."""
    table: BackendTable


@dataclass
class _Trial:
    """A measured backend."""

    backend: Backend
    forward: Substitute | None
    seconds: float
    """Time for the sample."""
    setup: float
    rows: Rows
    memory: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    again: float = 0.0
    """Set-up of each further worker, with the converted model in place; 0 if there are no others."""

    def whole(self, share: float) -> float:
        """Return the time of a further worker for its rows, in seconds. `share`: its rows, in samples."""
        return self.again + self.seconds * share


def choose(
    request: BackendRequest,
    model: PreTrainedModel,
    sample: Sample,
    remaining: int,
    folder: Path,
    machine: Machine | None = None,
    workers: int = 1,
    meter: DeviceMeter | None = None,
) -> Chosen:
    """Measure and choose.

    `remaining`: rows that each of the `workers` has to answer, the sample included. `meter`: meter of the device that
    holds the model; None: of a CPU.

    StageError STRATEGY_NOT_IN_EFFECT `BackendNotAvailable` if a backend requested by name cannot run here, and
    `BackendNotRightEnough` if its labels differ by more than the tolerance allows.
    """
    machine, meter = machine or Machine.here(), meter or HostMeter()
    candidates = backends_of(request.optimization, texts=request.texts)
    measures = request.optimization == "measured"
    if not measures and not request.tolerates and len(candidates) == 1:
        return _requested_backend(candidates[0], model, sample, folder, machine, meter)
    plain = _measured_plain(sample, meter, warm=request.texts is None)
    whole = plain.seconds / max(1, sample.rows) * remaining
    ledger = _Ledger(sample, plain, request, meter)
    if measures and whole < small_seconds(request, meter):
        return Chosen("none", None, ledger.table("none", small_job(whole)))
    spent = 0.0
    for backend in candidates:
        why = _untried(backend, model, machine, request)
        if why is None and measures and spent > MEASURING_SHARE * whole:
            used = f"measuring has taken {spent:.0f} s of the {whole:.0f} s that the plain model needs"
            why = f"not measured: {used}"
        if why is not None:
            ledger.refuse(backend, why)
            continue
        began = time.perf_counter()
        try:
            ledger.add(_fitting(partial(_measured, backend, model, sample, folder, meter, others=workers > 1)))
        except NotAvailable as error:
            ledger.refuse(backend, f"not available: {error}")
        except (RuntimeError, ServerUnavailableError) as error:
            if not measures:
                raise
            ledger.refuse(backend, f"not available: {_failure(backend, error)}")
        meter.release()  # only now, after the error, which holds the tensors of a failed backend
        spent += time.perf_counter() - began
    if measures:
        ledger.repeat(MEASURING_SHARE * whole - spent)
    return ledger.chosen(remaining / max(1, sample.rows))


def _untried(backend: Backend, model: PreTrainedModel, machine: Machine, request: BackendRequest) -> str | None:
    """Return why a backend is not built at all; None if it is."""
    why = backend.unavailable(model, machine)
    if why is not None:
        return f"not available: {why}"
    if request.optimization == "measured" and backend.lossy and not request.tolerates:
        return "not measured: its labels may differ, and predict.tolerance is not set"
    return None


def small_seconds(request: BackendRequest, meter: DeviceMeter) -> float:
    """Return the time of the plain model for a job below which nothing is measured."""
    return GPU_SMALL_SECONDS if meter.gpu and request.texts is None else SMALL_SECONDS


def _fitting(build: Callable[[], T]) -> T:
    """Return the result of `build`; NotAvailable if it exceeds the memory of the GPU."""
    import torch

    try:
        return build()
    except torch.OutOfMemoryError as error:
        raise NotAvailable(NO_ROOM) from error
    except StageError as error:
        if error.failure_class is not FailureClass.OUT_OF_MEMORY:
            raise
        raise NotAvailable(NO_ROOM) from error


def _failure(backend: Backend, error: Exception) -> str:
    """Log the failure of a backend, and return it in one line."""
    if isinstance(error, StageError):
        return str(error)
    log.warning("The optimization %s failed on a sample of the rows.", backend.name, exc_info=error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160] if lines else 'without a message'}"


def _requested_backend(
    backend: Backend, model: PreTrainedModel, sample: Sample, folder: Path, machine: Machine, meter: DeviceMeter
) -> Chosen:
    """Build the only candidate: neither its speed nor its labels decide anything, so nothing is timed."""
    why = backend.unavailable(model, machine)
    if why is None:
        try:
            ready = _fitting(lambda: _prepared(backend, model, sample, folder, meter))
        except NotAvailable as error:
            why = str(error)
    if why is not None:
        raise not_available(backend.name, why)
    reason = "requested by name"
    rows = (
        BackendRow(name="none", why="not measured: another one was requested by name without predict.tolerance"),
        BackendRow(
            name=backend.name, memory_bytes=ready.memory, setup_seconds=ready.seconds, chosen=True,
            why=f"{reason}; not measured: predict.tolerance is not set",
        ),
    )  # fmt: skip
    return Chosen(backend.name, ready.forward, BackendTable(chosen=backend.name, rows=0, reason=reason, backends=rows))


def by_name(
    name: str,
    model: PreTrainedModel,
    sample: Sample,
    folder: Path,
    machine: Machine | None = None,
    texts: TextSettings | None = None,
) -> Substitute:
    """Build a backend that another worker or attempt chose. StageError `BackendNotAvailable` if this machine lacks it:
    all parts must be computed in the same way.
    """
    try:
        backend = backend_by_name(name, texts)
    except KeyError:
        raise not_available(name, "this image does not have it") from None
    why = backend.unavailable(model, machine or Machine.here())
    if why is None:
        try:
            return _fitting(lambda: backend.prepare(model, sample.batches, folder))
        except NotAvailable as error:
            why = str(error)
    raise not_available(name, why)


def _measured_plain(sample: Sample, meter: DeviceMeter, *, warm: bool) -> _Trial:
    backend = backend_by_name("none")
    if warm:
        sample.answers(None)  # the first pass allocates and starts threads
    rows, seconds = timed(meter, lambda: sample.answers(None))
    return _Trial(backend, None, seconds, 0.0, rows, None, _metrics(sample, None))


def _metrics(sample: Sample, forward: Substitute | None) -> Mapping[str, float]:
    return {} if sample.metrics is None else sample.metrics(forward)


class _Prepared(NamedTuple):
    """A backend that is ready to answer."""

    forward: Substitute
    seconds: float
    """Time of the build."""
    memory: int


def _prepared(backend: Backend, model: PreTrainedModel, sample: Sample, folder: Path, meter: DeviceMeter) -> _Prepared:
    def build() -> Substitute:
        forward = backend.prepare(model, sample.batches, folder)
        if callable(forward):
            for batch in extremes(sample.batches):
                _run(forward, batch)
        return forward

    meter.begin()
    forward, seconds = timed(meter, build)
    return _Prepared(forward, seconds, meter.taken())


def _measured(
    backend: Backend, model: PreTrainedModel, sample: Sample, folder: Path, meter: DeviceMeter, *, others: bool
) -> _Trial:
    """Build the backend, as a further worker does if there are `others`, and time it."""
    ready = _prepared(backend, model, sample, folder, meter)
    rows, seconds = timed(meter, lambda: sample.answers(ready.forward))
    metrics = _metrics(sample, ready.forward)
    again = _prepared(backend, model, sample, folder, meter).seconds if others else 0.0
    return _Trial(backend, ready.forward, seconds, ready.seconds, rows, ready.memory, metrics, again)


def _run(forward: ForwardPass, batch: Batch) -> None:
    import torch

    with torch.inference_mode():
        forward(**batch)


@dataclass
class _Ledger:
    """Results of the backends so far."""

    sample: Sample
    plain: _Trial
    request: BackendRequest
    meter: DeviceMeter
    trials: list[_Trial] = field(default_factory=list)
    right: list[_Trial] = field(default_factory=list)
    """Trials that are right enough to be chosen."""
    refused: dict[str, str] = field(default_factory=dict)
    order: list[Backend] = field(default_factory=list)
    agreements: dict[str, float] = field(default_factory=dict)

    def add(self, trial: _Trial) -> None:
        """Record a measured backend. One that is not right enough gives its memory back."""
        self.trials.append(trial)
        self.order.append(trial.backend)
        # Requested by name and without a tolerance: the user knows that its labels may differ.
        why = self._wrong(trial) if self.request.tolerates or self._measures else None
        if why is None:
            self.right.append(trial)
        else:
            trial.forward = None
            self.refused[trial.backend.name] = why

    @property
    def _measures(self) -> bool:
        """True if the plain model may be chosen, too."""
        return self.request.optimization == "measured"

    def refuse(self, backend: Backend, why: str) -> None:
        """Record a backend that was not measured, with the reason."""
        self.refused[backend.name] = why
        self.order.append(backend)

    def repeat(self, seconds: float) -> None:
        """End the first round with the plain model, then time all backends that are right in further rounds that fit
        into `seconds`.
        """
        if not self.right or seconds < self.plain.seconds:
            return
        seconds -= self.plain.seconds
        again = self._timed(self.plain)
        if math.isinf(again):
            return
        self.plain.seconds = again
        trials = [*self.right, self.plain]
        for _ in range(ROUNDS):
            seconds -= sum(trial.seconds for trial in trials)
            if seconds < 0:
                return
            trials.reverse()
            for trial in trials:
                trial.seconds = min(trial.seconds, self._timed(trial))

    def _timed(self, trial: _Trial) -> float:
        """Return the time of a further round; infinite if the copies of all backends leave no room for a batch."""
        try:
            return _fitting(lambda: timed(self.meter, lambda: self.sample.answers(trial.forward))[1])
        except NotAvailable:
            return math.inf

    def chosen(self, share: float) -> Chosen:
        """Return the backend that is right enough and ends first. `share`: rows of each worker, in samples."""
        named, request, right = not self._measures, self.request, self.right
        if named and not self.trials:
            raise not_available(request.optimization, " | ".join(_reasons(self.refused)))
        if named and not right:
            raise StageError(
                FailureClass.STRATEGY_NOT_IN_EFFECT,
                "BackendNotRightEnough",
                f"predict.optimization is {request.optimization}: {' | '.join(_reasons(self.refused))}.",
                "Lower predict.tolerance, raise predict.metricTolerance, or leave predict.optimization at auto.",
            )
        # This worker has built all backends by now, and the others wait for it: they build the chosen one.
        best = min((*right, *(() if named else (self.plain,))), key=lambda trial: trial.whole(share))
        gain = self.plain.seconds / best.seconds if best.seconds else 1.0
        name = best.backend.name
        reason = (
            f"{gain:.2f} times as fast as the plain model on {self.sample.rows:,} rows"
            if best is not self.plain
            else f"no backend that is accurate enough was faster on {self.sample.rows:,} rows"
        )
        for trial in right:
            if trial is not best:
                setup = f" with {trial.again:.0f} s of set-up in each worker" if trial.seconds < best.seconds else ""
                self.refused[trial.backend.name] = f"slower than {name}{setup}"
        return Chosen(name, best.forward, self.table(name, reason))

    def _wrong(self, trial: _Trial) -> str | None:
        """Return why a backend is not right enough; None if it is."""
        request, share = self.request, self._agreement(trial)
        if share < request.share:
            return f"{share:.2%} of its labels are equal, less than {request.share:.2%}"
        worst = worst_metric(self.plain.metrics, trial.metrics)
        if request.metric_tolerance is None or worst is None or worst.by <= request.metric_tolerance:
            return None
        return f"{worst.name} is {worst.by:.4f} worse, more than {request.metric_tolerance:.4f}"

    def _tokens_per_second(self, trial: _Trial) -> float | None:
        counted = self.sample.tokens
        return counted(trial.rows) / trial.seconds if counted is not None and trial.seconds else None

    def _agreement(self, trial: _Trial) -> float:
        if trial.backend.name not in self.agreements:
            self.agreements[trial.backend.name] = agreement(self.plain.rows, trial.rows)
        return self.agreements[trial.backend.name]

    def table(self, chosen: str, reason: str) -> BackendTable:
        """Return all backends with their figures."""
        trials = {trial.backend.name: trial for trial in (self.plain, *self.trials)}
        names = ["none", *(backend.name for backend in self.order)]
        rows = [self._row(name, trials.get(name), chosen, reason) for name in names]
        return BackendTable(chosen=chosen, rows=self.sample.rows, reason=reason, backends=tuple(rows))

    def _row(self, name: str, trial: _Trial | None, chosen: str, reason: str) -> BackendRow:
        why = reason if name == chosen else self.refused.get(name, "the reference")
        if trial is None:
            return BackendRow(name=name, why=why)
        worst = worst_metric(self.plain.metrics, trial.metrics)
        return BackendRow(
            name=name,
            rows_per_second=self.sample.rows / trial.seconds if trial.seconds else None,
            tokens_per_second=self._tokens_per_second(trial),
            agreement=self._agreement(trial),
            largest_difference=largest_difference(self.plain.rows, trial.rows),
            metric=None if worst is None else worst.name,
            metric_worse_by=None if worst is None else worst.by,
            memory_bytes=trial.memory,
            setup_seconds=trial.setup,
            worker_setup_seconds=trial.again or None,
            chosen=name == chosen,
            why=why,
        )


def _reasons(refused: Mapping[str, str]) -> list[str]:
    return [f"{name}: {why}" for name, why in refused.items()]


def not_available(name: str, why: str) -> StageError:
    """Return the error for a backend requested by name."""
    return StageError(
        FailureClass.STRATEGY_NOT_IN_EFFECT,
        "BackendNotAvailable",
        f"predict.optimization {name} is not available here: {why}.",
        "Choose another one, or leave predict.optimization at auto.",
    )


def small_job(seconds: float) -> str:
    """Return the reason why nothing is measured."""
    return f"the plain model ends within {math.ceil(seconds)} s, too short to gain from measuring"

"""Schedule of faults for jobs, drawn from a seed; and the valid ends of a job after its faults.

Pure: values in, values out. A seed gives the same plan on every machine, but timing decides which attempt is really
hit, so `possible_ends` judges by the actual strikes, not by the planned ones. It has its own table of the effects of
faults, independent of the operator's, so that the two can disagree.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise, product
from typing import Literal, TypeAlias, TypeVar

_T = TypeVar("_T")
Launcher: TypeAlias = Literal["job", "pytorchjob", "mpijob"]

PREPARE, TRAIN, EVALUATE, PREDICT = STAGES = ("prepare", "train", "evaluate", "predict")
GLOBAL_BATCH = 16


class Kind(StrEnum):
    """Kind of a fault."""

    KILL_POD = "all processes of a pod killed"
    KILL_RANK = "one process killed"
    CRASH_RANK = "one process crashed"
    RAISE = "one process raised"
    HANG = "one process hung"
    MEMORY = "a pod's memory ran out"
    DELETE_POD = "a pod deleted"
    DELETE_CHILD = "the attempt's object deleted"
    PREEMPT = "a pod preempted by a taint"
    SHUT_DOWN = "a pod ended by its node's shutdown"
    NODE_OFF = "a node without power"
    SUSPEND = "suspended and resumed"
    OPERATOR = "the acting operator killed"
    OPERATORS = "all operators killed"
    API = "the API server away"


CONTROL = frozenset({Kind.OPERATOR, Kind.OPERATORS, Kind.API})
"""Faults of the control plane; they touch no job itself, and must not change its end."""
RANKS = frozenset({Kind.KILL_RANK, Kind.CRASH_RANK, Kind.RAISE, Kind.HANG})
"""Faults that need a process of a training."""
BLIND = frozenset({Kind.KILL_POD, Kind.KILL_RANK, Kind.CRASH_RANK, Kind.RAISE})
"""Faults that are possible without an API server."""
GRACEFUL = frozenset({Kind.DELETE_POD, Kind.PREEMPT, Kind.SHUT_DOWN, Kind.DELETE_CHILD, Kind.SUSPEND})
"""Faults that request pods to stop, which may finish first."""
PODLESS = frozenset({*CONTROL, Kind.SUSPEND, Kind.DELETE_CHILD})
"""Faults that need no running pod."""


class Moment(StrEnum):
    """Moment of a fault within an attempt."""

    MADE = "when its object is there"
    BEGUN = "when a pod of it has begun"
    STEP = "at a step of the training"
    BETWEEN = "between it and the next attempt"


class Remedy(StrEnum):
    """Required reaction to a fault that breaks an attempt."""

    FREE = "again, free of charge"
    COUNTED = "again, counted"
    ADAPTED = "again with less memory; outside of train counted"
    AGAIN = "again, as the user wished"
    FATAL = "the end"


@dataclass(frozen=True)
class Effect:
    """Effect of a fault on an attempt."""

    remedy: Remedy
    failure: str | None
    """Failure class in the status."""


# The processes of a node without power look like killed ones if they are seen before the node is missed.
_KILLED = (Effect(Remedy.COUNTED, "Killed"),)
# A controller that loses sight of a pod's end, as during an outage of the API server, leaves its attempt without pods.
_STOPPED = tuple(Effect(Remedy.FREE, failure) for failure in ("Preempted", "NodeLost", "PodsGone"))
EFFECTS: Mapping[Kind, tuple[Effect, ...]] = {
    Kind.KILL_POD: _KILLED,
    Kind.KILL_RANK: _KILLED,
    Kind.CRASH_RANK: _KILLED,
    Kind.RAISE: (Effect(Remedy.FATAL, "ProgramError"),),
    Kind.HANG: (Effect(Remedy.COUNTED, "NoProgress"),),
    Kind.MEMORY: (Effect(Remedy.ADAPTED, "OutOfMemory"),),
    Kind.DELETE_POD: _STOPPED,
    Kind.DELETE_CHILD: (Effect(Remedy.COUNTED, "ChildDeleted"),),
    Kind.PREEMPT: _STOPPED,
    Kind.SHUT_DOWN: _STOPPED,
    Kind.NODE_OFF: (*_KILLED, *_STOPPED, Effect(Remedy.FREE, "CollectiveFailed")),
    Kind.SUSPEND: (Effect(Remedy.AGAIN, None),),
    Kind.OPERATOR: (),
    Kind.OPERATORS: (),
    Kind.API: (),
}


def effects(kind: Kind, stage: str) -> tuple[Effect, ...]:
    """Return the possible effects of a fault on an attempt at `stage`; empty: none."""
    if stage == TRAIN:
        return EFFECTS[kind]
    # Only train has a micro-batch to halve.
    return tuple(replace(one, remedy=Remedy.COUNTED) if one.remedy is Remedy.ADAPTED else one for one in EFFECTS[kind])


# ----------------------------------------------------------------------------------------------------------------- jobs


class Doom(StrEnum):
    """Error of a job from the start, because of which it must fail."""

    COLUMN = "DataError"
    SECRET = "ContainerConfig"
    DIVERGES = "LossNotFinite"
    GATE = "GateNotMet"


DOOMED_STAGE: Mapping[Doom, str] = {
    Doom.COLUMN: PREPARE,
    Doom.SECRET: PREPARE,
    Doom.DIVERGES: TRAIN,
    Doom.GATE: EVALUATE,
}


@dataclass(frozen=True)
class Case:
    """A job of the storm."""

    name: str
    stages: tuple[str, ...] = (PREPARE, TRAIN, EVALUATE)
    launcher: Launcher = "job"
    nodes: int = 1
    max_restarts: int = 3
    doom: Doom | None = None

    @property
    def reached(self) -> tuple[str, ...]:
        """Stages that the job reaches."""
        if self.doom is None:
            return self.stages
        return self.stages[: self.stages.index(DOOMED_STAGE[self.doom]) + 1]

    @property
    def adaptations(self) -> int:
        """Number of times that its micro-batch can be halved; a process starts with its whole share."""
        return (GLOBAL_BATCH // self.nodes).bit_length() - 1


@dataclass(frozen=True)
class Fault:
    """A planned fault."""

    number: int
    kind: Kind
    stage: str
    moment: Moment
    share: float = 0.0
    """Share of the training's steps, with `Moment.STEP`; it also orders the faults of a stage."""
    pod: int = 0
    """Index of the attempt's pod, by name, modulo their number."""
    seconds: float = 0.0
    """Duration, for faults that last."""
    together: bool = False
    """True if it happens together with the fault before it, while that lasts."""

    def __str__(self) -> str:
        when = f"{self.share:.0%} of the steps" if self.moment is Moment.STEP else self.moment
        also = " (together with the one before)" if self.together else ""
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.number:3}. {self.stage}, {when}: {self.kind}{lasting}{also}"


@dataclass(frozen=True)
class Fate:
    """A job and its faults, in order."""

    case: Case
    faults: tuple[Fault, ...]

    @property
    def groups(self) -> tuple[tuple[Fault, ...], ...]:
        """Faults grouped by moment."""
        found: list[tuple[Fault, ...]] = []
        for one in self.faults:
            if one.together:
                found[-1] = (*found[-1], one)
            else:
                found.append((one,))
        return tuple(found)


@dataclass(frozen=True)
class Schedule:
    """Jobs and faults of a whole run."""

    seed: int
    fates: tuple[Fate, ...]

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(fault for fate in self.fates for fault in fate.faults)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {len(self.faults)} faults, {len(self.fates)} jobs"]
        for fate in self.fates:
            case = fate.case
            doom = f", doomed to {case.doom.value}" if case.doom else ""
            lines.append(
                f"{case.name}: {' -> '.join(case.stages)} by {case.launcher} on {case.nodes} node(s), "
                f"maxRestarts {case.max_restarts}{doom}"
            )
            lines += [f"  {fault}" for fault in fate.faults]
        return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------- generation

# A trained model is evaluated, too.
_TRAINS = (PREPARE, TRAIN, EVALUATE)
_SHAPES = (_TRAINS, _TRAINS, _TRAINS, (*_TRAINS, PREDICT), (PREPARE, EVALUATE), (PREPARE, PREDICT))
_MACHINES: tuple[tuple[Launcher, int], ...] = (
    ("job", 2), ("pytorchjob", 2), ("mpijob", 2), ("job", 1), ("pytorchjob", 1),
)  # fmt: skip
_SECONDS: Mapping[Kind, tuple[float, float]] = {
    # Nodes count as lost after 40 s without a heartbeat, also those whose heartbeats an absent API server missed.
    Kind.API: (3, 15),
    Kind.NODE_OFF: (3, 15),
    Kind.SUSPEND: (0.3, 6),
}
FAULTS_A_JOB = 3
"""Average faults of a job."""
MOST_FAULTS = 5
"""Most faults of one job: the delay before an attempt doubles each time."""
_DOOMED_EACH = 4
"""Every fourth job is doomed."""


def schedule(seed: int, faults: int) -> Schedule:
    """Draw `faults` faults for a third as many jobs. Kinds, shapes and launchers are drawn without replacement from
    shuffled packs, so that each comes once before any repeats.
    """
    dice = random.Random(seed)
    count = max(2, round(faults / FAULTS_A_JOB))
    shapes, machines, dooms = _dealt(dice, _SHAPES), _dealt(dice, _MACHINES), _dealt(dice, tuple(Doom))
    cases = [
        _case(dice, f"storm-{number}", next(shapes), next(machines), next(dooms) if number in doomed else None)
        for doomed in [frozenset(range(dice.randrange(_DOOMED_EACH), count, _DOOMED_EACH))]
        for number in range(count)
    ]
    kinds = _dealt(dice, tuple(Kind))
    taken: dict[str, list[Fault]] = {case.name: [] for case in cases}
    for number in range(1, faults + 1):
        _place(dice, cases, taken, number, next(kinds))
    fates = [Fate(case, _together(dice, _with_between(taken[case.name]))) for case in cases]
    return Schedule(seed, tuple(fates))


def _dealt(dice: random.Random, cards: Sequence[_T]) -> Iterator[_T]:
    while True:
        yield from dice.sample(cards, len(cards))


def _case(
    dice: random.Random, name: str, stages: tuple[str, ...], machine: tuple[Launcher, int], doom: Doom | None
) -> Case:
    launcher, nodes = machine
    if doom is not None and DOOMED_STAGE[doom] not in stages:
        stages = _TRAINS
    return Case(name, stages, launcher, nodes, dice.choice((1, 2, 3)), doom)


def _place(dice: random.Random, cases: Sequence[Case], taken: dict[str, list[Fault]], number: int, kind: Kind) -> None:
    """Assign the fault to a job that can take it and does not end before it, preferably one with few faults."""
    places = [(case, stage) for case in cases for stage in case.reached if _applies(kind, case, stage)]
    dice.shuffle(places)
    # Most faults concern train, but no other stage shall be left out.
    places.sort(key=lambda place: len(taken[place[0].name]) - (place[1] == TRAIN and dice.random() < 0.7))
    for case, stage in places:
        faults = _in_order([*taken[case.name], _fault(dice, number, kind, stage, case)])
        if len(faults) <= MOST_FAULTS and lives_through(case, faults[:-1]):
            taken[case.name] = faults
            return
    # No job can take it: kill the operator instead, which is always possible.
    _place(dice, cases, taken, number, dice.choice((Kind.OPERATOR, Kind.OPERATORS)))


def _applies(kind: Kind, case: Case, stage: str) -> bool:
    if case.doom is Doom.SECRET and kind not in PODLESS:
        return False  # No pod of it ever runs.
    if kind in (Kind.HANG, Kind.RAISE) and case.doom is Doom.DIVERGES:
        return False  # It may end before that step.
    return stage == TRAIN or kind not in RANKS


def _fault(dice: random.Random, number: int, kind: Kind, stage: str, case: Case) -> Fault:
    moments = [Moment.MADE, Moment.BETWEEN] if kind in PODLESS and kind is not Kind.DELETE_CHILD else []
    moments += [Moment.MADE] if kind is Kind.DELETE_CHILD else []
    if case.doom is not Doom.SECRET:
        moments += [Moment.BEGUN]
    if stage == TRAIN and case.doom is not Doom.DIVERGES:
        moments += [Moment.STEP, Moment.STEP]
    # A hang is noticed only after a reported step, and the signal to raise has no handler before the imports are over.
    moment = Moment.STEP if kind in (Kind.HANG, Kind.RAISE) else dice.choice(moments)
    low, high = _SECONDS.get(kind, (0, 0))
    return Fault(number, kind, stage, moment, dice.uniform(0.05, 0.7), dice.randrange(3), dice.uniform(low, high))


def _in_order(faults: Iterable[Fault]) -> list[Fault]:
    """Sort by stages; a fault that ends the job comes last in its stage, and steps only grow, as a training resumes."""
    return sorted(
        faults,
        key=lambda one: (STAGES.index(one.stage), one.kind is Kind.RAISE, one.share, one.number),
    )


def lives_through(case: Case, faults: Sequence[Fault]) -> bool:
    """Return whether the job still runs after these faults, even with the worst effect of each."""
    counted = adapted = 0
    for fault in faults:
        worst = {one.remedy for one in effects(fault.kind, fault.stage)}
        counted += Remedy.COUNTED in worst
        adapted += Remedy.ADAPTED in worst
        if Remedy.FATAL in worst or counted > case.max_restarts or adapted > case.adaptations:
            return False
    return True


def _with_between(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Keep `Moment.BETWEEN` only after a fault that breaks an attempt; there is no such time otherwise."""
    pairs = zip((None, *faults), faults, strict=False)
    return tuple(
        replace(fault, moment=Moment.MADE)
        if fault.moment is Moment.BETWEEN
        and (before is None or before.stage != fault.stage or not effects(before.kind, before.stage))
        else fault
        for before, fault in pairs
    )


def _together(dice: random.Random, faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Move some faults into the duration of a preceding control-plane fault."""
    found = list(faults[:1])
    for before, fault in pairwise(faults):
        fits = fault.kind in (BLIND if before.kind is Kind.API else BLIND | GRACEFUL - {Kind.SUSPEND})
        moments = (Moment.STEP,) if fault.kind is Kind.RAISE else (Moment.BEGUN, Moment.STEP)
        same = before.stage == fault.stage and before.moment in moments
        if before.kind in CONTROL and not found[-1].together and fits and same and dice.random() < 0.6:
            fault = replace(fault, moment=before.moment, share=before.share, together=True)
        found.append(fault)
    return tuple(found)


# --------------------------------------------------------------------------------------------------------------- oracle


@dataclass(frozen=True)
class Strike:
    """A fault that really hit an attempt of a job."""

    kind: Kind
    stage: str
    attempt: int
    late: bool = False
    """True if the attempt may have finished before the effect."""


@dataclass(frozen=True)
class End:
    """End of a job."""

    phase: Literal["Succeeded", "Failed"]
    failure: str | None
    """Failure class; None: it succeeded."""
    restarts: int
    """`status.restarts`."""
    counted: int
    """Restarts that count against `runPolicy.maxRestarts`."""


@dataclass(frozen=True)
class _Path:
    """Restarts used so far, in one possible history of the job."""

    restarts: int = 0
    counted: int = 0
    adapted: int = 0

    def after(self, effect: Effect, case: Case) -> _Path | None:
        """Return the path after a restart because of `effect`; None if that restart was not allowed."""
        match effect.remedy:
            case Remedy.AGAIN:
                return self
            case Remedy.FREE:
                return replace(self, restarts=self.restarts + 1)
            case Remedy.COUNTED if self.counted < case.max_restarts:
                return replace(self, restarts=self.restarts + 1, counted=self.counted + 1)
            case Remedy.ADAPTED if self.adapted < case.adaptations:
                return replace(self, restarts=self.restarts + 1, adapted=self.adapted + 1)
        return None

    def ending(self, effect: Effect, case: Case) -> End | None:
        """Return the end of the job because of `effect`; None if the job would not have ended."""
        if effect.remedy in (Remedy.AGAIN, Remedy.FREE) or self.after(effect, case) is not None:
            return None
        return End("Failed", effect.failure, self.restarts, self.counted)


@dataclass(frozen=True)
class Verdict:
    """Valid ends, or the reasons why there are none."""

    ends: frozenset[End] = frozenset()
    wrong: tuple[str, ...] = field(default=())


def possible_ends(case: Case, attempts: Mapping[str, int], strikes: Iterable[Strike]) -> Verdict:
    """Judge a job by the number of the last attempt at each stage (0 or absent: none) and its strikes.

    Each attempt with a successor must have a strike that leads to a restart, and each successful one must not have a
    strike that it cannot have survived.
    """
    dealt: dict[tuple[str, int], list[Strike]] = {}
    for strike in strikes:
        dealt.setdefault((strike.stage, strike.attempt), []).append(strike)
    if unknown := [stage for stage, last in attempts.items() if last and stage not in case.reached]:
        return Verdict(wrong=(f"{case.name} must not come to {' and '.join(unknown)}",))
    paths = {_Path()}
    for stage, following in zip(case.reached, (*case.reached[1:], None), strict=True):
        last = attempts.get(stage, 0)
        for number in range(1, last):
            causes = [effect for one in dealt.get((stage, number), []) for effect in effects(one.kind, stage)]
            after = (path.after(effect, case) for path, effect in product(paths, causes))
            paths = {path for path in after if path is not None}
            if not paths:
                causes_text = ", ".join(sorted({effect.failure or "stopped" for effect in causes})) or "nothing"
                return Verdict(wrong=(f"{stage} attempt {number + 1}: {causes_text} explains no further attempt",))
        here = dealt.get((stage, last), [])
        outlived = all(one.late or not effects(one.kind, stage) for one in here)
        if following is not None and attempts.get(following, 0):
            if not outlived:
                kinds = ", ".join(one.kind for one in here)
                return Verdict(wrong=(f"{stage} attempt {last} succeeded in spite of: {kinds}",))
            continue
        causes = [effect for one in here for effect in effects(one.kind, stage)]
        ends = {path.ending(effect, case) for path, effect in product(paths, causes)}
        if outlived and following is None:
            ends |= {_own_end(case, path) for path in paths}
        return Verdict(frozenset(end for end in ends if end is not None))
    raise AssertionError("the last stage has nothing after it")


def _own_end(case: Case, path: _Path) -> End:
    if case.doom is None:
        return End("Succeeded", None, path.restarts, path.counted)
    return End("Failed", case.doom.value, path.restarts, path.counted)

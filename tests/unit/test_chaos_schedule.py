"""The schedule of a chaos run, and the verdict on its outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from box_support.chaos import spec_of
from box_support.chaos_schedule import (
    BLIND,
    CONTROL,
    FAULTS_A_JOB,
    RANKS,
    Case,
    Doom,
    End,
    Fault,
    Kind,
    Moment,
    Schedule,
    Strike,
    effects,
    lives_through,
    possible_ends,
    schedule,
)
from finetune_operator.spec.checks.validation import validate_job
from finetune_operator.spec.settings.settings import CLUSTER_SETTINGS
from finetune_operator.spec.types import API_VERSION, KIND

SEEDS = range(40)
PREPARE, TRAIN, EVALUATE = "prepare", "train", "evaluate"


@pytest.mark.parametrize("faults", [1, 4, 10, 30])
def test_seed_determines_a_storm_with_the_requested_number_of_faults(faults: int) -> None:
    for seed in SEEDS:
        made = schedule(seed, faults)
        assert made == schedule(seed, faults)
        assert sorted(fault.number for fault in made.faults) == list(range(1, faults + 1))
        assert str(made).startswith(f"seed {seed}, {faults} faults, {len(made.fates)} jobs")


def test_another_seed_gives_another_storm() -> None:
    assert len({str(schedule(seed, 10).fates) for seed in SEEDS}) == len(SEEDS)


def test_thirty_faults_cover_every_kind_in_ten_jobs_of_every_launcher() -> None:
    for seed in SEEDS:
        made = schedule(seed, 30)
        assert len(made.fates) == 30 / FAULTS_A_JOB == 10
        assert {fault.kind for fault in made.faults} == set(Kind)
        assert {fate.case.launcher for fate in made.fates} == {"job", "pytorchjob", "mpijob"}
        assert {fate.case.nodes for fate in made.fates} == {1, 2}
        assert 2 <= sum(fate.case.doom is not None for fate in made.fates) <= 3


def test_many_storms_have_every_doom_moment_and_shape() -> None:
    storms = [schedule(seed, 30) for seed in SEEDS]
    assert {fate.case.doom for one in storms for fate in one.fates} == {None, *Doom}
    assert {fault.moment for one in storms for fault in one.faults} == set(Moment)
    assert {fate.case.stages for one in storms for fate in one.fates} == {
        ("prepare", "train", "evaluate"),
        ("prepare", "train", "evaluate", "predict"),
        ("prepare", "evaluate"),
        ("prepare", "predict"),
    }
    assert any(fault.together for one in storms for fault in one.faults)


def _storms() -> list[Schedule]:
    return [schedule(seed, faults) for seed in SEEDS for faults in (10, 30)]


def test_every_job_of_a_storm_is_one_that_the_api_server_takes() -> None:
    dooms = set()
    for fate in (fate for seed in SEEDS for fate in schedule(seed, 30).fates):
        dooms.add(fate.case.doom)
        document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "storm"}, "spec": spec_of(fate)}
        job, problems = validate_job(document, CLUSTER_SETTINGS)
        assert (job is None, problems) == (False, []), fate
    assert dooms == {None, *Doom}


def test_a_fault_is_planned_where_it_can_be_made() -> None:
    for fate in [fate for one in _storms() for fate in one.fates]:
        for fault in fate.faults:
            assert fault.stage in fate.case.reached
            assert fault.stage == TRAIN or (fault.kind not in RANKS and fault.moment is not Moment.STEP)
            assert fault.kind not in (Kind.HANG, Kind.RAISE) or fault.moment is Moment.STEP
            assert fate.case.doom is not Doom.SECRET or fault.moment in (Moment.MADE, Moment.BETWEEN)


def test_no_fault_but_the_last_ends_its_job() -> None:
    for fate in [fate for one in _storms() for fate in one.fates]:
        assert lives_through(fate.case, fate.faults[:-1]), fate


def test_simultaneous_faults_follow_a_control_fault_and_work_without_it() -> None:
    for group in [group for one in _storms() for fate in one.fates for group in fate.groups]:
        first, *others = group
        assert not first.together
        for other in others:
            assert first.kind in CONTROL
            assert (other.stage, other.moment, other.share) == (first.stage, first.moment, first.share)
            assert first.kind is not Kind.API or other.kind in BLIND


def test_fault_between_attempts_follows_a_fault_that_ends_one() -> None:
    found = 0
    for fate in [fate for one in _storms() for fate in one.fates]:
        for place, fault in enumerate(fate.faults):
            if fault.moment is Moment.BETWEEN:
                before = fate.faults[place - 1]
                assert place > 0
                assert before.stage == fault.stage
                assert effects(before.kind, before.stage)
                found += 1
    assert found


def test_no_kind_is_dealt_again_before_all_were_dealt() -> None:
    for seed in SEEDS:
        most = Counter(fault.kind for fault in schedule(seed, 10).faults if fault.kind not in CONTROL).most_common(1)
        assert [times for _, times in most] == [1]


# -------------------------------------------------------------------------------------------------------------- judging


TWO_STAGES = Case("job", ("prepare", "train"))


@dataclass(frozen=True)
class Judged:
    """A job, its attempts by stage, and the faults that it was dealt."""

    attempts: Mapping[str, int]
    strikes: tuple[Strike, ...] = ()
    case: Case = TWO_STAGES
    right: tuple[End, ...] = ()
    wrong: str = ""


def ok(restarts: int = 0, counted: int = 0) -> End:
    return End("Succeeded", None, restarts, counted)


def failed(failure: str, restarts: int = 0, counted: int = 0) -> End:
    return End("Failed", failure, restarts, counted)


WELL = {PREPARE: 1, TRAIN: 1}
TWICE = {PREPARE: 1, TRAIN: 2}
ONCE_ONLY = Case("job", ("prepare", "train"), max_restarts=1)
GATED = Case("job", (PREPARE, TRAIN, EVALUATE), doom=Doom.GATE)

CASES: Mapping[str, Judged] = {
    "left alone, it succeeds": Judged(WELL, right=(ok(),)),
    "doomed by its column, it fails in prepare": Judged(
        {PREPARE: 1}, case=Case("job", ("prepare", "train"), doom=Doom.COLUMN), right=(failed("DataError"),)
    ),
    "doomed by its column, it never comes to train": Judged(
        WELL, case=Case("job", ("prepare", "train"), doom=Doom.COLUMN), wrong="job must not come to train"
    ),
    "below its gate, it fails in evaluate after all restarts that faults explain": Judged(
        {PREPARE: 1, TRAIN: 2, EVALUATE: 1},
        (Strike(Kind.CRASH_RANK, TRAIN, 1),),
        GATED,
        right=(failed("GateNotMet", 1, 1),),
    ),
    "a stage that never began is the end only of a job that has failed": Judged({PREPARE: 1, TRAIN: 0}, wrong=""),
    "a deleted pod costs a restart and counts against nothing": Judged(
        TWICE, (Strike(Kind.DELETE_POD, TRAIN, 1),), right=(ok(1),)
    ),
    "a preempted pod costs the same": Judged(TWICE, (Strike(Kind.PREEMPT, TRAIN, 1),), right=(ok(1),)),
    "killed processes are counted": Judged(TWICE, (Strike(Kind.KILL_POD, TRAIN, 1),), right=(ok(1, 1),)),
    "a crash is counted": Judged(TWICE, (Strike(Kind.CRASH_RANK, TRAIN, 1),), right=(ok(1, 1),)),
    "a hang is counted": Judged(TWICE, (Strike(Kind.HANG, TRAIN, 1),), right=(ok(1, 1),)),
    "memory that ran out in train is adapted, and not counted": Judged(
        TWICE, (Strike(Kind.MEMORY, TRAIN, 1),), right=(ok(1),)
    ),
    "memory that ran out in prepare is counted": Judged(
        {PREPARE: 2, TRAIN: 1}, (Strike(Kind.MEMORY, PREPARE, 1),), right=(ok(1, 1),)
    ),
    "counted restarts that are used up end it with the class of the last fault": Judged(
        TWICE,
        (Strike(Kind.CRASH_RANK, TRAIN, 1), Strike(Kind.DELETE_CHILD, TRAIN, 2)),
        ONCE_ONLY,
        right=(failed("ChildDeleted", 1, 1),),
    ),
    "free restarts never end it": Judged(
        {PREPARE: 1, TRAIN: 7},
        tuple(Strike(Kind.SHUT_DOWN, TRAIN, attempt) for attempt in range(1, 7)),
        ONCE_ONLY,
        right=(ok(6),),
    ),
    "a micro-batch of one row cannot be halved again": Judged(
        {PREPARE: 1, TRAIN: 4},
        tuple(Strike(Kind.MEMORY, TRAIN, attempt) for attempt in range(1, 5)),
        Case("job", ("prepare", "train"), nodes=2),
        right=(failed("OutOfMemory", 3),),
    ),
    "an error of a process is the end": Judged(WELL, (Strike(Kind.RAISE, TRAIN, 1),), right=(failed("ProgramError"),)),
    "nothing can follow an error of a process": Judged(
        TWICE, (Strike(Kind.RAISE, TRAIN, 1),), wrong="train attempt 2: ProgramError explains no further attempt"
    ),
    "a suspension costs an attempt and no restart": Judged(TWICE, (Strike(Kind.SUSPEND, TRAIN, 1),), right=(ok(),)),
    "of two faults that hit one attempt either may count": Judged(
        TWICE,
        (Strike(Kind.CRASH_RANK, TRAIN, 1), Strike(Kind.DELETE_POD, TRAIN, 1)),
        right=(ok(1), ok(1, 1)),
    ),
    "of two faults that hit the last attempt the one that may end it decides": Judged(
        TWICE,
        (
            Strike(Kind.CRASH_RANK, TRAIN, 1),
            Strike(Kind.CRASH_RANK, TRAIN, 2, late=True),
            Strike(Kind.DELETE_POD, TRAIN, 2, late=True),
        ),
        ONCE_ONLY,
        right=(ok(1, 1), failed("Killed", 1, 1)),
    ),
    "an operator that is killed explains no restart": Judged(
        TWICE, (Strike(Kind.OPERATORS, TRAIN, 1),), wrong="train attempt 2: nothing explains no further attempt"
    ),
    "a restart without a fault is wrong": Judged(
        {PREPARE: 2, TRAIN: 1}, wrong="prepare attempt 2: nothing explains no further attempt"
    ),
    "a fault on another attempt explains nothing": Judged(
        {PREPARE: 1, TRAIN: 3},
        (Strike(Kind.CRASH_RANK, TRAIN, 1),),
        wrong="train attempt 3: nothing explains no further attempt",
    ),
    "who is killed in the midst of a stage does not succeed at it": Judged(
        {PREPARE: 1, TRAIN: 1},
        (Strike(Kind.KILL_POD, PREPARE, 1),),
        wrong="prepare attempt 1 succeeded in spite of: all processes of a pod killed",
    ),
    "who is killed in the midst of the last stage does not succeed either": Judged(
        WELL, (Strike(Kind.CRASH_RANK, TRAIN, 1),)
    ),
    "who is killed at the very end may be through": Judged(
        WELL, (Strike(Kind.CRASH_RANK, TRAIN, 1, late=True),), right=(ok(),)
    ),
    "one restart too many is wrong when the budget was used up before": Judged(
        {PREPARE: 1, TRAIN: 3},
        (Strike(Kind.CRASH_RANK, TRAIN, 1), Strike(Kind.HANG, TRAIN, 2)),
        ONCE_ONLY,
        wrong="train attempt 3: NoProgress explains no further attempt",
    ),
}


@pytest.mark.parametrize("judged", CASES.values(), ids=CASES)
def test_possible_ends_of_a_job_follow_from_its_faults(judged: Judged) -> None:
    verdict = possible_ends(judged.case, judged.attempts, judged.strikes)
    assert (set(verdict.ends), verdict.wrong) == (set(judged.right), (judged.wrong,) if judged.wrong else ())


def test_every_kind_of_fault_has_effects_except_those_of_the_control() -> None:
    assert {kind for kind in Kind if not effects(kind, TRAIN)} == CONTROL
    assert {kind for kind in Kind if not effects(kind, PREPARE)} == CONTROL


def test_fault_is_described_in_one_line() -> None:
    fault = Fault(7, Kind.API, TRAIN, Moment.STEP, share=0.25, seconds=12.34)
    assert str(fault) == "  7. train, 25% of the steps: the API server away for 12.3 s"

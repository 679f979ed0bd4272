"""Names of a job's children: valid for their kinds, distinct per job, stage and attempt."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_contract.choices import Stage
from finetune_operator.plan.types.names import BASE_LIMIT, JobNames

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
JOB_NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", fullmatch=True)
ATTEMPTS = st.integers(1, 99_999)


def all_names(names: JobNames, attempt: int) -> list[str]:
    stages = [names.stage(stage, attempt) for stage in Stage]
    return [*stages, names.claim, names.network_policy, names.service(attempt)]


def test_a_short_name_is_kept_and_readable():
    names = JobNames.of("deberta-rotten-tomatoes")
    assert all_names(names, 2) == [
        "deberta-rotten-tomatoes-prepare-2",
        "deberta-rotten-tomatoes-train-2",
        "deberta-rotten-tomatoes-evaluate-2",
        "deberta-rotten-tomatoes-predict-2",
        "deberta-rotten-tomatoes-serve-2",
        "deberta-rotten-tomatoes-workspace",
        "deberta-rotten-tomatoes-network",
        "deberta-rotten-tomatoes-train-2-ranks",
    ]


@pytest.mark.parametrize("job", ["2026-run", "on", "a" * 63, "1", "0" * 63, "a.b", "j-" + "x" * 60])
def test_any_job_name_gives_valid_names(job):
    assert [name for name in all_names(JobNames.of(job), 12) if not DNS_1035.fullmatch(name)] == []


@given(job=JOB_NAMES, attempt=ATTEMPTS, index=st.integers(0, 9999))
def test_names_and_the_pods_that_launchers_make_of_them_are_labels(job, attempt, index):
    names = JobNames.of(job)
    assert len(names.base) <= BASE_LIMIT
    for name in all_names(names, attempt):
        assert DNS_1035.fullmatch(name)
    train = names.stage(Stage.TRAIN, attempt)
    for pod in (f"{train}-worker-{index}", f"{train}-master-0"):
        assert DNS_1035.fullmatch(pod)


@given(one=JOB_NAMES, other=JOB_NAMES, attempt=ATTEMPTS, later=ATTEMPTS)
def test_no_two_jobs_and_no_two_attempts_share_a_child(one, other, attempt, later):
    first, second = JobNames.of(one), JobNames.of(other)
    assert (first.base == second.base) == (one == other)
    assert (first.stage(Stage.TRAIN, attempt) == first.stage(Stage.TRAIN, later)) == (attempt == later)


def test_long_names_that_differ_at_their_end_stay_distinct():
    bases = {JobNames.of("a" * 62 + end).base for end in "abcdefgh0123"}
    assert len(bases) == 12


@pytest.mark.parametrize("attempt", [0, -1, 100_000])
def test_an_attempt_outside_its_range_is_an_error(attempt):
    with pytest.raises(ValueError, match="outside 1 to 99999"):
        JobNames.of("job").stage(Stage.TRAIN, attempt)

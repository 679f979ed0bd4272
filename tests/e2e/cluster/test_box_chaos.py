"""Random faults over short jobs: none is lost, none is done twice, and each ends as its faults explain.

`FINETUNE_FAULTS=30 FINETUNE_SEED=7` chooses another storm; a failed one prints its seed and its events.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from box_support import chaos_checks as checks
from box_support.chaos import CLASSIFIER, Storm
from box_support.chaos_schedule import schedule
from box_support.faults import caught_up
from box_support.team import INPUTS, Team
from cluster_support.api_access import wait_until

FAULTS = int(os.environ.get("FINETUNE_FAULTS", "10"))
SEED = int(os.environ.get("FINETUNE_SEED", "7"))
SETTLED_SECONDS = 180.0
"""Time for things to end after the last job: pods have 30 s, operators start again within 10 s."""

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600 + 120 * FAULTS)]


@pytest.fixture(scope="module")
def over(team: Team, training_operators: None, input_files: Path) -> Storm:
    """Run a storm to its end."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = team.box.claim_folder(team.namespace, INPUTS) / CLASSIFIER
    base, labels = input_files / "tiny" / "model", {"bad": 0, "good": 1}
    names = {number: label for label, number in labels.items()}
    AutoModelForSequenceClassification.from_pretrained(base, id2label=names, label2id=labels).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    for path in [folder, *folder.iterdir()]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    made = Storm(team, schedule(SEED, FAULTS))
    try:
        made.rage()
    except BaseException:
        print(made.describe())
        raise
    caught_up(team)
    return made


@pytest.fixture
def storm(over: Storm) -> Storm:
    print(over.describe())
    return over


def test_every_fault_was_made(storm: Storm) -> None:
    assert sorted(fault.number for fault in storm.done) == list(range(1, FAULTS + 1))


def test_jobs_end_as_their_faults_explain(storm: Storm) -> None:
    assert list(checks.wrong_ends(storm)) == []


def test_no_attempt_is_made_twice(storm: Storm) -> None:
    assert list(checks.attempts_not_made_once(storm)) == []


def test_two_attempts_of_a_job_never_run_at_the_same_time(storm: Storm) -> None:
    assert {stage for _, stage, _ in storm.worked} >= {"prepare", "train"}, "the watch sees nobody at work"
    assert storm.overlaps == []


def test_results_of_jobs_that_succeeded_are_whole(storm: Storm) -> None:
    assert list(checks.broken_results(storm)) == []


def test_events_give_the_reason_of_each_further_attempt(storm: Storm) -> None:
    assert list(checks.unreported_restarts(storm)) == []


def test_nothing_is_left_behind(storm: Storm) -> None:
    wait_until(lambda: not list(checks.left_behind(storm)), "all is tidied up", SETTLED_SECONDS,
               lambda: list(checks.left_behind(storm)))  # fmt: skip


def test_nothing_is_made_for_a_job_that_has_ended(storm: Storm) -> None:
    assert [*checks.made_after_the_end(storm), *checks.changed_after_the_end(storm)] == []


def test_the_operator_meets_no_error_that_it_does_not_expect(storm: Storm) -> None:
    assert list(checks.tracebacks(storm)) == []

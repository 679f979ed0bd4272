"""Conditions of a job that `describe`, `get` and the pages show."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from finetune_operator.cli.cluster.jobview import notable
from finetune_operator.spec.types.job_status import Condition


def condition(name: str, status: str, message: str = "") -> Condition:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return Condition.model_validate(
        {"type": name, "status": status, "reason": "Seen", "message": message, "lastTransitionTime": at}
    )


FAILED = condition("Failed", "True", "The attempts are used up.")
REFUSED = condition("Planned", "False", "spec.strategy does not fit.")
STALLED = condition("Stalled", "True", "No progress for 10 min.")
WAITING = condition("Running", "False", "Pods wait for a GPU.")


@pytest.mark.parametrize(
    ("conditions", "failure_is_shown", "shown"),
    [
        pytest.param([FAILED], False, [FAILED], id="failure that is shown nowhere else"),
        pytest.param([FAILED], True, [], id="failure that is shown already"),
        pytest.param([condition("Failed", "False")], False, [], id="no failure"),
        pytest.param([condition("Succeeded", "True"), WAITING], False, [], id="nothing is waited for after the end"),
        pytest.param([REFUSED, FAILED, WAITING], False, [REFUSED, FAILED], id="refusal before the failure"),
        pytest.param([condition("Planned", "True"), STALLED, WAITING], False, [STALLED, WAITING], id="obstacles"),
        pytest.param([condition("Stalled", "False", "gone"), condition("Running", "False")], False, [], id="none"),
        pytest.param(
            [STALLED, condition("Running", "False", STALLED.message)], False, [STALLED], id="each message once"
        ),
    ],
)
def test_conditions_of_obstacles_and_waits_are_shown(
    conditions: list[Condition], failure_is_shown: bool, shown: list[Condition]
) -> None:
    assert list(notable(conditions, failure_is_shown)) == shown

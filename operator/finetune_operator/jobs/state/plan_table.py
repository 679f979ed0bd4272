"""Latest plans of one job, by what they follow from: a job is planned once for each change, not for each look at it.

`decide` looks a plan up. In the operator, a plan that is not known ends the decision, and the job is decided again when
another process has planned it: planning takes up to seconds, and the event loop serves all jobs.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from finetune_operator.plan.plan import plan
from finetune_operator.plan.types.plan_types import JobPlan, PlanRefused, PlanRequest
from finetune_operator.spec.problems import Problem
from finetune_operator.spec.settings.settings import Settings

FindPlan: TypeAlias = Callable[[PlanRequest], JobPlan]
"""Lookup of a plan. PlanRefused; NotPlannedError where it has to be computed first."""

KEPT = 4
"""Plans that are kept: one decision asks for two at most, with and without an endpoint, before and after a change."""


class NotPlannedError(Exception):
    """A plan is not known yet: the decision waits for it."""


class PlanningFailedError(Exception):
    """A plan could not be computed because of a bug."""


class PlannerLostError(PlanningFailedError):
    """The process that plans cannot be reached, or was ended by somebody: another try may succeed."""


Answer: TypeAlias = bytes | PlanningFailedError
"""Content of a table: a pickled plan, or the pickled problems of a refused one; or why there is neither."""


def planned(request: PlanRequest, settings: Settings) -> bytes:
    """Plan now, and return the plan, or the problems of a refused one, for a table. A plan takes 9 KB so, a fifth of
    its size as an object.
    """
    try:
        return pickle.dumps(plan(request.job, request.facts, settings, request.adaptation))
    except PlanRefused as refused:
        return refusal(refused.problems)


def refusal(problems: tuple[Problem, ...]) -> bytes:
    """Return a refusal for a table."""
    return pickle.dumps(problems)


class PlanTable:
    """See the module."""

    def __init__(self) -> None:
        self._known: deque[tuple[PlanRequest, Answer]] = deque(maxlen=KEPT)
        self.missing: PlanRequest | None = None
        """Plan that was looked up last and was not known."""

    def find(self, request: PlanRequest) -> JobPlan:
        """Return a known plan. PlanRefused; NotPlannedError; PlanningFailedError, once."""
        entry = next((one for one in self._known if one[0] == request), None)
        if entry is None:
            self.missing = request
            raise NotPlannedError
        answer = entry[1]
        if isinstance(answer, PlanningFailedError):
            self._known.remove(entry)
            raise answer
        content: JobPlan | tuple[Problem, ...] = pickle.loads(answer)
        if isinstance(content, JobPlan):
            return content
        raise PlanRefused(content)

    def put(self, request: PlanRequest, answer: Answer) -> None:
        """Keep a plan."""
        self._known.append((request, answer))


def planning_at_once(settings: Settings) -> FindPlan:
    """Return a planner that computes what it does not know."""
    table = PlanTable()

    def find(request: PlanRequest) -> JobPlan:
        try:
            return table.find(request)
        except NotPlannedError:
            table.put(request, planned(request, settings))
            return table.find(request)

    return find

"""The webhook answers within the API server's timeout, whatever one namespace asks of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, cast

import aiohttp
import pytest

from finetune_operator.controller.servers.webhook import MOST_WAITING, REVIEWING, WebhookServer, limit_seconds
from finetune_operator.controller.store.fair_queue import TooManyWaitError, Turns
from finetune_operator.jobs.admission import JOBS, answer_to
from finetune_operator.jobs.missing_objects import LookUp
from planning_support.cases import job
from suite_plugins.patience import patient

REVIEW_SECONDS = 0.5
TIMEOUT_SECONDS = 4


class NoJobs:
    """State of an operator without jobs."""

    def jobs(self) -> list[Any]:
        """Return that there are none."""
        return []

    async def served(self) -> list[Any]:
        """Return that nothing is known."""
        return []

    async def look_up(self, namespace: str, job: Any) -> LookUp:
        """Answer never, as an API server that is too busy."""
        await asyncio.Event().wait()
        return LookUp()


async def slowly(review: dict[str, Any]) -> Any:
    """Review as a job does that takes long to validate: in its thread, without a pause."""
    time.sleep(REVIEW_SECONDS)
    REVIEWING.get().job = job(name=review["request"]["name"])
    return answer_to(review, None)


def review(namespace: str, number: int, *, old: Any = None) -> dict[str, Any]:
    document = {"metadata": {"name": f"job-{number}"}, "spec": {"number": number}}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": str(number), "operation": "CREATE" if old is None else "UPDATE", "namespace": namespace,
            "name": f"job-{number}", "resource": JOBS, "userInfo": {}, "object": document, "oldObject": old,
        },
    }  # fmt: skip


async def asked(session: aiohttp.ClientSession, port: int, body: dict[str, Any]) -> tuple[int, float]:
    """Return the code of the answer, 200 for an allowed job, and its seconds."""
    began = time.monotonic()
    async with session.post(f"http://127.0.0.1:{port}/validate?timeout={TIMEOUT_SECONDS}s", json=body) as answer:
        given = await answer.json()
        response = given.get("response", {"allowed": False, "status": {"code": answer.status}})
        code = 200 if response["allowed"] else response["status"]["code"]
        return code, time.monotonic() - began


def answers(bodies: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the answers to reviews that are asked for in a moment, in their order."""

    async def scene() -> list[tuple[int, float]]:
        server = WebhookServer(NoJobs(), cast(Any, None))
        server.answer.set_result(slowly)
        port = await server.start("127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                tasks = []
                for body in bodies:
                    tasks.append(asyncio.create_task(asked(session, port, body)))
                    await asyncio.sleep(0.005)
                return list(await asyncio.gather(*tasks))
        finally:
            await server.stop()

    return asyncio.run(scene())


def test_flood_of_slow_reviews_delays_its_own_namespace_alone() -> None:
    flood = [review("flood", number) for number in range(40)]
    label = review("flood", 41, old={"metadata": {}, "spec": {"number": 41}})
    *of_flood, of_label, of_team = answers([*flood, label, review("team", 42)])
    assert of_team[0] == 200
    assert of_team[1] < patient(TIMEOUT_SECONDS - 1)
    assert of_label[0] == 200, "a label is never refused"
    codes = Counter(code for code, _ in of_flood)
    assert set(codes) == {200, 429}
    assert codes[429] >= 40 - MOST_WAITING - 1
    assert max(seconds for _, seconds in of_flood) < patient(TIMEOUT_SECONDS)


def test_namespaces_take_turns() -> None:
    async def scene() -> list[str]:
        turns, order = Turns(1, 9), []

        async def work(namespace: str) -> None:
            await turns.take(namespace)
            order.append(namespace)
            await asyncio.sleep(0)
            turns.give_back(namespace)

        await asyncio.gather(*(work(namespace) for namespace in "aaaabbc"))
        assert [turns.asked(namespace) for namespace in "abc"] == [0, 0, 0]
        return order

    assert asyncio.run(scene()) == list("abcabaa")


def test_turn_of_one_who_left_goes_to_the_next() -> None:
    async def scene() -> None:
        turns = Turns(2, 2)
        await turns.take("a")
        left, stays = (asyncio.create_task(turns.take("a")) for _ in range(2))
        await asyncio.sleep(0)
        with pytest.raises(TooManyWaitError):
            await turns.take("a")
        await turns.take("b")
        left.cancel()
        turns.give_back("a")
        await stays
        # Whoever leaves in the moment of its turn gives it back.
        last = asyncio.create_task(turns.take("a"))
        await asyncio.sleep(0)
        turns.give_back("a")
        last.cancel()
        await asyncio.wait([left, last])
        assert (turns.asked("a"), turns.asked("b")) == (0, 1)
        await turns.take("c")

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("timeout", "seconds"), [("5s", 4.0), ("4.5s", 3.5), ("1s", 0.5), ("", 4.0), ("1e9s", 4.0), ("2m0s", 4.0)]
)
def test_limit_of_a_review_follows_the_timeout_of_its_client(timeout: str, seconds: float) -> None:
    assert limit_seconds(timeout) == seconds

"""The choice of shards by workers, simulated with many workers, a clock of its own and a folder in memory."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from finetune_trainer.data.row_shards import ShardKey
from finetune_trainer.predict.shard_claims import (
    CHOOSING_SECONDS,
    SILENT_SECONDS,
    Beat,
    ShardClaimer,
    Wait,
    Worker,
    beat_name,
)

PARTS = "parts"
BEAT_SECONDS = 10.0


@dataclass
class CountedFiles:
    """`SharedFiles` in memory that counts requests."""

    files: dict[str, dict[str, str]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)

    def create(self, name: str, text: str) -> bool:
        self.requests["create"] += 1
        folder, _, base = name.rpartition("/")
        return self.files.setdefault(folder, {}).setdefault(base, text) is text

    def write(self, name: str, text: str) -> None:
        self.requests["write"] += 1
        folder, _, base = name.rpartition("/")
        self.files.setdefault(folder, {})[base] = text

    def read(self, name: str) -> str | None:
        self.requests["read"] += 1
        folder, _, base = name.rpartition("/")
        return self.files.get(folder, {}).get(base)

    def names(self, folder: str) -> list[str]:
        self.requests["list"] += 1
        return list(self.files.get(folder, {}))


@dataclass
class Incarnation:
    """A running worker."""

    worker: Worker
    name: str
    taker: ShardClaimer
    number: int = 0
    """Shard that it passes next."""
    answers: int | None = None
    """Shard under way, written at its next turn."""
    beat: int = 0


class Play:
    """Workers that share shards; those in `stuck` never end theirs."""

    def __init__(self, workers: int, shards: int, seed: int = 7) -> None:
        self.count = workers
        self.keys = [ShardKey(0, number) for number in range(shards)]
        self.files = CountedFiles()
        self.draw = random.Random(seed)
        self.answered: Counter[int] = Counter()
        self.ended: dict[int, float] = {}
        self.lists: Counter[str] = Counter()
        self.now = 0.0
        self._turns: list[tuple[float, int, str]] = []
        self._running: dict[str, Incarnation] = {}
        self._order = 0
        self.stuck: set[str] = set()
        """Names of incarnations that stay in their next shard for ever."""

    def start(self, index: int, at: float = 0.0) -> str:
        worker = Worker(index, self.count, "attempt")
        self._order += 1
        name = f"{index}-{self._order}"
        self.now = max(self.now, at)
        self._beat(worker, name, 1)
        self._running[name] = Incarnation(worker, name, ShardClaimer(worker, PARTS, self.files, name))
        self._turn(at, name)
        return name

    def kill(self, name: str) -> bool:
        """End it without a report; return False if it had ended before."""
        return self._running[name].worker.index not in self.ended and self._running.pop(name, None) is not None

    def run(self, until: float = float("inf")) -> None:
        """Let the workers run until all have ended."""
        while self._turns and self._turns[0][0] <= until:
            self.now, _, name = heapq.heappop(self._turns)
            if name in self._running:
                self._step(self._running[name])

    @property
    def names(self) -> list[str]:
        return list(self._running)

    def _turn(self, at: float, name: str) -> None:
        self._order += 1
        heapq.heappush(self._turns, (at, self._order, name))

    def _beat(self, worker: Worker, name: str, beat: int) -> None:
        text = Beat(incarnation=name, beat=beat).to_json()
        self.files.files.setdefault(worker.folder(PARTS), {})[beat_name("", worker.index)[1:]] = text

    def _step(self, one: Incarnation) -> None:
        one.beat = int(self.now // BEAT_SECONDS) + 2
        self._beat(one.worker, one.name, one.beat)
        if one.answers is not None:
            self.files.write(f"{PARTS}/{self.keys[one.answers]}.json", "")
            self.answered[one.answers] += 1
            one.answers = None
        while one.number < len(self.keys) and not one.taker.through:
            number = one.number
            one.number += 1
            if one.taker.takes(number, self.keys[number]):
                seconds = self.draw.uniform(20, 40)
                one.taker.longest = max(one.taker.longest, seconds)
                if one.name in self.stuck:
                    self._turn(self.now + BEAT_SECONDS, one.name)
                    one.number = len(self.keys)
                    return
                one.answers = number
                self._turn(self.now + seconds, one.name)
                return
        if one.name in self.stuck:
            self._turn(self.now + BEAT_SECONDS, one.name)
            if len(self.ended) >= self.count - len(self.stuck):
                self._turns.clear()
            return
        before = self.files.requests["list"]
        found = one.taker.look(self.keys, self.now)
        self.lists[one.name] += self.files.requests["list"] - before
        if isinstance(found, Wait):
            self._turn(self.now + found.seconds, one.name)
        elif found:
            one.number = 0
            self._turn(self.now, one.name)
        else:
            self.ended[one.worker.index] = self.now


def test_workers_share_all_shards_and_none_is_answered_twice():
    play = Play(4, 50)
    for index in range(4):
        play.start(index)
    play.run()
    assert play.answered == Counter(range(50))
    assert set(play.ended) == {0, 1, 2, 3}
    assert play.ended[0] == pytest.approx(max(play.ended.values()), abs=40)


def test_shards_of_workers_that_never_start_are_taken_by_the_others():
    play = Play(4, 50)
    play.start(0)
    play.start(2)
    play.run()
    assert play.answered == Counter(range(50))


def test_worker_0_answers_everything_alone_without_waiting():
    play = Play(1000, 50)
    play.start(0)
    play.run()
    assert play.answered == Counter(range(50))
    assert play.ended[0] <= 50 * 40


def test_killed_workers_cost_one_shard_each_and_a_replaced_one_goes_on():
    play = Play(5, 200)
    running = {index: play.start(index) for index in range(5)}
    kills = 0
    for at in range(50, 1050, 50):
        play.run(until=at)
        index = play.draw.randrange(5)
        if play.kill(running[index]):
            kills += 1
            running[index] = play.start(index, at)
    play.run()
    assert kills == 20
    assert set(play.answered) == set(range(200))
    assert sum(play.answered.values()) == 200, "a killed worker has not written its shard"
    claims = len(play.files.files[f"{Worker(0, 5, 'attempt').folder(PARTS)}/claims"])
    assert 0 <= claims - 200 <= kills


def test_killed_worker_without_replacement_is_left_behind():
    play = Play(3, 9)
    running = [play.start(index) for index in range(3)]
    play.run(until=5)
    assert play.kill(running[1])
    play.run()
    assert play.answered == Counter(range(9))
    assert play.ended[0] < 9 * 40 + SILENT_SECONDS


class EndingFiles(CountedFiles):
    """Files whose first reader of the heartbeat `beat` finds that its worker has just written a part and ended."""

    beat = ""
    part = ""
    incarnation = ""

    def read(self, name: str) -> str | None:
        if name == self.beat:
            self.write(f"{PARTS}/{self.part}.json", "")
            self.write(name, Beat(incarnation=self.incarnation, beat=2, ended=True).to_json())
        return super().read(name)


def test_part_of_a_worker_that_has_just_ended_is_not_taken_over():
    files = EndingFiles()
    keys = [ShardKey(0, 0), ShardKey(0, 1)]
    crew = [Worker(index, 2, "attempt") for index in range(2)]
    for worker in crew:
        beat = Beat(incarnation=f"{worker.index}", beat=1)
        files.write(beat_name(worker.folder(PARTS), worker.index), beat.to_json())
    first, other = (ShardClaimer(worker, PARTS, files, f"{worker.index}") for worker in crew)
    assert first.takes(0, keys[0])
    assert other.takes(1, keys[1])
    files.write(f"{PARTS}/{keys[0]}.json", "")
    files.beat, files.part, files.incarnation = beat_name(crew[1].folder(PARTS), 1), str(keys[1]), "1"
    assert first.look(keys, 1.0) is False
    assert first.through is False


def test_a_worker_that_lives_and_is_stuck_is_a_straggler():
    play = Play(3, 9)
    running = [play.start(index) for index in range(3)]
    play.stuck.add(running[2])
    play.run()
    assert play.answered == Counter(range(9))
    assert play.ended[0] < 9 * 40 + SILENT_SECONDS


def test_parts_of_an_earlier_attempt_are_never_answered_again():
    play = Play(3, 30)
    for key in play.keys[:20]:
        play.files.write(f"{PARTS}/{key}.json", "")
    for index in range(3):
        play.start(index)
    play.run()
    assert play.answered == Counter(range(20, 30))


def test_requests_of_a_thousand_workers_stay_bounded():
    """2,000 shards of half a minute each on a thousand workers, of which 40 are killed and replaced."""
    workers, shards, kills = 1000, 2000, 20
    play = Play(workers, shards)
    running = {index: play.start(index, play.draw.uniform(0, 10)) for index in range(workers)}
    for number in range(kills):
        at = 10 + number
        play.run(until=at)
        index = play.draw.randrange(workers)
        assert play.kill(running[index])
        running[index] = play.start(index, at)
    play.run()
    assert set(play.answered) == set(range(shards))
    again = sum(play.answered.values()) - shards
    assert again <= shards // 100, "few shards at the end are taken for stragglers"
    requests = play.files.requests
    assert requests["create"] <= shards + workers + kills, "a claim a shard, and few that two workers want"
    assert requests["read"] <= 64 * workers
    assert max(count for name, count in play.lists.items() if not name.startswith("0-")) <= 24


class Choosers:
    """Three workers, one of which does a piece of work for all."""

    def __init__(self) -> None:
        self.files = CountedFiles()
        self.folder = Worker(0, 3, "attempt").folder(PARTS)
        self.takers = [self.begin(index) for index in range(3)]

    def begin(self, index: int, incarnation: str = "a") -> ShardClaimer:
        self.beat(index, 1, incarnation)
        return ShardClaimer(Worker(index, 3, "attempt"), PARTS, self.files, f"{index}-{incarnation}")

    def beat(self, index: int, beat: int, incarnation: str = "a", *, ended: bool = False) -> None:
        text = Beat(incarnation=f"{index}-{incarnation}", beat=beat, ended=ended).to_json()
        self.files.write(beat_name(self.folder, index), text)

    def chosen(self, now: float, *indices: int) -> list[int]:
        """Return which of these workers do the work."""
        return [index for index in indices if self.takers[index].first("choice", now)]


def test_one_worker_chooses_while_it_lives() -> None:
    play = Choosers()
    assert play.chosen(0, 2, 0, 1) == [2]
    for now in range(10, int(CHOOSING_SECONDS), 10):
        play.beat(2, 1 + now)
        assert play.chosen(now, 0, 1) == []
    assert play.chosen(CHOOSING_SECONDS + 20, 0, 1) == [0], "it is stuck, and one of the others is next"


def test_the_choice_of_a_worker_that_died_is_taken_over_by_one_other() -> None:
    play = Choosers()
    assert play.chosen(0, 0, 1, 2) == [0]
    assert play.chosen(SILENT_SECONDS, 1, 2) == []
    assert play.chosen(SILENT_SECONDS + 1, 1, 2) == [1]
    play.beat(1, 2)
    assert play.chosen(SILENT_SECONDS + 2, 2) == []


def test_a_worker_that_ended_or_was_replaced_chooses_no_more() -> None:
    play = Choosers()
    assert play.chosen(0, 0, 1, 2) == [0]
    play.takers[0] = play.begin(0, "b")
    assert play.chosen(1, 0, 1, 2) == [0], "it knows that the one before it is dead"
    play.beat(0, 2, "b", ended=True)
    assert play.chosen(2, 1, 2) == [1]


def test_unfinished_claim_blocks_no_worker_for_ever() -> None:
    play = Choosers()
    play.files.create(f"{play.folder}/claims/choice.0", "")
    assert play.chosen(0, 1, 2) == []
    assert play.chosen(SILENT_SECONDS + 1, 1, 2) == [1]

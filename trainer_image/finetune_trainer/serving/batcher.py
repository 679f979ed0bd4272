"""Batches of rows of many requests, by their tokens and by time; one thread computes at a time.

A batch starts as soon as the thread is free: rows that arrive meanwhile form the next one, so batches grow with the
load, and without load no request waits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from finetune_trainer.core.failures import StageError
from finetune_trainer.serving.fair_lock import FairLock
from finetune_trainer.serving.request_rows import Form, RequestError, Row
from finetune_trainer.serving.serving_engine import EncodedRow, ServingEngine
from finetune_trainer.serving.serving_metrics import ServingMetrics
from finetune_trainer.serving.watched_writing import Finish, WatchedWriting

log = logging.getLogger(__name__)

_SMOOTHING = 0.2
"""Weight of the last batch in the time that a token takes."""


_WRITING = 4
"""Batches that are written by turns: each takes memory, and slows the others down."""


@dataclass(eq=False)
class Ticket:
    """A request that is queued or computed."""

    form: Form
    rows: Sequence[Row]
    done: asyncio.Future[list[dict[str, Any]]]
    deadline: float | None
    put: Callable[[str], None] | None = None
    """Receives pieces of text as they are written: the row is computed by itself."""
    encoded: list[EncodedRow] = field(default_factory=list)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_of: dict[int, Finish] = field(default_factory=dict)
    """Index of a row -> end of its text, for models that write."""
    disconnected: bool = False
    """True once no client waits for the answer."""
    settled: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the inputs."""
        return sum(row.tokens for row in self.encoded)

    @property
    def finishes(self) -> list[Finish]:
        """Ends of the texts, in the order of the rows."""
        return [self.finish_of[at] for at in sorted(self.finish_of)]

    @property
    def over(self) -> bool:
        """True once an answer is of no use."""
        return self.disconnected or self.late

    @property
    def late(self) -> bool:
        """True once its deadline has passed."""
        return self.deadline is not None and time.monotonic() > self.deadline


_Result: TypeAlias = list[dict[str, Any]] | Exception


class Batcher:
    """Request queue and the thread that computes."""

    def __init__(self, engine: ServingEngine, metrics: ServingMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._serving = engine.serving
        metrics.set_limits(self._serving.max_queue, self._serving.max_latency_seconds)
        self._wake = threading.Condition()
        self._inbox: deque[Ticket] = deque()
        self._waiting: list[tuple[Ticket, int]] = []
        self._rows = 0
        self._stop = False
        self._token_seconds = 0.0
        self._turns = FairLock()
        self._pool = ThreadPoolExecutor(_WRITING, "write")
        self._writing = 0
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self.ready = False
        self.failed: BaseException | None = None

    def start(self) -> None:
        """Load the model and warm up, then accept requests."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; queued requests are not answered."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join(timeout=5)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def queued(self) -> int:
        """Number of rows that are queued or computed."""
        return self._rows

    def submit(
        self, form: Form, rows: Sequence[Row], deadline: float | None, put: Callable[[str], None] | None = None
    ) -> Ticket:
        """Queue a request of the running event loop. RequestError 429 if the queue is full."""
        if self._rows and self._rows + len(rows) > self._serving.max_queue:
            retry = max(1, round(self._rows * self._token_seconds * 64))
            message = f"The queue of {self._serving.max_queue} rows is full: retry in {retry} s."
            raise RequestError(429, message, {"Retry-After": str(retry)})
        ticket = Ticket(form, rows, asyncio.get_running_loop().create_future(), deadline, put)
        with self._wake:
            self._rows += len(rows)
            self._inbox.append(ticket)
            self._wake.notify()
        self._metrics.queue.set(self._rows)
        return ticket

    # ------------------------------------------------------------------------------------------------- the thread

    def _work(self) -> None:
        try:
            self._engine.open()
            self._metrics.describe({name: model.revision for name, model in self._engine.models.items()})
            self._token_seconds = self._engine.warm_up()
        except BaseException as error:  # on any error the server must end and report it
            self.failed = error
            return
        self.ready = True
        while True:
            with self._wake:
                while not (self._inbox or (self._waiting and self._writing < _WRITING) or self._stop):
                    self._wake.wait()
                if self._stop:
                    return
                arrived = list(self._inbox)
                self._inbox.clear()
            self._take(arrived)
            self._drop_abandoned()
            if self._waiting and self._writing < _WRITING:
                self._begin()

    def _take(self, arrived: Sequence[Ticket]) -> None:
        """Encode the rows of requests, those of one form in one call: a call costs as much as many rows."""
        alike: dict[object, list[Ticket]] = {}
        for ticket in arrived:
            if not self._over(ticket):
                # A column has one type, and a prompt may be text or messages.
                texts = all(isinstance(value, str) for row in ticket.rows for value in row.values())
                alike.setdefault(ticket.form if texts else ticket, []).append(ticket)
        for tickets in alike.values():
            try:
                self._encode(tickets)
            except BaseException as error:  # a panic of the tokenizer is no Exception, and must not end the thread
                for ticket in tickets if len(tickets) > 1 else ():
                    self._take([ticket])
                if len(tickets) == 1:
                    self._settle([(tickets[0], _refusal(error))])

    def _encode(self, tickets: Sequence[Ticket]) -> None:
        rows = [row for ticket in tickets for row in ticket.rows]
        with self._turns.taken():
            encoded = iter(self._engine.encode(tickets[0].form, rows))
        for ticket in tickets:
            ticket.encoded = list(islice(encoded, len(ticket.rows)))
        with self._wake:
            self._waiting += [(ticket, at) for ticket in tickets for at in range(len(ticket.rows))]

    def _drop_abandoned(self) -> None:
        for ticket in {id(ticket): ticket for ticket, _ in self._waiting}.values():
            self._over(ticket)

    def _over(self, ticket: Ticket) -> bool:
        if ticket.disconnected:
            self._settle([(ticket, RequestError(499, "The client has disconnected."))])
        elif ticket.late:
            self._settle([(ticket, RequestError(504, "The request timed out before its answer was computed."))])
        else:
            return False
        return True

    def _chosen(self) -> list[tuple[Ticket, int]]:
        """Return the oldest row and those of its form that fit beside it, the closest in length first."""
        first, at = self._waiting[0]
        width = first.encoded[at].width
        if first.put is not None or first.form.seed is not None:
            return [self._waiting[0]]
        alike = [entry for entry in self._waiting if entry[0].form == first.form and entry[0].put is None]
        alike[1:] = sorted(alike[1:], key=lambda entry: abs(entry[0].encoded[entry[1]].width - width))
        room = self._serving.max_batch_tokens
        if self._token_seconds:
            # Half of the bound, as a row also waits for the batch before its own.
            room = min(room, int(self._serving.max_latency_seconds / 2 / self._token_seconds))
        batch, longest = [alike[0]], width
        for entry in alike[1:]:
            longest = max(longest, entry[0].encoded[entry[1]].width)
            if longest * (len(batch) + 1) > room:
                break
            batch.append(entry)
        return batch

    def _begin(self) -> None:
        """Compute the next batch; batches that write take long, and share the model by turns."""
        with self._wake:
            batch = self._chosen()
            taken = {(id(ticket), at) for ticket, at in batch}
            self._waiting = [entry for entry in self._waiting if (id(entry[0]), entry[1]) not in taken]
            self._writing += self._engine.writes
        if not self._engine.writes:
            self._batch(batch, None)
            return
        tickets = list({id(ticket): ticket for ticket, _ in batch}.values())
        writing = WatchedWriting(
            self._turns, lambda: self._stop or all(ticket.over for ticket in tickets), put=batch[0][0].put
        )
        self._pool.submit(self._write, batch, writing)

    def _write(self, batch: list[tuple[Ticket, int]], writing: WatchedWriting) -> None:
        try:
            self._batch(batch, writing)
        finally:
            with self._wake:
                self._writing -= 1
                self._wake.notify()

    def _batch(self, batch: list[tuple[Ticket, int]], writing: WatchedWriting | None) -> None:
        rows = [ticket.encoded[at] for ticket, at in batch]
        tickets = {id(ticket): ticket for ticket, _ in batch}.values()
        given = () if writing is None else (writing,)
        began = time.perf_counter()
        try:
            answers = self._engine.answer(batch[0][0].form, rows, *given)
            if self._stop:
                raise RequestError(503, "The server has stopped.")
        except BaseException as error:  # as in `_take`
            refusal = _refusal(error)
            self._settle([(ticket, refusal) for ticket in tickets])
            return
        seconds = time.perf_counter() - began - (0.0 if writing is None else writing.others_seconds)
        padded = max(row.width for row in rows) * len(rows)
        self._token_seconds += _SMOOTHING * (seconds / padded - self._token_seconds)
        model = self._engine.model_of(batch[0][0].form)
        self._metrics.batch(model, len(rows), sum(row.tokens for row in rows), seconds)
        if writing is not None:
            for (ticket, at), finish in zip(batch, writing.finishes, strict=True):
                ticket.finish_of[at] = finish
            if writing.put is not None and not writing.streams:
                writing.put(answers[0]["generated_text"])
        for (ticket, at), answer in zip(batch, answers, strict=True):
            ticket.answers[at] = answer
        self._settle(
            [
                (ticket, [ticket.answers[index] for index in range(len(ticket.rows))])
                for ticket in tickets
                if len(ticket.answers) == len(ticket.rows) and not (writing is not None and self._over(ticket))
            ]
        )

    def _settle(self, results: Sequence[tuple[Ticket, _Result]]) -> None:
        """Answer requests, with one wake-up of their event loop."""
        with self._wake:
            # Another batch that has rows of a ticket may have settled it.
            fresh = [entry for entry in results if not entry[0].settled]
            for ticket, _ in fresh:
                ticket.settled = True
                self._rows -= len(ticket.rows)
            if any(isinstance(result, Exception) for _, result in fresh):
                self._waiting = [entry for entry in self._waiting if not entry[0].settled]
        if not fresh:
            return
        self._metrics.queue.set(self._rows)

        def notify() -> None:
            for ticket, result in fresh:
                if ticket.done.done():
                    continue
                if isinstance(result, Exception):
                    ticket.done.set_exception(result)
                else:
                    ticket.done.set_result(result)

        fresh[0][0].done.get_loop().call_soon_threadsafe(notify)


def _refusal(error: BaseException) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, StageError):
        return RequestError(422, f"{error.message} {error.hint}".strip())
    log.exception("A batch has failed.")
    return RequestError(500, "The model failed on this request; the server's log has the reason.")

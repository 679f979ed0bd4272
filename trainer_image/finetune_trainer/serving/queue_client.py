"""Requests in the queue of the model: submitting, waiting, giving up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from finetune_contract.choices import WRITING_TASKS
from finetune_contract.inference_settings import Generation
from finetune_trainer.serving.batcher import Ticket
from finetune_trainer.serving.protocols.text_pieces import TextPieces
from finetune_trainer.serving.request_rows import Form, RequestError, check_rows
from finetune_trainer.serving.server_state import ServerState
from finetune_trainer.serving.serving_engine import refuse_roles

DEADLINE_HEADERS = ("x-request-timeout-ms", "x-envoy-expected-rq-timeout-ms")


class QueueClient:
    """Access to the queue for handlers."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def require_model(self) -> None:
        """Raise RequestError 503 while the model is being loaded."""
        if not self._state.batcher.ready:
            raise RequestError(503, "The model is being loaded.", {"Retry-After": "1"})

    def model(self, request: Request, named: object, param: str | None = None) -> str:
        """Return the name of the model of a request, the default one if it names none, and note it for log and metrics.
        RequestError 404 if there is no such model; `param`: field that names it.
        """
        names = self._state.engine.names
        name = names[0] if named is None else named
        if not isinstance(name, str) or name not in names:
            raise self._unknown(name, param)
        request.state.model = name
        return name

    def _unknown(self, name: object, param: str | None = None) -> RequestError:
        names = self._state.engine.names
        known = ", ".join(repr(model) for model in names[:8]) + (", ..." if len(names) > 8 else "")
        return RequestError(404, f"There is no model {str(name)[:80]!r}; this server has {known}.", param=param)

    def form(
        self,
        model: str,
        rows: Sequence[dict[str, Any]],
        generation: Generation,
        stop: tuple[str, ...] = (),
        seed: int | None = None,
    ) -> Form:
        """Return the form of valid rows for the model of that name; RequestError for others."""
        self.require_model()
        engine = self._state.engine
        if model not in engine.models:
            raise self._unknown(model)  # a base model without a head, which the loading has shown
        check_rows(rows)
        roles = tuple(sorted(rows[0]))
        refuse_roles(engine.job.task, roles)
        return Form(roles, generation if engine.job.task in WRITING_TASKS else engine.generation, stop, seed, model)

    async def answered(self, request: Request, form: Form, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the columns of predict for each row."""
        ticket = self._state.batcher.submit(form, rows, _deadline(request))
        request.state.rows = len(rows)
        disconnection = asyncio.create_task(_disconnected(request))
        left = None if ticket.deadline is None else max(0.0, ticket.deadline - time.monotonic())
        try:
            waiting: set[asyncio.Future[Any]] = {ticket.done, disconnection}
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            request.state.tokens = ticket.tokens
            if ticket.done.done():
                request.state.finishes = ticket.finishes
                return ticket.done.result()
            if disconnection.done():
                raise RequestError(499, "The client has disconnected.")
            raise RequestError(504, "The request timed out before its answer was computed.")
        finally:
            ticket.disconnected = True
            ticket.done.cancel()
            disconnection.cancel()

    async def begun(self, request: Request, form: Form, row: dict[str, Any]) -> tuple[Ticket, TextPieces, str | None]:
        """Start writing a text, and return its ticket, its pieces and the first piece. RequestError if it fails."""
        pieces = TextPieces()
        ticket = self._state.batcher.submit(form, [row], _deadline(request), pieces.put)
        ticket.done.add_done_callback(lambda _: pieces.end())
        request.state.rows = 1
        first = await pieces.get()
        if ticket.done.done() and (error := ticket.done.exception()) is not None:
            raise error
        return ticket, pieces, first


def _deadline(request: Request) -> float | None:
    given = next((request.headers[name] for name in DEADLINE_HEADERS if name in request.headers), None)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and 0 < len(given) <= 9 and int(given)):
        raise RequestError(400, f"X-Request-Timeout-Ms must be whole milliseconds from 1; found {given[:40]!r}.")
    return time.monotonic() + int(given) / 1000


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

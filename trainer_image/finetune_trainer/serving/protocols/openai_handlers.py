"""OpenAI's API: models, completions and chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from finetune_trainer.serving.batcher import Ticket
from finetune_trainer.serving.protocols import openai_json
from finetune_trainer.serving.protocols.http_json import json_response, read_json
from finetune_trainer.serving.protocols.text_pieces import TextPieces
from finetune_trainer.serving.queue_client import QueueClient
from finetune_trainer.serving.request_rows import RequestError
from finetune_trainer.serving.server_state import ServerState


class OpenAIHandlers:
    """One method for each path. `writes`: role of a prompt in the model's task; `chats`: that of a conversation."""

    def __init__(self, state: ServerState, queue: QueueClient, *, writes: str, chats: str) -> None:
        self._state, self._queue, self._writes, self._chats = state, queue, writes, chats
        self._engine = state.engine

    async def models(self, request: Request) -> Response:
        """Models of the server, as the OpenAI API lists them."""
        alike = {"object": "model", "created": int(self._state.started), "owned_by": "finetune"}
        return json_response({"object": "list", "data": [{"id": name, **alike} for name in self._engine.names]})

    async def completions(self, request: Request) -> Response:
        """Write on behind prompts, as the OpenAI API does."""
        body = await read_json(request)
        model = self._model(request, body)
        rows = [{self._writes: prompt} for prompt in openai_json.prompts(body)]
        return await self._written(request, model, body, rows, chat=False)

    async def chat(self, request: Request) -> Response:
        """Write the next message of a conversation, as the OpenAI API does."""
        body = await read_json(request)
        model = self._model(request, body)
        return await self._written(request, model, body, [{self._chats: openai_json.messages(body)}], chat=True)

    def _model(self, request: Request, body: Mapping[str, Any]) -> str:
        return self._queue.model(request, body.get("model"), param="model")

    async def _written(
        self, request: Request, model: str, body: Mapping[str, Any], rows: list[dict[str, Any]], *, chat: bool
    ) -> Response:
        wanted = openai_json.wanted(self._engine.generation, body, chat=chat)
        form = self._queue.form(model, rows, wanted.generation, wanted.stop, wanted.seed)
        completion = openai_json.CompletionJson(model, self._state.revision_of(model), chat, wanted.usage)
        if not wanted.stream:
            answers = await self._queue.answered(request, form, rows)
            texts = [row["generated_text"] for row in answers]
            return json_response(completion.whole(texts, request.state.tokens, request.state.finishes))
        if len(rows) != 1:
            raise RequestError(400, "A stream has one prompt: send others in separate requests.", param="prompt")
        # The status code is sent first: wait for the first piece, or the reason why there is none.
        ticket, pieces, first = await self._queue.begun(request, form, rows[0])
        return StreamingResponse(_events(completion, first, pieces, ticket), media_type="text/event-stream")


async def _events(
    completion: openai_json.CompletionJson, first: str | None, pieces: TextPieces, ticket: Ticket
) -> AsyncIterator[bytes]:
    """Yield server-sent events; a client that disconnects ends the writing."""
    try:
        piece = first
        while piece is not None:
            yield completion.piece(piece)
            piece = await pieces.get()
        error = ticket.done.exception()
        if error is None:
            yield completion.last(ticket.finishes[0], ticket.tokens)
        else:
            yield completion.failed(str(error))
        yield b"data: [DONE]\n\n"
    finally:
        ticket.disconnected = True
        with suppress(asyncio.CancelledError):
            ticket.done.cancel()

"""The HTTP application: protocols in front of one queue.

Handlers take and return bytes: FastAPI routes, and makes the OpenAPI document, but validates no answers.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from finetune_contract.choices import WRITING_TASKS
from finetune_trainer.serving import hugging_face_json, open_inference, openai_json
from finetune_trainer.serving import page as page_of
from finetune_trainer.serving.batcher import Batcher, Ticket
from finetune_trainer.serving.request_rows import Form, RequestError, check_rows
from finetune_trainer.serving.serving_engine import ServingEngine, refuse_roles
from finetune_trainer.serving.serving_metrics import CONTENT_TYPE, ServingMetrics

MAX_BODY = 4 << 20
MOST_DISCARDED = 64 << 20
"""Bytes of a body that is too large after which the connection is closed."""
BODY_SECONDS = 10.0
"""Time that a client has to send a body."""
DEADLINE_HEADERS = ("x-request-timeout-ms", "x-envoy-expected-rq-timeout-ms")
_OPEN = ("/v2/health/live", "/v2/health/ready", "/metrics")
"""Paths without a token: those who probe and scrape have none."""
_PAGE = ("GET /", "GET /page/{name}")
"""Open as well: a browser loads the page first, and the page asks for the token."""
access = logging.getLogger("finetune_trainer.access")

Handler = Callable[[Request], Awaitable[Response]]


@dataclass
class ServerState:
    """What handlers share."""

    engine: ServingEngine
    batcher: Batcher
    metrics: ServingMetrics
    token: str | None
    revision: str
    endpoint_revision: str | None = None
    """Number of the endpoint's revision that the server belongs to."""
    draining: bool = False
    drain_deadline: float | None = None
    in_flight: int = 0
    started: float = field(default_factory=time.time)

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here."""
        return self.batcher.ready and not self.draining


def json_response(body: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Compact JSON."""
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(content, code, dict(headers or {}), "application/json")


def make_app(state: ServerState) -> FastAPI:
    """The routes of one server."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.batcher.start()
        yield
        state.batcher.stop()

    app = FastAPI(
        title=f"{state.engine.name}: {state.engine.job.task}",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    handlers = _Handlers(state)
    for method, path, handler in handlers.routes():
        app.add_api_route(
            path, _guarded(state, path, handler, method), methods=[method], response_model=None, summary=handler.__doc__
        )

    async def openapi(request: Request) -> Response:
        """Document of these paths, in the OpenAPI format."""
        return json_response(app.openapi())

    app.add_api_route("/openapi.json", _guarded(state, "/openapi.json", openapi), methods=["GET"], response_model=None)

    async def told(request: Request, error: Exception) -> Response:
        code = getattr(error, "status_code", 404)
        allowed = getattr(error, "headers", None)
        why = "There is no such path; see /openapi.json." if code == 404 else "The path does not take this method."
        return _error(request.url.path, RequestError(code, why, allowed))

    for code in (404, 405):
        app.add_exception_handler(code, told)
    return app


def _error(path: str, error: RequestError) -> Response:
    """An error in the form of the path's protocol."""
    if path.startswith("/v1/"):
        kind = "invalid_request_error" if error.code < 500 else "server_error"
        return json_response(
            {"error": {"message": error.message, "type": kind, "code": error.code}}, error.code, error.headers
        )
    return json_response({"error": error.message}, error.code, error.headers)


def _guarded(state: ServerState, path: str, handler: Handler, method: str = "GET") -> Handler:
    """Check the token, answer errors, count and log."""

    async def guarded(request: Request) -> Response:
        began = time.perf_counter()
        identity = request.headers.get("x-request-id", "")[:128] or uuid.uuid4().hex
        request.state.rows = request.state.tokens = 0
        state.in_flight += 1
        state.metrics.in_flight.set(state.in_flight)
        try:
            try:
                if path not in _OPEN and f"{method} {path}" not in _PAGE:
                    _check_token(state, request)
                response = await handler(request)
            except RequestError as error:
                response = _error(path, error)
        finally:
            state.in_flight -= 1
            state.metrics.in_flight.set(state.in_flight)
        seconds = time.perf_counter() - began
        response.headers["X-Request-Id"] = identity if identity.isascii() and identity.isprintable() else "-"
        if state.endpoint_revision is not None:
            response.headers["X-Endpoint-Revision"] = state.endpoint_revision
        if state.draining:
            response.headers["Connection"] = "close"
        state.metrics.requests.labels(path, str(response.status_code)).inc()
        state.metrics.seconds.labels(path).observe(seconds)
        if path not in _OPEN:
            line = {
                "request": identity,
                "path": path,
                "code": response.status_code,
                "ms": round(seconds * 1000, 2),
                "rows": request.state.rows,
                "tokens": request.state.tokens,
            }
            access.info("%s", json.dumps(line))
        return response

    return guarded


def _check_token(state: ServerState, request: Request) -> None:
    if state.token is None:
        return
    given = request.headers.get("authorization", "").encode("utf-8", "replace")
    if not hmac.compare_digest(given, f"Bearer {state.token}".encode()):
        raise RequestError(401, "Send the server's token: Authorization: Bearer TOKEN.", {"WWW-Authenticate": "Bearer"})


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object. RequestError 408, 413 or 400."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > MOST_DISCARDED:
                    raise _too_large()
                if size > MAX_BODY:
                    parts.clear()  # read on: a client that still sends would not see the answer
                else:
                    parts.append(part)
    except TimeoutError as error:
        raise RequestError(
            408, f"The body did not arrive within {BODY_SECONDS:g} s.", {"Connection": "close"}
        ) from error
    if size > MAX_BODY:
        raise _too_large()
    try:
        body = json.loads(b"".join(parts), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise RequestError(400, f"The body is not UTF-8: {error.reason} at byte {error.start}.") from error
    except RecursionError as error:
        raise RequestError(400, "The body is nested too deeply.") from error
    except ValueError as error:
        raise RequestError(400, f"The body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestError(400, f"The body must be a JSON object; found {type(body).__name__}.")
    return body


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _too_large() -> RequestError:
    return RequestError(413, f"The body has more than {MAX_BODY:,} bytes: split the request.", {"Connection": "close"})


def _parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    found = body.get("parameters") or {}
    if not isinstance(found, dict):
        raise RequestError(422, f"parameters must be an object; found {type(found).__name__}.")
    return found


class _Handlers:
    """One method for each path."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._engine = state.engine

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Method, path and handler."""
        found: list[tuple[str, str, Handler]] = [
            ("GET", "/", self.page),
            ("GET", "/page/{name}", self.page_file),
            ("GET", "/v2", self.server),
            ("GET", "/v2/health/live", self.live),
            ("GET", "/v2/health/ready", self.ready),
            ("GET", "/v2/models/{name}", self.metadata),
            ("GET", "/v2/models/{name}/ready", self.model_ready),
            ("POST", "/v2/models/{name}/infer", self.infer),
            ("POST", "/", self.hugging_face),
            ("POST", "/models/{name}", self.hugging_face),
            ("GET", "/metrics", self.metrics),
        ]
        if self._engine.job.task in ("text-generation", "preference-tuning"):
            found += [
                ("GET", "/v1/models", self.models),
                ("POST", "/v1/completions", self.completions),
                ("POST", "/v1/chat/completions", self.chat),
            ]
        return found

    # ---------------------------------------------------------------------------------------------- about the server

    async def page(self, request: Request) -> Response:
        """Page to try the model."""
        return Response(page_of.page(self.told()), headers=dict(page_of.HEADERS), media_type="text/html")

    async def page_file(self, request: Request) -> Response:
        """Style, script or picture of the page."""
        found = page_of.FILES.get(request.path_params["name"])
        if found is None:
            raise RequestError(404, "The page has no such file.")
        return Response(found[0], headers=dict(page_of.HEADERS), media_type=found[1])

    async def server(self, request: Request) -> Response:
        """Name, version and extensions of the server."""
        return json_response({"name": "finetune-trainer", "version": "0.1.0", "extensions": []})

    async def live(self, request: Request) -> Response:
        """Whether the process works."""
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """Whether requests should be sent here: after the warm-up, until it drains."""
        return json_response({"ready": self._state.ready}, 200 if self._state.ready else 503)

    def told(self) -> dict[str, Any]:
        """Metadata of the model."""
        state, engine = self._state, self._engine
        roles = sorted(engine.answerer.asked.columns.model_dump(exclude_none=True))
        schema = engine.answerer.encoder.task.answer_schema(engine.answerer.labels)
        kinds = [(field.name, "FP64" if str(field.type) == "double" else "BYTES") for field in schema]
        facts = {"task": engine.job.task, "labels": list(engine.labels), "revision": state.revision}
        facts |= self._facts_of_page()
        return {
            "name": engine.name,
            "versions": [state.revision],
            "platform": "finetune-trainer",
            "inputs": [{"name": role, "datatype": "BYTES", "shape": [-1]} for role in roles],
            "outputs": [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in kinds],
            "properties": facts,
            "parameters": facts,
        }

    def _facts_of_page(self) -> dict[str, Any]:
        """Inputs and outputs beyond the task, for the page and other clients."""
        job, tokenizer = self._engine.job, self._engine.tokenizer
        facts: dict[str, Any] = {}
        if job.task == "text-classification":
            facts["label_form"] = self._engine.answerer.labels.form
            facts["pairs"] = job.dataset is not None and job.dataset.columns.text_pair is not None
        elif job.task == "masked-lm":
            facts["mask_token"] = tokenizer.mask_token
        elif job.task in ("text-generation", "preference-tuning"):
            facts["chat"] = tokenizer.chat_template is not None
        return facts

    async def metadata(self, request: Request) -> Response:
        """Task, labels, revision, inputs and outputs of the model."""
        self._check_name(request)
        return json_response(self.told())

    async def model_ready(self, request: Request) -> Response:
        """As /v2/health/ready."""
        self._check_name(request)
        ready = self._state.ready
        return json_response({"name": self._engine.name, "ready": ready}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        return Response(self._state.metrics.text(), media_type=CONTENT_TYPE)

    def _check_name(self, request: Request) -> None:
        name = request.path_params.get("name")
        if name is not None and name != self._engine.name:
            raise RequestError(404, f"There is no model {name[:80]!r}; this server has {self._engine.name!r}.")

    # ----------------------------------------------------------------------------------------------------- inference

    async def infer(self, request: Request) -> Response:
        """Answer an inference request of the Open Inference Protocol."""
        self._check_name(request)
        if "inference-header-content-length" in request.headers:
            raise RequestError(400, "This server takes JSON only: send tensors without the binary extension.")
        body = await read_json(request)
        identity = body.get("id")
        if identity is not None and not isinstance(identity, str):
            raise RequestError(400, "id must be text.")
        generation = hugging_face_json.generation_of(self._engine.generation, _parameters(body))
        found = await self._answered(request, open_inference.rows_of(body), generation)
        return json_response(open_inference.answer_of(self._engine.name, self._state.revision, identity, found))

    async def hugging_face(self, request: Request) -> Response:
        """Answer a request of the Hugging Face inference API."""
        self._check_name(request)
        body, task = await read_json(request), self._engine.job.task
        if "inputs" not in body:
            raise RequestError(422, "The request has no inputs.")
        parameters = _parameters(body)
        rows, texts = hugging_face_json.rows_of(task, body["inputs"], self._writes)
        generation = hugging_face_json.generation_of(self._engine.generation, parameters)
        found = await self._answered(request, rows, generation)
        single = not isinstance(body["inputs"], list)
        return json_response(
            hugging_face_json.answer_of(task, found, texts, parameters, self._engine.tokenizer, single)
        )

    @property
    def _writes(self) -> str:
        """The role of a prompt."""
        task = self._engine.job.task
        dataset = self._engine.job.dataset
        if task == "text-generation" and (dataset is None or dataset.columns.source is None):
            return "text"
        return {"masked-lm": "text", "preference-tuning": "prompt"}.get(task, "source")

    # -------------------------------------------------------------------------------------------------------- OpenAI

    async def models(self, request: Request) -> Response:
        """Models of the server, as the OpenAI API lists them."""
        model = {
            "id": self._engine.name,
            "object": "model",
            "created": int(self._state.started),
            "owned_by": "finetune",
        }
        return json_response({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        """Write on behind prompts, as the OpenAI API does."""
        body = await read_json(request)
        self._check_model(body)
        rows = [{self._writes: prompt} for prompt in openai_json.prompts(body)]
        return await self._written(request, body, rows, chat=False)

    async def chat(self, request: Request) -> Response:
        """Write the next message of a conversation, as the OpenAI API does."""
        body = await read_json(request)
        self._check_model(body)
        role = "prompt" if self._engine.job.task == "preference-tuning" else "messages"
        return await self._written(request, body, [{role: openai_json.messages(body)}], chat=True)

    def _check_model(self, body: Mapping[str, Any]) -> None:
        if body.get("model") not in (None, self._engine.name):
            raise RequestError(
                404, f"There is no model {str(body['model'])[:80]!r}; this server has {self._engine.name!r}."
            )

    async def _written(
        self, request: Request, body: Mapping[str, Any], rows: list[dict[str, Any]], *, chat: bool
    ) -> Response:
        generation = openai_json.generation_of(self._engine.generation, body)
        told = openai_json.Told(self._engine.name, chat)
        if not body.get("stream"):
            found = await self._answered(request, rows, generation)
            texts = [row["generated_text"] for row in found]
            return json_response(told.whole(texts, request.state.tokens, request.state.finishes))
        if len(rows) != 1:
            raise RequestError(422, "A stream has one prompt: send others in requests of their own.")
        self._check(rows)
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(text: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, text)

        form = Form(tuple(rows[0]), generation)
        ticket = self._state.batcher.submit(form, rows, self._deadline(request), put)
        ticket.done.add_done_callback(lambda _: pieces.put_nowait(None))
        request.state.rows = 1
        # The code of the answer goes first: wait for the first piece, or the reason why there is none.
        first = await pieces.get()
        if ticket.done.done() and ticket.done.exception() is not None:
            raise ticket.done.exception() or RequestError(500, "")
        return StreamingResponse(_events(told, first, pieces, ticket), media_type="text/event-stream")

    # --------------------------------------------------------------------------------------------------- the queue

    def _check(self, rows: list[Any]) -> None:
        if not self._state.batcher.ready:
            raise RequestError(503, "The model is being loaded.", {"Retry-After": "1"})
        check_rows(rows)
        refuse_roles(self._engine.job.task, tuple(rows[0]))

    async def _answered(self, request: Request, rows: list[dict[str, Any]], generation: Any) -> list[dict[str, Any]]:
        self._check(rows)
        if self._engine.job.task not in WRITING_TASKS:
            generation = self._engine.generation
        ticket = self._state.batcher.submit(Form(tuple(sorted(rows[0])), generation), rows, self._deadline(request))
        request.state.rows = len(rows)
        gone = asyncio.create_task(_disconnected(request))
        left = None if ticket.deadline is None else max(0.0, ticket.deadline - time.monotonic())
        try:
            waiting: set[asyncio.Future[Any]] = {ticket.done, gone}
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            request.state.tokens = ticket.tokens
            if ticket.done.done():
                request.state.finishes = ticket.finishes
                return ticket.done.result()
            if gone.done():
                raise RequestError(499, "The client is gone.")
            if self._state.draining:
                raise RequestError(503, "The server is stopping.", {"Retry-After": "1"})
            raise RequestError(504, "The request's time is over before its answer was computed.")
        finally:
            ticket.gone = True
            ticket.done.cancel()
            gone.cancel()

    def _deadline(self, request: Request) -> float | None:
        given = next((request.headers[name] for name in DEADLINE_HEADERS if name in request.headers), None)
        if given is None:
            return None
        if not (given.isascii() and given.isdigit() and 0 < len(given) <= 9 and int(given)):
            raise RequestError(400, f"X-Request-Timeout-Ms must be whole milliseconds from 1; found {given[:40]!r}.")
        return time.monotonic() + int(given) / 1000


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    told: openai_json.Told, first: str | None, pieces: asyncio.Queue[str | None], ticket: Ticket
) -> AsyncIterator[bytes]:
    """Server-sent events; a client that goes ends the writing."""
    try:
        piece = first
        while piece is not None:
            yield told.piece(piece)
            piece = await pieces.get()
        error = ticket.done.exception()
        yield told.last(ticket.finishes[0]) if error is None else told.failed(str(error))
        yield b"data: [DONE]\n\n"
    finally:
        ticket.gone = True
        with suppress(asyncio.CancelledError):
            ticket.done.cancel()


def settle_access_log() -> None:
    """Write the lines of requests as they are, to standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.handlers = [handler]
    access.propagate = False
    access.setLevel(logging.INFO)

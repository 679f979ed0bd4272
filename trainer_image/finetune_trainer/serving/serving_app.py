"""The HTTP application: protocols in front of one queue.

Requests use plain routes: FastAPI's own take as long for each as a small model. FastAPI generates the OpenAPI document.
"""

from __future__ import annotations

import hmac
import json
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from finetune_contract.browser_requests import of_other_name, of_other_site
from finetune_contract.layout import ENV_SERVE_TOKEN, METRICS_PATH
from finetune_trainer.serving import page as page_of
from finetune_trainer.serving.protocols import hugging_face_json, open_inference
from finetune_trainer.serving.protocols.binary_tensors import (
    EXTENSION,
    LENGTH_HEADER,
    MEDIA_TYPE,
    infer_response,
    split_message,
    wanted_as_bytes,
    with_decoded_inputs,
)
from finetune_trainer.serving.protocols.http_json import (
    JSON,
    json_response,
    parameters_of,
    parsed_json,
    read_body,
    read_json,
)
from finetune_trainer.serving.protocols.openai_handlers import OpenAIHandlers
from finetune_trainer.serving.protocols.openapi_document import openapi_document
from finetune_trainer.serving.queue_client import QueueClient
from finetune_trainer.serving.request_rows import RequestError
from finetune_trainer.serving.server_state import ServerState
from finetune_trainer.serving.serving_metrics import CONTENT_TYPE

_OPEN = ("/v2/health/live", "/v2/health/ready", METRICS_PATH)
"""Paths without a token: probes and scrapes have none."""
_PAGE = ("GET /", "GET /page/{name}")
"""Open as well: a browser loads the page first, which then asks for the token."""
_OPENAI_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}
access = logging.getLogger("finetune_trainer.access")
log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


def make_app(state: ServerState) -> Starlette:
    """Return the application with the routes of one server."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state.batcher.start()
        yield
        state.batcher.stop()

    async def no_such_route(request: Request, error: Exception) -> Response:
        code = getattr(error, "status_code", 404)
        # A path has a route for each of its methods, and Starlette lists those of the first only.
        matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
        allowed = {"Allow": ", ".join(sorted({name for route in matching for name in route.methods or ()}))}
        why = "There is no such path; see /openapi.json." if code == 404 else "The path does not support this method."
        return _error(request.url.path, RequestError(code, why, allowed if code == 405 else None))

    handlers = _Handlers(state)
    routes = [
        Route(path, _guarded(state, path, handler, method), methods=[method])
        for method, path, handler in handlers.routes()
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: no_such_route, 405: no_such_route})


def _error(path: str, error: RequestError) -> Response:
    """Return an error in the form of the path's protocol."""
    if path.startswith("/v1/"):
        # That API answers 400 to every invalid request.
        status = 400 if error.code == 422 else error.code
        kind = "invalid_request_error" if status < 500 else "server_error"
        code = _OPENAI_CODES.get(status)
        error_body = {"message": error.message, "type": kind, "param": error.param, "code": code}
        return json_response({"error": error_body}, status, error.headers)
    return json_response({"error": error.message}, error.code, error.headers)


def _guarded(state: ServerState, path: str, handler: Handler, method: str = "GET") -> Handler:
    """Check the token, answer errors, count and log."""
    # A load balancer checks `GET /` all day; it must not count among the requests to the model, `POST /`.
    of_page = f"{method} {path}" in _PAGE
    counted_path = "/page/{name}" if of_page else path

    async def guarded(request: Request) -> Response:
        began = time.perf_counter()
        identity = request.headers.get("x-request-id", "")[:128] or uuid.uuid4().hex
        request.state.rows = request.state.tokens = 0
        request.state.model = ""
        state.in_flight += 1
        state.metrics.in_flight.set(state.in_flight)
        try:
            try:
                if state.token is not None and path not in _OPEN and not of_page:
                    _check_token(state.token, request)  # which no other site knows
                else:
                    _check_site(state, request)
                response = await handler(request)
            except RequestError as error:
                response = _error(path, error)
            except Exception:
                log.exception("A request has failed.")
                response = _error(path, RequestError(500, "The server failed on this request; its log has the reason."))
        finally:
            state.in_flight -= 1
            state.metrics.in_flight.set(state.in_flight)
        seconds = time.perf_counter() - began
        response.headers["X-Request-Id"] = identity if identity.isascii() and identity.isprintable() else "-"
        if state.endpoint_revision is not None:
            response.headers["X-Endpoint-Revision"] = state.endpoint_revision
        if state.draining:
            response.headers["Connection"] = "close"
        state.metrics.requests.labels(counted_path, str(response.status_code), request.state.model).inc()
        state.metrics.seconds.labels(counted_path).observe(seconds)
        if path not in _OPEN:
            line = {
                "request": identity,
                "path": path,
                "code": response.status_code,
                "ms": round(seconds * 1000, 2),
                **({"model": request.state.model} if request.state.model else {}),
                "rows": request.state.rows,
                "tokens": request.state.tokens,
            }
            access.info("%s", json.dumps(line))
        return response

    return guarded


def _check_site(state: ServerState, request: Request) -> None:
    """Refuse a request that a web site may have caused in somebody's browser. RequestError 403, 415 or 421."""
    refused = of_other_name(request.headers) if state.local else None
    refused = refused or of_other_site(request.headers, request.method)
    if refused is not None:
        hint = f"Start it with {ENV_SERVE_TOKEN}: requests with that token are answered."
        raise RequestError(refused.code, f"{refused.text} {hint}")
    # Browsers send the types of HTML forms to any server. Triton's client names no type.
    media_type = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if request.method == "POST" and media_type not in (JSON, MEDIA_TYPE) and not media_type.endswith("+json"):
        raise RequestError(415, f"The body has the Content-Type {media_type[:40]!r}: send it as {JSON}.")


def _check_token(token: str, request: Request) -> None:
    given = request.headers.get("authorization", "").encode("utf-8", "replace")
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise RequestError(401, "Send the server's token: Authorization: Bearer TOKEN.", {"WWW-Authenticate": "Bearer"})


class _Handlers:
    """One method for each path."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._engine = state.engine
        self._queue = QueueClient(state)
        self._document: dict[str, Any] | None = None

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each route."""
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/", self.page),
            ("GET", "/page/{name}", self.page_file),
            ("GET", "/v2", self.server),
            ("GET", "/v2/health/live", self.live),
            ("GET", "/v2/health/ready", self.ready),
            ("GET", "/v2/models", self.models),
            ("GET", "/v2/models/{name}", self.metadata),
            ("GET", "/v2/models/{name}/ready", self.model_ready),
            ("POST", "/v2/models/{name}/infer", self.infer),
            ("POST", "/", self.hugging_face),
            ("POST", "/models/{name}", self.hugging_face),
            ("GET", METRICS_PATH, self.metrics),
            ("GET", "/openapi.json", self.openapi),
        ]
        chats = self._engine.description.chat_role
        if chats is not None:
            openai = OpenAIHandlers(self._state, self._queue, writes=self._writes, chats=chats)
            routes += [
                ("GET", "/v1/models", openai.models),
                ("POST", "/v1/completions", openai.completions),
                ("POST", "/v1/chat/completions", openai.chat),
            ]
        return routes

    # ---------------------------------------------------------------------------------------------- about the server

    async def page(self, request: Request) -> Response:
        """Page to try the models."""
        described = [self.description(name) for name in self._engine.names]
        return Response(page_of.page(described), headers=dict(page_of.HEADERS), media_type="text/html")

    async def page_file(self, request: Request) -> Response:
        """Style, script or picture of the page."""
        file = page_of.FILES.get(request.path_params["name"])
        if file is None:
            raise RequestError(404, "The page has no such file.")
        return Response(file[0], headers=dict(page_of.HEADERS), media_type=file[1])

    async def server(self, request: Request) -> Response:
        """Name, version and extensions of the server."""
        return json_response({"name": "finetune-trainer", "version": "0.1.0", "extensions": [EXTENSION]})

    async def live(self, request: Request) -> Response:
        """Tell whether the process works."""
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """Tell whether requests should be sent here: after the warm-up, until it drains."""
        return json_response({"ready": self._state.ready}, 200 if self._state.ready else 503)

    async def openapi(self, request: Request) -> Response:
        """Document of these paths, in the OpenAPI format."""
        if self._document is None:
            described = [(method, path, handler.__doc__ or "") for method, path, handler in self.routes()]
            title = f"{self._engine.name}: {self._engine.job.task}"
            self._document = openapi_document(title, self._engine.job.task, described, self._state.token is not None)
        return json_response(self._document)

    async def models(self, request: Request) -> Response:
        """Names of the models, the default one first."""
        return json_response({"models": list(self._engine.names)})

    def description(self, name: str) -> dict[str, Any]:
        """Return the metadata of a model."""
        self._queue.require_model()
        engine, revision = self._engine, self._state.revision_of(name)
        answerer = engine.models[name].answerer
        roles = sorted(answerer.requested.columns.model_dump(exclude_none=True))
        schema = engine.description.answer_schema(answerer.labels)
        kinds = [(field.name, "FP64" if str(field.type) == "double" else "BYTES") for field in schema]
        facts = {"task": engine.job.task, "labels": list(answerer.labels.names), "revision": revision}
        # Inputs and outputs beyond the task, for the page and other clients.
        facts |= engine.description.served_facts(answerer.labels, engine.columns, engine.tokenizer)
        return {
            "name": name,
            "versions": [revision],
            "platform": "finetune-trainer",
            "inputs": [{"name": role, "datatype": "BYTES", "shape": [-1]} for role in roles],
            "outputs": [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in kinds],
            "properties": facts,
            "parameters": facts,
        }

    async def metadata(self, request: Request) -> Response:
        """Task, labels, revision, inputs and outputs of the model."""
        return json_response(self.description(self._name(request)))

    async def model_ready(self, request: Request) -> Response:
        """As /v2/health/ready."""
        name, ready = self._name(request), self._state.ready
        return json_response({"name": name, "ready": ready}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Metrics for Prometheus."""
        return Response(self._state.metrics.text(), media_type=CONTENT_TYPE)

    def _name(self, request: Request) -> str:
        return self._queue.model(request, request.path_params.get("name"))

    # ----------------------------------------------------------------------------------------------------- inference

    async def infer(self, request: Request) -> Response:
        """Answer an inference request of the Open Inference Protocol."""
        name = self._name(request)
        content, binary = split_message(await read_body(request), request.headers.get(LENGTH_HEADER))
        body = with_decoded_inputs(parsed_json(content), binary)
        identity = body.get("id")
        if identity is not None and not isinstance(identity, str):
            raise RequestError(400, "id must be text.")
        generation = hugging_face_json.generation_of(self._engine.generation, parameters_of(body))
        rows, requested = open_inference.rows_of(body), open_inference.outputs_of(body)
        as_bytes = wanted_as_bytes(body)
        answers = await self._queue.answered(request, self._queue.form(name, rows, generation), rows)
        answer = open_inference.answer_of(name, self._state.revision_of(name), identity, answers, requested)
        return infer_response(answer, as_bytes)

    async def hugging_face(self, request: Request) -> Response:
        """Answer a request of the Hugging Face inference API."""
        name = self._name(request)
        body, task = await read_json(request), self._engine.job.task
        if "inputs" not in body:
            raise RequestError(422, "The request has no inputs.")
        parameters = parameters_of(body)
        rows, texts = hugging_face_json.rows_of(task, body["inputs"], self._writes)
        generation = hugging_face_json.generation_of(self._engine.generation, parameters)
        answers = await self._queue.answered(request, self._queue.form(name, rows, generation), rows)
        single = not isinstance(body["inputs"], list)
        return json_response(
            hugging_face_json.answer_of(task, answers, texts, parameters, self._engine.tokenizer, single)
        )

    @property
    def _writes(self) -> str:
        """Role of a prompt."""
        return self._engine.description.prompt_role(self._engine.columns)


def settle_access_log() -> None:
    """Write the log lines of requests unchanged to standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access.handlers = [handler]
    access.propagate = False
    access.setLevel(logging.INFO)

"""A stand-in for vLLM's OpenAI-compatible server, as far as an endpoint meets it: the options of `vllm serve` that the
operator writes, the ASGI middleware that one of them names, the key, the probe, and completions.

Options have the types and choices of vLLM 0.33.0 (`vllm/engine/arg_utils.py`, `vllm/entrypoints/common/cli_args.py`,
`vllm/config/lora.py`), and any other option ends the process. `/invocations` answers without the key, as vLLM's does.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

GUARDED = ("/v1", "/v2", "/inference", "/cohere")


def options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    serve = parser.add_subparsers(required=True).add_parser("serve", allow_abbrev=False)
    serve.add_argument("model_tag")
    for name in ("--served-model-name", "--revision", "--generation-config"):
        serve.add_argument(name)
    for name in (
        "--port", "--tensor-parallel-size", "--max-num-seqs", "--max-num-queued-reqs", "--max-num-batched-tokens",
        "--max-loras", "--max-cpu-loras", "--shutdown-timeout",
    ):  # fmt: skip
        serve.add_argument(name, type=int)
    serve.add_argument("--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"])
    serve.add_argument("--max-model-len", type=lambda text: -1 if text == "auto" else int(text))
    serve.add_argument("--gpu-memory-utilization", type=float)
    serve.add_argument("--override-generation-config", type=json.loads)
    serve.add_argument("--middleware", action="append", default=[])
    serve.add_argument("--trust-remote-code", action=argparse.BooleanOptionalAction)
    serve.add_argument("--enable-lora", action=argparse.BooleanOptionalAction)
    serve.add_argument("--max-lora-rank", type=int, choices=[1, 8, 16, 32, 64, 128, 256, 320, 512])
    serve.add_argument("--lora-modules", nargs="+", default=[], type=lambda text: tuple(text.split("=", 1)))
    return parser.parse_args(argv)


def application(parsed: argparse.Namespace) -> FastAPI:
    app, key = FastAPI(), os.environ.get("VLLM_API_KEY")
    names = [parsed.served_model_name, *(name for name, _ in parsed.lora_modules)]

    @app.middleware("http")
    async def authenticate(request: Request, call_next: Any) -> Response:
        given = request.headers.get("Authorization")
        if key is not None and request.url.path.startswith(GUARDED) and given != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        answer: Response = await call_next(request)
        return answer

    @app.get("/health")
    def health() -> Response:
        return Response()

    @app.get("/metrics")
    def metrics() -> Response:
        return PlainTextResponse('vllm:num_requests_running{model_name="chat"} 0\n')

    @app.get("/v1/models")
    def models() -> Any:
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}

    @app.post("/v1/completions")
    @app.post("/invocations")
    async def complete(request: Request) -> Any:
        body = await request.json()
        if body.get("model") not in names:
            return JSONResponse({"error": "no such model"}, 404)
        return {"model": body["model"], "choices": [{"text": "", "temperature": parsed.override_generation_config}]}

    for middleware in parsed.middleware:
        module, _, name = middleware.rpartition(".")
        app.add_middleware(getattr(importlib.import_module(module), name))
    return app


def main(argv: list[str]) -> None:
    parsed = options(argv)
    for place in (parsed.model_tag, *(path for _, path in parsed.lora_modules)):
        if not Path(place).is_dir():
            raise SystemExit(f"{place} is not a folder")
    uvicorn.run(application(parsed), host="127.0.0.1", port=parsed.port, log_level="warning")

"""`python -m finetune_trainer serve`: loads the model, serves it, and drains on SIGTERM."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from finetune_contract.layout import ENV_SERVE_TOKEN, EXIT_OK, SERVE_PORT, FailureClass, JobPaths
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.failures import StageError, classify, needed_library
from finetune_trainer.jobs import read_job
from finetune_trainer.stage_console import quiet_libraries, settle_console
from finetune_trainer.stages import leave_out_unused

log = logging.getLogger("finetune_trainer")

IDLE_SECONDS = 10
"""Time that a connection may be without a request."""
LINGER_SECONDS = 3.0
"""Time after SIGTERM in which requests are still taken: those who send them learn of it a little later."""
CONNECTIONS = 4096


def serve(argv: Sequence[str]) -> int:
    """Serve until SIGTERM, and return the exit code."""
    arguments = _parse(argv)
    settle_console(0)
    quiet_libraries()
    try:
        job = read_job(arguments.job)
        leave_out_unused(job)
        return _serve(job, JobPaths.of(arguments.workspace, job.name), arguments.host, arguments.port)
    except Exception as error:
        report = classify(error)
        log.error("%s: %s %s", report.reason, report.message, report.hint, exc_info=not isinstance(error, StageError))
        return report.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune-trainer serve", description="Answers requests with a job's model.")
    parser.add_argument("--job", type=Path, required=True, help="the job.json to obey")
    parser.add_argument("--workspace", type=Path, required=True, help="folder that holds the job's folder")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen at")
    parser.add_argument("--port", type=int, default=SERVE_PORT, help="port to listen at; 0: a free one")
    return parser.parse_args(argv)


def _serve(job: TrainerJob, paths: JobPaths, host: str, port: int) -> int:
    with needed_library(
        "fastapi", "ServeMissing", "FastAPI, which the server needs", "pip install 'finetune-trainer[serve]'"
    ):
        import fastapi  # noqa: F401
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from finetune_trainer.serving.batcher import Batcher
    from finetune_trainer.serving.serving_app import ServerState, make_app, settle_access_log
    from finetune_trainer.serving.serving_engine import ServingEngine
    from finetune_trainer.serving.serving_metrics import ServingMetrics

    engine = ServingEngine.load(job, paths)
    revision = revision_of(job, paths)
    metrics = ServingMetrics(engine.name, job.task, revision)
    batcher = Batcher(engine, metrics)
    state = ServerState(engine, batcher, metrics, os.environ.get(ENV_SERVE_TOKEN) or None, revision)
    drain = engine.serving.drain_seconds
    linger = min(LINGER_SECONDS, drain / 3)

    class Guarded(H11Protocol):
        """Closes connections that send no whole request head for too long."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(IDLE_SECONDS, self._refuse_idle)

        def _refuse_idle(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    class Draining(uvicorn.Server):
        """Goes on answering for a moment after SIGTERM; ends without a signal of its own."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if state.draining:
                self.should_exit = True
                return
            state.draining = True
            if sig == signal.SIGINT:
                self.should_exit = True
            else:
                threading.Timer(linger, self._end).start()

        def _end(self) -> None:
            self.should_exit = True

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for server in self.servers:
                for socket in server.sockets:
                    log.info("Serving %s at http://%s:%d", engine.name, *socket.getsockname()[:2])

    settle_access_log()
    config = uvicorn.Config(
        make_app(state),
        host=host,
        port=port,
        http=Guarded,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=max(1, round(drain - linger)),
        h11_max_incomplete_event_size=32 << 10,
        backlog=2048,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = Draining(config)
    watch = threading.Thread(target=_watch, args=(batcher, server), daemon=True)
    watch.start()
    server.run()
    if batcher.failed is not None:
        raise batcher.failed
    if not server.started:
        raise StageError(
            FailureClass.CONFIG, "PortTaken", f"The server cannot listen at {host}:{port}.", "Name another --port."
        )
    return EXIT_OK


def _watch(batcher: Any, server: Any) -> None:
    """End the server when its warm-up fails."""
    while not batcher.ready and batcher.failed is None:
        time.sleep(0.05)
    if batcher.failed is not None:
        server.should_exit = True
    else:
        log.info("Ready.")


def revision_of(job: TrainerJob, paths: JobPaths) -> str:
    """A short digest of the weights' files by sizes and times, or the revision of a model that nothing trained."""
    if not job.trains:
        return job.model.revision
    digest = hashlib.sha256()
    for file in sorted(paths.model.glob("*.safetensors")):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]

"""`python -m finetune_trainer serve`: loads the model, serves it, and drains on SIGTERM."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune_contract.browser_requests import is_loopback
from finetune_contract.layout import (
    ENV_ENDPOINT_REVISION,
    ENV_SERVE_TOKEN,
    EXIT_OK,
    SERVE_PORT,
    FailureClass,
    JobPaths,
)
from finetune_contract.trainer_job import TrainerJob
from finetune_trainer.core import garbage_collection
from finetune_trainer.core.failures import StageError, classify, needed_library
from finetune_trainer.core.job_file import as_prepared, read_job
from finetune_trainer.core.stage_console import quiet_libraries, settle_console
from finetune_trainer.core.unused_libraries import leave_out_unused

log = logging.getLogger("finetune_trainer")


def serve(argv: Sequence[str]) -> int:
    """Serve until SIGTERM, and return the exit code."""
    arguments = _parse(argv)
    settle_console(0)
    garbage_collection.put_off()
    quiet_libraries()
    # A batch of a few texts is done before other threads wake up; on a busy machine they cost many times as much.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        job = read_job(arguments.job)
        leave_out_unused(job)
        paths = JobPaths.of(arguments.workspace, job.name)
        return _serve(as_prepared(job, paths), paths, arguments.host, arguments.port)
    except Exception as error:
        report = classify(error)
        log.error("%s: %s %s", report.reason, report.message, report.hint, exc_info=not isinstance(error, StageError))
        return report.exit_code


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="finetune-trainer serve", description="Serve a job's model.")
    parser.add_argument("--job", type=Path, required=True, help="path of job.json")
    parser.add_argument("--workspace", type=Path, required=True, help="folder that holds the job's folder")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=SERVE_PORT, help="port to listen on; 0: a free one")
    return parser.parse_args(argv)


def _serve(job: TrainerJob, paths: JobPaths, host: str, port: int) -> int:
    with needed_library(
        "fastapi", "ServeMissing", "FastAPI, which the server needs", "pip install 'finetune-trainer[serve]'"
    ):
        import fastapi  # noqa: F401
    from finetune_trainer.serving.batcher import Batcher
    from finetune_trainer.serving.http_server import http_server
    from finetune_trainer.serving.server_state import ServerState
    from finetune_trainer.serving.serving_app import settle_access_log
    from finetune_trainer.serving.serving_engine import ServingEngine
    from finetune_trainer.serving.serving_metrics import ServingMetrics

    engine = ServingEngine.of(job, paths)
    revision = revision_of(job, paths)
    metrics = ServingMetrics(engine.name, job.task, revision)
    batcher = Batcher(engine, metrics)
    token, number = os.environ.get(ENV_SERVE_TOKEN) or None, os.environ.get(ENV_ENDPOINT_REVISION) or None
    state = ServerState(engine, batcher, metrics, token, revision, number, is_loopback(host))
    settle_access_log()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = http_server(state, host, port)
    watch = threading.Thread(target=_watch, args=(batcher, server), daemon=True)
    watch.start()
    server.run()
    if batcher.failed is not None:
        raise batcher.failed
    if not server.started:
        raise StageError(
            FailureClass.CONFIG, "PortTaken", f"The server cannot listen on {host}:{port}.", "Use another --port."
        )
    return EXIT_OK


def _watch(batcher: Any, server: Any) -> None:
    """End the server if it cannot load the model or warm up."""
    while not batcher.ready and batcher.failed is None:
        time.sleep(0.05)
    if batcher.failed is not None:
        server.should_exit = True
    else:
        log.info("Ready.")


def revision_of(job: TrainerJob, paths: JobPaths) -> str:
    """Return a short digest that identifies the weights of a trained model, else the revision in the job."""
    if not job.trains:
        return job.model.revision
    from finetune_trainer.predict.runner import weights_version

    return hashlib.sha256(json.dumps(weights_version(job, paths)).encode()).hexdigest()[:12]

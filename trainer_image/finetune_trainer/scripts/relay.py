"""Progress of a user's own program without a cluster.

In a cluster transformers posts to the operator by itself. On a laptop this process serves that protocol, on the
loopback interface while the program runs, and passes updates on. Invalid ones are dropped: reporting must never disturb
the run.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pydantic import ValidationError

from finetune_contract.browser_requests import of_other_name, of_other_site
from finetune_contract.layout import ENV_KUBEFLOW_TOKEN, ENV_KUBEFLOW_URL
from finetune_contract.report import KubeflowUpdate
from finetune_trainer.core.distributed import LOOPBACK
from finetune_trainer.core.progress import NoProgress, ProgressSink

_BODY_LIMIT_BYTES = 1 << 16
_NAMES = {"loss": ("loss", "train_loss"), "epoch": ("epoch", "current_epoch")}
"""Our name -> the names of transformers' callback."""
_STEP, _TOTAL = "current_step", "total_steps"


@contextmanager
def relayed(environment: Mapping[str, str], progress: ProgressSink) -> Iterator[dict[str, str]]:
    """Yield `environment`, with the address of a server that passes progress on to `progress`, unless it names one
    already or `progress` is a NoProgress.
    """
    if ENV_KUBEFLOW_URL in environment or isinstance(progress, NoProgress):
        yield dict(environment)
        return
    with tempfile.TemporaryDirectory(prefix="finetune-progress-") as folder:
        token = Path(folder) / "token"
        token.write_text("local", encoding="utf-8")  # the protocol requires one; it is not checked here
        server = ThreadingHTTPServer((LOOPBACK, 0), _handler(progress))
        threading.Thread(target=server.serve_forever, name="relay", daemon=True).start()
        address = f"http://{LOOPBACK}:{server.server_port}/"
        try:
            yield {**environment, ENV_KUBEFLOW_URL: address, ENV_KUBEFLOW_TOKEN: str(token)}
        finally:
            server.shutdown()
            server.server_close()


def _handler(progress: ProgressSink) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            headers = {name.title(): value for name, value in self.headers.items()}
            refused = of_other_name(headers) or of_other_site(headers, "POST")
            length = headers.get("Content-Length", "")
            accepted = refused is None and length.isdecimal() and int(length) <= _BODY_LIMIT_BYTES
            if accepted:
                with contextlib.suppress(ValidationError), lock:
                    pass_on(KubeflowUpdate.model_validate_json(self.rfile.read(int(length))), progress)
            self.send_response(200 if accepted else 413 if refused is None else refused.code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the output belongs to the program."""

    return Handler


def pass_on(update: KubeflowUpdate, progress: ProgressSink) -> None:
    """Pass on an update with a step. The others (the first and the last) only repeat the stage's own start and end."""
    values = {metric.name: _number(metric.value) for metric in update.trainer_status.metrics}
    step, total = values.get(_STEP), values.get(_TOTAL)
    if step is None or total is None or not 0 <= step <= total:
        return
    figures = {
        ours: next((v for name in names if (v := values.get(name)) is not None), None) for ours, names in _NAMES.items()
    }
    progress.update(int(step), int(total), **{name: value for name, value in figures.items() if value is not None})


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None

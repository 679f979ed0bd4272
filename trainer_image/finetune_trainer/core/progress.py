"""Progress reports of a stage: a file for its launcher, the Kubeflow protocol for the operator.

Reporting must never disturb the work. Both outlets go through one throttle, requests are sent by a separate thread with
timeouts, and network errors are logged once and then ignored.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from finetune_contract.choices import Stage
from finetune_contract.layout import ENV_KUBEFLOW_CA, ENV_KUBEFLOW_TOKEN, ENV_KUBEFLOW_URL, ENV_PROGRESS
from finetune_contract.measured_devices import MeasuredDevices
from finetune_contract.report import (
    COMMUNICATION,
    DEVICES,
    NOTE,
    Communication,
    KubeflowMetric,
    KubeflowStatus,
    KubeflowUpdate,
    Progress,
)

# ------------------------------------------------------------------------------------------------------------- findings


@dataclass
class Findings:
    """Measurements and remarks so far; None: none, or not known."""

    devices: MeasuredDevices | None = None
    communication: Communication | None = None
    note: str | None = None

    def add_note(self, sentence: str) -> None:
        """Log a remark, and add it to those for the job's status."""
        log.warning("%s", sentence)
        self.note = sentence if self.note is None else f"{self.note} {sentence}"


# -------------------------------------------------------------------------------------------------------------- reports

log = logging.getLogger(__name__)

FILE_INTERVAL_SECONDS = 0.5
KUBEFLOW_INTERVAL_SECONDS = 5.0
"""Minimum interval between two updates, set by the protocol."""
_POST_TIMEOUT_SECONDS = 10.0
"""Limit of each step of a post. A busy operator begins a TLS handshake after seconds; a new try would wait again."""
_CLOSE_SECONDS = 6.0
"""Longest wait for the last post when the stage ends."""
_TRIES = 3
"""Posts of one update: a busy operator closes connections for others, and refuses while no replica leads."""
_IDLE_SECONDS = 20.0
"""Longest idle time of a connection that is used again; the operator closes it after 30 s."""
_AGAIN_SECONDS = 1.0
"""Delay before an update is posted again; the operator accepts one a second from a pod."""
_FIELDS = ("epoch", "loss", "samples_per_second", "tokens_per_second")


class ProgressSink(Protocol):
    """Takes the progress of one stage."""

    def update(self, step: int, total: int, **values: float) -> None:
        """Report that `step` of `total` is done; `values` are further figures, e.g. loss."""

    def close(self) -> None:
        """Finish: no further update follows."""


class NoProgress:
    """Sink that discards progress."""

    def update(self, step: int, total: int, **values: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Outlet(Protocol):
    """One destination of progress reports."""

    interval_seconds: float

    def publish(self, progress: Progress) -> None:
        """Send the progress; never raises, never blocks for long."""

    def close(self) -> None:
        """Finish pending sends; bounded in time."""


class Throttle:
    """Lets the first and the last update through, and in between at most one per the outlet's interval."""

    def __init__(self, outlet: Outlet, clock: Callable[[], float] = time.monotonic) -> None:
        self._outlet = outlet
        self._clock = clock
        self._published_at: float | None = None
        self._held: Progress | None = None
        self._published_last = False
        """True once the last step was sent: several updates may be of it, as an evaluation follows it."""

    def publish(self, progress: Progress) -> None:
        """Send it when the interval is over or the last step is done, else hold it until the next call or the close."""
        now = self._clock()
        due = self._published_at is None or now - self._published_at >= self._outlet.interval_seconds
        if due or (progress.step == progress.total_steps and not self._published_last):
            self._published_at, self._held = now, None
            self._published_last = progress.step == progress.total_steps
            self._outlet.publish(progress)
        else:
            self._held = progress

    def close(self) -> None:
        """Send the held update, then close the outlet."""
        if self._held is not None:
            self._outlet.publish(self._held)
        self._outlet.close()


class ProgressReporter:
    """Turns steps into `Progress` with rates and remaining time."""

    def __init__(
        self,
        stage: Stage,
        outlets: Sequence[Outlet],
        clock: Callable[[], float] = time.monotonic,
        findings: Findings | None = None,
    ) -> None:
        """`findings`: read with each update, as measurements come later."""
        self._stage = stage
        self._findings = findings or Findings()
        self._throttles = [Throttle(outlet, clock) for outlet in outlets]
        self._clock = clock
        self._start: tuple[int, float] | None = None

    def update(self, step: int, total: int, **values: float) -> None:
        """Record an update. The first call sets the start of counting: a resumed run starts at its step, not at 0."""
        now = self._clock()
        if self._start is None:
            self._start = (step, now)
        first_step, since = self._start
        rate = (step - first_step) / (now - since) if step > first_step and now > since else None
        fields = {name: values.pop(name, None) for name in _FIELDS}
        if self._stage is not Stage.TRAIN and fields["samples_per_second"] is None:
            fields["samples_per_second"] = rate  # steps are rows in these stages
        progress = Progress(
            stage=self._stage,
            step=step,
            total_steps=total,
            remaining_seconds=(total - step) / rate if rate else None,
            metrics=values,
            devices=self._findings.devices,
            communication=self._findings.communication,
            note=self._findings.note,
            time=time.time(),
            **fields,
        )
        for throttle in self._throttles:
            throttle.publish(progress)

    def close(self) -> None:
        """Send held updates and close the outlets."""
        for throttle in self._throttles:
            throttle.close()


class ProgressFile:
    """Appends JSON lines to a file. A full disk loses updates, not the run."""

    interval_seconds = FILE_INTERVAL_SECONDS

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warned = False

    def publish(self, progress: Progress) -> None:
        """Append one line in one write, so that a reader never sees half of one."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(progress.model_dump_json(by_alias=True, exclude_none=True) + "\n")
        except OSError as error:
            if not self._warned:
                log.warning("Progress cannot be written to %s (%s); the stage continues without it.", self._path, error)
            self._warned = True

    def close(self) -> None:
        """Do nothing: no file is open between two updates."""


class KubeflowProgress:
    """POSTs the latest progress to a server of the Kubeflow Trainer protocol, from a thread of its own.

    Only the newest update waits: when the server is slow, the ones between are dropped. A failed post is repeated,
    unless there is a newer update. The connection stays open for the next post if the server keeps it: while many
    clients crowd the server, a new one takes long. HTTPS only, no proxies and no redirects, because each request
    carries a bearer token.
    """

    interval_seconds = KUBEFLOW_INTERVAL_SECONDS

    def __init__(self, url: str, ca_file: Path | None, token_file: Path) -> None:
        parts = urlsplit(url)
        if parts.scheme != "https" or not parts.hostname:
            raise ValueError(f"{ENV_KUBEFLOW_URL} is {url!r}; it must be an https:// address")
        self._host, self._port = parts.hostname, parts.port or 443
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._ca_file = ca_file
        self._token_file = token_file
        self._warned = False
        self._closed = False
        self._next: Progress | None = None
        self._connection: http.client.HTTPSConnection | None = None
        """Connection that the server keeps open after an accepted post."""
        self._used_at = 0.0
        """Time of that post, on the monotonic clock."""
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def publish(self, progress: Progress) -> None:
        """Queue it for the thread."""
        with self._wake:
            self._next = progress
            self._wake.notify()

    def close(self) -> None:
        """Wait for the last post, for a limited time."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._next is not None or self._closed)
                progress, self._next = self._next, None
            if progress is None:
                if self._connection is not None:
                    self._connection.close()
                return
            self._deliver(kubeflow_update(progress))

    def _deliver(self, update: KubeflowUpdate) -> None:
        """Post the update until it is accepted, a newer one waits, or all tries have failed. The first update that is
        given up is logged.
        """
        for left in reversed(range(_TRIES)):
            try:
                self.post(update)
                return
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure = error
            with self._wake:
                if left:
                    # The end of the stage cuts the delay short.
                    self._wake.wait_for(lambda: self._next is not None or self._closed, _AGAIN_SECONDS)
                if self._next is not None:
                    break
        self._warn(failure)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            log.warning(
                "Progress cannot be sent to %s:%s (%s); training continues without it.", self._host, self._port, error
            )
        self._warned = True

    def post(self, update: KubeflowUpdate) -> None:
        """Post the update once. OSError, HTTPException or ValueError if it is not accepted within the time limit of
        each step.
        """
        connection = self._open()
        headers = {
            "Content-Type": "application/json",
            # Read every time: the kubelet replaces the token before it expires.
            "Authorization": f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}",
        }
        try:
            connection.request("POST", self._path, update.model_dump_json(by_alias=True, exclude_none=True), headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status >= 300:
                raise http.client.HTTPException(f"status {answer.status}")
            if not answer.will_close:
                self._connection, self._used_at = connection, time.monotonic()
        finally:
            if connection is not self._connection:
                connection.close()

    def _open(self) -> http.client.HTTPSConnection:
        """Return the connection of the last post, or a new one. It belongs to the caller."""
        connection, self._connection = self._connection, None
        if connection is not None and time.monotonic() - self._used_at < _IDLE_SECONDS:
            return connection
        if connection is not None:
            connection.close()
        context = ssl.create_default_context(cafile=str(self._ca_file) if self._ca_file else None)
        return http.client.HTTPSConnection(self._host, self._port, timeout=_POST_TIMEOUT_SECONDS, context=context)


def kubeflow_update(progress: Progress) -> KubeflowUpdate:
    """Convert `progress` to an update of the Kubeflow protocol."""
    named = {name: getattr(progress, name) for name in _FIELDS} | {
        "step": progress.step,
        "total_steps": progress.total_steps,
    }
    named |= progress.metrics
    texts = {name: json.dumps(value) for name, value in named.items() if value is not None}
    for name, facts in ((DEVICES, progress.devices), (COMMUNICATION, progress.communication)):
        if facts is not None:
            texts[name] = facts.model_dump_json(by_alias=True, exclude_none=True)
    if progress.note is not None:
        texts[NOTE] = progress.note
    remaining = progress.remaining_seconds
    return KubeflowUpdate(
        trainer_status=KubeflowStatus(
            progress_percentage=progress.percent,
            estimated_remaining_seconds=None if remaining is None else round(remaining),
            metrics=tuple(KubeflowMetric(name=name, value=text) for name, text in texts.items()),
            last_updated_time=datetime.fromtimestamp(progress.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )
    )


def progress_for(
    stage: Stage, rank: int, environment: Mapping[str, str] | None = None, findings: Findings | None = None
) -> ProgressSink:
    """Return the sink for this process's progress, and for the stage's `findings`; only rank 0 reports."""
    environment = os.environ if environment is None else environment
    if rank != 0:
        return NoProgress()
    outlets: list[Outlet] = []
    if environment.get(ENV_PROGRESS):
        outlets.append(ProgressFile(Path(environment[ENV_PROGRESS])))
    if environment.get(ENV_KUBEFLOW_URL):
        outlets.extend(_kubeflow(environment))
    return ProgressReporter(stage, outlets, findings=findings) if outlets else NoProgress()


def _kubeflow(environment: Mapping[str, str]) -> list[Outlet]:
    ca_file, token_file = environment.get(ENV_KUBEFLOW_CA), environment.get(ENV_KUBEFLOW_TOKEN)
    if not token_file:
        log.warning("%s is set without %s; progress is not sent.", ENV_KUBEFLOW_URL, ENV_KUBEFLOW_TOKEN)
        return []
    try:
        return [KubeflowProgress(environment[ENV_KUBEFLOW_URL], Path(ca_file) if ca_file else None, Path(token_file))]
    except ValueError as error:
        log.warning("%s; progress is not sent.", error)
        return []

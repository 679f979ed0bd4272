"""The operator's handlers: what kopf calls, and when. Begin to read here.

    on.startup   settings of kopf; then discovery, servers, workers, the election of a leader (lifecycle.py)
    on.login     the connection that kopf reads through (kopf_guard.py)
    on.event     a job, or an object that runs one: into the store, and the job's key into the queue (resync.py)
    on.validate  whether the API server may store a job (jobs/admission.py)
    on.probe     the facts of /healthz
    on.cleanup   reconciles finish, the Lease is released, servers stop

What has to be done about an event is decided elsewhere. A worker takes the job's key from the queue, and `decide`
(jobs/decide/decide.py) compares the job with everything that is known of it (controller/reconcile/reconciler.py). So
there are no handlers of creations, updates or deletions, no timers and no daemons: kopf stores nothing in objects,
neither a finalizer nor an annotation. What a watch can miss is listed by a task that on.startup starts (resync.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kopf

from finetune_operator.jobs.admission import Request
from finetune_operator.jobs.render.render_types import JOB_LABEL
from finetune_operator.jobs.state.planned import problems_text
from finetune_operator.kubernetes_api.client import PAGE
from finetune_operator.kubernetes_api.errors import ApiError
from finetune_operator.kubernetes_api.resources import (
    DEPLOYMENT,
    FINETUNE_JOB,
    INFERENCE_SERVICE,
    LAUNCHER_RESOURCES,
    POD,
)

CHILDREN = (POD, *LAUNCHER_RESOURCES.values(), INFERENCE_SERVICE, DEPLOYMENT)
"""Kinds of objects that run jobs. One that is not served yet is watched once it is (lifecycle.py)."""


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Configure kopf, then start what does not wait for events."""
    # Events and statuses are written by the reconciler, and served kinds are discovered without the right to list
    # CustomResourceDefinitions.
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NothingStored()
    settings.persistence.finalizer = NO_FINALIZER
    settings.networking.error_backoffs = Backoffs()
    settings.watching.chunk_size = PAGE
    for child in CHILDREN:
        settings.watching.label_selectors[child.api_version, child.plural] = JOB_LABEL
    settings.admission.server = memo.operator.reviews
    settings.queueing.idle_timeout = 0.02  # Each object with news has a task for this long.
    try:
        await memo.operator.start()
    except (ApiError, OSError) as error:
        raise kopf.PermanentError(str(error)) from error  # Not a bug, so without a trace in the log.


@kopf.on.login()
async def login(memo: kopf.Memo, **_: Any) -> kopf.AiohttpSession:
    """Return the connection. kopf asks for another one after a 401, the answer of an API server that still starts."""
    connection: kopf.AiohttpSession = await memo.operator.connection()
    return connection


@kopf.on.event(FINETUNE_JOB.api_version, FINETUNE_JOB.plural)
async def job_event(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Take the news of a job."""
    await memo.operator.take(FINETUNE_JOB, event)


async def child_event(event: kopf.RawEvent, memo: kopf.Memo, param: Any = None, **_: Any) -> None:
    """Take the news of an object that has the label of a job."""
    await memo.operator.take(param, event)


for child in CHILDREN:
    kopf.on.event(child.api_version, child.plural, param=child)(child_event)


@kopf.on.validate(FINETUNE_JOB.api_version, FINETUNE_JOB.plural)
async def validate(name: str, namespace: str | None, warnings: list[str], memo: kopf.Memo, **kwargs: Any) -> None:
    """Refuse a job that must not be stored, or warn of it. Each replica answers, in a thread with its own loop
    (controller/servers/webhook.py): nothing here may be awaited that belongs to the operator's.
    """
    new, old = [dict(kwargs[one]) if kwargs[one] is not None else None for one in ("new", "old")]
    problems, notices = memo.operator.judge(Request(kwargs["operation"], namespace or "", name or "", new, old))
    warnings.extend(notices)
    if problems:
        raise kopf.AdmissionError(problems_text(problems), code=422)


@kopf.on.probe(id="faults")
async def faults(memo: kopf.Memo, **_: Any) -> list[str]:
    """Return what has to run for ever and has ended, each of which is a bug: /healthz then fails."""
    ended: list[str] = memo.operator.faults()
    return ended


@kopf.on.cleanup(errors=kopf.ErrorsMode.PERMANENT)
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Let the reconciles in progress finish, release the Lease, and stop the servers."""
    await memo.operator.stop()


NO_FINALIZER = "no object can have this"
"""kopf removes its finalizer from objects without handlers that need one, and by default all operators of kopf have the
same. A finalizer with blanks is refused by every API server.
"""


class Backoffs:
    """Seconds between kopf's tries, without an end: an API server that is away for long does not end the operator."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0, 3.0)
        while True:
            yield 5.0


class NothingStored(kopf.DiffBaseStorage):
    """For on.event handlers kopf needs no last state of an object, of which it would make a copy at each event."""

    def build(self, **_: Any) -> Any:
        """Return an empty state."""
        return {}

    def fetch(self, **_: Any) -> None:
        """Return that there is none."""

    def store(self, **_: Any) -> None:
        """Do nothing."""

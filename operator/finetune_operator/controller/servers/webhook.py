"""Answer the API server's requests whether a FineTuneJob may be stored: HTTPS, one path, and an answer in every case.

Each replica answers, also a stand-by, which knows the jobs as well. Its certificate is the one of the progress server,
whose authority the operator writes into its ValidatingWebhookConfiguration; or it lies in a folder that somebody else
maintains, as cert-manager does, who then configures the authority, too.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
import shutil
import ssl
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from aiohttp import web
from pydantic import JsonValue

from finetune_operator.controller.cluster.kube import Kube
from finetune_operator.controller.servers.certificates import valid_until
from finetune_operator.controller.servers.listener import LOG_INTERVAL_SECONDS, Bounds
from finetune_operator.controller.servers.request_bodies import Bodies, BodyError
from finetune_operator.controller.servers.sites import Site
from finetune_operator.controller.store.fair_queue import TooManyWaitError, Turns
from finetune_operator.jobs.admission import NoReviewError, answer_to, needs_validation, read_review, request_of
from finetune_operator.jobs.missing_objects import LookUp
from finetune_operator.jobs.render.render_types import Manifest
from finetune_operator.jobs.state.decision_types import JobView
from finetune_operator.jobs.state.planned import problems_text
from finetune_operator.kubernetes_api.errors import ConflictError, NotFoundError
from finetune_operator.kubernetes_api.resources import WEBHOOK
from finetune_operator.spec.launcher_rows import LauncherName
from finetune_operator.spec.types import FineTuneJob

log = logging.getLogger(__name__)

PATH = "/validate"
BODY_LIMIT_BYTES = 3 * 1024 * 1024
"""A review holds two objects. The largest job (`spec/problems.py`), with annotations and managed fields, is half of
that.
"""
BODY_SECONDS = 10.0
BOUNDS = Bounds(connections=64, seconds=60.0)
AT_ONCE = 2
"""Maximum number of reviews that are answered at the same time, each in a thread and of another namespace."""
MOST_WAITING = 16
"""Reviews of one namespace that wait; a review takes 0.3 s at most."""
TIMEOUT_SECONDS = 5.0
"""The chart's `webhook.timeoutSeconds`, for a client that does not say how long it waits."""
LOOK_UP_SECONDS = 1.0
"""Longest time of the requests for what an admitted job names; without answers there is no warning."""
MARGIN_SECONDS = 1.0
"""Part of the API server's timeout that is left for the way of the answer."""
RETRY_SECONDS = 2
"""Seconds after which a client may try again."""
_TIMEOUT = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)s")
AUTHORITIES = 2
"""Authorities in a configuration: while certificates change, replicas may still show one that the last one signed."""
LOOK_AGAIN_SECONDS = 60.0
"""Interval between two checks of a folder with certificates."""
_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)


@dataclass(frozen=True)
class WebhookOptions:
    """Options of the webhook's server."""

    port: int
    """0: any free port."""
    configuration: str | None = None
    """ValidatingWebhookConfiguration that gets our authority; None: somebody else writes it."""
    certificate: Path | None = None
    """Folder with tls.crt and tls.key; None: the progress server's certificate."""
    clients: Path | None = None
    """File with the authorities (PEM) of clients' certificates; None: any client that reaches the port may ask."""
    client_names: tuple[str, ...] = ()
    """Common names of clients that may ask; empty: each with a certificate of these authorities."""


Answer: TypeAlias = Callable[[dict[str, Any]], Awaitable[Any]]
"""Function that answers an AdmissionReview with one: kopf's, which calls the handlers of `on.validate`."""


@dataclass
class Reviewing:
    """The review in progress."""

    jobs: Sequence[JobView]
    """All known jobs."""
    served: Collection[LauncherName]
    """Launchers that the cluster has; empty: not known now."""
    status: dict[str, JsonValue] | None = None
    """The whole Status of a refusal, of which kopf answers message and code."""
    job: FineTuneJob | None = None
    """The job, if it is admitted and its work is new."""


REVIEWING: ContextVar[Reviewing] = ContextVar("REVIEWING")


class World(Protocol):
    """State that answers depend on."""

    def jobs(self) -> Iterable[JobView]:
        """Return all known jobs."""
        ...

    async def served(self) -> Collection[LauncherName]:
        """Return the launchers that the cluster has; empty: not known now."""
        ...

    async def look_up(self, namespace: str, job: FineTuneJob) -> LookUp:
        """Return what exists of the objects that the job names, as far as the operator may read them."""
        ...


class WebhookServer:
    """See the module."""

    def __init__(
        self,
        world: World,
        tls: ssl.SSLContext,
        counted: Callable[[str], None] = lambda outcome: None,
        client_names: Collection[str] = (),
    ) -> None:
        """`counted` is called with each answer: `allowed`, `refused`, `late` for a review that waited too long behind
        others, or `failed` for a request that is no review.
        `client_names`: common names of certificates whose owners may ask; empty: all that `tls` lets in.
        """
        self._client_names = client_names
        self._world = world
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        """Function that answers reviews; they wait for it."""
        self._tls = tls
        self._counted = counted
        self._site: Site | None = None
        self._bodies = Bodies(BODY_LIMIT_BYTES, BODY_SECONDS)
        self._turns = Turns(AT_ONCE, MOST_WAITING)
        self._refusal_logged_at = float("-inf")

    async def start(self, host: str | None, port: int) -> int:
        """Listen on `host` (None: all addresses); return the port. OSError if it is in use."""
        routes = {("POST", PATH): self._review}
        self._site = Site(
            "webhook",
            routes,
            BOUNDS,
            tls=self._tls,
            keepalive_seconds=60.0,
            refused=self._client_refused,
            trusted=self._trusted,
        )
        return await self._site.start(host, port)

    async def stop(self) -> None:
        """Stop, also after a start that failed."""
        if self._site is not None:
            await self._site.stop()
        self._site = None

    def _trusted(self, transport: asyncio.BaseTransport) -> bool:
        """Return whether the client has a certificate, which TLS has verified, with a name that may ask."""
        shown = transport.get_extra_info("peercert")
        pairs = [pair for part in (shown or {}).get("subject", ()) for pair in part]
        named = any(kind == "commonName" and name in self._client_names for kind, name in pairs)
        return bool(shown) and (named or not self._client_names)

    def _is_permitted(self, request: web.BaseRequest) -> bool:
        return not self._client_names or (request.transport is not None and self._trusted(request.transport))

    def _client_refused(self, why: str) -> None:
        """Count a client that may not ask, and log it from time to time: it may be a misconfigured API server, whose
        users do not notice under `failurePolicy: Ignore`.
        """
        self._counted("failed")
        if time.monotonic() > self._refusal_logged_at + LOG_INTERVAL_SECONDS:
            log.warning(
                "Webhook: a client was refused: %s. If it is the API server, correct the client certificate in its "
                "admission configuration.",
                why,
            )
            self._refusal_logged_at = time.monotonic()

    async def _review(self, request: web.BaseRequest) -> web.Response:
        if not self._is_permitted(request):
            self._client_refused("its certificate has none of the permitted names")
            message = "the client's certificate is not permitted here"
            return web.json_response({"message": message}, status=HTTPStatus.FORBIDDEN)
        until = asyncio.get_running_loop().time() + limit_seconds(request.query.get("timeout", ""))
        try:
            body = await self._bodies.read(request)
            review = await self._answered_until(until, await asyncio.to_thread(read_review, body))
        except (NoReviewError, BodyError) as error:
            self._counted("failed")
            status = error.status if isinstance(error, BodyError) else HTTPStatus.BAD_REQUEST
            return web.json_response({"message": str(error)}, status=status)
        if review is None:
            self._counted("late")
            message = "others keep the operator from answering in time"
            return web.json_response({"message": message}, status=HTTPStatus.SERVICE_UNAVAILABLE)
        if self._site is not None:
            # The API server keeps its connections for many reviews.
            self._site.renew(request.transport)
        self._counted("allowed" if review["response"]["allowed"] else "refused")
        return web.json_response(review)

    async def _answered_until(self, until: float, review: dict[str, Any]) -> Any:
        """Return the answer; None if others alone are the reason that there is none in time, so that failurePolicy
        decides. A namespace that asks for more than can be answered is told so: nothing that it stores this way is
        stored without a check.
        """
        namespace = str(review["request"].get("namespace") or "")
        task = asyncio.create_task(self._answered(namespace, review, until))
        try:
            done, _ = await asyncio.wait([task], timeout=max(0.0, until - asyncio.get_running_loop().time()))
            if done and not isinstance(task.exception(), TooManyWaitError):
                return task.result()
            alone = self._turns.asked(namespace) <= 1 and not self._turns.runs(namespace)
        finally:
            task.cancel()
        if not needs_validation(request_of(review)):
            return answer_to(review, None)
        return None if alone else answer_to(review, _too_many(namespace))

    async def _answered(self, namespace: str, review: dict[str, Any], until: float) -> Any:
        """Return the answer once it is the namespace's turn. NoReviewError, TooManyWaitError."""
        served = await self._world.served()
        answer = await asyncio.shield(self.answer)
        await self._turns.take(namespace)
        reviewing = Reviewing(tuple(self._world.jobs()), served)
        work = asyncio.create_task(asyncio.to_thread(answered, answer, review, reviewing))
        # A thread goes on to its end, also if nobody waits for its answer any more.
        work.add_done_callback(lambda work: self._over(namespace, work))
        answer_given = await asyncio.shield(work)
        if reviewing.job is not None:
            left = until - asyncio.get_running_loop().time()
            warnings = await self._warnings(namespace, reviewing.job, min(LOOK_UP_SECONDS, left / 2))
            answer_given["response"].setdefault("warnings", []).extend(warnings)
        return answer_given

    async def _warnings(self, namespace: str, job: FineTuneJob, seconds: float) -> list[str]:
        """Return warnings of objects that the job names and that do not exist, or do not fit it."""
        try:
            async with asyncio.timeout(seconds):
                found = await self._world.look_up(namespace, job)
        except TimeoutError:
            return []
        return [problems_text((problem,)) for problem in (*found.conflicts, *found.absent)]

    def _over(self, namespace: str, work: asyncio.Task[Any]) -> None:
        self._turns.give_back(namespace)
        if not work.cancelled() and (error := work.exception()) is not None:
            log.debug("a review has failed: %s", error)


def limit_seconds(timeout: str) -> float:
    """Return how long an answer may take: the API server's timeout, which it sends as `4.9s`, less a margin."""
    match = _TIMEOUT.fullmatch(timeout)
    seconds = float(match[1]) if match else TIMEOUT_SECONDS
    return max(seconds / 2, seconds - MARGIN_SECONDS)


def _too_many(namespace: str) -> dict[str, JsonValue]:
    return {
        "code": HTTPStatus.TOO_MANY_REQUESTS.value,
        "reason": "TooManyRequests",
        "message": f"the operator could not check this job in time, as namespace {namespace} changes many or large "
        "jobs at once; try again",
        "details": {"retryAfterSeconds": RETRY_SECONDS},
    }


def answered(answer: Answer, review: dict[str, Any], reviewing: Reviewing) -> Any:
    """Return the answer, in a thread with its own event loop: kopf compares both objects of a review, which takes long
    for large ones. NoReviewError; RuntimeError for a bug, so that failurePolicy decides.
    """
    REVIEWING.set(reviewing)
    reviewed = asyncio.run(_awaited(answer(review)))
    status = reviewed["response"].get("status", {})
    if status.get("code") == HTTPStatus.INTERNAL_SERVER_ERROR:
        raise RuntimeError(f"a review failed: {status.get('message')}")
    if reviewing.status is not None:
        reviewed["response"]["status"] = reviewing.status
    return reviewed


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


# ------------------------------------------------------------------------------------------------------- our authority


async def write_authority(kube: Kube, name: str, authority: str) -> bool:
    """Return whether the configuration `name` now trusts `authority` (PEM). False if it does not exist, or was changed
    in the same moment: the next check will see. ApiError.
    """
    try:
        configuration = await kube.get(WEBHOOK, None, name)
    except NotFoundError:
        log.warning(
            "ValidatingWebhookConfiguration %s does not exist: the webhook's CA certificate cannot be written to it.",
            name,
        )
        return False
    changed, updated = with_authority(configuration, authority)
    if not changed:
        return True
    try:
        await kube.replace(updated, None, name)
    except (ConflictError, NotFoundError):
        return False
    log.info("Wrote the operator's CA certificate to ValidatingWebhookConfiguration %s.", name)
    return True


def with_authority(configuration: Manifest, authority: str) -> tuple[bool, Manifest]:
    """Return whether anything changes, and the configuration with our authority first in each of its bundles."""
    hooks, changed = configuration.get("webhooks"), False
    hooks_after: list[JsonValue] = []
    for hook in hooks if isinstance(hooks, list) else []:
        assert isinstance(hook, dict), "a webhook is an object"
        client = hook.get("clientConfig")
        client = client if isinstance(client, dict) else {}
        before = _certificates(client.get("caBundle"))
        after = [authority, *(one for one in before if one.strip() != authority.strip())][:AUTHORITIES]
        changed = changed or [one.strip() for one in before] != [one.strip() for one in after]
        bundle = base64.b64encode("".join(f"{one.strip()}\n" for one in after).encode()).decode()
        hooks_after.append({**hook, "clientConfig": {**client, "caBundle": bundle}})
    return changed, {**configuration, "webhooks": hooks_after}


def _certificates(bundle: JsonValue) -> list[str]:
    with suppress(binascii.Error, UnicodeDecodeError):
        return _BLOCK.findall(base64.b64decode(str(bundle or ""), validate=True).decode())
    return []


# --------------------------------------------------------------------------------------- files that somebody else keeps


async def _repeat(action: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
        action()


# ------------------------------------------------------------------------------------------------------------- clients


class ClientAuthorities:
    """Authorities that sign clients' certificates, in a file that somebody else maintains and changes."""

    def __init__(self, file: Path, context: ssl.SSLContext) -> None:
        """Admit nobody through `context` without such a certificate. OSError for a file that cannot be used."""
        self._file = file
        self._context = context
        self._modified = 0
        self._load()
        context.verify_mode = ssl.CERT_REQUIRED

    def _load(self) -> None:
        modified = self._file.stat().st_mtime_ns
        if modified != self._modified:
            try:
                self._context.load_verify_locations(cafile=self._file)
            except ssl.SSLError as error:
                raise OSError(f"{self._file} contains no CA certificates (PEM): {error.reason}") from error
            self._modified = modified

    async def follow(self) -> None:
        """Trust authorities that are added, for ever. A removed one stays trusted until the process ends."""
        await _repeat(self.reload_if_changed)

    def reload_if_changed(self) -> None:
        """Reload the file if it has changed since the last check."""
        try:
            self._load()
        except OSError as error:
            log.warning("The CA certificates of the webhook's clients could not be reloaded: %s", error)


# ---------------------------------------------------------------------------------------------------- somebody else's


class FolderCertificate:
    """Certificate that somebody else maintains in a folder, and renews there."""

    def __init__(self, folder: Path) -> None:
        """Load the certificate. OSError, also as ssl.SSLError, if it cannot be read or used."""
        self._folder = folder
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._modified = self._stamp()
        self._load()

    def _stamp(self) -> tuple[int, ...]:
        return tuple((self._folder / name).stat().st_mtime_ns for name in ("tls.crt", "tls.key"))

    def _load(self) -> None:
        with tempfile.TemporaryDirectory() as copies:
            for name in ("tls.crt", "tls.key"):
                shutil.copy(self._folder / name, copies)
            certificate, key = Path(copies) / "tls.crt", Path(copies) / "tls.key"
            # A context whose certificate and key do not match shows none: it gets only a pair that was tried.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
            self.context.load_cert_chain(certificate, key)
            self.valid_until = valid_until(certificate.read_text())

    async def follow(self) -> None:
        """Reload renewed certificates, for ever; open connections stay."""
        await _repeat(self.reload_if_changed)

    def reload_if_changed(self) -> None:
        """Reload the files if they have changed since the last check."""
        try:
            now = self._stamp()
            if now != self._modified:
                self._load()
                self._modified = now
                log.info("Loaded a new certificate of the webhook.")
        except OSError as error:
            # The renewal may be half done; the next check will see the rest.
            log.warning("The webhook's certificate could not be reloaded: %s", error)

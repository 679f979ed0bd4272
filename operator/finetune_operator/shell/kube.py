"""The only module that calls the API server: raw JSON in and out, and errors by what they mean.

Retries are here and nowhere else: 429 (after what `Retry-After` asks for), 5xx and broken connections, with a growing,
jittered delay. Repeating is harmless for all that is sent: objects have names, so a second create finds the first one;
a delete names the uid, and a status names the version that it was computed from. Never retried is an answer that says
no.

What is used, and so what the Roles in manifests/operator grant:

| group | resource | verbs | where | for |
|---|---|---|---|---|
| finetune.dev | finetunejobs | get list watch delete | jobs | get after a conflict; delete for the time to live |
| finetune.dev | finetunejobs/status | patch | jobs | status, by server-side apply |
| of launchers/rows.py | those of its rows | get list watch create delete | jobs | attempts |
| "" | configmaps services persistentvolumeclaims | get create | jobs | beside attempts; get when a name is taken |
| networking.k8s.io | networkpolicies | get create | jobs | before the first attempt; get when a name is taken |
| "" | pods | list watch | jobs | reports, causes |
| "" | pods/log | get | jobs | end of a failed pod's log |
| "" | events | create | jobs | the story |
| authentication.k8s.io | tokenreviews | create | cluster | tokens of progress posts (progress.tokens: review) |
| none | /.well-known/openid-configuration /openid/v1/jwks | get | cluster | the same (progress.tokens: keys) |
| coordination.k8s.io | leases | get create update | own | leadership (leader.py) |
| "" | secrets | get create update | own | the progress server's certificate |

Where: `jobs` = the namespaces of jobs, `own` = the operator's own, `cluster` = no namespace. Discovery (/apis) is open
to every authenticated client, and no Role of ours grants the two paths of the issuer:
`system:service-account-issuer-discovery` binds all service accounts to them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import quote

import aiohttp
from kubernetes.aio import client, config
from pydantic import JsonValue

from finetune_operator.api.json_text import loads
from finetune_operator.launchers.rows import BUILT_IN, SUPPORTED, LauncherName
from finetune_operator.reconcile.times import stamp
from finetune_operator.rendering.types import FIELD_OWNER, Manifest
from finetune_operator.shell.clock import ClusterClock

log = logging.getLogger(__name__)

Verb: TypeAlias = Literal["get", "list", "watch", "create", "update", "patch", "delete"]
Query: TypeAlias = Mapping[str, str]

TRIES = 5
FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 5.0
LONGEST_RETRY_AFTER_SECONDS = 30.0
"""What we wait for at most within one request; after that the pass is repeated instead."""
REQUEST_SECONDS = 30.0
LIST_SECONDS = 60.0
LOG_SECONDS = 10.0
WATCH_SECONDS = 300
"""A watch's life; up to a minute more by chance, so that not all of them are begun again at once."""
SILENCE_SECONDS = 150.0
"""Of a watch. The server sends a bookmark about once a minute; two that are missing mean a dead connection."""
PAGE = 500
PAGE_BYTES = 16 * 1024 * 1024
"""Of one page of a list; a longer one is asked for again with fewer objects. One object has about 3 MiB at most, and
anybody who may create jobs may store many of that size.
"""
SMALLER = 8
AT_ONCE_BYTES = 128 * 1024
"""Longest text that is parsed on the event loop; longer ones are parsed in a thread."""
LOG_LINES = 60
LOG_BYTES = 256 * 1024
"""Of those lines. The kubelet cuts them at their end, so that this has to hold them all."""
EVENT_MESSAGE = 1024
"""Longest message of a core/v1 Event that the API server takes, in bytes."""
ISSUER_PATH = "/.well-known/openid-configuration"
KEYS_PATH = "/openid/v1/jwks"
"""Of the API server itself. `jwks_uri` of the former may name another server, which is none of ours to ask."""
_METHODS: Mapping[Verb, str] = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}


@dataclass(frozen=True)
class Resource:
    """One kind of object, and where it is served."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The path of one object, or of the collection."""
        parts = ["/apis" if "/" in self.api_version else "/api", self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        parts += [quote(part, safe="") for part in (name, subresource) if part is not None]
        return "/".join(parts)


FINETUNE_JOB = Resource("finetune.dev/v1alpha1", "FineTuneJob", "finetunejobs")
LAUNCHER_RESOURCES: Mapping[LauncherName, Resource] = {
    each.name: Resource(each.api_version, each.kind, each.plural) for each in SUPPORTED
}
JOB = LAUNCHER_RESOURCES["job"]
POD = Resource("v1", "Pod", "pods")
CONFIG_MAP = Resource("v1", "ConfigMap", "configmaps")
SERVICE = Resource("v1", "Service", "services")
CLAIM = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENT = Resource("v1", "Event", "events")
NETWORK_POLICY = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
SECRET = Resource("v1", "Secret", "secrets")
LEASE = Resource("coordination.k8s.io/v1", "Lease", "leases")
WEBHOOK = Resource(
    "admissionregistration.k8s.io/v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    namespaced=False,
)
TOKEN_REVIEW = Resource("authentication.k8s.io/v1", "TokenReview", "tokenreviews", namespaced=False)

RESOURCES: tuple[Resource, ...] = (
    FINETUNE_JOB,
    *LAUNCHER_RESOURCES.values(),
    POD,
    CONFIG_MAP,
    SERVICE,
    CLAIM,
    NETWORK_POLICY,
    EVENT,
    SECRET,
    LEASE,
    TOKEN_REVIEW,
    WEBHOOK,
)
_BY_KIND = {(each.api_version, each.kind): each for each in RESOURCES}
OPENID = "openid"
"""What requests about the issuer of tokens are about, which is no resource."""


def resource_of(api_version: str, kind: str) -> Resource:
    """The resource of a kind that this operator makes. ValueError for any other: it has no rights on it."""
    try:
        return _BY_KIND[api_version, kind]
    except KeyError:
        raise ValueError(f"{kind} of {api_version} is no kind that this operator reads or writes") from None


# --------------------------------------------------------------------------------------------------------------- errors


class ApiError(Exception):
    """The API server did not do what was asked for."""

    def __init__(self, what: str, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{what}: {code} {reason}: {message}" if code else f"{what}: {message}")
        self.code = code
        """HTTP status; 0 when there was no answer."""
        self.reason = reason
        """The Status object's word: NotFound, AlreadyExists, Forbidden, ..."""
        self.message = message
        """The Status object's sentence."""
        self.retry_after = retry_after


class NotFoundError(ApiError):
    """404."""


class AlreadyExistsError(ApiError):
    """409 at a create: the name is taken."""


class ConflictError(ApiError):
    """409: what we know is older than what is there."""


class InvalidError(ApiError):
    """400, 413 or 422: the object is refused for what it says."""


class ForbiddenError(ApiError):
    """403: no rights, a quota, or an admission rule."""


class NamespaceTerminatingError(ApiError):
    """403 because the namespace is being deleted: whatever is asked about goes as well."""


class UnauthorizedError(ApiError):
    """401: the credentials are not taken."""


class GoneError(ApiError):
    """410: the version that was asked from is no longer there."""


class TooManyRequestsError(ApiError):
    """429, after all retries."""


class UnavailableError(ApiError):
    """5xx or no answer, after all retries."""


class TooLongError(ApiError):
    """The answer is longer than was asked for."""


class WebhookError(UnavailableError):
    """500 because an admission webhook that must be asked does not answer: the API server is well, the webhook's
    program (a training operator, a policy engine) is not.
    """


_ERRORS: Mapping[int, type[ApiError]] = {
    400: InvalidError,
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: GoneError,
    413: InvalidError,
    422: InvalidError,
    429: TooManyRequestsError,
}


def error_of(what: str, code: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """The error that an answer means. Proxies answer in HTML, so the body may be anything."""
    reason, message = "", ""
    try:
        status = loads(body)
    except ValueError:
        status = None
    if isinstance(status, dict):
        reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    kind = UnavailableError if code >= 500 else _ERRORS.get(code, ApiError)
    if code == 409 and reason == "AlreadyExists":
        kind = AlreadyExistsError
    if code == 403 and _is_caused_by(status, "NamespaceTerminating"):
        kind = NamespaceTerminatingError
    if code == 500 and "failed calling webhook" in message:
        kind = WebhookError
    return kind(what, code, reason, message or body[:200].decode("utf-8", "replace"), _seconds(retry_after))


def _is_caused_by(status: JsonValue, reason: str) -> bool:
    details = status.get("details") if isinstance(status, dict) else None
    causes = details.get("causes") if isinstance(details, dict) else None
    return isinstance(causes, list) and any(isinstance(each, dict) and each.get("reason") == reason for each in causes)


def _seconds(written: str | None) -> float | None:
    """`Retry-After` as the API server writes it; a date, which it never sends, counts as nothing."""
    return float(written) if written is not None and written.isascii() and written.isdecimal() else None


@dataclass(frozen=True)
class WatchEvent:
    """One thing that a watch tells."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Manifest
    """As it is now, or was last; of a bookmark nothing but the version."""
    version: int
    """Where a later watch can begin."""


@dataclass(frozen=True)
class Page:
    """A part of a list."""

    items: list[Manifest]
    version: int
    """At which the whole list is read."""
    first: bool
    """What came before it no longer counts."""


# ----------------------------------------------------------------------------------------------------------- connection


@dataclass
class Outage:
    """Whether the API server was away, so that everything has to be read again once it is back."""

    down: bool = False
    on_end: Callable[[], None] | None = None
    _waiting: set[asyncio.Timeout] = field(default_factory=set)

    @asynccontextmanager
    async def until_end(self) -> AsyncIterator[None]:
        """TimeoutError when an outage ends meanwhile: what was open then may hang on a server that is gone, which a
        connection does not tell by itself.
        """
        async with asyncio.timeout(None) as limit:
            self._waiting.add(limit)
            try:
                yield
            finally:
                self._waiting.discard(limit)

    def failed(self) -> None:
        """A request had no answer."""
        if not self.down:
            log.warning("the API server does not answer")
        self.down = True

    def answered(self) -> None:
        """A request had an answer."""
        if self.down:
            self.down = False
            log.info("the API server answers again")
            for limit in self._waiting:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())
            if self.on_end is not None:
                self.on_end()


class RequestCounter(Protocol):
    """What is told of every request."""

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """See `state.Measurements`."""


async def connect(kubeconfig: Path | None = None, context: str | None = None, pool: int = 32) -> client.ApiClient:
    """A client for the cluster that is meant: the kubeconfig named, else KUBECONFIG, else the one around this pod,
    else ~/.kube/config. ConfigException when there is none.

    `pool` connections at most are open at once.
    """
    if kubeconfig is not None and not kubeconfig.is_file():
        raise config.ConfigException(f"there is no file {kubeconfig}")
    # Without the environment: aiohttp would read ~/.netrc before each request. A proxy stands in the kubeconfig.
    configuration = client.Configuration(connection_pool_maxsize=pool, client_session_kwargs={"trust_env": False})
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ
    if in_cluster and kubeconfig is None and context is None and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=None if kubeconfig is None else str(kubeconfig),
            context=context,
            client_configuration=configuration,
            persist_config=False,
        )
    api = client.ApiClient(configuration=configuration)
    api.user_agent = f"{FIELD_OWNER}/{distribution_version('finetune-operator')}"
    return api


@dataclass
class Kube:
    """The API server, as the operator uses it."""

    api: client.ApiClient
    outage: Outage = field(default_factory=Outage)
    counter: RequestCounter | None = None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: ClusterClock = field(default_factory=ClusterClock)

    # ------------------------------------------------------------------------------------------------------- reading

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest:
        """One object. NotFoundError."""
        return await self._json("get", resource, resource.path(namespace, name))

    async def list_objects(
        self, resource: Resource, namespace: str | None = None, labels: str | None = None
    ) -> tuple[list[Manifest], int]:
        """All objects, of one namespace or of all, and the version at which they were read: for few."""
        items: list[Manifest] = []
        version = 0
        async for page in self.pages(resource, namespace, labels):
            if page.first:
                items.clear()
            items += page.items
            version = page.version
        return items, version

    async def pages(
        self, resource: Resource, namespace: str | None = None, labels: str | None = None
    ) -> AsyncGenerator[Page, None]:
        """The same in pages, so that no more than one is in memory. It is begun anew, with a page that is the first
        again, when the server has forgotten the version of the first page.
        """
        left, limit, next_page = TRIES, PAGE, ""
        while True:
            query = {"limit": str(limit), **({} if labels is None else {"labelSelector": labels})}
            if next_page:
                query["continue"] = next_page
            try:
                page = await self._json(
                    "list", resource, resource.path(namespace), query=query, seconds=LIST_SECONDS, most=PAGE_BYTES
                )
            except GoneError:
                left, next_page = left - 1, ""
                if not left:
                    raise
                continue
            except TooLongError:
                if limit == 1:
                    raise
                limit = max(1, limit // SMALLER)
                continue
            metadata = page["metadata"]
            found = page["items"] or []
            assert isinstance(metadata, dict)
            assert isinstance(found, list)
            # Items of built-in lists come without their kind.
            named = {"apiVersion": resource.api_version, "kind": resource.kind}
            items = [{**named, **item} for item in found if isinstance(item, dict)]
            yield Page(items, int(str(metadata["resourceVersion"])), first=not next_page)
            next_page, limit = str(metadata.get("continue") or ""), min(PAGE, 2 * limit)
            if not next_page:
                return

    async def watch(
        self, resource: Resource, version: int, namespace: str | None = None, labels: str | None = None
    ) -> AsyncGenerator[WatchEvent, None]:
        """What happens to objects after `version`, until the server ends the watch, as it does every few minutes.

        GoneError when it has forgotten that version; UnavailableError when the connection breaks or is silent for
        longer than the bookmarks that the server sends about once a minute.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": str(version),
            "timeoutSeconds": str(WATCH_SECONDS + random.randrange(60)),
            **({} if labels is None else {"labelSelector": labels}),
        }
        path, began = resource.path(namespace), time.monotonic()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=SILENCE_SECONDS)
        try:
            async with self._sent("watch", path, query, None, "application/json", timeout) as answer:
                self._count("watch", resource.plural, answer.status, began)
                if answer.status >= 300:
                    retry_after = answer.headers.get("Retry-After")
                    raise error_of(f"watch {path}", answer.status, await answer.read(), retry_after)
                self.outage.answered()
                async for line in _lines(answer.content):
                    yield await _event(f"watch {path}", resource, line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"watch {path}", 0, "", f"broken: {error or type(error).__name__}") from error

    async def pod_log(self, namespace: str, name: str, container: str) -> str:
        """The last lines of a container's log, whole; empty when there is none to be had: the node may be the very
        thing that broke.
        """
        query = {"container": container, "tailLines": str(LOG_LINES), "limitBytes": str(LOG_BYTES)}
        path = POD.path(namespace, name, "log")
        try:
            body = await self._request("get", POD, path, query=query, seconds=LOG_SECONDS, tries=1, subresource="log")
        except ApiError as error:
            log.info("no log of pod %s/%s: %s", namespace, name, error)
            return ""
        return body.decode("utf-8", "replace")

    async def served_launchers(self) -> tuple[LauncherName, ...]:
        """Launchers whose kinds the API server serves."""
        served: list[LauncherName] = []
        for launcher, resource in LAUNCHER_RESOURCES.items():
            if launcher in BUILT_IN or await self.serves(resource):
                served.append(launcher)
        return tuple(served)

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server has this kind."""
        try:
            found = await self._json("get", resource, f"/apis/{resource.api_version}", subresource="discovery")
        except NotFoundError:
            return False
        kinds = found.get("resources")
        return isinstance(kinds, list) and any(
            isinstance(each, dict) and each.get("name") == resource.plural for each in kinds
        )

    async def token_issuer(self) -> tuple[Manifest, Manifest]:
        """Who signs the tokens of service accounts, as OpenID Connect's discovery tells it, and their public keys, a
        JSON web key set. ForbiddenError where somebody took the right from service accounts; NotFoundError where the
        API server's issuer is no https URL, as it then publishes neither.
        """
        return await self._json("get", OPENID, ISSUER_PATH), await self._json("get", OPENID, KEYS_PATH)

    # ------------------------------------------------------------------------------------------------------- writing

    async def create(self, manifest: Manifest, namespace: str | None = None) -> Manifest:
        """Make an object; gives it as it is stored. AlreadyExistsError when its name is taken."""
        resource = resource_of(str(manifest["apiVersion"]), str(manifest["kind"]))
        query = {"fieldManager": FIELD_OWNER}
        return await self._json("create", resource, resource.path(namespace), query=query, body=manifest)

    async def replace(self, manifest: Manifest, namespace: str | None, name: str) -> Manifest:
        """Write an object again. With a resourceVersion in it, ConflictError when it has changed since."""
        resource = resource_of(str(manifest["apiVersion"]), str(manifest["kind"]))
        query = {"fieldManager": FIELD_OWNER}
        return await self._json("update", resource, resource.path(namespace, name), query=query, body=manifest)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str | None) -> Manifest | None:
        """Delete an object and, in the background, what it owns. Gives it as it is while it still ends, None when it
        is gone. ConflictError when the name belongs to an object with another uid.
        """
        body: Manifest = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            left = await self._json("delete", resource, resource.path(namespace, name), body=body)
        except NotFoundError:
            return None
        return left if left.get("kind") == resource.kind else None

    async def apply_status(
        self, namespace: str, name: str, uid: str, version: str, status: Mapping[str, JsonValue]
    ) -> Manifest:
        """Make this the whole of what we say in the job's status; gives the job as it is stored. ConflictError when the
        job is no longer at `version`, NotFoundError when it is gone.
        """
        body: Manifest = {
            "apiVersion": FINETUNE_JOB.api_version,
            "kind": FINETUNE_JOB.kind,
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": version},
            "status": dict(status),
        }
        return await self._json(
            "patch",
            FINETUNE_JOB,
            FINETUNE_JOB.path(namespace, name, "status"),
            query={"fieldManager": FIELD_OWNER, "force": "true"},
            body=as_yaml(body),
            # With a parameter: the client library would write a body of the bare type itself, by json.dumps.
            content_type="application/apply-patch+yaml; charset=utf-8",
            subresource="status",
        )

    async def create_event(
        self, involved: Mapping[str, JsonValue], kind: str, reason: str, message: str, salt: str = ""
    ) -> None:
        """One event about an object; the same event with the same `salt` is told once only."""
        namespace, name = str(involved["namespace"]), str(involved["name"])
        digest = hashlib.sha256("\0".join((str(involved.get("uid")), kind, reason, message, salt)).encode())
        now = stamp(datetime.now(UTC))
        event: Manifest = {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": f"{name}.{digest.hexdigest()[:16]}", "namespace": namespace},
            "involvedObject": dict(involved),
            "type": kind,
            "reason": reason,
            "message": message.encode()[:EVENT_MESSAGE].decode("utf-8", "ignore"),
            "source": {"component": FIELD_OWNER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self.create(event, namespace)
        except AlreadyExistsError:
            log.debug("%s/%s: event %s was told already", namespace, name, reason)

    # ------------------------------------------------------------------------------------------------------ requests

    async def _json(
        self,
        verb: Verb,
        resource: Resource | str,
        path: str,
        *,
        query: Query | None = None,
        body: Manifest | str | None = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
        subresource: str | None = None,
        most: int | None = None,
    ) -> Manifest:
        answer = await self._request(
            verb,
            resource,
            path,
            query=query,
            body=body,
            content_type=content_type,
            seconds=seconds,
            subresource=subresource,
            most=most,
        )
        try:
            value = await _parsed(answer)
        except ValueError as error:
            raise UnavailableError(f"{verb} {path}", 0, "", "the answer is no JSON") from error
        if not isinstance(value, dict):
            raise UnavailableError(f"{verb} {path}", 0, "", "the answer is no object")
        return value

    async def _request(
        self,
        verb: Verb,
        resource: Resource | str,
        path: str,
        *,
        query: Query | None = None,
        body: Manifest | str | None = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
        tries: int = TRIES,
        subresource: str | None = None,
        most: int | None = None,
    ) -> bytes:
        counted = resource if isinstance(resource, str) else resource.plural
        counted = counted if subresource is None else f"{counted}/{subresource}"
        for attempt in range(1, tries + 1):
            began = time.monotonic()
            try:
                answer = await self._once(verb, path, query, body, content_type, seconds, most)
            except ApiError as error:
                self._count(verb, counted, error.code, began)
                if attempt == tries or not isinstance(error, TooManyRequestsError | UnavailableError):
                    raise
                await self.sleep(_delay(attempt, error.retry_after))
            else:
                self._count(verb, counted, 200, began)
                return answer
        raise AssertionError("a loop of at least one try")

    async def _once(
        self,
        verb: Verb,
        path: str,
        query: Query | None,
        body: Manifest | str | None,
        content_type: str,
        seconds: float,
        most: int | None,
    ) -> bytes:
        what = f"{verb} {path}"
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._sent(verb, path, query, body, content_type, timeout) as response:
                answer = await _whole(what, response, most)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.outage.failed()
            raise UnavailableError(what, 0, "", f"no answer: {error or type(error).__name__}") from error
        if response.status >= 300:
            raise error_of(what, response.status, answer, response.headers.get("Retry-After"))
        self.outage.answered()
        return answer

    @asynccontextmanager
    async def _sent(
        self,
        verb: Verb,
        path: str,
        query: Query | None,
        body: Manifest | str | None,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to one request, whose body is still to be read."""
        method, url, headers, sent, _ = await self.api.param_serialize(
            _METHODS[verb],
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json, */*", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        asked = self.clock.local()
        answered = await self.api.call_api(method, url, headers, body=sent, _request_timeout=timeout)
        response: aiohttp.ClientResponse = answered.response
        self.clock.answered(response.headers.get("Date"), asked)
        async with response:
            yield response

    def _count(self, verb: Verb, resource: str, code: int, began: float) -> None:
        if self.counter is not None:
            self.counter.request_done(verb, resource, code, time.monotonic() - began)


_ESCAPE = re.compile(r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u(d[89a-f][0-9a-f]{2})|.)")


def as_yaml(value: Manifest) -> str:
    """JSON that is YAML too, which is what a server-side apply is read as.

    JSON writes a character beyond U+FFFF, as an emoji in a log, as two escapes, and YAML refuses either of them; so
    it stands there as it is. All other escapes are the same in both. A half of such a pair is no character anywhere.
    """

    def character(escape: re.Match[str]) -> str:
        high, low, alone = escape.groups()
        if alone is not None:
            return "\\ufffd"
        return escape[0] if high is None else bytes.fromhex(high + low).decode("utf-16-be")

    return _ESCAPE.sub(character, json.dumps(value))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length; the reader's own method gives up at long ones."""
    buffer = b""
    async for chunk in content.iter_any():
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            yield line


async def _event(what: str, resource: Resource, line: bytes) -> WatchEvent:
    """One line of a watch. The error that it tells of; UnavailableError for a line that is no event."""
    try:
        read: Any = await _parsed(line)
        kind, found = read["type"], read["object"]
        if kind == "ERROR":
            raise error_of(what, int(found.get("code", 500)), json.dumps(found).encode())
        version = int(found["metadata"]["resourceVersion"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnavailableError(what, 0, "", "a line of the watch cannot be read") from error
    return WatchEvent(kind, {"apiVersion": resource.api_version, "kind": resource.kind, **found}, version)


async def _parsed(text: bytes) -> JsonValue:
    """The value of JSON of any length, while others have their turn. ValueError."""
    return loads(text) if len(text) <= AT_ONCE_BYTES else await asyncio.to_thread(loads, text)


async def _whole(what: str, response: aiohttp.ClientResponse, most: int | None) -> bytes:
    """The body. TooLongError when it has more than `most` bytes."""
    if most is None:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most:
            response.close()
            raise TooLongError(what, 0, "", f"the answer has more than {most:,} bytes")
    return bytes(body)


def _delay(attempt: int, retry_after: float | None) -> float:
    """Seconds before the next try: doubled each time, half of it by chance so that many do not come back at once."""
    doubled: float = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** (attempt - 1))
    jittered = doubled * (0.5 + random.random() / 2)
    return max(jittered, min(retry_after or 0.0, LONGEST_RETRY_AFTER_SECONDS))

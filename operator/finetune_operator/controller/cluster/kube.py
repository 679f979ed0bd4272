"""The API server as the operator uses it: statuses, events, log tails, served kinds, and outages.

Requests in use, which are those that the Roles in manifests/operator grant:

| group | resource | verbs | where | for |
|---|---|---|---|---|
| finetune.dev | finetunejobs | get list watch delete | jobs | get after a conflict; delete for the time to live |
| finetune.dev | finetunejobs/status | patch | jobs | status, by server-side apply |
| of spec/launcher_rows.py | those of its rows | get list watch create delete | jobs | attempts |
| "" | configmaps services | get create patch delete | jobs | beside attempts and servers; get when a name is taken |
| "" | persistentvolumeclaims | get list create | jobs | the workspace; get when a name is taken; list for a metric |
| networking.k8s.io | networkpolicies | get create patch delete | jobs | before the first attempt, and beside servers |
| apps | deployments | get list watch create patch delete | jobs | servers |
| apps | replicasets | get | jobs | whether a pod is a server's |
| serving.kserve.io | inferenceservices | get list watch create patch delete | jobs | servers by KServe |
| gateway.networking.k8s.io | httproutes | get create patch delete | jobs | shares of requests during canaries |
| http.keda.sh | httpscaledobjects | get create patch delete | jobs | scaling to zero |
| autoscaling | horizontalpodautoscalers | get create patch delete | jobs | beside servers |
| policy | poddisruptionbudgets | get create patch delete | jobs | beside servers |
| "" | pods | list watch | jobs | reports, causes |
| "" | pods/log | get | jobs | end of a failed pod's log |
| "" | events | create list | jobs | the story; list: why a pod does not start, its own or its child's events |
| "" | nodes | list | cluster | GPUs, for plans of jobs with some (nodes.read) |
| authentication.k8s.io | tokenreviews | create | cluster | tokens of progress posts (progress.tokens: review) |
| none | /.well-known/openid-configuration /openid/v1/jwks | get | cluster | the same (progress.tokens: keys) |
| coordination.k8s.io | leases | get create update | own | leadership (leader.py) |
| apps | deployments | get | own | owner of the Lease |
| "" | secrets | get create update | own | the progress server's certificate |
| "" | serviceaccounts | get | jobs | what a reviewed job names (the chart's webhook.enabled) |
| storage.k8s.io, scheduling.k8s.io | storageclasses, priorityclasses | get | cluster | the same |

Where: `jobs` = the namespaces of jobs, `own` = the operator's own, `cluster` = no namespace. Discovery (/apis) is open
to every authenticated client, and no Role of ours grants the two paths of the issuer:
`system:service-account-issuer-discovery` binds all service accounts to them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from pydantic import JsonValue

from finetune_operator.controller.cluster.clock import ClusterClock
from finetune_operator.jobs.render.render_types import FIELD_OWNER, Manifest
from finetune_operator.kubernetes_api.client import POD_LOG, KubernetesClient, Request
from finetune_operator.kubernetes_api.errors import AlreadyExistsError, ApiError
from finetune_operator.kubernetes_api.resources import (
    EVENT,
    FINETUNE_JOB,
    LAUNCHER_RESOURCES,
    OPENID,
    POD,
    resource_of,
)
from finetune_operator.spec.launcher_rows import BUILT_IN, LauncherName
from finetune_operator.spec.status_times import stamp

log = logging.getLogger(__name__)

APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
"""Content type with a parameter: the client library would write a body of the bare type itself, by json.dumps."""
LOG_SECONDS = 10.0
LOG_LINES = 60
LOG_BYTES = 256 * 1024
"""Maximum size of those lines. The kubelet cuts them at their end, so that this has to hold them all."""
EVENT_MESSAGE = 1024
"""Longest message of a core/v1 Event that the API server takes, in bytes."""
ISSUER_PATH = "/.well-known/openid-configuration"
KEYS_PATH = "/openid/v1/jwks"
"""Paths on the API server itself. `jwks_uri` of the former may name another server, which is not ours to ask."""


@dataclass
class Outage:
    """Outage of the API server, after whose end everything has to be read again."""

    down: bool = False
    on_end: Callable[[], None] | None = None
    loop_lag: Callable[[], float] = float
    """Function that returns the largest lag of the event loop within the last minute, in seconds."""
    _waiting: set[asyncio.Timeout] = field(default_factory=set)

    @asynccontextmanager
    async def until_end(self) -> AsyncIterator[None]:
        """Raise TimeoutError when an outage ends meanwhile: a connection that was open then may hang on a server that
        is gone, which it does not notice by itself.
        """
        async with asyncio.timeout(None) as limit:
            self._waiting.add(limit)
            try:
                yield
            finally:
                self._waiting.discard(limit)

    def failed(self, error: ApiError) -> None:
        """Note that a request had no answer."""
        if not self.down:
            log.warning(
                "the API server does not answer: %s (largest lag of the operator's event loop in the last minute: "
                "%.1f s)",
                error,
                self.loop_lag(),
            )
        self.down = True

    def answered(self) -> None:
        """Note that a request had an answer."""
        if self.down:
            self.down = False
            log.info("the API server answers again")
            for limit in self._waiting:
                if not limit.expired():
                    limit.reschedule(asyncio.get_running_loop().time())
            if self.on_end is not None:
                self.on_end()


class RequestCounter(Protocol):
    """Counter of all requests."""

    def request_done(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """See `state.Measurements`."""


@dataclass
class Kube(KubernetesClient):
    """The API server, as the operator uses it."""

    manager: str = FIELD_OWNER
    outage: Outage = field(default_factory=Outage)
    counter: RequestCounter | None = None
    clock: ClusterClock = field(default_factory=ClusterClock)

    async def pod_log(self, namespace: str, name: str, container: str) -> str:
        """Return the last lines of a container's log, whole; empty if none can be read: the node itself may have
        failed.
        """
        query = {"container": container, "tailLines": str(LOG_LINES), "limitBytes": str(LOG_BYTES)}
        path = POD.path(namespace, name, "log")
        try:
            body = await self._body(Request("get", path, POD_LOG, query, seconds=LOG_SECONDS, tries=1))
        except ApiError as error:
            log.info("no log of pod %s/%s: %s", namespace, name, error)
            return ""
        return body.decode("utf-8", "replace")

    async def served_launchers(self) -> tuple[LauncherName, ...]:
        """Return the launchers whose kinds the API server serves."""
        served: list[LauncherName] = []
        for launcher, resource in LAUNCHER_RESOURCES.items():
            if launcher in BUILT_IN or await self.serves(resource):
                served.append(launcher)
        return tuple(served)

    async def token_issuer(self) -> tuple[Manifest, Manifest]:
        """Return the issuer of service accounts' tokens, as OpenID Connect's discovery describes it, and its public
        keys, a JSON web key set. ForbiddenError if somebody took the right from service accounts; NotFoundError if the
        API server's issuer is no https URL, as it then publishes neither.
        """
        return await self.document(ISSUER_PATH, OPENID), await self.document(KEYS_PATH, OPENID)

    async def apply_status(
        self, namespace: str, name: str, uid: str, version: str, status: Mapping[str, JsonValue]
    ) -> Manifest:
        """Apply this as all of our part of the job's status; return the job as stored. ConflictError if the job is no
        longer at `version`, NotFoundError if it is deleted.
        """
        body: Manifest = {
            "apiVersion": FINETUNE_JOB.api_version,
            "kind": FINETUNE_JOB.kind,
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": version},
            "status": dict(status),
        }
        path, query = FINETUNE_JOB.path(namespace, name, "status"), {"fieldManager": self.manager, "force": "true"}
        counted = f"{FINETUNE_JOB.plural}/status"
        return await self._json(Request("patch", path, counted, query, as_yaml(body), APPLY_PATCH))

    async def apply(self, manifest: Manifest, namespace: str, uid: str | None, version: str | None = None) -> Manifest:
        """Create an object or change it to `manifest`, and return it as it is stored. With `uid`, ConflictError for
        another object of that name, and with `version`, for one that was changed since; without `uid`, ConflictError if
        somebody has created one meanwhile.
        """
        resource = resource_of(str(manifest["apiVersion"]), str(manifest["kind"]))
        metadata = manifest["metadata"]
        assert isinstance(metadata, dict), "a manifest without metadata was rendered"
        read: Manifest = {} if uid is None else {"uid": uid}
        read |= {} if version is None else {"resourceVersion": version}
        body: Manifest = {**manifest, "metadata": {**metadata, **read}}
        query = {"fieldManager": self.manager, "force": "true" if uid is not None else "false"}
        path = resource.path(namespace, str(metadata["name"]))
        return await self._json(Request("patch", path, resource.plural, query, as_yaml(body), APPLY_PATCH))

    async def events_of(self, namespace: str, kind: str, name: str, uid: str | None = None) -> list[Manifest]:
        """Return the events about an object; without `uid`, about all that had this name. No more than a page is read:
        controllers limit their events about one object to a few dozen, and others may write any number.
        """
        fields = {"involvedObject.kind": kind, "involvedObject.name": name}
        fields |= {} if uid is None else {"involvedObject.uid": uid}
        selector = ",".join(f"{name}={value}" for name, value in fields.items())
        async for page in self.pages(EVENT, namespace, fields=selector):
            return page.items
        return []

    async def create_event(
        self,
        involved: Mapping[str, JsonValue],
        kind: str,
        reason: str,
        message: str,
        salt: str = "",
        *,
        dry_run: bool = False,
    ) -> None:
        """Create one event about an object; the same event with the same `salt` is created only once."""
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
            await self.create(event, namespace, dry_run=dry_run)
        except AlreadyExistsError:
            log.debug("%s/%s: event %s exists already", namespace, name, reason)

    # --------------------------------------------------------------------------------------- outcomes of requests

    def _responded(self, date: str | None, sent: datetime) -> None:
        self.clock.answered(date, sent)

    def _answered(self) -> None:
        self.outage.answered()

    def _failed(self, request: Request, error: ApiError) -> None:
        # The API server itself waits for the kubelet to send a log: one of a lost node does not come.
        if request.counted != POD_LOG:
            self.outage.failed(error)

    def _count(self, request: Request, code: int, began: float) -> None:
        if self.counter is not None:
            self.counter.request_done(request.verb, request.counted, code, time.monotonic() - began)


_ESCAPE = re.compile(r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|u(d[89a-f][0-9a-f]{2})|.)")


def as_yaml(value: Manifest) -> str:
    """Return JSON that is YAML too, as which a server-side apply is read.

    JSON writes a character beyond U+FFFF, as an emoji in a log, as two escapes, and YAML refuses either of them; so it
    is written as it is. All other escapes are the same in both. A half of such a pair is no character anywhere.
    """

    def character(escape: re.Match[str]) -> str:
        high, low, alone = escape.groups()
        if alone is not None:
            return "\\ufffd"
        return escape[0] if high is None else bytes.fromhex(high + low).decode("utf-16-be")

    return _ESCAPE.sub(character, json.dumps(value))

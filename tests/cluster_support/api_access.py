"""Clients of an API server: a synchronous one for tests, an asynchronous one for stand-ins.

Both use plain JSON without typed kinds, so that a test sees the API server's answers unchanged.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import requests
import yaml
from kubernetes import client, config

from suite_plugins import waiting
from suite_plugins.patience import patient

Object = dict[str, Any]
T = TypeVar("T")

PATIENCE_SECONDS = 120.0
"""Longest wait for something that takes a moment, next to other suites; scaled by `patient` at its use."""
PATIENCE_CODES = (429, 500, 503, 504)
"""Status codes of an API server that has just started, or is overloaded."""
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


class ApiError(Exception):
    """Error answer of the API server to a request."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass(frozen=True)
class Access:
    """An address and the credentials of one user."""

    host: str
    ca: str | None
    token: str | None = None
    client_certificate: tuple[str, str] | None = None

    @classmethod
    def of(cls, kubeconfig: Path) -> Access:
        """Read the current context of `kubeconfig`."""
        loaded = client.Configuration()
        config.load_kube_config(str(kubeconfig), client_configuration=loaded)
        bearer = str(loaded.api_key.get("authorization", "") or loaded.api_key.get("BearerToken", ""))
        pair = (loaded.cert_file, loaded.key_file) if loaded.cert_file and loaded.key_file else None
        return cls(loaded.host.rstrip("/"), loaded.ssl_ca_cert, bearer.removeprefix("Bearer ") or None, pair)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def ssl_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        if self.client_certificate is not None:
            context.load_cert_chain(*self.client_certificate)
        return context


def path_of(api_version: str, plural: str, namespace: str | None = None, name: str = "", sub: str = "") -> str:
    """Return the path of a collection or, with `name`, of one object."""
    root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
    parts = [root, *(["namespaces", namespace] if namespace else []), plural, *[part for part in (name, sub) if part]]
    return "/".join(parts)


def new_session() -> requests.Session:
    """Return a session that ignores proxies and certificate authorities from the environment."""
    session = requests.Session()
    session.trust_env = False
    return session


def kubeconfig_text(host: str, ca: str | None, token: str, namespace: str | None = None) -> str:
    """Return a kubeconfig with the token."""
    where = {"server": host} | ({"certificate-authority": ca} if ca else {})
    context = {"cluster": "test", "user": "test"} | ({"namespace": namespace} if namespace else {})
    return yaml.safe_dump({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": where}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    })  # fmt: skip


class Api:
    """Synchronous client for tests."""

    def __init__(self, access: Access) -> None:
        self._host = access.host
        self._session = new_session()
        self._session.headers.update(access.headers)
        self._session.verify = access.ca or True
        self._session.cert = access.client_certificate

    def call(self, method: str, path: str, body: Object | None = None, content: str = "application/json") -> Any:
        """Return the answer as JSON or, if it is not JSON, as text."""
        data = None if body is None else json.dumps(body)
        answer = self._session.request(
            method, self._host + path, data=data, headers={"Content-Type": content}, timeout=patient(30)
        )
        if not answer.ok:
            raise ApiError(answer.status_code, answer.text)
        return answer.json() if "json" in answer.headers.get("Content-Type", "") else answer.text

    def get(self, path: str) -> Object | None:
        """Return the object, or None if it does not exist."""
        try:
            found: Object = self.call("GET", path)
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        return found

    def items(self, path: str, **query: str) -> list[Object]:
        text = "&".join(f"{name}={requests.utils.quote(value, safe='')}" for name, value in query.items())
        found: list[Object] = self.call("GET", f"{path}?{text}" if text else path)["items"]
        return found

    def create(self, path: str, body: Object) -> Object:
        made: Object = self.call("POST", path, body)
        return made

    def patch(self, path: str, body: Object, content: str = MERGE) -> Object:
        changed: Object = self.call("PATCH", path, body, content)
        return changed

    def delete(self, path: str, **options: Any) -> None:
        """Delete in the background; a missing object is no error."""
        try:
            self.call("DELETE", path, {"propagationPolicy": "Background", **options})
        except ApiError as error:
            if error.code != 404:
                raise


def wait_until(
    look: Callable[[], T | None],
    goal: str,
    seconds: float = PATIENCE_SECONDS,
    detail: Callable[[], object] | None = None,
    poll_seconds: float = 0.1,
) -> T:
    """Return the first value of `look` that is neither None, False nor empty; fail with the text of `detail` after
    `seconds`, scaled by `patient`.

    Also waits for an API server that is briefly unavailable or overloaded.
    """
    trouble: Exception | None = None

    def look_again() -> T | None:
        nonlocal trouble
        try:
            value = look()
            trouble = None
        except (requests.ConnectionError, requests.Timeout) as error:
            value, trouble = None, error
        except ApiError as error:
            if error.code not in PATIENCE_CODES:
                raise
            value, trouble = None, error
        return value

    def why() -> str:
        more = f"\n{detail()}" if detail is not None else ""
        return f"{goal}{f' ({trouble})' if trouble else ''}{more}"

    return waiting.wait_until(look_again, why, seconds, poll_seconds=poll_seconds)


@dataclass
class AsyncApi:
    """Asynchronous client for stand-ins; open and close it on its loop."""

    access: Access
    _session: aiohttp.ClientSession = field(init=False)

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(ssl=self.access.ssl_context(), limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=patient(5))
        self._session = aiohttp.ClientSession(connector=connector, headers=self.access.headers, timeout=timeout)

    async def close(self) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: Object | None = None, content: str = "application/json") -> Any:
        """Send one request, retried for as long as the API server is unavailable or overloaded."""
        data = None if body is None else json.dumps(body)
        while True:
            try:
                async with self._session.request(
                    method, self.access.host + path, data=data, headers={"Content-Type": content}
                ) as answer:
                    text = await answer.text()
                    if answer.status < 400:
                        return json.loads(text)
                    # 403 is temporary while an API server that has just started still reads its roles.
                    if answer.status not in (403, *PATIENCE_CODES):
                        raise ApiError(answer.status, text)
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)

    async def quietly(
        self, method: str, path: str, body: Object | None = None, content: str = "application/json"
    ) -> Object | None:
        """Call, with None for an object that was deleted, exists already, or has changed meanwhile."""
        try:
            answer: Object = await self.call(method, path, body, content)
        except ApiError as error:
            if error.code in (404, 409):
                return None
            raise
        return answer

    async def follow(
        self, path: str, query: Mapping[str, str] | None = None, first: Object | None = None
    ) -> AsyncIterator[tuple[bool, Object]]:
        """Yield every object of a collection now and at each change, as (there, object); for ever. `first`: the
        collection as read before; no later change is missed.

        After a broken watch the list is read again, and objects missing from it are yielded as deleted.
        """
        known: dict[str, Object] = {}
        chosen = dict(query or {})
        while True:
            try:
                listed, first = first or await self.call("GET", path + _query(chosen)), None
            except ApiError as error:
                if error.code != 404:
                    raise
                # The CRD itself was deleted; another test may install it again.
                listed = {"items": [], "metadata": {"resourceVersion": "0"}}
                await asyncio.sleep(1)
            current = {item["metadata"]["uid"]: item for item in listed["items"]}
            for uid in [uid for uid in known if uid not in current]:
                yield False, known.pop(uid)
            for uid, item in current.items():
                known[uid] = item
                yield True, item
            version = listed["metadata"]["resourceVersion"]
            try:
                async for there, item in self._watch(path, {**chosen, "resourceVersion": version}):
                    if there:
                        known[item["metadata"]["uid"]] = item
                    else:
                        known.pop(item["metadata"]["uid"], None)
                    yield there, item
            except (aiohttp.ClientError, ApiError, TimeoutError, json.JSONDecodeError):
                await asyncio.sleep(0.1)

    async def _watch(self, path: str, query: Mapping[str, str]) -> AsyncIterator[tuple[bool, Object]]:
        url = self.access.host + path + _query({**query, "watch": "true", "timeoutSeconds": "300"})
        async with self._session.get(url) as answer:
            if answer.status >= 400:
                raise ApiError(answer.status, await answer.text())
            buffer = b""
            async for chunk in answer.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError(410, str(event["object"]))
                    yield event["type"] != "DELETED", event["object"]


def _query(values: Mapping[str, str]) -> str:
    text = "&".join(f"{name}={requests.utils.quote(value, safe='')}" for name, value in values.items())
    return f"?{text}" if text else ""

"""Existence of an image in its registry, asked from this machine: one HEAD of its manifest, without credentials.

The nodes pull, not this machine. So no answer, or one that asks for credentials, says nothing about the image.
"""

from __future__ import annotations

import json
import re
from http.client import HTTPException
from typing import Literal, TypeAlias
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from finetune_operator.cli.local.hub_reach import ANSWER_SECONDS, TIMEOUT_TEXT, in_time, reason_text

Answer: TypeAlias = tuple[Literal["there", "absent"] | None, str]
"""State of an image, None for unknown, and the reason for that."""
MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_IMAGE = re.compile(
    r"(?P<host>localhost(?::\d+)?|[^/]*[.:][^/]*)/(?P<name>[^:@]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>.+))?"
)
"""Image with a registry, which has a dot or a port, as container engines read it."""
_LOCAL = re.compile(r"(localhost|127\.\d+\.\d+\.\d+)(:\d+)?")
"""Registries that container engines reach without TLS."""
_DOCKER_HUB = {"docker.io": "registry-1.docker.io"}
_CHALLENGE = re.compile(r'(realm|service|scope)="([^"]*)"')


def image_state(image: str) -> Answer:
    """Return the state of an image."""
    parts = _IMAGE.fullmatch(image) or _IMAGE.fullmatch(f"docker.io/{image}")
    if parts is None or "/" not in image:
        return None, "it names no registry"
    host, reference = parts["host"], parts["digest"] or parts["tag"] or "latest"
    scheme = "http" if _LOCAL.fullmatch(host) else "https"
    url = f"{scheme}://{_DOCKER_HUB.get(host, host)}/v2/{parts['name']}/manifests/{reference}"
    late: Answer = None, f"{host} cannot be reached from here ({TIMEOUT_TEXT})"
    return in_time(lambda: _asked(url, host), late)


def _asked(url: str, host: str) -> Answer:
    try:
        code, challenge = _head(url, None)
        if code == 401 and (token := _anonymous_token(challenge)):
            code, _ = _head(url, token)
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        return None, f"{host} cannot be reached from here ({reason_text(reason) or 'its certificate is not trusted'})"
    match code:
        case 200:
            return "there", ""
        case 404:
            return "absent", ""
        case 401 | 403:
            return None, f"{host} requires credentials"
        case _:
            return None, f"{host} answered {code}"


def _head(url: str, token: str | None) -> tuple[int, str]:
    """Return status and challenge of the answer."""
    headers = {"Accept": MANIFESTS, **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        with urlopen(Request(url, method="HEAD", headers=headers), timeout=ANSWER_SECONDS) as answer:
            return answer.status, ""
    except HTTPError as error:
        return error.code, error.headers.get("WWW-Authenticate", "")


def _anonymous_token(challenge: str) -> str | None:
    """Return the token that everybody gets, as for public images; None: there is none."""
    asked = dict(_CHALLENGE.findall(challenge))
    realm = asked.pop("realm", "")
    if not challenge.startswith("Bearer ") or not realm.startswith("https://"):
        return None
    try:
        with urlopen(f"{realm}?{urlencode(asked)}", timeout=ANSWER_SECONDS) as answer:
            given = json.loads(answer.read(65_536))
    except HTTPError:
        return None
    token = given.get("token") or given.get("access_token") if isinstance(given, dict) else None
    return token if isinstance(token, str) else None

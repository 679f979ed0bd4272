"""Reachability of the Hub from this machine: one request with a short limit, before a stage waits for it.

The trainer's libraries retry for half a minute and more: right in a pod, too long for somebody at a terminal without a
network. If the Hub does not answer here, stages on this machine use the copies in its cache (HF_HUB_OFFLINE), and a
repository without a copy is refused at once. A trainer in a cluster still retries.
"""

from __future__ import annotations

import functools
import os
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from finetune_operator.cli.terminal.console import note

ANSWER_SECONDS = 5.0
SCHEME = "hf://"
HINT = "Connect to the network, or name a folder on this machine: file://FOLDER"
Kind: TypeAlias = Literal["model", "dataset"]
Value = TypeVar("Value")

_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
"""True values of variables, as huggingface_hub reads them."""
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def variables(uris: Mapping[str, Kind]) -> dict[str, str]:
    """Return the variables with which the trainer does not wait for an unreachable Hub."""
    needs_hub = any(uri.startswith(SCHEME) for uri in uris) and _offline_variable() is None
    if not needs_hub or unreachable_reason() is None:
        return {}
    _note_offline()
    return {"HF_HUB_OFFLINE": "1"}


def missing(uris: Mapping[str, Kind]) -> tuple[str, ...]:
    """Return the URIs of models and data sets that neither the Hub nor its cache here can provide."""
    uncached = [uri for uri, kind in uris.items() if uri.startswith(SCHEME) and not _is_cached(uri, kind)]
    return tuple(uncached) if uncached and unreachable_reason() is not None else ()


@functools.cache
def unreachable_reason() -> str | None:
    """Return why the Hub is unavailable, as the end of a sentence; None if it answers. Requests once."""
    if variable := _offline_variable():
        return f"{variable} is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    late: str | None = TIMEOUT_TEXT
    reason = in_time(lambda: _request(endpoint), late)
    return None if reason is None else f"{endpoint} cannot be reached ({reason})"


def in_time(request: Callable[[], Value], late: Value) -> Value:
    """Return the result of a request; `late` if there is none within ANSWER_SECONDS."""
    answers: queue.SimpleQueue[Value] = queue.SimpleQueue()
    # Name resolution has no timeout: a thread that nobody waits for can be left behind.
    threading.Thread(target=lambda: answers.put(request()), daemon=True).start()
    try:
        return answers.get(timeout=ANSWER_SECONDS)
    except queue.Empty:
        return late


def _offline_variable() -> str | None:
    """Return the variable with which the user has requested no network; the trainer reads it, too."""
    return next((name for name in _OFFLINE_VARIABLES if os.environ.get(name, "").upper() in _TRUE), None)


TIMEOUT_TEXT = f"no answer within {ANSWER_SECONDS:.0f} s"


_GATEWAYS = (502, 503, 504)
"""HTTP statuses by which a proxy reports that the target is unreachable."""


def _request(endpoint: str) -> str | None:
    """Return why there is no answer, of whatever kind; None for one."""
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=ANSWER_SECONDS):
            return None
    except HTTPError as error:
        return f"{error.code} {error.reason}" if error.code in _GATEWAYS else None
    except URLError as error:
        return reason_text(error.reason)
    except (OSError, HTTPException) as error:
        return reason_text(error)
    except ValueError:  # HF_ENDPOINT is no URL, which the trainer reports better
        return None


def reason_text(reason: object) -> str | None:
    """Return why there is no answer; None for one whose certificate is not trusted here."""
    match reason:
        case ssl.SSLError():  # there is an answer; judging certificates is left to the trainer's libraries
            return None
        case socket.gaierror():
            return "its name does not resolve"
        case TimeoutError():
            return TIMEOUT_TEXT
        case ConnectionRefusedError():
            return "connection refused"
        case OSError(strerror=str(text)) if text:
            return text
        case _:
            return " ".join(str(reason).split()) or type(reason).__name__


def _is_cached(uri: str, kind: Kind) -> bool:
    """Return True if a cache of the trainer's libraries has the repository; the libraries check the commit."""
    name = uri.removeprefix(SCHEME).partition("@")[0].strip("/").removeprefix("datasets/")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(os.environ.get("HF_HOME") or f"{base}/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub")
    folders = [hub / f"{kind}s--{name.replace('/', '--')}" / "snapshots"]
    if kind == "dataset":
        data = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
        folders.append(data / name.replace("/", "___"))
    return any(folder.expanduser().is_dir() for folder in folders)


@functools.cache
def _note_offline() -> None:
    note(f"{unreachable_reason()}: models and data of the Hub are read from the cache on this machine.")

"""Errors of requests to the API server, by their meaning."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from finetune_operator.spec.json_text import loads


class NoClusterError(Exception):
    """No cluster is configured, or its configuration cannot be used; the text has a hint."""


class ApiError(Exception):
    """The API server did not carry out a request."""

    def __init__(self, request: str, code: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(f"{request}: {code} {reason}: {message}" if code else f"{request}: {message}")
        self.code = code
        """HTTP status; 0 when there was no answer."""
        self.reason = reason
        """Reason of the Status object: NotFound, AlreadyExists, Forbidden, ..."""
        self.message = message
        """Message of the Status object."""
        self.retry_after = retry_after


class NotFoundError(ApiError):
    """404."""


class AlreadyExistsError(ApiError):
    """409 at a create: the name is taken."""


class ConflictError(ApiError):
    """409: the object has changed since it was read."""


class InvalidError(ApiError):
    """400, 413 or 422: the object is refused for its content."""


class ForbiddenError(ApiError):
    """403: no rights, a quota, or an admission rule."""


class NamespaceTerminatingError(ApiError):
    """403 because the namespace is being deleted, and its objects with it."""


class UnauthorizedError(ApiError):
    """401: the credentials are not accepted."""


class GoneError(ApiError):
    """410: the requested resource version no longer exists."""


class TooManyRequestsError(ApiError):
    """429, after all retries."""


class UnavailableError(ApiError):
    """5xx or no answer, after all retries."""


class NoAnswerError(UnavailableError):
    """No answer, or not to its end, after all retries."""


class TooLongError(ApiError):
    """The answer is longer than its limit."""


class WebhookError(UnavailableError):
    """500 because a required admission webhook does not answer: the API server is well, the webhook's program (a
    training operator, a policy engine) is not.
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


def error_of(request: str, code: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """Return the error for an answer. Proxies answer in HTML, so the body may be anything."""
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
    return kind(request, code, reason, message or body[:200].decode("utf-8", "replace"), _seconds(retry_after))


def _is_caused_by(status: JsonValue, reason: str) -> bool:
    details = status.get("details") if isinstance(status, dict) else None
    causes = details.get("causes") if isinstance(details, dict) else None
    return isinstance(causes, list) and any(
        isinstance(cause, dict) and cause.get("reason") == reason for cause in causes
    )


def _seconds(written: str | None) -> float | None:
    """Parse `Retry-After` as the API server writes it; None for a date, which it never sends."""
    return float(written) if written is not None and written.isascii() and written.isdecimal() else None


def in_one_line(error: BaseException) -> str:
    """Return the error's text for a message."""
    return " ".join(str(error).split()) or type(error).__name__

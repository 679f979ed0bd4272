"""Rows of requests, and the errors for invalid ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_contract.data_settings import Columns
from finetune_contract.inference_settings import Generation

MAX_ROWS = 256
"""Most rows of a request."""
MAX_CHARACTERS = 200_000
"""Most characters of a row: more than the context of served models, and still tokenised within 0.1 s."""
MAX_NEW_TOKENS = 4096

_INPUT_FORMS: Mapping[str, tuple[frozenset[str], ...]] = {
    "text-classification": (frozenset({"text"}), frozenset({"text", "text_pair"})),
    "token-classification": (frozenset({"tokens"}),),
    "question-answering": (frozenset({"question", "context"}),),
    "masked-lm": (frozenset({"text"}),),
    "text-generation": (frozenset({"text"}), frozenset({"source"}), frozenset({"messages"})),
    "preference-tuning": (frozenset({"prompt"}),),
}
Row = Mapping[str, Any]
"""Role of each input -> its value."""


class RequestError(Exception):
    """A request that cannot be answered; its message is for the client."""

    def __init__(
        self, code: int, message: str, headers: Mapping[str, str] | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.headers = dict(headers or {})
        self.param = param
        """Invalid field of the request, for protocols that report it."""


@dataclass(frozen=True)
class Form:
    """Rows that can share a batch: the same model and inputs, and the same way to write."""

    roles: tuple[str, ...]
    generation: Generation
    stop: tuple[str, ...] = ()
    """Texts that end the written text, and are no part of it."""
    seed: int | None = None
    """Seed of each row's sampling; None: the job's seed, shared by the rows of a batch in their order."""
    model: str = ""
    """Name of the model that answers; empty: the default one."""

    @property
    def columns(self) -> Columns:
        """Columns, named like their roles."""
        return Columns(**{role: role for role in self.roles})


def input_forms(task: str) -> tuple[frozenset[str], ...]:
    """Return the sets of inputs that the rows of a task can have."""
    return _INPUT_FORMS.get(task, (frozenset({"source"}),))


def whole_number(value: Any) -> Any:
    """Return a number without a fraction as an integer, since JSON has one type of numbers (7.0 is 7); others as they
    are.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Refuse too many rows (413), too long texts (413) and wrong types (422)."""
    if not rows:
        raise RequestError(422, "The request has no rows: send at least one input.")
    if len(rows) > MAX_ROWS:
        raise RequestError(413, f"The request has {len(rows)} rows; at most {MAX_ROWS} are answered at once: split it.")
    if any(set(row) != set(rows[0]) for row in rows):
        raise RequestError(422, "The rows of a request must have the same inputs: send others in a separate request.")
    for row in rows:
        size = sum(_size(role, value) for role, value in row.items())
        if size > MAX_CHARACTERS:
            raise RequestError(413, f"A row has {size} characters; at most {MAX_CHARACTERS} are allowed: shorten it.")


def _size(role: str, value: Any) -> int:
    if role == "prompt" and isinstance(value, list):
        role = "messages"
    if isinstance(value, str) and role not in ("tokens", "messages"):
        if not value.isascii():
            _refuse_surrogates(role, value)
        return len(value)
    if role == "tokens" and isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return sum(_size("word", word) for word in value)
    if role == "messages" and isinstance(value, list) and value:
        return sum(_message_size(message) for message in value)
    rule = {"tokens": "a list of words", "messages": "a list of messages"}.get(role, "text")
    raise RequestError(422, f"{role} must be {rule}; found {type(value).__name__}.")


def _message_size(message: Any) -> int:
    if not isinstance(message, dict):
        raise RequestError(422, f"A message must be an object with role and content; found {type(message).__name__}.")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise RequestError(422, f"A message needs {name} as text; found {type(message.get(name)).__name__}.")
    return _size("role", message["role"]) + _size("content", message["content"])


def _refuse_surrogates(role: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            422, f"{role} has half of a surrogate pair at {error.start}: send whole characters."
        ) from error

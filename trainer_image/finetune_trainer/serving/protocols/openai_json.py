"""The JSON of OpenAI's completions and chat completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_contract.inference_settings import Generation
from finetune_trainer.serving.protocols.hugging_face_json import generation_of as by_parameters
from finetune_trainer.serving.request_rows import RequestError, whole_number
from finetune_trainer.serving.watched_writing import Finish

ROLES = ("developer", "system", "user", "assistant")
"""Roles of messages; tools, which have others, are refused."""
MOST_STOPS = 16
LONGEST_STOP = 256
_READ = {
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("stop", "seed", "stream", "stream_options"),
}
_WITHOUT_EFFECT = {"user", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
"""Fields without effect on the text: about the user, and about tools, which are refused."""
_NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none",)),
    **dict.fromkeys(("logprobs", "echo", "store"), (False,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "top_logprobs"), (0, 0.0)),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "reasoning_effort", "verbosity"), ()),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Field -> values that request nothing, and are accepted beside null."""


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a request for its text."""

    generation: Generation
    stop: tuple[str, ...]
    seed: int | None
    stream: bool
    usage: bool
    """True if a stream ends with the token usage."""


def prompts(body: Mapping[str, Any]) -> list[str]:
    """Return the prompts of a request for completions."""
    given = body.get("prompt")
    texts: list[Any] = given if isinstance(given, list) else [given]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise _wrong("prompt", "a text or a list of texts", given)
    return texts


def messages(body: Mapping[str, Any]) -> list[Any]:
    """Return the conversation of a request; text parts of a content are joined."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise _wrong("messages", "a list of messages", given)
    return [_message(message) for message in given]


def _message(message: Any) -> Any:
    if not isinstance(message, dict) or message.get("content") is None:
        return message
    if message.get("role") not in ROLES:
        raise _wrong("messages", f"messages with one of the roles {', '.join(ROLES)}", message.get("role"))
    content = message["content"]
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if not content or len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
            raise _wrong("messages", "messages whose content is text, or a list of parts of the type text", content)
        content = "".join(map(str, texts))
    # Chat templates know the older of the two names.
    role = "system" if message.get("role") == "developer" else message.get("role")
    return {"role": role, "content": content}


def wanted(base: Generation, body: Mapping[str, Any], *, chat: bool) -> GenerationSettings:
    """Return the settings for the text. RequestError 400 for unsupported fields, and for invalid values."""
    for name, value in body.items():
        if name in _READ or name in _WITHOUT_EFFECT or value is None:
            continue
        taken = _NOT_OFFERED.get(name)
        if taken is None or not any(type(accepted) is type(value) and accepted == value for accepted in taken):
            raise RequestError(400, f"{str(name)[:80]} is not supported: leave it out.", param=str(name)[:80])
    if ("prompt" if chat else "messages") in body:
        other = "/v1/completions accepts prompt, /v1/chat/completions messages"
        name = "prompt" if chat else "messages"
        raise RequestError(400, f"{name} is not a field of this path: {other}.", param=name)
    longest = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    given = {"max_new_tokens": body.get(longest), "temperature": body.get("temperature"), "top_p": body.get("top_p")}
    try:
        generation = by_parameters(base, given)
    except RequestError as error:
        name, _, rest = error.message.partition(" ")
        name = longest if name == "max_new_tokens" else name
        raise RequestError(400, f"{name} {rest}", param=name) from error
    stream, options = body.get("stream"), body.get("stream_options")
    if stream is not None and not isinstance(stream, bool):
        raise _wrong("stream", "true or false", stream)
    if options is not None and (not stream or not isinstance(options, dict)):
        raise _wrong("stream_options", "an object, and stream true", options)
    usage = (options or {}).get("include_usage")
    if usage is not None and not isinstance(usage, bool):
        raise _wrong("stream_options.include_usage", "true or false", usage)
    return GenerationSettings(generation, _stop(body.get("stop")), _seed(body.get("seed")), bool(stream), bool(usage))


def _stop(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    stops = [given] if isinstance(given, str) else given
    texts = isinstance(stops, list) and all(isinstance(stop, str) and stop for stop in stops)
    if not texts or len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        rule = f"a text, or a list of at most {MOST_STOPS}, each of 1 to {LONGEST_STOP} characters"
        raise _wrong("stop", rule, given)
    try:
        "".join(stops).encode()
    except UnicodeEncodeError as error:
        raise _wrong("stop", "text without halves of surrogate pairs", given) from error
    return tuple(dict.fromkeys(stops))


def _seed(given: Any) -> int | None:
    if given is None:
        return None
    given = whole_number(given)
    if isinstance(given, bool) or not isinstance(given, int) or not -(2**63) <= given < 2**63:
        raise _wrong("seed", "a whole number of 64 bits", given)
    return given


def _wrong(name: str, rule: str, value: Any) -> RequestError:
    return RequestError(400, f"{name} must be {rule}; found {str(value)[:40]!r}.", param=name)


class CompletionJson:
    """Answers to one request. `usage`: True if a stream ends with the token usage."""

    def __init__(self, model: str, revision: str, chat: bool, usage: bool) -> None:
        self._chat, self._usage = chat, usage
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": revision,
        }
        self._first = True

    def whole(self, texts: list[str], prompt_tokens: int, finishes: Sequence[Finish]) -> dict[str, Any]:
        """Return the answer without a stream."""
        named = [
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text} for text in texts
        ]
        ended = zip(named, finishes, strict=True)
        choices = [
            {"index": at, **choice, "logprobs": None, "finish_reason": how.reason}
            for at, (choice, how) in enumerate(ended)
        ]
        kind = "chat.completion" if self._chat else "text_completion"
        usage = _used(prompt_tokens, sum(finish.tokens for finish in finishes))
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def piece(self, text: str) -> bytes:
        """Return an event with a piece of text."""
        return self._event(text, None)

    def last(self, finish: Finish, prompt_tokens: int) -> bytes:
        """Return the event with the reason why the text ends, and one with the token usage if requested."""
        event = self._event("", finish.reason)
        if not self._usage:
            return event
        return event + self._chunk([], {"usage": _used(prompt_tokens, finish.tokens)})

    def failed(self, why: str) -> bytes:
        """Return the event of an error after the stream began."""
        return f"data: {json.dumps({'error': {'message': why, 'type': 'server_error'}})}\n\n".encode()

    def _event(self, text: str, reason: str | None) -> bytes:
        content: dict[str, Any] = {"text": text}
        if self._chat:
            role = {"role": "assistant"} if self._first else {}
            content = {"delta": {**role, **({"content": text} if text else {})}}
        self._first = False
        return self._chunk(
            [{"index": 0, **content, "logprobs": None, "finish_reason": reason}], {"usage": None} if self._usage else {}
        )

    def _chunk(self, choices: list[Any], usage: Mapping[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        body = {**self._head, "object": kind, "choices": choices, **usage}
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def _used(prompt: int, written: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

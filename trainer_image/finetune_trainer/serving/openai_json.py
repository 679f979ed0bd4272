"""The JSON of OpenAI's completions and chat completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from finetune_contract.trainer_job import Generation
from finetune_trainer.serving.hugging_face_json import generation_of as by_parameters
from finetune_trainer.serving.request_rows import RequestError
from finetune_trainer.serving.watched_writing import Finish


def prompts(body: Mapping[str, Any]) -> list[str]:
    """The prompts of a request for completions."""
    given = body.get("prompt")
    found: list[Any] = given if isinstance(given, list) else [given]
    if not found or not all(isinstance(each, str) for each in found):
        raise RequestError(422, "prompt must be a text or a list of texts.")
    return found


def messages(body: Mapping[str, Any]) -> list[Any]:
    """The conversation of a request; parts of a content that are text are joined."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise RequestError(422, "messages must be a list of messages.")
    return [_message(each) for each in given]


def _message(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message if content is None else {"role": message.get("role"), "content": content}
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise RequestError(422, "content must be text, or a list of parts of the type text.")
    return {"role": message.get("role"), "content": "".join(map(str, texts))}


def generation_of(base: Generation, body: Mapping[str, Any]) -> Generation:
    """How to write. RequestError 422 for what is not offered."""
    if body.get("n") not in (None, 1):
        raise RequestError(422, f"n must be 1; found {str(body['n'])[:40]!r}.")
    for name in ("tools", "functions", "logprobs", "stop"):
        if body.get(name):
            raise RequestError(422, f"{name} is not supported: leave it out.")
    longest = body.get("max_completion_tokens") or body.get("max_tokens")
    given = {"max_new_tokens": longest, "temperature": body.get("temperature"), "top_p": body.get("top_p")}
    return by_parameters(base, given)


class Told:
    """Answers to one request."""

    def __init__(self, model: str, chat: bool) -> None:
        self._chat = chat
        self._head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }
        self._first = True

    def whole(self, texts: list[str], prompt_tokens: int, finishes: Sequence[Finish]) -> dict[str, Any]:
        """The answer without a stream."""
        named = [
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text} for text in texts
        ]
        ended = zip(named, finishes, strict=True)
        choices = [{"index": at, **each, "finish_reason": how.reason} for at, (each, how) in enumerate(ended)]
        tokens = sum(each.tokens for each in finishes)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        }
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def piece(self, text: str) -> bytes:
        """An event with a piece of text."""
        said: dict[str, Any] = {"text": text}
        if self._chat:
            said = {"delta": {**({"role": "assistant"} if self._first else {}), "content": text}}
        self._first = False
        return self._event(said, None)

    def last(self, finish: Finish) -> bytes:
        """The event that says why the text ends."""
        return self._event({"delta": {}} if self._chat else {"text": ""}, finish.reason)

    def failed(self, why: str) -> bytes:
        """The event of an error after the stream began."""
        return f"data: {json.dumps({'error': {'message': why, 'type': 'server_error'}})}\n\n".encode()

    def _event(self, said: Mapping[str, Any], reason: str | None) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        body = {**self._head, "object": kind, "choices": [{"index": 0, **said, "finish_reason": reason}]}
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()

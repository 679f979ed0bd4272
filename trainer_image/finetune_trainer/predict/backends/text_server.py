"""The backend `vllm`: an OpenAI-compatible server that has the model generates the texts. This process reads,
tokenises, decodes and writes as with its own model, so that only the generation differs.

vLLM is not part of the image, because it pins other versions of torch and transformers; the job names a server. Prompts
and answers are token ids: a server that tokenises by itself could add or drop special tokens. Before the first row the
server is compared with the job's model on a few tokens, as a server with other weights would answer everything wrong.

A row that the server rejects is set aside. While the server does not answer, rows wait for it: up to `OUTAGE_SECONDS`
without any answer; then the worker ends, and another attempt may succeed.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError
from finetune_trainer.predict.backends.backend_protocol import Batch, Machine, NotAvailable, with_texts

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

REQUESTS = 64
"""Requests at a time, one prompt each. vLLM batches them itself, up to 256 by default."""
ROWS = 512
"""Rows of one call: as many as keep the server busy while the last ones end, and few enough to report progress."""
OUTAGE_SECONDS = 300.0
"""Time without any answer after which the worker ends. A restarted vLLM loads its model for a minute or more."""
FIRST_WAIT_SECONDS = 0.5
"""Wait before the first repetition of a request; each next one is twice as long."""
MOST_WAIT_SECONDS = 10.0
TRIES = 4
"""Errors of the server for one row after which another prompt is tried: if that is answered, the row is the cause."""
READ_SECONDS = 600.0
"""Longest time of one request: a text of thousands of tokens among many others."""
CHECKED_ROWS = 16
CHECKED_SHARE = 0.75
"""Least share of equal next tokens. Rounding changes a few where two tokens are about as likely."""
ENV_KEY = "OPENAI_API_KEY"
"""Variable with the server's bearer token, as clients of OpenAI name it."""
_ONE_TOKEN: Mapping[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
_ROW_STATUSES = (400, 413, 422)
_ACCESS_STATUSES = (401, 403, 404)
_BUSY_STATUSES = (429, 503)


class ServerUnavailableError(StageError):
    """The server has not answered for `OUTAGE_SECONDS`; another attempt may succeed."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(
            FailureClass.HUB_UNAVAILABLE,
            "ServerUnavailable",
            f"predict.server {url} has not answered for {OUTAGE_SECONDS:.0f} s: {why}",
            "Start the server, or let the job's pods reach it; finished parts are kept.",
        )


class Refusal(NamedTuple):
    """Reason why the server does not answer a row."""

    reason: str
    message: str


class _RowError(Exception):
    """The server rejects the request."""


class _ServerError(Exception):
    """The server fails, or does not answer."""

    def __init__(self, message: str, *, busy: bool) -> None:
        super().__init__(message)
        self.busy = busy
        """True if the request has not been computed: the server is away, starting, or has too many others."""


@dataclass
class TextServer:
    """A model on a server, with the part of transformers' interface that generation needs."""

    url: str
    name: str
    """Name of the model in requests."""
    config: PretrainedConfig
    generation_config: GenerationConfig | None
    device: torch.device
    refused: dict[int, Refusal] = field(default_factory=dict)
    """Rows of the last call of `generate` that have no text."""
    _probe: Sequence[int] = ()
    """A prompt that the server has answered."""
    _answered: float = field(default_factory=time.monotonic)
    """Time of its last answer."""

    def generate(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pad_token_id: int,
        eos_token_id: Sequence[int] | None,
        max_new_tokens: int,
        num_beams: int = 1,
        do_sample: bool = False,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> torch.Tensor:
        """Return prompts and generated tokens, shape (rows, tokens), padded at the end; `refused` has the rows without
        any. Samples start from torch's generator. StageError HUB_UNAVAILABLE `ServerUnavailable`, and CONFIG for
        beams and a rejected token.
        """
        import torch

        if num_beams > 1:
            raise StageError(
                FailureClass.CONFIG,
                "BeamsNotSupported",
                f"generation.numBeams is {num_beams}, and predict.optimization vllm has no beam search.",
                "Leave generation.numBeams out, or set predict.optimization to none.",
            )
        ends = list(eos_token_id or ())
        settings = {"max_tokens": max_new_tokens, "temperature": temperature if do_sample else 0.0}
        if do_sample:
            settings["top_p"] = top_p
        seeds = torch.randint(2**31 - 1, (len(input_ids),)).tolist() if do_sample else [None] * len(input_ids)
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        bodies = [
            self._body(prompt, ends, {**settings, **({} if seed is None else {"seed": seed})})
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        answers = self._all(bodies)
        self.refused = {at: answer for at, answer in enumerate(answers) if isinstance(answer, Refusal)}
        tokens = [[] if isinstance(answer, Refusal) else answer for answer in answers]
        return with_texts(input_ids.cpu(), tokens, pad_token_id)

    def calls(self, tokens: NDArray[np.int64], batch_tokens: int) -> Sequence[NDArray[np.int64]]:
        """See `TextGenerator.calls`; the server divides its memory itself."""
        import numpy as np

        return np.array_split(np.arange(len(tokens)), max(1, -(-len(tokens) // ROWS)))

    def check(self, model: PreTrainedModel, sample: Sequence[Batch]) -> None:
        """Compare the server's next tokens with the model's. NotAvailable if they differ, or if the server rejects a
        request or returns no token ids; StageErrors of `generate`.
        """
        import torch

        rows = _shortest_rows(sample)
        equal = 0
        for row in rows:
            with torch.inference_mode():
                logits = cast(Any, model)(input_ids=row[None]).logits[0, -1]
            answer = self._tried(self._body(row.tolist(), [], _ONE_TOKEN))
            if isinstance(answer, Refusal):
                raise NotAvailable(f"{self.url} rejects a row: {answer.message}")
            self._probe = row.tolist()
            equal += answer[:1] == [int(logits.argmax())]
        if equal < CHECKED_SHARE * len(rows):
            raise NotAvailable(
                f"the model {self.name} of {self.url} continues {equal} of {len(rows)} rows as the job's model does: "
                "it seems to be another one"
            )

    @classmethod
    def of(cls, url: str, model: PreTrainedModel) -> TextServer:
        """Return the model of the server; NotAvailable if it has several, and none by the name of `model`."""
        made = cls(url, "", model.config, model.generation_config, cast(Any, model).device)
        listed = made._retried("/v1/models", None)
        entries = [
            item for item in _items(listed, "data") if isinstance(item.get("id"), str) and not item.get("parent")
        ]
        matching = [entry for entry in entries if model.name_or_path in (entry["id"], entry.get("root"))]
        chosen = entries if len(entries) == 1 else matching
        if len(chosen) != 1:
            names = ", ".join(str(entry["id"])[:80] for entry in entries[:5]) or "none"
            raise NotAvailable(f"{url} has the models {names}; start it with the job's model alone")
        made.name = chosen[0]["id"]
        return made

    # ----------------------------------------------------------------------------------------------------- requests

    def _body(self, prompt: Sequence[int], ends: Sequence[int], settings: Mapping[str, Any]) -> dict[str, Any]:
        ending = {"stop_token_ids": list(ends)} if ends else {}
        return {"model": self.name, "prompt": list(prompt), "return_token_ids": True, **ending, **settings}

    def _all(self, bodies: Sequence[Mapping[str, Any]]) -> list[list[int] | Refusal]:
        over = threading.Event()
        self._answered = time.monotonic()
        with ThreadPoolExecutor(max(1, min(REQUESTS, len(bodies)))) as threads:
            running = [threads.submit(self._tried, body, over) for body in bodies]
            try:
                return [future.result() for future in running]
            finally:  # the other requests end with the first error
                over.set()
                threads.shutdown(wait=False, cancel_futures=True)

    def _tried(self, body: Mapping[str, Any], over: threading.Event | None = None) -> list[int] | Refusal:
        """Return the tokens of one text, or the reason why the row has none; repeats the request while the server is
        away. NotAvailable if an answer has no token ids.
        """
        try:
            answer = self._retried("/v1/completions", body, over)
        except _RowError as error:
            return Refusal("ServerRefusedRow", str(error))
        choices = _items(answer, "choices")
        tokens = choices[0].get("token_ids") if choices else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise NotAvailable(f"{self.url} returns no token ids (return_token_ids), as vLLM does from 0.10.2 on")
        ended = choices[0].get("stop_reason")
        # An end token that vLLM leaves out, as transformers keeps it.
        return [*tokens, ended] if isinstance(ended, int) and tokens[-1:] != [ended] else tokens

    def _retried(self, path: str, body: Mapping[str, Any] | None, over: threading.Event | None = None) -> Any:
        waits, errors = FIRST_WAIT_SECONDS, 0
        over = over or threading.Event()
        while True:
            try:
                answer = self._once(path, body)
            except _ServerError as error:
                errors += not error.busy
                if errors >= TRIES and self._answers_another():
                    raise _RowError(f"the server fails for this row and answers others: {error}") from error
                if time.monotonic() - self._answered > OUTAGE_SECONDS:
                    raise ServerUnavailableError(self.url, str(error)) from error
                if over.wait(waits):
                    raise ServerUnavailableError(self.url, str(error)) from error
                waits = min(MOST_WAIT_SECONDS, 2 * waits)
            else:
                self._answered = time.monotonic()
                return answer

    def _answers_another(self) -> bool:
        if not self._probe:
            return False
        try:
            self._once("/v1/completions", self._body(self._probe, [], _ONE_TOKEN))
        except (_RowError, _ServerError):
            return False
        self._answered = time.monotonic()
        return True

    def _once(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, headers)
        if key := os.environ.get(ENV_KEY):  # for this server alone, not for one that it redirects to
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=READ_SECONDS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            message = f"status {error.code}: {_reason(error)}"
            if error.code in _ACCESS_STATUSES:
                raise StageError(
                    FailureClass.CONFIG,
                    "ServerRefused",
                    f"predict.server {self.url} answers {path} with {message}",
                    f"Correct predict.server, or the token in the variable {ENV_KEY} (template.env).",
                ) from error
            if error.code in _ROW_STATUSES:
                raise _RowError(message) from error
            raise _ServerError(message, busy=error.code in _BUSY_STATUSES) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise _ServerError(str(why), busy=True) from error


@dataclass(frozen=True)
class TextServerBackend:
    """Texts of an OpenAI-compatible server that has the model."""

    url: str | None = None
    """None: the job names no server."""
    name: str = "vllm"
    lossy: bool = True

    def unavailable(self, model: PreTrainedModel, machine: Machine) -> str | None:
        """Return the reason if the job names no server."""
        if self.url is not None:
            return None
        return "predict.server names no server, and the image has no vLLM, which pins other versions of torch"

    def prepare(self, model: PreTrainedModel, sample: Sequence[Batch], folder: Path) -> TextServer:
        """Return the model of the server once it is known to be the job's; StageError `ServerUnavailable`."""
        assert self.url is not None
        server = TextServer.of(self.url.rstrip("/").removesuffix("/v1"), model)
        server.check(model, sample)
        return server


VLLM = TextServerBackend()


def _shortest_rows(sample: Sequence[Batch]) -> list[torch.Tensor]:
    """Return the token ids of the shortest rows of the sample, without padding."""
    rows = [
        ids[mask.bool()]
        for batch in sample
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    return sorted(rows, key=len)[:CHECKED_ROWS]


def _items(answer: Any, name: str) -> list[dict[str, Any]]:
    """Return the objects of a list in an answer; empty if it has none."""
    items = answer.get(name) if isinstance(answer, dict) else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the message of an error in OpenAI's form, else its first characters."""
    try:
        text = error.read(4096).decode(errors="replace")
    except OSError:
        return str(error.reason)
    try:
        content = json.loads(text)
    except ValueError:
        return text.strip()[:160] or str(error.reason)
    inner = content.get("error", content) if isinstance(content, dict) else content
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:160]

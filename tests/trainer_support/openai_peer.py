"""A small server with the part of vLLM's OpenAI API that the backend `vllm` uses: token ids in, token ids out. Texts
are those of transformers' `generate`, one prompt at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = Callable[[Mapping[str, Any]], "tuple[int, object] | None"]


@dataclass
class OpenAIPeer:
    """Settings of the server, and the requests that it got."""

    model: Any
    name: str = "served"
    key: str | None = None
    fault: Fault = lambda _body: None
    """Status and answer in place of a completion; None: none."""
    others: tuple[str, ...] = ()
    """Names of further models that it lists."""
    returns_ids: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def listed(self) -> object:
        names = (self.name, *self.others)
        return {"object": "list", "data": [{"id": name, "object": "model", "root": name} for name in names]}

    def completed(self, body: Mapping[str, Any]) -> tuple[int, object]:
        """Return status and answer, in the form of vLLM 0.10.2 and later."""
        import torch

        with self._turn:
            self.requests.append(dict(body))
            found = self.fault(body)
            if found is not None:
                return found
            ids = torch.tensor([body["prompt"]])
            drawn = body["temperature"] > 0
            if drawn:
                torch.manual_seed(body["seed"])
            sampling = {"temperature": body["temperature"], "top_p": body["top_p"]} if drawn else {}
            written = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=body["max_tokens"],
                eos_token_id=body.get("stop_token_ids"), pad_token_id=0, do_sample=drawn, **sampling,
            )[0, ids.shape[1] :].tolist()  # fmt: skip
        # Of the tokens that end a text, vLLM shows its model's own one, and others as the reason only.
        stop = written[-1] if written[-1:] and written[-1] in body.get("stop_token_ids", ()) else None
        choice = {"index": 0, "text": "", "finish_reason": "length" if stop is None else "stop", "stop_reason": stop}
        shown = written[:-1] if stop is not None else written
        return 200, {"choices": [{**choice, **({"token_ids": shown} if self.returns_ids else {})}]}


def peer_of(folder: Path, **settings: Any) -> OpenAIPeer:
    """Return a server of the model in `folder`."""
    from transformers import AutoModelForCausalLM

    return OpenAIPeer(AutoModelForCausalLM.from_pretrained(folder).eval(), **settings)


@contextmanager
def listening(peer: OpenAIPeer, port: int = 0) -> Iterator[str]:
    """Run the server, and yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def do_GET(self) -> None:
            self._send(200, peer.listed())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if peer.key is not None and self.headers.get("Authorization") != f"Bearer {peer.key}":
                self._send(401, {"error": {"message": "Unauthorized"}})
                return
            self._send(*peer.completed(body))

        def _send(self, status: int, answer: object) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    class Server(ThreadingHTTPServer):
        request_queue_size = 128
        daemon_threads = True

    with Server(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()

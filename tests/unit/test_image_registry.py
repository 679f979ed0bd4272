"""Existence of images, asked from registries that speak the distribution API."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from finetune_operator.cli.local.image_registry import image_state

IMAGES = {"/v2/team/trainer/manifests/1", "/v2/trainer/manifests/latest", "/v2/team/trainer/manifests/sha256:ab"}


class Registry(BaseHTTPRequestHandler):
    """Answers as a registry does: 404 for an unknown manifest, 401 for a private repository."""

    def do_HEAD(self) -> None:
        private = self.path.startswith("/v2/private/")
        code = 401 if private else 200 if self.path in IMAGES and "oci.image.index" in self.headers["Accept"] else 404
        self.send_response(code)
        if private:
            self.send_header("WWW-Authenticate", 'Basic realm="registry"')
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """Yield the address of a registry without TLS, which engines allow on this machine alone."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("image", "state", "reason"),
    [
        ("{host}/team/trainer:1", "there", ""),
        ("{host}/trainer", "there", ""),
        ("{host}/team/trainer:2@sha256:ab", "there", ""),
        ("{host}/team/trainer:2", "absent", ""),
        ("{host}/private/trainer:1", None, "{host} requires credentials"),
        ("127.0.0.1:1/trainer:1", None, "127.0.0.1:1 cannot be reached from here (connection refused)"),
        ("finetune-trainer:0.1.0", None, "it names no registry"),
    ],
)
def test_registry_is_asked_for_the_manifest(host: str, image: str, state: str | None, reason: str) -> None:
    assert image_state(image.format(host=host)) == (state, reason.format(host=host))

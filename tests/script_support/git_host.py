"""A git host for programs of this machine: real repositories over real HTTPS.

They fetch from `https://git.example.com/NAME`. The host is also their configured proxy, so that name needs neither DNS
nor port 443 of this machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path

from cluster_support import self_signed
from script_support.git_server import Repositories, handler

HOST = "git.example.com"


@dataclass(frozen=True)
class GitHost(Repositories):
    """A running host."""

    port: int = 0
    certificate: Path = Path()

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a process that finds the host by its name."""
        return {"https_proxy": f"http://127.0.0.1:{self.port}", "GIT_SSL_CAINFO": str(self.certificate)}

    def url(self, repository: str) -> str:
        return f"https://{HOST}/{repository}"


@contextmanager
def git_host(folder: Path) -> Iterator[GitHost]:
    """Run a host without repositories, in a new folder."""
    (folder / "repositories").mkdir(parents=True)
    pair = self_signed.for_hosts(folder, "git", names=(HOST,))
    served = Repositories(folder / "repositories")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(served, pair.server_context)) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield GitHost(served.folder, served.requests, served.answers, server.server_port, pair.certificate)
        server.shutdown()

"""Serves git repositories over HTTPS by git's own http-backend. Standard library only: it also runs alone, in a pod.

`python git_server.py --port 8443 --certificate FILE --key FILE --commit REPOSITORY=FOLDER ...` creates a
repository of one commit on main from each folder and serves them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

IDENTITY = {
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.com",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}


@dataclass(frozen=True)
class Repositories:
    """Served repositories, and the requests for them."""

    folder: Path
    requests: list[str] = field(default_factory=list)
    """`METHOD path` of each request, and `CONNECT host:port`."""
    answers: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    """Repository -> status and headers of an answer that replaces git's."""

    def commit(self, repository: str, files: Mapping[str, str], *, tag: str = "", branch: str = "main") -> str:
        """Add a commit with only `files`; a value that begins with `-> ` is a link to the rest of it."""
        place = self.folder / repository
        if not place.exists():
            git(self.folder, "init", "--quiet", f"--initial-branch={branch}", repository)
        elif branch not in git(place, "branch", "--format=%(refname:short)").split():
            git(place, "checkout", "--quiet", "-b", branch)
        else:
            git(place, "checkout", "--quiet", branch)
        if (place / ".git" / "index").exists():
            git(place, "rm", "-r", "--quiet", "--ignore-unmatch", ".")
        for name, text in files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("-> "):
                path.symlink_to(text.removeprefix("-> "))
            else:
                path.write_text(text, encoding="utf-8")
        git(place, "add", "--all")
        git(place, "commit", "--quiet", "--allow-empty", "--message", "Another one")
        if tag:
            git(place, "tag", tag)
        return git(place, "rev-parse", "HEAD").strip()


def git(folder: Path, *arguments: str) -> str:
    """Run git without any user's configuration; return its output."""
    ours = {**os.environ, **IDENTITY}
    return subprocess.run(["git", *arguments], cwd=folder, env=ours, capture_output=True, text=True, check=True).stdout


def handler(repositories: Repositories, tls: Callable[[], ssl.SSLContext]) -> type[BaseHTTPRequestHandler]:
    """Return a handler of requests for repositories. After CONNECT to any host it speaks TLS as that host on the same
    connection, so a client with this proxy finds it by any name.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_CONNECT(self) -> None:
            repositories.requests.append(f"CONNECT {self.path}")
            self.send_response(200)
            self.end_headers()
            self.wfile.flush()
            try:
                self.connection = tls().wrap_socket(self.connection, server_side=True)
            except OSError:
                self.close_connection = True
                return
            self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb")
            self.close_connection = False

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        def _answer(self, body: bytes) -> None:
            repositories.requests.append(f"{self.command} {self.path}")
            path, _, query = self.path.partition("?")
            status, headers = repositories.answers.get(path.split("/")[1], (0, {}))
            output = b""
            if not status:
                head, _, output = _backend(repositories.folder, self, path, query, body).partition(b"\r\n\r\n")
                headers = dict(line.split(": ", 1) for line in head.decode().splitlines())
                status = int(headers.pop("Status", "200").split()[0])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(output)))
            self.end_headers()
            self.wfile.write(output)
            self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: requests are recorded in `requests`."""

    return Handler


def _backend(root: Path, request: BaseHTTPRequestHandler, path: str, query: str, body: bytes) -> bytes:
    """Return the answer of git's CGI program. A repository is its working copy's `.git`."""
    name, _, rest = path.strip("/").partition("/")
    environment = {
        **os.environ,
        **IDENTITY,
        "GIT_PROJECT_ROOT": str(root),
        "GIT_HTTP_EXPORT_ALL": "1",
        "PATH_INFO": f"/{name}/.git/{rest}",
        "QUERY_STRING": query,
        "REQUEST_METHOD": request.command,
        "CONTENT_TYPE": request.headers.get("Content-Type", ""),
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding", ""),
        "GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
    }
    # It also ends with an error if its answer is "not found".
    return subprocess.run(["git", "http-backend"], env=environment, input=body, capture_output=True, check=False).stdout


def main() -> None:
    """Serve HTTPS until the process ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--certificate", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--commit", action="append", default=[], metavar="REPOSITORY=FOLDER")
    options = parser.parse_args()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options.certificate, options.key)
    repositories = Repositories(Path(tempfile.mkdtemp()))
    for entry in options.commit:
        name, _, folder = entry.partition("=")
        files = {path.name: path.read_text() for path in Path(folder).iterdir() if path.is_file()}
        print(name, repositories.commit(name, files), flush=True)
    server = ThreadingHTTPServer(("0.0.0.0", options.port), handler(repositories, lambda: context))
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    try:
        server.serve_forever()
    finally:
        shutil.rmtree(repositories.folder)


if __name__ == "__main__":
    main()

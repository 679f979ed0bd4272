"""A stand-in for the Hugging Face Hub: just what the Hub's own clients need to fetch a model or a data set, public or
private.

It needs nothing but the standard library, so that it runs in a pod of the trainer's image, from one file. What the
client looks at is as the Hub has it: the status, `X-Error-Code`, `X-Error-Message`, `X-Repo-Commit` and `ETag`. Uploads
and large-file storage are not here. A token is compared, never logged.

  python hub_server.py --port 8080 --public org/name=FOLDER --private org/name=FOLDER

HUB_TOKEN opens the private ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

API = re.compile(
    r"^/api/(?:models|datasets)/(?P<name>[^/]+/[^/]+)(?:/(?P<what>revision|tree|paths-info)/(?P<revision>[^/]+)(?P<folder>/.*)?)?$"
)
FILE = re.compile(r"^/(?:datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)$")
BRANCH = "main"


@dataclass(frozen=True)
class Repository:
    """A model or a data set: a folder of files, at the one commit that there is."""

    name: str
    folder: Path
    private: bool

    @property
    def commit(self) -> str:
        """40 hexadecimal digits, the same for the same files."""
        listed = "".join(f"{path} {digest(self.folder / path)}\n" for path in self.files)
        return hashlib.sha1(listed.encode(), usedforsecurity=False).hexdigest()

    @property
    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())


def digest(file: Path) -> str:
    """The ETag of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Refusal(Exception):  # noqa: N818 - an answer, not a defect
    """An answer other than 200, with the words that the Hub puts into its headers."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Hub(ThreadingHTTPServer):
    """Serves repositories; `token` opens those that are private."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], repositories: Mapping[str, Repository], token: str | None) -> None:
        self.repositories, self.token = repositories, token
        super().__init__(address, Handler)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        """Answer which of some paths are files."""
        self._answer(body=True, asked=parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()))

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *arguments: object) -> None:
        """Method, path and status. Headers, which hold the token, are never written."""
        print(format % arguments, flush=True)

    def _answer(self, body: bool, asked: Mapping[str, list[str]] | None = None) -> None:
        try:
            headers, content = self._find(unquote(urlsplit(self.path).path), (asked or {}).get("paths", []))
            status = 200
        except Refusal as refusal:
            headers, content, status = {"X-Error-Message": refusal.message}, b"", refusal.status
            if refusal.code is not None:
                headers["X-Error-Code"] = refusal.code
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _find(self, path: str, asked: Sequence[str]) -> tuple[dict[str, str], bytes]:
        if found := FILE.match(path):
            return self._file(self._repository(found["name"], found["revision"]), found["path"])
        if found := API.match(path):
            repository = self._repository(found["name"], found["revision"] or BRANCH)
            if found["what"] == "paths-info":
                return _json([entry for entry in _tree(repository, "") if entry["path"] in asked])
            if found["what"] == "tree":
                return _json(_tree(repository, (found["folder"] or "").strip("/")))
            siblings = [{"rfilename": file} for file in repository.files]
            about = {"id": repository.name, "sha": repository.commit, "private": repository.private}
            return _json({**about, "siblings": siblings})
        raise Refusal(404, None, "Not found")

    def _repository(self, name: str, revision: str) -> Repository:
        """Return the repository; like the Hub, answer 404 to clients without access, and refuse unknown tokens."""
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        if given is not None and given != self.server.token:
            raise Refusal(401, None, "Invalid credentials in Authorization header")
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and given is None):
            raise Refusal(404 if given else 401, "RepoNotFound", "Repository not found")
        if revision not in (BRANCH, repository.commit):
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository

    @staticmethod
    def _file(repository: Repository, path: str) -> tuple[dict[str, str], bytes]:
        commit = {"X-Repo-Commit": repository.commit}
        if path not in repository.files:
            raise Refusal(404, "EntryNotFound", "Entry not found")
        file = repository.folder / path
        return {**commit, "ETag": f'"{digest(file)}"', "Content-Type": "application/octet-stream"}, file.read_bytes()


def _json(value: object) -> tuple[dict[str, str], bytes]:
    return {"Content-Type": "application/json"}, json.dumps(value).encode()


def _tree(repository: Repository, folder: str) -> list[dict[str, object]]:
    inside = [file for file in repository.files if not folder or file.startswith(f"{folder}/")]
    if folder and not inside:
        raise Refusal(404, "EntryNotFound", f"{folder} does not exist")
    return [
        {"type": "file", "path": file, "size": (repository.folder / file).stat().st_size, "oid": "0" * 40}
        for file in inside
    ]


def repositories(public: list[str], private: list[str]) -> dict[str, Repository]:
    """By name, from `org/name=folder`."""
    found = {}
    for given, closed in ((public, False), (private, True)):
        for entry in given:
            name, _, folder = entry.partition("=")
            found[name] = Repository(name, Path(folder), closed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="A stand-in for the Hugging Face Hub.")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--public", action="append", default=[], metavar="ORG/NAME=FOLDER")
    parser.add_argument("--private", action="append", default=[], metavar="ORG/NAME=FOLDER")
    options = parser.parse_args()
    with Hub(("", options.port), repositories(options.public, options.private), os.environ.get("HUB_TOKEN")) as hub:
        hub.serve_forever()


if __name__ == "__main__":
    main()

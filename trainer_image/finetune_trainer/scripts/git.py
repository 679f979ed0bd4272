"""One commit of a git repository, fetched over HTTPS.

git is called with an argument vector and an environment of its own: no shell, no prompt, no protocol but HTTPS, no
redirect to another host, no submodule, no hook, and no configuration of the user. The operator decides which hosts are
allowed. Large files (LFS) stay the pointers in the repository. git reports failures as text only; they are classified
here by that text, in English in any locale.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError, first_of

_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "credential.helper": "",
    "fetch.recurseSubmodules": "false",
    # An allowed host could redirect to one that is not.
    "http.followRedirects": "false",
    # Below 1 kB/s for a minute: the connection is dead, and the fetch fails.
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "submodule.recurse": "false",
}
_PASSED_ON = (
    *("GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "SSL_CERT_FILE", "PATH"),
    *("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"),
)
"""Places of certificates, and proxies; every other GIT_* variable would change the fetched content."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_REF = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|^[-+/.]|[/.]$|\.lock$|//")
"""Pattern of invalid names of branches, tags and commits (git-check-ref-format), and of options and refspecs."""
_SHOWN = 12


@dataclass(frozen=True)
class Rule:
    """Failure that a pattern in git's output stands for."""

    pattern: re.Pattern[str]
    failure_class: FailureClass
    reason: str
    hint: str


def _rule(pattern: str, failure_class: FailureClass, reason: str, hint: str) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), failure_class, reason, hint)


_REF_MISSING = re.compile(r"couldn't find remote ref|not our ref|unadvertised object", re.IGNORECASE)
_RULES = (
    _rule(
        r"certificate|CAfile",
        FailureClass.CONFIG,
        "GitCertificate",
        "For a private certificate authority, mount its certificate and set GIT_SSL_CAINFO in template.env to its "
        "path.",
    ),
    _rule(
        r"returned error: 30\d|redirect",
        FailureClass.CONFIG,
        "GitRedirect",
        "Redirects are not followed, since they could lead to another host: use the target address, often the same "
        "with .git at its end.",
    ),
    _rule(
        r"Authentication failed|could not read Username|terminal prompts disabled|returned error: 40[13]",
        FailureClass.CONFIG,
        "GitNotOpen",
        "Only public repositories can be fetched; check the address, or make the repository public.",
    ),
    _rule(
        r"returned error: 404|repository .* not found|does not appear to be a git repository",
        FailureClass.CONFIG,
        "GitRepositoryNotFound",
        "Check training.script.git.url.",
    ),
    _rule(
        r"does not support shallow",
        FailureClass.CONFIG,
        "GitServerTooOld",
        "The server must support git's smart protocol, as git-http-backend and all git hosts do.",
    ),
    _rule(
        r"No space left on device|Disk quota exceeded",
        FailureClass.STORAGE_FULL,
        "NoSpaceLeft",
        "Free space or enlarge the workspace.",
    ),
)


def fetch(url: str, ref: str, target: Path) -> str:
    """Write the files of `ref` into the empty folder `target` and return the commit.

    StageError CONFIG for an address, a reference or an answer that a retry would not change, STORAGE_FULL, and
    CODE_UNAVAILABLE for the rest.
    """
    if not url.startswith("https://"):
        message = f"training.script.git.url is {url!r}; code is fetched over https:// only."
        raise StageError(FailureClass.CONFIG, "BadUri", message, "Name the repository by its HTTPS address.")
    if _NO_REF.search(ref):
        message = f"training.script.git.ref is {ref!r}, which is not a name of a branch, tag or commit."
        raise StageError(FailureClass.CONFIG, "GitRefNotFound", message, "Use one of the repository.")
    if shutil.which("git") is None:
        message = "training.script is fetched with git, and git is not installed here."
        raise StageError(FailureClass.CONFIG, "GitMissing", message, "Use an image with git.")
    with tempfile.TemporaryDirectory(prefix="finetune-git-") as scratch:
        repository = _Repository(Path(scratch), target.absolute())
        repository.run("init", "--quiet", "--template=", "--initial-branch=main", f"{scratch}/git")
        fetched = repository.try_to("fetch", "--quiet", "--depth=1", "--no-tags", "--", url, ref)
        if fetched.returncode:
            raise _failed(repository, url, ref, fetched.stderr)
        commit = repository.run("rev-parse", "--verify", "FETCH_HEAD^{commit}").strip()
        repository.run("checkout", "--quiet", "--detach", commit)
    return commit


@dataclass(frozen=True)
class _Repository:
    """A repository with its own files in `scratch` and its work tree in `target`."""

    scratch: Path
    target: Path

    def try_to(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        settings = [argument for name, value in _SETTINGS.items() for argument in ("-c", f"{name}={value}")]
        return subprocess.run(
            ["git", *settings, *arguments],
            env=self._environment(os.environ),
            cwd=self.target,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )

    def run(self, *arguments: str) -> str:
        """Run git and return its output; StageError if it fails."""
        done = self.try_to(*arguments)
        if done.returncode:
            raise _git_error(f"git {arguments[0]} failed", done.stderr)
        return done.stdout

    def _environment(self, base: Mapping[str, str]) -> dict[str, str]:
        passed = {name: base[name] for name in _PASSED_ON if name in base}
        return passed | {
            "GIT_ALLOW_PROTOCOL": "https",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_DIR": str(self.scratch / "git"),
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_WORK_TREE": str(self.target),
            "HOME": str(self.scratch),
            "LC_ALL": "C",
        }


def _failed(repository: _Repository, url: str, ref: str, stderr: str) -> StageError:
    if not _REF_MISSING.search(stderr):
        return _git_error(f"training.script.git.url {url} cannot be fetched", stderr)
    listed = repository.try_to("ls-remote", "--quiet", "--heads", "--tags", "--refs", "--", url)
    names = [line.partition("\trefs/")[2].partition("/")[2] for line in listed.stdout.splitlines()]
    near = difflib.get_close_matches(ref, names, n=1)
    whole = "" if _COMMIT.fullmatch(ref) else "; a commit needs all its 40 digits"
    return StageError(
        FailureClass.CONFIG,
        "GitRefNotFound",
        f"training.script.git.ref is {ref!r}, and {url} has no such branch, tag or commit. "
        f"It has {first_of(names, _SHOWN)}.",
        f"Did you mean {near[0]}?" if near else f"Use one of them{whole}.",
    )


def _git_error(subject: str, stderr: str) -> StageError:
    """Classify git's output; an unknown failure counts as temporary, and its restarts are counted."""
    text = " ".join(line.removeprefix("fatal: ").removeprefix("error: ") for line in stderr.split("\n") if line.strip())
    for rule in _RULES:
        if rule.pattern.search(stderr):
            return StageError(rule.failure_class, rule.reason, f"{subject}: {text}", rule.hint)
    return StageError(
        FailureClass.CODE_UNAVAILABLE, "GitFailed", f"{subject}: {text}", "Check that the host responds, and try again."
    )

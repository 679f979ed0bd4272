"""Location on this machine of a URI in a job file.

Supports `file://` and `pkg://package/folder`, a folder inside an installed package. It never imports the package: a job
file must not run code by naming it. The finetune command makes relative `file://` paths absolute, counted from the job
file's folder; one that still is relative here counts from the current directory.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from finetune_contract.hub import is_hub_name
from finetune_contract.layout import FailureClass
from finetune_trainer.core.failures import StageError


@dataclass(frozen=True)
class Uri:
    """A URI split at its scheme. The rest is kept as written: file names may hold `%`, `?` and `#`."""

    text: str
    scheme: str
    rest: str

    @classmethod
    def parse(cls, text: str, field: str) -> Uri:
        """Split `text`, the value of `field`; raise StageError CONFIG `BadUri` when it has no scheme or no path."""
        scheme, separator, rest = text.partition("://")
        if not separator or not scheme or not rest.strip("/"):
            raise StageError(
                FailureClass.CONFIG,
                "BadUri",
                f"{field} is {text!r}, which is not a URI with a scheme and a path.",
                "Write hf://org/name, file:///absolute/path, file://relative/path or pkg://package/folder.",
            )
        return cls(text, scheme.lower(), rest)


def hub_name(name: str, uri: Uri, field: str) -> str:
    """Return the repository `name`, or `organisation/name`, of an `hf://` URI.

    Libraries look for a folder of that name first: raise StageError CONFIG `BadHubName` for a name that could lead
    elsewhere, and `HubNameIsFolder` where such a folder exists, whose code and weights were not requested.
    """
    if not is_hub_name(name):
        raise StageError(
            FailureClass.CONFIG,
            "BadHubName",
            f"{field} is {uri.text!r}, which is not a name of a repository on the Hub.",
            "Write hf://name or hf://organisation/name, each of letters, digits, -, _ and ., without -- and ...",
        )
    if Path(name).exists():
        raise StageError(
            FailureClass.CONFIG,
            "HubNameIsFolder",
            f"{field} is {uri.text!r}, and {Path(name).absolute()} exists, which would be used in its place.",
            f"Write file://{name} if you mean it; otherwise rename it, or run in another folder.",
        )
    return name


def local_path(uri: Uri) -> Path:
    """Return the path of a `file://` URI."""
    return Path(uri.rest)


def package_path(uri: Uri, field: str, failure_class: FailureClass, reason: str) -> Path:
    """Return the path of a `pkg://package/folder` URI.

    Raise StageError `failure_class`/`reason` when the package is not installed or the folder leads out of it.
    """
    package, _, inner = uri.rest.partition("/")
    # find_spec imports the parents of a dotted name, so only top-level names are looked up.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise StageError(
            failure_class,
            reason,
            f"{field} is {uri.text!r}, but no package {package!r} is installed in this environment.",
            f"Install the distribution that holds {package!r}, or use file:// or hf://.",
        )
    if ".." in PurePosixPath(inner).parts:
        raise StageError(
            failure_class,
            reason,
            f"{field} is {uri.text!r}, which leads out of its package.",
            "Use a folder inside the package.",
        )
    return Path(next(iter(spec.submodule_search_locations))) / inner


def public_uri(uri: str) -> str:
    """Return the URI, or the last part of a local path: results are shared, and must not name local folders."""
    return uri.rstrip("/").rpartition("/")[2] if uri.startswith("file://") else uri

"""URIs of models and data sets behind addresses, paths and names in other forms."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import JsonValue

from finetune_contract.hub import is_hub_name
from finetune_operator.spec.fields.shapes import Shape, Text
from finetune_operator.spec.hint_values import Drop, Hint, ReplaceBy, SetTo
from finetune_operator.spec.problems import holds_secret, is_secret_name
from finetune_operator.spec.types import URI_PATTERN

_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/?#]+/[^/?#]+|[^/?#]+)(?:[/?#].*)?"
)
_MISSPELT_HUB = re.compile(r"(?:hugging-?_?face|hub|hf):/{0,3}([^/:].*)", re.IGNORECASE)
_SCHEME = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>/*)(?P<rest>[^\s/].*)")
"""URI of any scheme; a drive of Windows has one letter."""
_OWN_SCHEMES = ("hf", "file", "pkg", "pvc")
_NAMED_BY = {
    "hf://": "hf:// before the name of a Hub repository", "file://": "file:// before a path",
    "pvc://": "pvc:// before the name of a claim",
}  # fmt: skip
_FORMS = {"hf://": "hf://ORG/NAME", "file://": "file://PATH", "pvc://": "pvc://CLAIM/PATH"}
_REVISION = re.compile(r"([^@?#]+)(?:@([\w./-]*\w)|\?revision=([\w./-]*\w))(?:[#&].*)?")
CLAIM = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
DATA_ENDING = re.compile(r"\.(jsonl?|csv|tsv|txt|parquet|arrow)(\.(gz|zst|bz2|xz))?$")
"""Ending of a file with rows."""
_FILE = re.compile(
    r"(?:(?:\.{0,2}|~)/.*|.*\.(?:csv|tsv|txt|jsonl?|parquet|arrow|gz|zst|bz2|xz|safetensors)|.*\*.*|.*/)"
)


def on_hub(data: JsonValue) -> bool:
    """Return True if data at this URI are read from the Hub, as far as its form shows."""
    uri = data if isinstance(data, str) and "://" in data else as_uri(data)
    return uri is not None and uri.startswith("hf://")


def rows_in_files(role: str, data: JsonValue) -> Drop:
    """Return the hint for a fraction of rows in place of a split's file; `data`: the URI of the data.

    Files have no slices: rows are held out by writing them to files that are named as the splits.
    """
    ending = DATA_ENDING.search(data) if isinstance(data, str) else None
    of = ending[0] if ending is not None else ".csv"
    files = f"write the rows to train{of}, validation{of} and test{of} of a folder that spec.dataset.uri names"
    return Drop(f"5 % of train are held out; for another fraction, {files}" if role == "validation" else files)


def windows_path_hint(path: str) -> ReplaceBy:
    """Return the hint for a path that begins with a drive of Windows."""
    rest = path[2:].replace("\\", "/")
    return ReplaceBy(f"file:///mnt/{path[0].lower()}{rest}", "for WSL, or another path of this machine")


def _content_at(path: str) -> str:
    """Return the noun for what the URI of the field at the dotted path names; empty for a place to write to."""
    return "model" if path.endswith("model.uri") else "data" if path.endswith("dataset.uri") else ""


def copy_hint(path: str, prefixes: Sequence[str]) -> str:
    """Return the hint for a URI at a store that no stage reaches, in a field whose URIs begin with `prefixes`."""
    forms, content = listed([_FORMS[prefix] for prefix in prefixes if prefix in _FORMS]), _content_at(path)
    if not forms:
        return "leave it out"
    return f"copy the {content}, and write {forms}" if content else f"write {forms}"


def one_machine(path: str) -> str:
    """Return the rule that a path of this machine breaks in a cluster, at the field of the dotted path."""
    return "is a path of one machine, which pods cannot " + ("read" if _content_at(path) else "write to")


def uri_hint(path: str, value: JsonValue, prefixes: Sequence[str]) -> Hint:
    """Return the hint for a value that is no URI, at the field of the dotted path, whose URIs begin with one of
    `prefixes`.
    """
    uri, content = as_uri(value), _content_at(path)
    text = value if isinstance(value, str) else ""
    if uri is not None and uri.startswith(tuple(prefixes)):
        return ReplaceBy(uri)
    if re.match(r"[A-Za-z]:[\\/]", text):
        return windows_path_hint(text)
    claim = re.fullmatch(r"(?:pvc:/*)?(?P<name>[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:/.*)?)", text)
    if claim is not None and "pvc://" in prefixes and ("/" not in claim["name"] or text.startswith("pvc:")):
        return ReplaceBy(f"pvc://{claim['name']}")
    match = _SCHEME.match(text) if "/" in text else None
    if match is not None and match["name"].lower() not in _OWN_SCHEMES:
        scheme = f"{match['name']}:{'//' * ('/' in match['slashes'])}"
        return f"{copy_hint(path, prefixes)}: {scheme} is not supported in this version"
    if uri is not None and uri.startswith("file://") and "pvc://" in prefixes:
        copied = f"copy the {content} to a claim, and " if content else ""
        return f"{copied}write pvc://CLAIM/PATH: it {one_machine(path)}"
    named = [_NAMED_BY[prefix] for prefix in prefixes if prefix in _NAMED_BY]
    return f"write {', '.join(named)}" if named else f"begin it with {listed(prefixes)}"


def as_uri(value: JsonValue) -> str | None:
    """Return a Hub name, an address of the Hub or a path as a URI; None if it is ambiguous."""
    if not isinstance(value, str) or is_secret_name(value) or holds_secret(value):
        return None
    text = value.strip()
    if address := _HUB_ADDRESS.fullmatch(text):
        text = address[1]
    elif misspelt := _MISSPELT_HUB.fullmatch(text):
        text = misspelt[1].rstrip("/")
    elif scheme := _SCHEME.fullmatch(text):
        return _as_file(scheme["name"].lower(), len(scheme["slashes"]), scheme["rest"])
    elif "://" in text or not text or re.match(r"[A-Za-z]:[\\/]|pvc:", text):
        return None
    elif _FILE.fullmatch(text):
        return f"file://{text.removeprefix('./')}"
    return f"hf://{text}" if is_hub_name(text) and not _TABLE.fullmatch(text) else None


_TABLE = re.compile(r"(?:[A-Za-z_]\w*\.){2}[A-Za-z_]\w*")
"""Table of a catalogue: `main.support.chats`; no repository of the Hub without an organisation has two dots."""


_LOCAL_SLASHES = 2
"""Slashes of a `file://` URI before a relative path."""


def _as_file(scheme: str, slashes: int, rest: str) -> str | None:
    """Return the `file://` URI behind a path with another number of slashes; None: it is none."""
    if re.match(r"[A-Za-z]:", rest):
        return None
    if scheme != "file":
        return None
    return f"file://{rest}" if slashes in (0, _LOCAL_SLASHES) else f"file:///{rest}"


def hub_name_hint(path: str, name: str) -> Hint:
    """Return the hint for `hf://NAME` that is no repository: it holds an address, a configuration or a revision."""
    data, owner = path.endswith("dataset.uri"), path.rpartition(".")[0]

    def with_revision(repository: str, revision: str) -> Hint:
        uri = f"hf://{repository}"
        if revision == "main":
            return ReplaceBy(uri)
        return ReplaceBy(f"{uri}@{revision}") if data else SetTo({path: uri, f"{owner}.revision": revision})

    plain = re.sub("/{2,}", "/", re.sub(r"\?(?!revision=).*", "", name)).strip("/").removesuffix(".git")
    for prefix in ("models/", "datasets/"):
        plain = plain.removeprefix(prefix) if plain.count("/") > 1 else plain
    for nearest in (as_uri(name.rstrip("/")), as_uri(plain)):
        if nearest and nearest.startswith("hf://"):
            return ReplaceBy(nearest)
    if match := _REVISION.fullmatch(plain):
        repository, revision = match[1].rstrip("/"), match[2] or match[3]
        if is_hub_name(repository):
            return with_revision(repository, revision)
    named, mark, config = plain.partition(":")
    if not mark and plain.count("/") > 1:
        named, _, config = plain.rpartition("/")
    if data and config and is_hub_name(named) and not _FILE.fullmatch(config):
        return SetTo({path: f"hf://{named}", f"{owner}.config": config})
    return (
        "write hf://name or hf://organisation/name, each part of at most 96 letters, digits, -, _ and ., without -- "
        "and .."
    )


def is_uri(shape: Shape) -> bool:
    return isinstance(shape.body, Text) and shape.body.pattern == URI_PATTERN


def listed(prefixes: Sequence[str]) -> str:
    return f"{', '.join(prefixes[:-1])} or {prefixes[-1]}" if len(prefixes) > 1 else "".join(prefixes)

"""Image archives in OCI's layout: pack one with the same bytes each time, and list what differs between two.

A tar file of an image differs from the next one by times and order although the image in it is the same; `pack` leaves
both out. `compare` says for two archives, or for two folders of a release, what differs in them, down to the files of a
layer.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ARCHIVE_SUFFIX = ".oci.tar"
INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
CHUNK_BYTES = 1 << 20
MANY_TIMES = 20
"""More entries of a layer that differ in their time alone are counted, not listed: one setting is behind them."""


# ------------------------------------------------------------------------------------------------------------- packing


def pack(layout: Path, archive: Path) -> str:
    """Write the image in the folder `layout` to the file `archive`, and return the digest of its manifest.

    The archive holds what the index leads to and nothing else, sorted by name, with time 0 and no owner. Raise
    ValueError if the layout does not hold exactly one image.
    """
    index = json.loads((layout / "index.json").read_text(encoding="utf-8"))
    manifests = index["manifests"]
    if len(manifests) != 1:
        raise ValueError(f"{layout} holds {len(manifests)} images; an archive holds 1")
    blobs = sorted({_blob(digest) for digest in _reached(layout, manifests[0])})
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("oci-layout", "index.json", *blobs):
            entry = tarfile.TarInfo(name)
            entry.size = (layout / name).stat().st_size
            entry.mode = 0o644
            with (layout / name).open("rb") as content:
                tar.addfile(entry, content)
    return str(manifests[0]["digest"])


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _reached(layout: Path, descriptor: Mapping[str, object]) -> Iterator[str]:
    """Yield the digests of a manifest and of all that it refers to."""
    digest = str(descriptor["digest"])
    yield digest
    content = json.loads((layout / _blob(digest)).read_text(encoding="utf-8"))
    if descriptor.get("mediaType") in INDEX_TYPES:
        for manifest in content["manifests"]:
            yield from _reached(layout, manifest)
        return
    yield str(content["config"]["digest"])
    yield from (str(layer["digest"]) for layer in content["layers"])


# ----------------------------------------------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Member:
    """An entry of a layer, as far as two builds may differ in it."""

    kind: str
    mode: int
    owner: tuple[int, int]
    time: float
    link: str
    digest: str
    """SHA-256 of a file's content; empty for all other kinds."""

    def differences(self, other: Member) -> list[str]:
        """Return what differs: "content", "mode", and so on."""
        pairs = {
            "kind": (self.kind, other.kind),
            "mode": (self.mode, other.mode),
            "owner": (self.owner, other.owner),
            "time": (self.time, other.time),
            "link": (self.link, other.link),
            "content": (self.digest, other.digest),
        }
        return [what for what, (first, second) in pairs.items() if first != second]


class Archive:
    """An OCI archive of one image, open for reading."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        index = self._json("index.json")
        self.digest = str(index["manifests"][0]["digest"])
        self.manifest = self._json(_blob(self.digest))
        self.config = self._json(_blob(self.manifest["config"]["digest"]))
        self.layers = [str(layer["digest"]) for layer in self.manifest["layers"]]

    def _open(self, name: str) -> IO[bytes]:
        found = self._tar.extractfile(name)
        if found is None:
            raise ValueError(f"{self._tar.name!r} holds no file {name}")
        return found

    def _json(self, name: str) -> dict[str, Any]:
        return dict(json.load(self._open(name)))

    def members(self, layer: str) -> dict[str, Member]:
        """Return the entries of a layer by path."""
        content = self._open(_blob(layer))
        packed = content.read(2) == b"\x1f\x8b"
        content.seek(0)
        stream: IO[bytes] = gzip.GzipFile(fileobj=content) if packed else content  # type: ignore[assignment]
        found = {}
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for entry in tar:
                file = tar.extractfile(entry) if entry.isfile() else None
                found[entry.name] = Member(
                    entry.type.decode(),
                    entry.mode,
                    (entry.uid, entry.gid),
                    entry.mtime,
                    entry.linkname,
                    _digest(file) if file else "",
                )
        return found


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """Open an archive."""
    with tarfile.open(path) as tar:
        yield Archive(tar)


def compare_archives(first: Path, second: Path) -> list[str]:
    """Return a line for each difference of two images; none if their manifests are the same."""
    with opened(first) as one, opened(second) as other:
        if one.digest == other.digest:
            return []
        lines = [
            f"config: {key}"
            for key in sorted({*one.config, *other.config} - {"rootfs"})
            if one.config.get(key) != other.config.get(key)
        ]
        if len(one.layers) != len(other.layers):
            lines.append(f"layers: {len(one.layers)} and {len(other.layers)}")
        for number, (left, right) in enumerate(zip(one.layers, other.layers, strict=False), 1):
            if left != right:
                found = _member_differences(one.members(left), other.members(right))
                lines += [f"layer {number}: {line}" for line in found or ["same files in another order or packing"]]
        return lines or ["manifest"]


def _member_differences(first: Mapping[str, Member], second: Mapping[str, Member]) -> list[str]:
    """Return a line for each path, but one for all together that differ in their time alone, if there are many."""
    times = [path for path in first.keys() & second.keys() if first[path].differences(second[path]) == ["time"]]
    if len(times) > MANY_TIMES:
        others = [{path: each[path] for path in each.keys() - set(times)} for each in (first, second)]
        return [f"{len(times)} entries: time", *_member_differences(*others)]
    lines = []
    for path in sorted({*first, *second}):
        if path not in second:
            lines.append(f"{path}: in the first only")
        elif path not in first:
            lines.append(f"{path}: in the second only")
        elif found := first[path].differences(second[path]):
            lines.append(f"{path}: {', '.join(found)}")
    return lines


def compare(first: Path, second: Path) -> list[str]:
    """Return what differs between two archives, or between two folders file by file; archives are looked into."""
    if not first.is_dir():
        return compare_archives(first, second)
    lines = []
    names = sorted({path.name for folder in (first, second) for path in folder.iterdir() if path.is_file()})
    for name in names:
        pair = first / name, second / name
        absent = [str(path) for path in pair if not path.is_file()]
        if absent:
            lines.append(f"{name}: there is no {absent[0]}")
        elif _file_digest(pair[0]) != _file_digest(pair[1]):
            inside = compare_archives(*pair) if name.endswith(ARCHIVE_SUFFIX) else []
            lines += [f"{name}: {line}" for line in inside] or [f"{name}: content"]
    return lines


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return _digest(file)


def deterministic_gzip(content: bytes) -> bytes:
    """Return `content` packed by gzip, without a time or a name in the header."""
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0, filename="") as file:
        file.write(content)
    return packed.getvalue()


def main() -> int:
    """Pack or compare; return 1 if there is a difference."""
    parser = argparse.ArgumentParser(description="Packs an image's OCI layout, or lists what differs between two.")
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="print the manifest's digest")
    packing.add_argument("layout", type=Path)
    packing.add_argument("archive", type=Path)
    comparing = commands.add_parser("compare", help="of two archives, or two folders of a release")
    comparing.add_argument("first", type=Path)
    comparing.add_argument("second", type=Path)
    given = parser.parse_args()
    if given.command == "pack":
        print(pack(given.layout, given.archive))
        return 0
    lines = compare(given.first, given.second)
    print(*(lines or ["No difference."]), sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

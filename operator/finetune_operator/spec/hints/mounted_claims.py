"""Paths in volumes of pods, as URIs of the claims that the volumes hold."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from finetune_operator.spec.fields.field_values import Path, value_at
from finetune_operator.spec.fields.uri_hints import CLAIM
from finetune_operator.spec.hint_values import Hint, ReplaceBy

NO_CLAIM = "CLAIM"
"""Place of a claim's name in the URI of a path in a volume that is none."""


def on_claim(value: JsonValue, spec: JsonValue) -> str | None:
    """Return the URI of a path below a volume mount, in or beside `template` of a spec's document; None: it is
    no such path.
    """
    path = value.removeprefix("file://") if isinstance(value, str) else ""
    if not path.startswith("/"):
        return None
    for folder, claim in _mounted_claims(spec):
        if path == folder or path.startswith(f"{folder}/"):
            return f"pvc://{claim}{path.removeprefix(folder)}".rstrip("/")
    return None


def in_claim(uri: str) -> Hint:
    """Return the hint for a path whose URI is that of `on_claim`."""
    if uri.startswith(f"pvc://{NO_CLAIM}"):
        return f"name a claim with the data, as {uri}: pods mount it themselves"
    return ReplaceBy(uri, "the claim and the path in it: pods mount it themselves")


def _mounted_claims(spec: JsonValue) -> Iterator[tuple[str, str]]:
    """Yield the folder of each volume mount, and its claim with the mount's path in it."""
    for block, mounts in _mounts(spec):
        volumes = value_at(spec, (*block, "volumes"))
        claims = {
            volume.get("name"): value_at(volume, ("persistentVolumeClaim", "claimName"))
            for volume in (volumes if isinstance(volumes, list) else [])
            if isinstance(volume, dict) and isinstance(volume.get("name"), str)
        }
        for mount in mounts:
            folder, name = value_at(mount, ("mountPath",)), value_at(mount, ("name",))
            if not isinstance(folder, str) or not isinstance(name, str) or name not in claims:
                continue
            claim, inner = claims[name], str(value_at(mount, ("subPath",)) or "").strip("/")
            named = isinstance(claim, str) and CLAIM.fullmatch(claim) is not None
            yield folder.rstrip("/"), f"{claim}/{inner}".rstrip("/") if named else NO_CLAIM


def _mounts(spec: JsonValue) -> Iterator[tuple[Path, list[JsonValue]]]:
    """Yield the blocks that may have volumes, each with the volume mounts beside them: those of a job, and those in the
    containers of a pod template.
    """
    for block in ((), ("template",), ("template", "spec")):
        containers = value_at(spec, (*block, "containers"))
        for holder in (value_at(spec, block), *(containers if isinstance(containers, list) else [])):
            mounts = holder.get("volumeMounts") if isinstance(holder, dict) else None
            if isinstance(mounts, list):
                yield block, mounts

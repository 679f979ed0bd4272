"""Differences between the FineTuneJob that an API server serves and that of this release.

The CRD may be of an earlier release: it was installed apart from the operator, and not upgraded with it. The API server
then refuses new fields in spec, and a server-side apply of a status with new fields as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from finetune_operator.spec.schema.crd import crd
from finetune_operator.spec.types import API_VERSION, KIND

OPENAPI_PATH = f"/openapi/v3/apis/{API_VERSION}"
"""Path of the served schema; every authenticated user may read it by default (ClusterRole `system:discovery`)."""
UPGRADE = "kubectl apply --server-side -k manifests/crd (docs/install.md)"
"""Way out of differences."""
_KIND_KEY = "x-kubernetes-group-version-kind"
_MOST_SHOWN = 5


def lacking(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields and values of this release's FineTuneJob that the served one lacks.

    Args:
        document: the answer at `OPENAPI_PATH`.

    Returns:
        Paths such as `status.plan.reasons`, and values such as `spec.endpoint.optimization=vllm`. Fields of a lacking
        field are not listed. Empty if the document describes no FineTuneJob, since nothing is known then.
    """
    served = _served(document)
    if served is None:
        return ()
    own = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return tuple(
        difference
        for part in ("spec", "status")
        for difference in _differences(part, own["properties"][part], served.get("properties", {}).get(part, {}))
    )


def in_status(differences: tuple[str, ...]) -> tuple[str, ...]:
    """Return the differences without which the operator cannot record the state of a job."""
    return tuple(difference for difference in differences if difference.startswith("status"))


def listed(differences: tuple[str, ...]) -> str:
    """Return the first differences as text, with the number of the others."""
    rest = len(differences) - _MOST_SHOWN
    return ", ".join(differences[:_MOST_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _served(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    schemas = document.get("components", {}).get("schemas", {})
    for schema in schemas.values():
        if any(gvk.get("kind") == KIND for gvk in schema.get(_KIND_KEY, ())):
            served: Mapping[str, Any] = schema
            return served
    return None


def _differences(path: str, own: Mapping[str, Any], served: Mapping[str, Any]) -> Iterator[str]:
    if served.get("x-kubernetes-preserve-unknown-fields"):
        return
    if "enum" in served:
        yield from (f"{path}={value}" for value in own.get("enum", ()) if value not in served["enum"])
    fields = served.get("properties", {})
    for name, schema in own.get("properties", {}).items():
        if name not in fields:
            yield f"{path}.{name}"
        else:
            yield from _differences(f"{path}.{name}", schema, fields[name])
    for nested in ("items", "additionalProperties"):
        ours, theirs = own.get(nested), served.get(nested)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            yield from _differences(f"{path}[]", ours, theirs)

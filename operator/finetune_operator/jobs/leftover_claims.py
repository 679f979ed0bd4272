"""Claims of deleted jobs: no object owns them and no list of jobs names them, while their storage is paid.

A claim is left over if the operator created it for a job, no job of that name exists, and nothing else uses it. Pure:
the caller reads the claims before the jobs, so that a job that is created meanwhile is known.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from pydantic import Field, JsonValue

from finetune_operator.jobs.render.render_types import JOB_LABEL, MANAGED_BY
from finetune_operator.spec.kubernetes_objects import Meta, Raw
from finetune_operator.spec.quantities import parse_quantity

_EXPONENT = re.compile(r"[0-9]{1,16}(\.[0-9]{1,16})?[eE][0-9]{1,2}")
"""Quantity with a decimal exponent; the API server takes none above 2^63."""
CLAIM_SELECTOR = ",".join([*(f"{key}={value}" for key, value in MANAGED_BY.items()), JOB_LABEL])
"""Label selector of the claims that the operator creates."""


class _ClaimMeta(Meta):
    owner_references: tuple[JsonValue, ...] = ()


class _Requests(Raw):
    storage: str = "0"


class _Resources(Raw):
    requests: _Requests = _Requests()


class _ClaimSpec(Raw):
    storage_class_name: str | None = None
    resources: _Resources = _Resources()


class _ClaimStatus(Raw):
    capacity: dict[str, str] = Field(default_factory=dict)


class WorkspaceClaim(Raw):
    """A claim that the operator created for a job's workspace."""

    metadata: _ClaimMeta
    spec: _ClaimSpec = _ClaimSpec()
    status: _ClaimStatus = _ClaimStatus()

    @property
    def key(self) -> tuple[str, str]:
        """Return namespace and name."""
        return self.metadata.namespace, self.metadata.name

    @property
    def job(self) -> str:
        """Return the name of the job that it was created for; a later one of that name uses it again."""
        return self.metadata.labels.get(JOB_LABEL, "")

    @property
    def size(self) -> int:
        """Return the bytes of its volume, or those requested if it has none yet; 0 for a text that is no number here.
        Anybody may label a claim so, and the API server takes rare forms as well, such as 1e9 and 5u.
        """
        text = self.status.capacity.get("storage", self.spec.resources.requests.storage)
        try:
            return int(parse_quantity(text))
        except ValueError:
            return int(float(text)) if _EXPONENT.fullmatch(text) else 0


def without_job(
    claims: Iterable[Mapping[str, JsonValue]], jobs: Collection[tuple[str, str]]
) -> tuple[WorkspaceClaim, ...]:
    """Return the claims whose job is not among `jobs`, which have namespace and name. Those that are being deleted, or
    will be by the garbage collector with their owner, are left out.
    """
    parsed = map(WorkspaceClaim.model_validate, claims)
    kept = (one for one in parsed if one.metadata.deletion_timestamp is None and not one.metadata.owner_references)
    return tuple(claim for claim in kept if (claim.metadata.namespace, claim.job) not in jobs)


def claims_used(spec: JsonValue) -> Iterator[str]:
    """Yield the claims that the spec of a job or a pod names: in `pvc://` URIs and in volumes."""
    match spec:
        case str() if spec.startswith("pvc://"):
            yield spec.removeprefix("pvc://").partition("/")[0]
        case list():
            for item in spec:
                yield from claims_used(item)
        case dict():
            for name, value in spec.items():
                if name == "claimName" and isinstance(value, str):
                    yield value
                else:
                    yield from claims_used(value)
        case _:
            return

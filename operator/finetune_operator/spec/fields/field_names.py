"""Names of the fields of a job's document, and the form in which names are compared."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic.alias_generators import to_camel

from finetune_operator.spec.types import FineTuneJobSpec

DOCUMENT = ("apiVersion", "kind", "metadata", "spec", "status")


def spec_fields() -> Iterator[str]:
    """Yield the names of the fields of `spec`."""
    # Not from its shape, which takes longer than the check of a job.
    yield from map(to_camel, FineTuneJobSpec.model_fields)


def plain(name: str) -> str:
    """Return the lookup key of a name: `per_device_train_batch_size` and `perDeviceTrainBatchSize` have the same."""
    return re.sub(r"[^a-z0-9./]", "", name.lower())
